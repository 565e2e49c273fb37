"""megatron-core's cached indices of datasets. A file has its name only when it is complete: runs may start at once."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset

from ..outputs import writing_to
from .aside import built_aside
from .splits import cache_folder

logger = logging.getLogger(__name__)

_DESCRIPTION = "description.txt"


def index_folder(paths: Sequence[Path], root: str | None, *, kind: str) -> Path:
    """The folder of the indices of data files (`splits.cache_folder`). Rank 0 removes damaged ones from it."""
    folder = cache_folder(paths, root, kind=kind)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        for path in sorted(folder.glob("*_index.npy")):
            remove_damaged(path)
    return folder


def remove_damaged(path: Path) -> None:
    """Remove the file of an array, if it is there and cannot be read, so that it is made again."""
    try:
        np.load(path, mmap_mode="r")
    except FileNotFoundError:
        return
    except (ValueError, EOFError, SyntaxError, TypeError):  # the last two: a damaged header
        logger.warning("making %s again: it is damaged", path)
        path.unlink(missing_ok=True)


class CachedGPTDataset(GPTDataset):
    """megatron-core's GPTDataset, whose index files appear whole."""

    def _build_document_sample_shuffle_indices(self) -> Any:
        with _built_aside(self, self.index_split.name, ("document_index.npy", "sample_index.npy", "shuffle_index.npy")):
            return super()._build_document_sample_shuffle_indices()


class CachedBlend(BlendedDataset):
    """megatron-core's BlendedDataset, whose index files appear whole."""

    def _build_indices(self) -> Any:
        with _built_aside(self, self.split.name, ("dataset_index.npy", "dataset_sample_index.npy")):
            return super()._build_indices()


class DatasetBuilder(BlendedMegatronDatasetBuilder):
    """megatron-core's builder, with `CachedBlend` for blends."""

    @staticmethod
    def build_generic_dataset(cls: Any, *args: Any) -> Any:
        """As megatron-core's."""
        wanted = CachedBlend if cls is BlendedDataset else cls
        return BlendedMegatronDatasetBuilder.build_generic_dataset(wanted, *args)


@contextmanager
def _built_aside(dataset: Any, split: str, names: Sequence[str]) -> Iterator[None]:
    """Have rank 0 write a dataset's index files into a folder of its own, and name them when all are complete.

    Nothing changes if the files are there. Two runs that both miss them write the same, and the first to end names its.

    Args:
        dataset: reads where to write from ``config.path_to_cache``.
        split: the split's name in the names of the files.
        names: how these names end.

    Raises:
        UserError: the files cannot be written. megatron-core would raise an error of its own for an OSError.
    """
    shared = dataset.config
    folder = Path(shared.path_to_cache)
    base = f"{dataset.unique_description_hash}-{type(dataset).__name__}-{split}"
    paths = [folder / f"{base}-{name}" for name in (*names, _DESCRIPTION)]
    if torch.distributed.get_rank() != 0 or all(path.is_file() for path in paths):
        yield
        return
    with writing_to(folder, "--data-cache-path"), built_aside(folder) as aside:
        dataset.config = copy.copy(shared)  # other datasets are built from it in other threads
        dataset.config.path_to_cache = str(aside)
        try:
            yield
        finally:
            dataset.config = shared
        for path in paths:
            if not path.is_file():  # else other hosts may have mapped it
                os.replace(aside / path.name, path)
