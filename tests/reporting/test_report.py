"""Reports end no run: what cannot be written is one line of the log, and the next write is tried."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8_megatron.reporting.report import AppendedFile, write_report
from tests.harness.limits import files_limited_to


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("call", ["write", "open"])
def test_every_error_of_the_system_is_one_line(
    call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the file takes up again."""
    file = AppendedFile(tmp_path / "file")

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    file.append(b"one\n")
    if call == "open":
        file.release()
    with monkeypatch.context() as patches:
        patches.setattr(os, call, fail)
        file.append(b"two\n")
        file.append(b"three\n")
    file.append(b"four\n")
    file.close()
    assert (tmp_path / "file").read_bytes() == b"one\nfour\n"
    first, last = warnings(caplog)
    assert first.startswith(f"{tmp_path / 'file'} is not written ({os.strerror(code)}; ")
    assert last == f"{tmp_path / 'file'} is not complete: 2 writes failed"


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets time pass."""
    passed = 0.0

    def wait(seconds: float) -> None:
        nonlocal passed
        passed += seconds

    monkeypatch.setattr(time, "monotonic", lambda: passed)
    return wait


def test_a_file_that_is_removed_is_made_again(
    tmp_path: Path, passing: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Not at once: a folder can be removed while the run writes into it."""
    path = tmp_path / "folder" / "file"
    file = AppendedFile(path, header=b"header\n")
    file.append(b"one\n")
    path.unlink()
    file.append(b"two\n")
    path.parent.rmdir()
    passing(9)
    file.append(b"three\n")
    assert not path.parent.exists()
    passing(2)
    file.append(b"four\n")
    assert path.read_bytes() == b"header\nfour\n"
    file.close()
    first, last = warnings(caplog)
    assert f"{path} is not written (somebody removed it during the run; " in first
    assert last == f"{path} is not complete: 2 writes failed"


def test_a_file_that_is_replaced_goes_on_in_the_new_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "folder" / "file"
    file = AppendedFile(path)
    file.append(b"one\n")
    path.unlink()
    path.write_bytes(b"zero\n")
    file.append(b"two\n")
    assert path.read_bytes() == b"zero\ntwo\n" and not warnings(caplog)
    path.unlink()
    path.mkdir()
    file.append(b"three\n")
    path.rmdir()
    path.touch()
    file.append(b"four\n")
    assert path.read_bytes() == b"four\n"
    shutil.rmtree(path.parent)
    path.parent.write_text("")
    file.append(b"five\n")
    file.close()
    first, last = warnings(caplog)
    assert "is not written (Is a directory" in first and last == f"{path} is not complete: 2 writes failed"


def test_a_piece_that_fits_in_part_leaves_nothing(tmp_path: Path) -> None:
    """In a text, whose last line a kill may have cut, and in a file that is none."""
    for header, before, expected in ((b"", b"cut", b"cut\none\nthree\n"), (b"header\n", b"", b"header\none\nthree\n")):
        path = tmp_path / f"file{len(header)}"
        path.write_bytes(before)
        file = AppendedFile(path, header)
        file.append(b"one\n")
        with files_limited_to(path.stat().st_size + 2):
            file.append(b"two\n")
        file.append(b"three\n")
        assert path.read_bytes() == expected


def test_a_report_that_cannot_be_replaced_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "new" / "memory.txt"
    write_report(path, b"one")
    with files_limited_to(100):
        write_report(path, bytes(1000))
    assert path.read_bytes() == b"one" and list(path.parent.iterdir()) == [path]
    assert len(warnings(caplog)) == 1 and "is not written (File too large; " in warnings(caplog)[0]
