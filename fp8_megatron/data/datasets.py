"""Training, validation and test datasets: megatron-core's GPTDataset over token files, or random tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from torch.utils.data import Dataset

from ..config.schema import DataConfig
from ..config.words import flag_name
from ..errors import UserError
from .cached_arrays import make_files, map_arrays
from .fim import FimRule, permuted_sample
from .indexed import IndexedSummary, check_indexed_dataset, may_have_ends
from .splits import SPLITS, blends_of_splits, builder_sources, cache_folder, process_group, remedies
from .token_files import Blend
from .tokenizer import Tokenizer


class CachedGPTDataset(GPTDataset):
    """megatron-core's GPTDataset, whose index files appear whole and are checked."""

    def _build_document_sample_shuffle_indices(self) -> Any:
        build = super()._build_document_sample_shuffle_indices
        return _indices(self, self.index_split.name, ("document_index", "sample_index", "shuffle_index"), build)


class FimGPTDataset(CachedGPTDataset):
    """Samples whose documents are cut for fill-in-the-middle, by the rule of its `FimDatasetConfig`."""

    def _query_document_sample_shuffle_indices(self, idx: int) -> Any:
        query = super()._query_document_sample_shuffle_indices(idx)
        assert self.config.fim is not None
        return permuted_sample(self.config.fim, self.config.random_seed, idx, query)


@dataclass
class FimDatasetConfig(GPTDatasetConfig):
    """megatron-core's settings of a dataset, and what is cut; None: nothing."""

    fim: FimRule | None = None


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


@dataclass(frozen=True)
class Datasets:
    """The datasets of a run; None for a split without samples. Samples have the keys `loader.SAMPLE_KEYS`."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None


class MockDataset(Dataset):
    """Uniformly random tokens. A sample depends only on `seed` and its index; keys and dtypes are GPTDataset's."""

    def __init__(self, num_samples: int, *, seq_length: int, vocab_size: int, seed: int):
        self._num_samples = num_samples
        self._seq_length = seq_length
        self._vocab_size = vocab_size
        self._seed = seed
        self._loss_mask = torch.ones(seq_length)
        self._position_ids = torch.arange(seq_length)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        tokens = np.random.default_rng((self._seed, int(index))).integers(self._vocab_size, size=self._seq_length + 1)
        text = torch.from_numpy(tokens)
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": self._loss_mask,
            "position_ids": self._position_ids,
        }


class MaskedTail(Dataset):
    """A dataset followed by copies of its first sample that count for nothing, so that `num_samples` fill batches."""

    def __init__(self, dataset: Dataset, num_samples: int):
        self._dataset = dataset
        self._num_own: int = len(dataset)  # type: ignore[arg-type]  # map-style datasets have a length
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index < self._num_own:
            return self._dataset[index]
        sample = self._dataset[0]
        return {**sample, "loss_mask": torch.zeros_like(sample["loss_mask"])}


def build_datasets(
    data: DataConfig,
    *,
    seq_length: int,
    seed: int,
    num_train_samples: int,
    num_valid_samples: int,
    num_test_samples: int,
    tokenizer: Tokenizer,
    vocab_size: int | None = None,
) -> Datasets:
    """The datasets that --data-path, --train-data-path …, or --mock-data name, checked before anything is built.

    All ranks call this together, or a single process without torch.distributed. Rank 0 writes the index caches; the
    other ranks wait and read them, so all hosts must share the cache folder.

    Args:
        data: what to read.
        seq_length: tokens in a sample.
        seed: seed of the samples' order.
        num_train_samples, num_valid_samples, num_test_samples: samples of each dataset; 0 for no dataset. A dataset
            repeats its text as often as needed.
        tokenizer: gives the end-of-document id.
        vocab_size: upper bound of token ids (exclusive). Default: the tokenizer's.

    Raises:
        UserError: bad paths, blends, files or --split, too little text for one sample, or settings of documents' ends
            for text that has none.
    """
    sizes = (num_train_samples, num_valid_samples, num_test_samples)
    vocab_size = vocab_size or tokenizer.vocab_size
    if data.mock_data:
        seeds = (seed, seed + 1, seed + 2)
        mock = (
            MockDataset(size, seq_length=seq_length, vocab_size=vocab_size, seed=own_seed) if size else None
            for size, own_seed in zip(sizes, seeds, strict=True)
        )
        return Datasets(*mock)
    if not any(sizes):
        return Datasets(None, None, None)
    blends = blends_of_splits(data, sizes)
    prefixes = sorted({prefix for blend in blends if blend for prefix in blend.prefixes})
    files = {prefix: check_indexed_dataset(prefix, vocab_size) for prefix in prefixes}
    _check_ends(data, files, tokenizer.eod)
    config = _gpt_dataset_config(data, blends, sizes, seq_length, seed, tokenizer)
    _check_enough_text(data, config, blends, files)
    builder = DatasetBuilder(_kind(data), list(sizes), lambda: True, config)
    with process_group():
        datasets = builder.build()
    if data.dataloader_type == "single":
        _check_one_pass(data, blends, sizes, datasets)
    return Datasets(*datasets)


def build_validation_sets(
    data: DataConfig, *, seq_length: int, seed: int, tokenizer: Tokenizer, vocab_size: int | None = None
) -> list[Dataset]:
    """The validation split of each token file, every sample once: for --full-validation. All ranks call this together.

    Takes the arguments of `build_datasets`, and raises its errors.
    """
    sizes = (0, 1, 0)
    blend = blends_of_splits(data, sizes)[1]
    assert blend is not None
    found: list[Dataset] = []
    for prefix in blend.prefixes:
        files = {prefix: check_indexed_dataset(prefix, vocab_size or tokenizer.vocab_size)}
        alone = (None, Blend((prefix,), None), None)
        config = _gpt_dataset_config(data, alone, sizes, seq_length, seed, tokenizer)
        _check_enough_text(data, config, alone, files)
        with process_group():
            dataset = DatasetBuilder(_kind(data), [0, None, 0], lambda: True, config).build()[1]
        found.append(dataset)
    return found


def _check_ends(data: DataConfig, files: dict[str, IndexedSummary], eod: int) -> None:
    """Raise UserError if a setting looks for the ends of documents, and no file of several documents has one."""
    flags = [
        flag_name(name)
        for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        if getattr(data, name)
    ]
    if flags and not any(may_have_ends(summary, eod) for summary in files.values()):
        raise UserError(
            f"{', '.join(flags)} finds the end of a document by token {eod}, which {', '.join(files)} does not have: "
            f"preprocess with --append-eod and this run's tokenizer, or leave the flag out"
        )


def _gpt_dataset_config(
    data: DataConfig,
    blends: Sequence[Blend | None],
    sizes: Sequence[int],
    seq_length: int,
    seed: int,
    tokenizer: Tokenizer,
) -> FimDatasetConfig:
    prefixes = sorted({prefix for blend in blends if blend for prefix in blend.prefixes})
    paths = [Path(prefix + extension).resolve() for prefix in prefixes for extension in (".bin", ".idx")]
    config = FimDatasetConfig(
        fim=FimRule.of(data, tokenizer) if data.fim_data else None,
        random_seed=seed,
        sequence_length=seq_length,
        path_to_cache=str(cache_folder(paths, data.data_cache_path, kind="index")),
        tokenizer=tokenizer,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=False,
        eod_mask_loss=data.eod_mask_loss,
        create_attention_mask=False,
        mmap_bin_files=data.mmap_bin_files,
        num_dataset_builder_threads=data.num_dataset_builder_threads,
        **builder_sources(data, blends),
    )
    if config.split_matrix is not None:
        # Drop splits without samples: the builder counts a split's epochs, and never ends if it has no documents.
        config.split_matrix = [part if size else None for part, size in zip(config.split_matrix, sizes, strict=True)]
    return config


def _kind(data: DataConfig) -> type[CachedGPTDataset]:
    return FimGPTDataset if data.fim_data else CachedGPTDataset


def _check_one_pass(
    data: DataConfig, blends: Sequence[Blend | None], sizes: Sequence[int], datasets: Sequence[Any]
) -> None:
    """Raise UserError if a split of files without weights, which are read once, has too few samples.

    In Megatron such a run ends in an error when it has read them.
    """
    for split, blend, wanted, dataset in zip(SPLITS, blends, sizes, datasets, strict=True):
        if blend is not None and len(dataset) < wanted:
            flag = "--data-path" if data.data_path else f"--{split}-data-path"
            raise UserError(
                f"{flag} {' '.join(blend.prefixes)} without weights is read once, as in Megatron: its {len(dataset)} "
                f"{split} samples are fewer than the {wanted} of the run; give weights (weight prefix weight prefix "
                f"…), with which files are read as often as needed"
            )


def _check_enough_text(
    data: DataConfig, config: FimDatasetConfig, blends: Sequence[Blend | None], files: dict[str, IndexedSummary]
) -> None:
    """Raise UserError if a file of a needed split has less text than one sample."""
    needed = config.sequence_length + 1
    for number, (split, blend) in enumerate(zip(SPLITS, blends, strict=True)):
        if blend is None:
            continue
        part = config.split_matrix[number] if config.split_matrix is not None else (0.0, 1.0)
        for prefix in blend.prefixes:
            lengths = files[prefix].sequence_lengths
            start, end = (round(bound * len(lengths)) for bound in part or (0.0, 0.0))
            num_tokens = int(lengths[start:end].sum(dtype=np.int64))
            if num_tokens < needed:
                where = f"with --split {data.split}, the {split} part of {prefix}" if data.data_path else prefix
                raise UserError(
                    f"{where} has {num_tokens} tokens in {end - start} of {len(lengths)} documents, but one {split} "
                    f"sample takes seq_length + 1 = {needed}: {remedies(data, split, 'documents')}"
                )
