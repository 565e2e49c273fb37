"""Which folder is loaded, which are kept, and the leftovers of a kill."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from fp8_megatron.checkpoint.files import (
    ANCESTORS,
    MANIFEST,
    META,
    TRACKER,
    CheckpointError,
    ancestors,
    candidates,
    iteration_folder,
    publish,
    remove_old,
    saved_iterations,
    start_writing,
    unfinished_folders,
)


def save(root: Path, iteration: int, content: str = "", earlier: list[int] | None = None) -> None:
    folder = iteration_folder(root, iteration)
    temporary = start_writing(folder)
    (temporary / MANIFEST).write_text(content)
    if earlier is not None:
        (temporary / META).write_text(json.dumps({ANCESTORS: earlier}))
    publish(temporary, folder)


def test_the_tracker_decides_and_older_ones_follow(tmp_path: Path) -> None:
    for iteration in (10, 20, 12345678):
        save(tmp_path, iteration)
    assert candidates(tmp_path) == [12345678, 20, 10]
    (tmp_path / TRACKER).write_text("20")
    assert candidates(tmp_path) == [20, 10]
    assert candidates(tmp_path, 10) == [10]


def test_without_a_tracker_whole_folders_are_found(tmp_path: Path) -> None:
    """Killed between the first folder's rename and the tracker's."""
    assert candidates(tmp_path) == []
    save(tmp_path, 10)
    (tmp_path / TRACKER).unlink()
    assert candidates(tmp_path) == [10]


def test_older_ones_are_of_the_same_run(tmp_path: Path) -> None:
    """30 was saved after going back to 10; 20 is of the abandoned branch, and can still be loaded by number."""
    save(tmp_path, 10, earlier=[])
    save(tmp_path, 20, earlier=[10])
    save(tmp_path, 30, earlier=[5, 10])
    assert ancestors(tmp_path, 30) == [10]
    assert candidates(tmp_path) == [30, 10]
    assert candidates(tmp_path, 20) == [20]


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"ancestors": 1}', '{"ancestors": [[1]]}', "\xff"])
def test_a_checkpoint_that_does_not_say_its_ancestors(tmp_path: Path, content: str | None) -> None:
    """Damaged, or of an earlier version: all older ones are tried."""
    for iteration in (10, 20, 30):
        save(tmp_path, iteration)
    if content is not None:
        (iteration_folder(tmp_path, 30) / META).write_bytes(content.encode("latin-1"))
    assert candidates(tmp_path) == [30, 20, 10]


def test_a_tracker_that_leads_nowhere(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / TRACKER).write_text("30")
    assert candidates(tmp_path) == [30, 10]
    (tmp_path / TRACKER).write_text("latest")
    with pytest.raises(CheckpointError, match="holds 'latest', not an iteration; write the number of a folder"):
        candidates(tmp_path)
    (tmp_path / TRACKER).write_text("release\n")
    with pytest.raises(CheckpointError, match="rename it to iter_0000001 and write 1 into the file"):
        candidates(tmp_path)


def test_a_file_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file is a file; give the folder that --save named"):
        candidates(tmp_path / "file")


def test_an_iteration_that_is_not_there(tmp_path: Path) -> None:
    save(tmp_path, 10)
    with pytest.raises(CheckpointError, match=r"iteration 5 is no whole checkpoint under .*; there are: 10"):
        candidates(tmp_path, 5)


def test_what_was_cut_short_is_ignored_and_cleared(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (start_writing(iteration_folder(tmp_path, 20)) / "half").write_text("")
    iteration_folder(tmp_path, 5).mkdir()  # no manifest: not a checkpoint
    assert candidates(tmp_path) == [10]
    assert unfinished_folders(tmp_path) == ["iter_0000020.tmp"]
    save(tmp_path, 30)
    assert unfinished_folders(tmp_path) == []
    assert saved_iterations(tmp_path) == [10, 30]


def test_saving_an_iteration_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 10, "first")
    save(tmp_path, 10, "second")
    assert (iteration_folder(tmp_path, 10) / MANIFEST).read_text() == "second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010", TRACKER]


@pytest.mark.parametrize("token", ["", "." + "0" * 16], ids=["of an earlier version", "of another session"])
@pytest.mark.parametrize("suffix", [".removed", ".replaced", ".tmp"])
def test_what_cannot_be_cleared_stops_no_save(
    tmp_path: Path, token: str, suffix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that is open on NFS keeps its folder; everything else is cleared."""
    save(tmp_path, 10)
    stuck, other = tmp_path / f"iter_0000010{token}{suffix}", tmp_path / f"iter_0000005{token}.tmp"
    for folder in (stuck, other):
        folder.mkdir()
    rmtree = shutil.rmtree

    def rmtree_on_nfs(path: Path, ignore_errors: bool = False) -> None:
        if path != stuck:
            rmtree(path, ignore_errors)
        elif not ignore_errors:
            raise OSError(39, "Directory not empty", str(path))

    monkeypatch.setattr(shutil, "rmtree", rmtree_on_nfs)
    save(tmp_path, 20)
    assert candidates(tmp_path) == [20, 10]
    assert stuck.exists() and not other.exists()
    assert f"{stuck} cannot be removed: [Errno 39] Directory not empty" in caplog.text


def test_one_that_cannot_be_removed_leaves_the_others_removable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for iteration in (10, 20, 30):
        save(tmp_path, iteration)
    (tmp_path / "iter_0000010.removed").mkdir()
    (tmp_path / "iter_0000010.removed" / ".nfs01").write_text("")
    remove_old(tmp_path, [10, 20, 30], keep_last=1, retain_interval=None)
    assert saved_iterations(tmp_path) == [10, 30]
    assert "iter_0000010 was not removed: [Errno 39]" in caplog.text


@pytest.mark.parametrize("token", ["", "." + "f" * 16])
def test_a_kill_while_replacing_leaves_the_old_one(tmp_path: Path, token: str) -> None:
    save(tmp_path, 10, "first")
    iteration_folder(tmp_path, 10).rename(tmp_path / f"iter_0000010{token}.replaced")
    (tmp_path / "iter_0000010.x.replaced").mkdir()  # not a name of ours
    assert candidates(tmp_path) == [10]
    assert (iteration_folder(tmp_path, 10) / MANIFEST).read_text() == "first"


def test_a_reader_puts_back_what_is_being_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes between the two renames, and takes the first for a kill's."""
    save(tmp_path, 10, "first")
    replace, readers = os.replace, [1]

    def replace_and_read(source: Path, target: Path) -> None:
        replace(source, target)
        if str(target).endswith(".replaced") and readers and readers.pop():
            assert candidates(tmp_path) == [10]

    monkeypatch.setattr(os, "replace", replace_and_read)
    save(tmp_path, 10, "second")
    assert not readers
    assert (iteration_folder(tmp_path, 10) / MANIFEST).read_text() == "second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010", TRACKER]


@pytest.mark.parametrize(
    ("keep_last", "interval", "kept"), [(2, None, [40, 45, 50, 90]), (1, 20, [20, 40, 45, 50, 90]), (9, None, None)]
)
def test_retention(tmp_path: Path, keep_last: int, interval: int | None, kept: list[int] | None) -> None:
    """Checkpoints of an abandoned branch are kept and not counted."""
    for iteration in (10, 20, 30, 40, 45, 90, 50):
        save(tmp_path, iteration)
    remove_old(tmp_path, [10, 20, 30, 35, 40, 50], keep_last=keep_last, retain_interval=interval)
    assert saved_iterations(tmp_path) == (kept or [10, 20, 30, 40, 45, 50, 90])
    assert candidates(tmp_path)[0] == 50
    assert not list(tmp_path.glob("*.removed"))
