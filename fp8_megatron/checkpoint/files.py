"""Checkpoint folders on disk: written aside, synced and renamed, so that a kill at any instant loses nothing saved.

``<save>/iter_0000100/`` holds one safetensors file per rank, ``meta.json`` and ``config.yaml``;
``<save>/latest_checkpointed_iteration.txt`` names the newest complete one and is replaced last. Nothing in a
checkpoint is executable: safetensors, JSON and YAML only.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

TRACKER = "latest_checkpointed_iteration.txt"
META = "meta.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, and why."""


def iteration_folder(root: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration lives."""
    return root / f"iter_{iteration:07d}"


def rank_file(folder: Path, tensor_rank: int, pipeline_rank: int, data_rank: int) -> Path:
    """The tensors of one rank: its share of the state of one model-parallel rank."""
    return folder / f"state_tp{tensor_rank:02d}_pp{pipeline_rank:03d}_dp{data_rank:04d}.safetensors"


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file and sync it to disk."""
    save_file({name: tensor.detach().contiguous().cpu().clone() for name, tensor in tensors.items()}, path)
    _sync(path)


def open_tensors(path: Path) -> Any:
    """Open a safetensors file (`safetensors.safe_open`), whose tensors are read onto the CPU as they are asked for.

    Raises:
        CheckpointError: missing or damaged.
    """
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(
            f"checkpoint file {path} is missing; use another iteration of {path.parent.parent}"
        ) from None
    except Exception as error:
        raise CheckpointError(f"checkpoint file {path} is damaged ({error}); use another iteration") from error


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    _sync(temporary)
    os.replace(temporary, path)
    _sync(path.parent)


def publish(temporary: Path, folder: Path, tracker_text: str) -> None:
    """Give a fully written folder its name, then point the tracker at it.

    An older folder of that iteration is moved aside first and removed last: at no instant is there none.
    """
    _sync(temporary)
    replaced = folder.with_name(folder.name + ".replaced")
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(folder, replaced)
    os.replace(temporary, folder)
    _sync(folder.parent)
    write_text(folder.parent / TRACKER, tracker_text)
    shutil.rmtree(replaced, ignore_errors=True)


def latest_iteration(root: Path) -> int | None:
    """The iteration that the tracker names, or None where there is no checkpoint.

    Raises:
        CheckpointError: an unreadable tracker, or one that names a folder that is not there.
    """
    tracker = root / TRACKER
    if not tracker.exists():
        return None
    text = tracker.read_text().strip()
    if not text.isdigit():
        raise CheckpointError(
            f"{tracker} holds {text!r}, not an iteration; write the number of a folder iter_* into it"
        )
    iteration = int(text)
    folder = iteration_folder(root, iteration)
    replaced = folder.with_name(folder.name + ".replaced")
    if not folder.exists() and replaced.exists():
        os.replace(replaced, folder)  # killed between the two renames of `publish`
    if not (folder / META).exists():
        found = sorted(path.name for path in root.glob("iter_*") if (path / META).exists())
        raise CheckpointError(f"{tracker} names {folder.name}, which is not complete; complete ones: {found or 'none'}")
    return iteration


def read_meta(folder: Path) -> dict[str, Any]:
    """The metadata of a checkpoint.

    Raises:
        CheckpointError: damaged.
    """
    try:
        return json.loads((folder / META).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / META} cannot be read ({error}); use another iteration") from error


def remove_old(root: Path, keep_last: int) -> None:
    """Remove all but the newest `keep_last` checkpoints."""
    complete = sorted(path for path in root.glob("iter_???????") if path.is_dir())
    for path in complete[:-keep_last]:
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
