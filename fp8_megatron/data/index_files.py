"""megatron-core's cached indices of datasets, checked against their checksums when a run begins."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset

from .cached_arrays import make_files, map_arrays


class CachedGPTDataset(GPTDataset):
    """megatron-core's GPTDataset, whose index files appear whole and are checked."""

    def _build_document_sample_shuffle_indices(self) -> Any:
        build = super()._build_document_sample_shuffle_indices
        return _indices(self, self.index_split.name, ("document_index", "sample_index", "shuffle_index"), build)


class CachedBlend(BlendedDataset):
    """megatron-core's BlendedDataset, whose index files appear whole and are checked."""

    def _build_indices(self) -> Any:
        return _indices(self, self.split.name, ("dataset_index", "dataset_sample_index"), super()._build_indices)


class DatasetBuilder(BlendedMegatronDatasetBuilder):
    """megatron-core's builder, with `CachedBlend` for blends."""

    @staticmethod
    def build_generic_dataset(cls: Any, *args: Any) -> Any:
        """As megatron-core's."""
        wanted = CachedBlend if cls is BlendedDataset else cls
        return BlendedMegatronDatasetBuilder.build_generic_dataset(wanted, *args)


def _indices(dataset: Any, split: str, names: Sequence[str], build: Callable[[], object]) -> list[np.ndarray]:
    """The indices of a dataset. Rank 0 makes and checks their files; megatron-core would un-pickle what it reads.

    Args:
        dataset: reads where to write from ``config.path_to_cache``.
        split: the split's name in the names of the files.
        names: of the indices.
        build: megatron-core's method that makes the files.

    Raises:
        UserError: see `make_files` and `map_arrays`. megatron-core would raise an error of its own for an OSError.
    """
    folder = Path(dataset.config.path_to_cache)
    base = f"{dataset.unique_description_hash}-{type(dataset).__name__}-{split}"
    files = [f"{base}-{name}.npy" for name in names]
    if torch.distributed.get_rank() == 0:
        make_files(folder, [*files, f"{base}-description.txt"], f"{base}-crc32.json", partial(_build, dataset, build))
    return map_arrays(folder, files, "indices of samples")


def _build(dataset: Any, build: Callable[[], object], folder: Path) -> None:
    """Have megatron-core write a dataset's index files into a folder."""
    shared = dataset.config
    dataset.config = copy.copy(shared)  # other datasets are built from it in other threads
    dataset.config.path_to_cache = str(folder)
    try:
        build()
    finally:
        dataset.config = shared
