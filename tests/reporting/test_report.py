"""Reports end no run: what cannot be written is one line of the log, and the next write is tried."""

from __future__ import annotations

import errno
import os
import shutil
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


def test_a_file_that_is_removed_or_replaced_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "folder" / "file"
    file = AppendedFile(path, header=b"header\n")
    file.append(b"one\n")
    shutil.rmtree(path.parent)
    file.append(b"two\n")
    assert path.read_bytes() == b"header\ntwo\n"
    path.unlink()
    path.mkdir()
    file.append(b"three\n")
    path.rmdir()
    file.append(b"four\n")
    assert path.read_bytes() == b"header\nfour\n"
    shutil.rmtree(path.parent)
    path.parent.write_text("")
    file.append(b"five\n")
    file.close()
    replaced, failed, missing = warnings(caplog)
    assert replaced == f"{path} was removed or replaced during the run; a new file has what follows"
    assert "is not written (Is a directory" in failed and missing == f"{path} is not complete: 2 writes failed"


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
