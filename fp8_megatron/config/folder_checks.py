"""Checks of the folders that a run reads and writes. They look at the disk, leave nothing on it, and need no device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..device.variables import number
from ..errors import UserError
from ..outputs import check_output_file, check_output_folder
from .schema import Config

#: Files of --output-dir that a run replaces or continues.
_OUTPUT_FILES = ("config.yaml", "events.jsonl", "loss.png", "memory.txt", "metrics.jsonl")


def check_run_folders(config: Config) -> None:
    """Check that every folder of a run can be written, and that --load leads to a folder.

    Raises:
        UserError: one problem per line, with path, reason and free space.
    """
    problems = list(_problems(config))
    if problems:
        raise UserError("\n".join(problems))


def load_problem(path: Path) -> str | None:
    """Why a path of --load is no folder; None if it is one."""
    if path.is_dir():
        return None
    if path.exists():
        return f"load({path}) is a file; give the folder that --save named"
    return f"load({path}) does not exist; give the folder that --save named"


def _problems(config: Config) -> Iterator[str]:
    bad: list[Path] = []
    for flag, folder in _folders(config):
        if any(folder.is_relative_to(other) for other in bad):
            continue
        try:
            check_output_folder(folder, flag)
        except UserError as error:
            bad.append(folder)
            yield str(error)
    output_dir = named_output_dir(config)
    for path in [] if output_dir is None or bad else [output_dir / name for name in _OUTPUT_FILES]:
        if os.path.lexists(path):
            try:
                check_output_file(path, "--output-dir")
            except UserError as error:
                yield str(error)
    checkpoint = config.checkpoint
    # A restarted run resumes from --save, and need not find --load again.
    if checkpoint.load is None or number("TORCHELASTIC_RESTART_COUNT", 0) > 0:
        return
    problem = load_problem(Path(checkpoint.load))
    needs_one = (
        checkpoint.loads_weights_alone or checkpoint.exit_on_missing_checkpoint or not checkpoint.loads_what_it_saves
    )
    may_be_missing = checkpoint.pretrained_checkpoint is not None or not needs_one
    if problem is not None and (Path(checkpoint.load).exists() or not may_be_missing):
        yield problem


def _folders(config: Config) -> Iterator[tuple[str, Path]]:
    """(flag, folder) of everything that the run writes. A data cache with something in it may hold all that is read."""
    logging, save, output_dir = config.logging, config.checkpoint.save, named_output_dir(config)
    if save is not None:
        yield "--save", Path(save)
    if logging.output_dir is not None or save is None:
        yield "--output-dir", output_dir or Path("runs")
    if logging.tensorboard and logging.tensorboard_dir is not None:
        yield "--tensorboard-dir", Path(logging.tensorboard_dir)
    elif logging.tensorboard and output_dir is not None:
        yield "--tensorboard", output_dir / "tensorboard"
    if logging.wandb_project is not None and logging.wandb_save_dir is not None:
        yield "--wandb-save-dir", Path(logging.wandb_save_dir)
    cache = config.data.data_cache_path
    if cache is not None and not config.data.mock_data and not _holds_something(Path(cache)):
        yield "--data-cache-path", Path(cache)


def _holds_something(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except OSError:
        return False


def named_output_dir(config: Config) -> Path | None:
    """The folder of a run's logs; None if the time of its start will name it."""
    given = config.logging.output_dir or config.checkpoint.save
    return None if given is None else Path(given)
