"""Every program ends every error with one line and a status; what is no user's leaves its traceback in a log file."""

from __future__ import annotations

import ast
import errno
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp8_megatron.commands import program
from fp8_megatron.commands.error_report import logging_errors_in
from fp8_megatron.commands.pretrain_gpt import check_process_limits
from fp8_megatron.commands.program import LineFormatter, exit_status
from fp8_megatron.errors import UserError
from tests.harness.limits import files_limited_to

ROOT = Path(__file__).parents[2]
LOG = "fp8_megatron_error.log"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs of internal errors go into the test's folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "TORCHELASTIC_ERROR_FILE", program.TRACEBACK_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def raising(error: BaseException) -> Callable[[], int]:
    def body() -> int:
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("lr(0) is wrong; give 1"), "error: lr(0) is wrong; give 1"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a/b"), "error: a/b: No such file; give a path that exists"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "error: /x: Permission denied; give a path that"),
        (OSError(errno.EROFS, "Read-only file system", "/x"), "error: /x: Read-only file system; its file system is"),
        (OSError(errno.EMFILE, "Too many open files"), "error: Too many open files; raise `ulimit -n` (it is "),
        (OSError(errno.ENOSPC, "No space left on device", "y"), "error: y: No space left on device, "),
        (MemoryError(), "error: out of memory; lower --micro-batch-size"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes."),
            "error: out of memory (4.0 GiB were asked for); lower",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to"), "error: CUDA out of memory. Tried to; lower"),
        (RuntimeError("can't start new thread"), "error: no more processes or threads can be started"),
        (ModuleNotFoundError("No module named 'x'", name="x"), "error: the package x is not installed; pip install"),
    ],
)
def test_an_error_of_the_user_or_the_machine_is_one_line(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(raising(error)) == 2
    told = capsys.readouterr().err
    assert told.startswith(line) and told.count("\n") == 1
    assert not Path(LOG).exists()


def test_a_full_disk_without_a_path_is_told_with_the_programs_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        with logging_errors_in(tmp_path / "run"):
            raise OSError(errno.ENOSPC, "No space left on device")

    assert exit_status(body) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {tmp_path / 'run'}: No space left on device, ") and "bytes are free" in told


def test_a_file_beyond_the_shells_limit_is_told_with_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    with files_limited_to(1024):
        assert exit_status(lambda: Path("large").write_bytes(bytes(4096))) == 2
    assert "File too large; `ulimit -f` allows 1024 bytes; raise it" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ValueError("odd\nthing"), RecursionError("deep"), OSError(errno.EBADF, "Bad file")])
def test_any_other_error_is_one_line_and_a_log(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(raising(error)) == 70
    told = capsys.readouterr().err
    said = " ".join(str(error).split())
    assert told.startswith(f"internal error: {type(error).__name__}: {said}; the traceback is in {LOG}; FP8_MEGATRON_")
    assert told.count("\n") == 1
    log = Path(LOG).read_text()
    assert "Traceback (most recent call last)" in log and "command: " in log
    assert f"torch {torch.__version__.partition('+')[0]}" in log


def test_the_log_is_beside_the_runs_files_and_keeps_what_it_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()

    def body() -> None:
        with logging_errors_in(tmp_path / "run"):
            raise KeyError("first")

    assert exit_status(body) == exit_status(body) == 70
    assert str(tmp_path / "run" / LOG) in capsys.readouterr().err
    assert (tmp_path / "run" / LOG).read_text().count("KeyError: 'first'") == 2 and not Path(LOG).exists()


def test_an_interrupt_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_program_may_call_another_and_return_nothing() -> None:
    assert exit_status(lambda: None) == 0
    assert exit_status(lambda: exit_status(raising(UserError("x")))) == 2


def test_of_ranks_with_one_error_one_tells_it(tmp_path: Path) -> None:
    """As torchrun starts them: a folder for each rank's error file, under one that they share."""
    code = "import sys; from fp8_megatron.commands.program import exit_status\ndef fail(): raise {}\nexit_status(fail)"

    def start(rank: int, error: str) -> subprocess.Popen[str]:
        (tmp_path / str(rank)).mkdir()
        variables = {"RANK": str(rank), "TORCHELASTIC_RUN_ID": "1"}
        variables |= {"TORCHELASTIC_ERROR_FILE": str(tmp_path / str(rank) / "error.json")}
        command = [sys.executable, "-c", code.format(error)]
        environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    shared, own = "ValueError('shared')", "ValueError('its own')"
    ranks = [start(rank, error) for rank, error in enumerate((shared, shared, own))]
    told = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert told[0].startswith("internal error: ValueError: shared") and told[1] == ""
    assert told[2].startswith("internal error on rank 2: ValueError: its own")


def test_a_working_folder_that_was_removed_is_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = "import os, sys; os.rmdir(os.getcwd()); from fp8_megatron.cli import main; sys.exit(main(['inspect', 'x']))"
    environment = {**os.environ, "PWD": str(gone), "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=gone, env=environment, capture_output=True, text=True, timeout=60
    )
    line = f"error: the working folder {gone} is gone; change to a folder that exists (cd)\n"
    assert (ended.returncode, ended.stderr) == (2, line)


def test_limits_of_the_shell_are_checked_before_the_work() -> None:
    code = (
        "import resource; from fp8_megatron.commands.pretrain_gpt import check_process_limits\n"
        "resource.setrlimit(resource.{0}, ({1}, {2})); check_process_limits()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )

    def said(name: str, soft: int, hard: int) -> str:
        command = [sys.executable, "-c", code.format(name, soft, hard)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        return result.stdout.strip() or result.stderr.splitlines()[-1]

    assert said("RLIMIT_NOFILE", 20, 1000) == "1000"
    assert "`ulimit -n` allows this process 20 open files; raise it to 256 or more" in said("RLIMIT_NOFILE", 20, 20)
    assert "0.5 GiB of address space; raise it to 2 GiB or more" in said("RLIMIT_AS", 2**29, 2**29)
    check_process_limits()


PROGRAMS = [
    path.relative_to(ROOT)
    for folder in ("tools", "benchmarks", "fp8_megatron")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if '\nif __name__ == "__main__":\n' in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("path", [Path("pretrain_gpt.py"), *PROGRAMS], ids=str)
def test_every_program_runs_under_the_handler(path: Path) -> None:
    """Its file calls `exit_status`, or the `main` of a program that does."""
    code = (ROOT / path).read_text(encoding="utf-8")
    called = {
        node.func.id
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert "exit_status" in called or path == Path("pretrain_gpt.py")


@pytest.mark.parametrize("place", ["link", "pipe", "file"])
def test_in_a_shared_folder_the_log_is_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another user may have put something there under the name that can be guessed."""
    shared, victim = tmp_path / "tmp", tmp_path / "victim"
    shared.mkdir()
    shared.chmod(0o1777)
    victim.write_text("precious")
    {"link": lambda: (shared / LOG).symlink_to(victim), "pipe": lambda: os.mkfifo(shared / LOG)}.get(
        place, lambda: (shared / LOG).write_text("theirs")
    )()
    monkeypatch.chdir("/proc")
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    assert exit_status(raising(KeyError("mine"))) == 70
    assert victim.read_text() == "precious" and (place != "file" or (shared / LOG).read_text() == "theirs")
    (log,) = shared.glob("fp8_megatron_error_*.log")
    assert "KeyError: 'mine'" in log.read_text() and log.stat().st_mode & 0o077 == 0
    assert str(log) in capsys.readouterr().err


def test_a_log_follows_no_link_and_waits_for_no_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only a group may write."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / LOG).symlink_to(tmp_path / "victim")
    private = tmp_path / "tmp"
    private.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    assert exit_status(raising(KeyError("mine"))) == 70
    assert (tmp_path / "victim").read_text() == "precious" and "KeyError" in (private / LOG).read_text()
    (private / LOG).unlink()
    os.mkfifo(private / LOG)
    assert exit_status(raising(KeyError("mine"))) == 70


def test_control_characters_are_shown_as_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    """A terminal would obey them. Names in errors and log lines may come from a foreign file."""
    hostile = "a\x1b[31m\u202eb\x9b"
    for error in (UserError(hostile), ValueError(hostile), FileNotFoundError(errno.ENOENT, "No such file", hostile)):
        exit_status(raising(error))
        assert r"a\x1b[31m\u202eb\x9b" in capsys.readouterr().err
    record = logging.LogRecord("x", logging.INFO, "", 0, "%s\n\t%s", (hostile, "next"), None)
    assert LineFormatter().format(record) == r"a\x1b[31m\u202eb\x9b" + "\n\tnext"
    assert str(UserError("one\ntwo")) == "one\ntwo" and UserError(3).args == (3,)


_PROGRAM = """
import logging, sys
from fp8_megatron.commands.program import LogOnStdout, exit_status, leave
def product():
    print("a figure")
def run():
    logging.basicConfig(level=logging.INFO, handlers=[LogOnStdout()])
    for step in range(3):
        logging.info("step %d", step)
    leave(sys.stdout)
sys.exit(exit_status({body}))
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("body", "status", "line"),
    [
        ("product", 2, "error: stdout is not written (No space left on device); send it to a file that has room"),
        ("run", 0, "the log on stdout is not written (No space left on device); the run goes on"),
    ],
)
def test_a_full_disk_behind_stdout(body: str, status: int, line: str, unbuffered: str) -> None:
    """It ends no run. A program whose product is what it prints says that this is lost. Neither prints a traceback."""
    words = [sys.executable, "-c", _PROGRAM.format(body=body)]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        ended = subprocess.run(words, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert (ended.returncode, ended.stderr.splitlines()) == (status, [line])
        ended = subprocess.run(words, env=environment, stdout=full, stderr=full, check=False)
        assert ended.returncode == status
