"""What cannot be written is found before the work, with path, reason and free space. A file appears whole."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8_megatron import outputs
from fp8_megatron.errors import UserError
from tests.harness.limits import files_limited_to


@pytest.mark.parametrize("check", [outputs.check_output_file, outputs.check_output_folder])
def test_a_file_in_the_way_is_named(check: Callable[[Path, str], None], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"--output {tmp_path}/file/a/b: {tmp_path}/file is a file, not a folder"):
        check(tmp_path / "file" / "a" / "b", "--output")
    check(tmp_path / "new" / "a", "--output")
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left behind"


def test_what_stands_at_the_path_decides(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outputs.check_output_file(tmp_path / "file", "--output")
    with pytest.raises(UserError, match="is a folder; give the path of a file"):
        outputs.check_output_file(tmp_path, "--output")
    with pytest.raises(UserError, match="is a device or a pipe"):
        outputs.check_output_file(Path("/dev/full"), "--output")
    with pytest.raises(UserError, match="File name too long"):
        outputs.check_output_file(tmp_path / ("x" * 300), "--output")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_takes_no_file_is_found_with_its_free_space(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    for check in (outputs.check_output_file, outputs.check_output_folder):
        with pytest.raises(UserError, match=rf"{tmp_path}/new .*{os.strerror(number)}; [0-9,.]+ GB free on its disk"):
            check(tmp_path / "new", "--output")


def test_a_size_beyond_the_disk_is_refused(tmp_path: Path) -> None:
    outputs.check_free_bytes(tmp_path / "a" / "b", "--output", 1, "the result")
    with pytest.raises(UserError, match=r"the result takes 1,000,000,000.000 GB, its disk has [0-9,.]+ GB free"):
        outputs.check_free_bytes(tmp_path / "a" / "b", "--output", 10**18, "the result")


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    """The limit on the size of a file stands for a full disk: the system refuses the same call."""
    path = tmp_path / "new" / "file"
    outputs.write_output(path, b"old")
    refused = pytest.raises(UserError, match=f"--output {path} cannot be written .File too large; .* GB free")
    with files_limited_to(1000), refused:
        outputs.write_output(path, bytes(2000), "--output")
    assert path.read_bytes() == b"old" and os.listdir(path.parent) == ["file"]
    outputs.write_output(path, b"new", "--output")
    assert path.read_bytes() == b"new"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    outputs.write_output(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"new"
