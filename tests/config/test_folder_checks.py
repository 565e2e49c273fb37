"""Folders of a run that cannot be written or read are found before anything is imported or built."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fp8_megatron.config.folder_checks import check_run_folders
from fp8_megatron.config.schema import CheckpointConfig, Config, DataConfig, LoggingConfig
from fp8_megatron.errors import UserError


def checked(root: Path, **settings: str | bool) -> list[str]:
    """The problems of a run with these settings; paths are below `root`."""

    def section(names: tuple[str, ...]) -> dict:
        given = {name: value for name, value in settings.items() if name in names}
        return {name: str(root / value) if isinstance(value, str) else value for name, value in given.items()}

    about_checkpoints = ("save", "load", "finetune", "exit_on_missing_checkpoint", "pretrained_checkpoint")
    config = Config(
        checkpoint=CheckpointConfig(**section(about_checkpoints)),
        logging=LoggingConfig(**section(("output_dir", "wandb_save_dir", "tensorboard")), wandb_project="p"),
        data=DataConfig(**section(("data_cache_path",))),
    )
    before = sorted(root.rglob("*"))
    try:
        check_run_folders(config)
        problems = []
    except UserError as error:
        problems = str(error).splitlines()
    assert sorted(root.rglob("*")) == before, "it leaves nothing behind"
    return problems


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file, an empty folder, and the logs of a run."""
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "metrics.jsonl").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    "settings",
    [
        {"save": "new/folder", "output_dir": "another", "wandb_save_dir": "w", "data_cache_path": "empty/cache"},
        {"output_dir": "logs"},
        {"save": "new", "load": "new"},
        {"save": "new", "load": "empty/../new"},
        {"save": "new", "load": "gone", "pretrained_checkpoint": "empty"},
        {"load": "empty", "output_dir": "empty"},
    ],
)
def test_what_can_be_written(root: Path, settings: dict) -> None:
    assert checked(root, **settings) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"save": "file"}, "--save {}/file: {}/file is a file, not a folder; move it away"),
        ({"save": "file/below/it"}, "--save {}/file/below/it: {}/file is a file, not a folder"),
        ({"save": "empty", "output_dir": "file"}, "--output-dir {}/file: {}/file is a file"),
        ({"output_dir": "file", "tensorboard": True}, "--output-dir {}/file: {}/file is a file"),
        ({"output_dir": "empty", "wandb_save_dir": "file"}, "--wandb-save-dir {}/file: "),
        ({"output_dir": "empty", "data_cache_path": "file"}, "--data-cache-path {}/file: "),
        ({"output_dir": "empty", "load": "file"}, "load({}/file) is a file; give the folder that --save named"),
        ({"save": "file", "load": "file"}, "--save {}/file: "),
        ({"output_dir": "empty", "load": "gone"}, "load({}/gone) does not exist; give the folder"),
        ({"save": "gone", "load": "gone", "finetune": True}, "load({}/gone) does not exist"),
        ({"save": "gone", "load": "gone", "exit_on_missing_checkpoint": True}, "load({}/gone) does not exist"),
    ],
)
def test_what_is_in_the_way_is_one_line(root: Path, settings: dict, expected: str) -> None:
    problems = checked(root, **settings)
    assert problems[0].startswith(expected.replace("{}", str(root)))
    assert len(problems) == (2 if settings.get("save") == "file" == settings.get("load") else 1)


def test_a_folder_in_the_place_of_a_file(root: Path) -> None:
    (root / "logs" / "config.yaml").mkdir()
    (problem,) = checked(root, output_dir="logs")
    assert problem == f"--output-dir {root}/logs/config.yaml is a folder; give the path of a file"


def test_a_file_in_the_place_of_tensorboards_folder(root: Path) -> None:
    (root / "logs" / "tensorboard").write_text("")
    (problem,) = checked(root, output_dir="logs")
    assert problem.startswith(f"--tensorboard {root}/logs/tensorboard: ")
    assert checked(root, output_dir="logs", tensorboard=False) == []


def test_a_place_that_takes_no_files() -> None:
    """Not even root's; with the reason and the free space."""
    with pytest.raises(UserError, match=r"--save /proc/run cannot be written \(.*\); give a path that can be written"):
        check_run_folders(Config(checkpoint=CheckpointConfig(save="/proc/run")))


def test_a_data_cache_with_something_in_it_may_be_read_only(tmp_path: Path) -> None:
    logging = LoggingConfig(output_dir=str(tmp_path))
    check_run_folders(Config(logging=logging, data=DataConfig(data_cache_path="/proc")))
    with pytest.raises(UserError, match=r"--data-cache-path /proc/cache cannot be written"):
        check_run_folders(Config(logging=logging, data=DataConfig(data_cache_path="/proc/cache")))


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_no_permission(root: Path) -> None:
    (root / "empty").chmod(0o500)
    assert "Permission denied" in checked(root, save="empty/run")[0]


def test_a_restarted_run_need_not_find_what_it_began_with(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert checked(root, save="empty", load="gone", finetune=True) == []
