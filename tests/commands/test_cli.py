"""The console script: its help, what it imports, and that tools run from a clone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from fp8_megatron.cli import COMMANDS, main

ROOT = Path(__file__).parents[2]
SIZES = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 5"
)
HEAVY = ("torch", "numpy", "megatron", "matplotlib")
#: What the trainer, its reports and its converters need, and models of other libraries do not.
NOT_FOR_ANY_MODEL = (
    "megatron transformers accelerate matplotlib wandb rich tensorboard yaml psutil sentencepiece safetensors triton"
).split()


def python(*words: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    text = capsys.readouterr().out
    assert exit_info.value.code == 0
    names = "demo train tokenize preprocess merge convert inspect generate plot health parity plan verify"
    assert list(COMMANDS) == names.split()
    assert all(f"  {name} " in text and command.help in text for name, command in COMMANDS.items())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_own_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([name, "--help"])
    assert exit_info.value.code == 0
    assert f"usage: fp8-megatron {name}" in capsys.readouterr().out


def test_a_reader_that_leaves_gets_no_traceback() -> None:
    """``fp8-megatron train --help | head -1``."""
    words = [sys.executable, "-m", "fp8_megatron.cli", "train", "--help"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None and program.stderr is not None
        program.stdout.close()
        assert program.stderr.read() == ""
    assert program.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "error: no command; give one of demo, train, "),
        (["trian"], "error: unknown command 'trian'; did you mean train?"),
        (["--gpus", "1", "train"], "error: --gpus stands before the command; write fp8-megatron COMMAND --gpus …"),
        (["frobnicate"], "error: unknown command 'frobnicate'; give one of demo, train, "),
    ],
)
def test_no_command_or_an_unknown_one_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    line = capsys.readouterr().err
    assert line.startswith(said) and line.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        "merge --input nowhere --output-prefix joined",
        "inspect nowhere",
        "generate --load nowhere --prompt x",
        "convert --input nowhere --output new --to hf",
    ],
)
def test_what_is_not_there_is_told_where_neither_torch_nor_megatron_can_be_imported(words: str) -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'megatron'))); from fp8_megatron import cli; "
        f"sys.exit(cli.main({words!r}.split()))"
    )
    result = python("-c", code)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.stderr
    assert result.stderr.startswith("error: ") and "nowhere" in result.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import fp8_megatron.cli",
        "from fp8_megatron.config.checks import check_config; from fp8_megatron.config.io import parse_config; "
        "check_config(parse_config(['--mock-data', '--vocab-size', '64']), 1)",
        *(f"import fp8_megatron.commands.{command.module}" for name, command in COMMANDS.items() if name == "train"),
    ],
    ids=["cli", "configuration", "train"],
)
def test_what_must_come_at_once_imports_nothing_heavy(code: str) -> None:
    """torch alone takes seconds: help and a configuration's mistakes do without it."""
    result = python("-c", f"import sys; {code}; print(*[name for name in {HEAVY} if name in sys.modules])")
    assert (result.stdout.strip(), result.returncode) == ("", 0), result.stderr


@pytest.mark.parametrize(
    "words", ["--lr 0", "--lr", "--num-layrs 3", "--config nowhere.yaml", "--seed 1__0", "--gpus x", "--save="]
)
def test_a_mistake_is_told_where_neither_torch_nor_megatron_can_be_imported(words: str) -> None:
    """So it is told in less than a second, as both take several."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({HEAVY})); from fp8_megatron import cli; "
        f"sys.exit(cli.main('train --mock-data --vocab-size 64 {SIZES} {words}'.split()))"
    )
    result = python("-c", code)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.stderr
    assert result.stderr.startswith("error: ")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_imports_nothing_of_seconds(name: str) -> None:
    code = (
        "import sys; from fp8_megatron import cli\n"
        f"try: cli.main([{name!r}, '--help'])\n"
        "finally: print('imported:', *({'torch', 'transformers', 'megatron', 'matplotlib'} & sys.modules.keys()))"
    )
    result = python("-c", code)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    assert result.stdout.startswith("usage: ") and result.stdout.splitlines()[-1] == "imported:"


def test_the_package_loads_nothing_by_itself() -> None:
    code = "import sys; before = set(sys.modules); import fp8_megatron; new = sys.modules.keys() - before; "
    code += "print(*[name for name in new if name.partition('.')[0] not in sys.stdlib_module_names])"
    result = python("-c", code)
    assert result.stdout.split() == ["fp8_megatron"], result.stderr


def test_initialize_loads_torch_and_the_core() -> None:
    code = f"import sys; from fp8_megatron import initialize; print(*set({NOT_FOR_ANY_MODEL}) & sys.modules.keys())"
    result = python("-c", code)
    assert (result.stdout.split(), result.returncode) == ([], 0), result.stderr


def test_importing_changes_nothing() -> None:
    code = "import os, sys; before = dict(os.environ); import fp8_megatron, fp8_megatron.device.cudnn as cudnn; "
    result = python("-c", code + "print(os.environ == before, cudnn._home)")
    assert result.stdout.split() == ["True", "None"], result.stderr


def test_cudnn_is_loaded_before_megatron_core_is_imported() -> None:
    """`load_bundled` is stopped where it is called, by the program that trains and by those that read checkpoints."""
    code = (
        "import sys; from fp8_megatron.device import cudnn; from importlib import import_module\n"
        "class Called(BaseException): pass\n"
        "def stop(): raise Called\n"
        "cudnn.load_bundled = stop\n"
        "for name, words in {0}:\n"
        "    try: import_module('fp8_megatron.commands.' + name).main(words)\n"
        "    except Called: print(name, 'megatron.core' in sys.modules)"
    )
    programs = (
        ("pretrain_gpt", ["--mock-data", "--vocab-size", "64", *SIZES.split()]),
        ("inspect_checkpoint", ["."]),
        ("convert_checkpoint", ["--input", ".", "--output", "b", "--to", "hf"]),
        ("generate_text", ["--load", ".", "--prompt", "x"]),
    )
    result = python("-c", code.format(programs))
    assert result.stdout.split() == [word for name, _ in programs for word in (name, "False")], result.stderr


def test_what_stands_for_a_clone_that_is_not_installed_is_one(tmp_path: Path) -> None:
    result = python("-S", "-c", "import fp8_megatron", cwd=tmp_path, PYTHONPATH=sysconfig.get_paths()["purelib"])
    assert "ModuleNotFoundError" in result.stderr


@pytest.mark.parametrize(
    "tool",
    [
        "pretrain_gpt.py",
        *(f"tools/{command.module}.py" for name, command in COMMANDS.items() if name not in ("demo", "train")),
        "tools/gradient_snr.py",
    ],
)
def test_tools_run_from_a_clone_that_is_not_installed(tool: str, tmp_path: Path) -> None:
    """-S leaves out what is installed as an editable project; other packages come through PYTHONPATH."""
    packages = sysconfig.get_paths()["purelib"]
    result = python("-S", str(ROOT / tool), "--help", cwd=tmp_path, PYTHONPATH=packages)
    asks_for_a_file = tool == "tools/gradient_snr.py"
    assert result.returncode == (2 if asks_for_a_file else 0), result.stderr
    assert "the first argument is the file" in result.stdout if asks_for_a_file else "usage: " in result.stdout
