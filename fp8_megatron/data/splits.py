"""What megatron-core's dataset builder is told: the files of each split, where indices are cached, a process group."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path

import torch

from ..config.schema import DataConfig
from ..device.rendezvous import talk_over_loopback
from ..errors import UserError
from .token_files import Blend, number_in

SPLITS = ("train", "valid", "test")
_HOW_TO_DO_WITHOUT = {"valid": ", or turn validation off with --eval-interval 0"}
_NO_TEST = {True: ", or do without a test: --split with 0 as its last weight", False: ", or drop --test-data-path"}


def blends_of_splits(data: DataConfig, sizes: Sequence[int]) -> tuple[Blend | None, ...]:
    """The blend of each split; None for a split without samples."""
    own = {"train": data.train_data_path, "valid": data.valid_data_path, "test": data.test_data_path}
    if data.data_path:
        if any(own.values()):
            raise UserError("--data-path (cut by --split) and --train-data-path … exclude each other: give one")
        _check_split(data.split)
        blend = Blend.parse("--data-path", data.data_path)
        return tuple(blend if size else None for size in sizes)
    if not any(own.values()):
        raise UserError("no data: give --data-path, or --train-data-path and --valid-data-path, or --mock-data")
    for split, size in zip(SPLITS, sizes, strict=True):
        if size and not own[split]:
            instead = _HOW_TO_DO_WITHOUT.get(split, "")
            raise UserError(f"{size} {split} samples are wanted, but no --{split}-data-path is given: give it{instead}")
    return tuple(
        Blend.parse(f"--{split}-data-path", own[split]) if size else None
        for split, size in zip(SPLITS, sizes, strict=True)
    )


def remedies(data: DataConfig, split: str, text: str) -> str:
    """What a user can do where a split has too little `text`: documents, or conversations."""
    without = _NO_TEST[bool(data.data_path)] if split == "test" else _HOW_TO_DO_WITHOUT.get(split, "")
    if not data.data_path:
        return f"give more {text}{without}"
    return f"give more {text}, a larger share in --split, or files for each split with --train-data-path …{without}"


def _check_split(split: str) -> None:
    parts = [number_in(part) for part in split.split(",")]
    known = [part for part in parts if part is not None and 0 <= part < math.inf]
    if len(parts) > 3 or len(known) < len(parts) or not 0 < sum(known) < math.inf:
        raise UserError(f"--split {split}: give up to three weights (train,valid,test), not all 0, e.g. 969,30,1")


def builder_sources(data: DataConfig, blends: Sequence[Blend | None]) -> dict[str, object]:
    """GPTDatasetConfig's arguments that name the files."""
    mcore_blends = [blend and (list(blend.prefixes), blend.weights and list(blend.weights)) for blend in blends]
    if data.data_path:
        # megatron-core finds digits and points in it.
        weights = ",".join(format(Decimal(weight), "f") for weight in data.split.split(","))
        return {"blend": next(blend for blend in mcore_blends if blend), "split": weights}
    return {"blend_per_split": mcore_blends}


def cache_folder(paths: Sequence[Path], root: str | None, *, kind: str, settings: Sequence[object] = ()) -> Path:
    """The folder of what is cached of data files, named by their paths, sizes and times.

    Megatron-core's caches are keyed on the path alone. If the files are made again, such a cache would point to
    replaced text. Rank 0 removes the folder of an earlier state of the same files.

    Args:
        paths: the files.
        root: the folder of all caches. Default: ``cache`` beside the first file.
        kind: what the name of the folder begins with.
        settings: what else the content depends on.

    Raises:
        UserError: the folder cannot be made.
    """
    states = [(path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    family = f"{kind}-{_digest([*map(str, paths), *settings])}-"
    parent = Path(root) if root else paths[0].parent / "cache"
    folder = parent / f"{family}{_digest(states)}"
    try:
        if not folder.is_dir():  # one that is complete need not be writable
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write dataset index caches to {parent} ({error.strerror}): "
            f"give --data-cache-path a folder that can be written"
        ) from error
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        for stale in parent.glob(f"{family}*"):
            if stale != folder:
                shutil.rmtree(stale, ignore_errors=True)
    return folder


def _digest(values: Sequence[object]) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


@contextmanager
def process_group() -> Iterator[None]:
    """A process group of one rank if there is none: BlendedDataset asks for its rank."""
    if torch.distributed.is_initialized():
        yield
        return
    talk_over_loopback()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
