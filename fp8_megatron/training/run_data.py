"""A run's data: tokenizer, vocabulary, datasets and loaders, under one parallel layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch.utils.data import ConcatDataset, Dataset

from ..checkpoint.run_state import Progress
from ..config.checks import ConfigError
from ..config.schema import Config, DataConfig
from ..config.words import shortened
from ..data.datasets import Datasets, MaskedTail, build_datasets, build_validation_sets
from ..data.document_bounds import Bounds, DocumentBounds, PositionBounds, most_documents
from ..data.loader import build_loader
from ..data.sft_datasets import build_sft_datasets, build_sft_validation_sets, most_conversations
from ..data.tokenizer import Tokenizer, padded_vocab_size
from ..data.tokenizer_settings import TokenizerOptions, build_tokenizer
from ..mcore.topology import Topology
from .batches import Batch


@dataclass(frozen=True)
class Evaluation:
    """One pass over held-out data.

    Attributes:
        name: the split, and the name of the set if there are several: ``valid-wiki``.
        num_batches: global batches of the pass.
        is_whole: every sample is read once, and a loss is the mean over tokens.
    """

    name: str
    loader: Iterator[Batch]
    num_batches: int
    is_whole: bool


@dataclass(frozen=True)
class RunData:
    """Datasets of a run and how this rank reads them.

    Attributes:
        num_train_samples: samples of the whole training, as given when the datasets were opened.
        eod: the token that ends a document.
        validation_sets: with --full-validation, the sets by name.
    """

    config: Config
    topology: Topology
    datasets: Datasets
    padded_vocab_size: int
    unpadded_vocab_size: int
    num_train_samples: int
    eod: int
    validation_sets: Mapping[str, Dataset] = field(default_factory=dict)

    def going_on(self, progress: Progress) -> RunData:
        """The data to resume with.

        If the global batch has changed, the datasets are opened again for the new number of training samples.
        All ranks call this together.
        """
        if num_train_samples(self.config, self.topology, progress) == self.num_train_samples:
            return self
        return open_run_data(self.config, self.topology, progress)

    def train_loader(
        self, consumed_samples: int, *, starts_over: bool = False, records: bool = False
    ) -> Iterator[Batch]:
        """Training micro-batches, starting after `consumed_samples` samples.

        Args:
            starts_over: read the order again from its start where it ends, in place of samples that were left out.
            records: steps are recorded, which takes one shape for all batches.
        """
        assert self.datasets.train is not None
        capacity = self.most_documents() if records else None
        return self._loader(self.datasets.train, "train", consumed_samples, starts_over=starts_over, capacity=capacity)

    def most_documents(self) -> int | None:
        """Documents that a training micro-batch may have; None if attention crosses them."""
        data = self.config.data
        if not data.keeps_documents_apart or self.datasets.train is None:
            return None
        most = (most_conversations if data.sft else most_documents)(self.datasets.train)
        return self.config.training.micro_batch_size * most

    @property
    def samples_of_a_validation(self) -> int:
        """Samples by which a validation moves the place of the next one."""
        training = self.config.training
        return training.eval_iters * self.config.eval_global_batch_size(self.topology.world_size) * training.moves_on

    def validated_samples(self, progress: Progress) -> int:
        """Samples of the validations before `progress`.

        As Megatron does, a run on steps that has none saved takes those of every --eval-interval before.
        """
        training = self.config.training
        if progress.consumed_valid_samples or self.config.counts_samples or not training.eval_interval:
            return progress.consumed_valid_samples
        return progress.iteration // training.eval_interval * self.samples_of_a_validation

    def evaluations(self, split: str, consumed_samples: int = 0) -> Iterator[Evaluation]:
        """The passes over a held-out split; none if the run has no such split.

        Args:
            consumed_samples: where they begin. A whole split is read from its start.
        """
        if split == "valid" and self.validation_sets:
            batch = self.config.eval_global_batch_size(self.topology.world_size)
            for name, dataset in self.validation_sets.items():
                num_batches = -(-len(dataset) // batch)  # type: ignore[arg-type]  # map-style datasets have a length
                whole = MaskedTail(dataset, num_batches * batch)
                yield Evaluation(name, self._loader(whole, split, 0), num_batches, is_whole=True)
        elif getattr(self.datasets, split) is not None:
            # It starts over for a run that validates more often than its flags say now.
            loader = self._loader(getattr(self.datasets, split), split, consumed_samples, starts_over=True)
            yield Evaluation(split, loader, self.config.training.eval_iters, is_whole=False)

    def _loader(
        self,
        dataset: Dataset,
        split: str,
        consumed_samples: int,
        *,
        starts_over: bool = False,
        capacity: int | None = None,
    ) -> Iterator[Batch]:
        is_whole = split == "valid" and bool(self.validation_sets)
        return build_loader(
            dataset,
            micro_batch_size=self.config.training.micro_batch_size,
            data_parallel_rank=self.topology.dp.rank(),
            data_parallel_size=self.topology.dp.size(),
            num_workers=self.config.data.num_workers if split == "train" else 0,
            consumed_samples=consumed_samples,
            cycle=starts_over,
            shuffles=None if is_whole else _shuffles(self.config.data),
            documents=self._bounds(capacity),
            part=self.topology.sequence_part,
            name=_name(self.config.data, split),
            timeout_seconds=60 * self.config.parallel.distributed_timeout_minutes,
        )

    def _bounds(self, capacity: int | None) -> Bounds | None:
        """What finds the documents of a micro-batch; None if attention crosses them."""
        if self.config.data.sft:
            return PositionBounds(capacity)
        return DocumentBounds(self.eod, capacity) if self.config.data.reset_attention_mask else None


def _name(data: DataConfig, split: str) -> str:
    """What a loader reads, for errors."""
    return shortened(f"{split} data {' '.join(data.data_path or getattr(data, f'{split}_data_path'))}".strip())


def _shuffles(data: DataConfig) -> Literal["sharded", "whole"] | None:
    """How `build_loader` shuffles each pass over a dataset."""
    if data.dataloader_type == "single":
        return None
    return "sharded" if data.data_sharding else "whole"


def load_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer that the configuration names. Random tokens may have none, only --vocab-size.

    Raises:
        ConfigError: the tokenizer's model does not exist, or its vocabulary is larger than --vocab-size.
    """
    try:
        data = config.data
        if data.has_no_tokenizer:
            return build_tokenizer("NullTokenizer", None, config.model.vocab_size)
        options = TokenizerOptions.of(data)
        return build_tokenizer(data.tokenizer_kind, data.tokenizer_model, config.model.vocab_size, options)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def unpadded_vocab(config: Config, tokenizer: Tokenizer) -> int:
    """Size of the vocabulary without padding."""
    return config.model.vocab_size or tokenizer.vocab_size


def padded_vocab(config: Config, tokenizer: Tokenizer) -> int:
    """Size of the padded vocabulary: the rows of the embedding."""
    return padded_vocab_size(
        unpadded_vocab(config, tokenizer),
        config.model.make_vocab_size_divisible_by,
        config.parallel.tensor_model_parallel_size,
    )


def num_train_samples(config: Config, topology: Topology, progress: Progress) -> int:
    """Samples of the whole training, as many as Megatron asks its datasets for: their order depends on it.

    With --train-samples, those. Otherwise the samples seen so far, and a largest global batch for each remaining step.
    Samples that rollbacks have left out do not count, so the order stays what it was before them.
    """
    if config.counts_samples:
        return config.train_counts
    remaining = max(0, config.train_counts - progress.iteration)
    seen = progress.consumed_samples - progress.left_out_samples
    batch = config.global_batch_size(topology.world_size)
    if not config.batch_schedule(topology.world_size).is_constant:
        seen = max(seen, progress.iteration * batch)  # Megatron counts the largest batch for the steps before too
    return seen + remaining * batch


def open_run_data(config: Config, topology: Topology, progress: Progress | None = None) -> RunData:
    """Check and open the tokenizer and all datasets. All ranks call this together.

    Args:
        progress: where training resumes. Default: at the start.

    Raises:
        ConfigError: any problem with tokenizer or data.
    """
    tokenizer = load_tokenizer(config)
    training = config.training
    batch = config.eval_global_batch_size(topology.world_size)
    evaluates = training.validates and training.eval_iters > 0
    has_test = bool(config.data.test_data_path) or (
        bool(config.data.data_path) and float(config.data.split.split(",")[-1]) > 0
    )
    is_whole = training.full_validation and training.validates
    num_test_samples = training.eval_iters * batch if evaluates and has_test else 0
    num_valid_samples = training.eval_iters * batch if evaluates and not is_whole else 0
    if training.moves_on and evaluates:  # as many as Megatron asks for: their order depends on it
        num_valid_samples *= config.train_iters(topology.world_size) // training.eval_interval + 1
    train_samples = num_train_samples(config, topology, progress or Progress())
    try:
        datasets = _datasets(config, (train_samples, num_valid_samples, num_test_samples), tokenizer)
        validation_sets = _validation_sets(config, tokenizer) if is_whole else {}
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return RunData(
        config,
        topology,
        datasets,
        padded_vocab(config, tokenizer),
        unpadded_vocab(config, tokenizer),
        train_samples,
        tokenizer.eod,
        validation_sets,
    )


def _datasets(config: Config, sizes: tuple[int, int, int], tokenizer: Tokenizer) -> Datasets:
    """Datasets of so many training, validation and test samples."""
    seq_length, seed = config.model.seq_length, config.training.seed
    if config.data.sft:
        return build_sft_datasets(config.data, seq_length=seq_length, seed=seed, sizes=sizes, tokenizer=tokenizer)
    num_train_samples, num_valid_samples, num_test_samples = sizes
    return build_datasets(
        config.data,
        seq_length=seq_length,
        seed=seed,
        num_train_samples=num_train_samples,
        num_valid_samples=num_valid_samples,
        num_test_samples=num_test_samples,
        tokenizer=tokenizer,
        vocab_size=config.model.vocab_size,
    )


def _validation_sets(config: Config, tokenizer: Tokenizer) -> dict[str, Dataset]:
    """The sets of --full-validation by name: one, or with --multiple-validation-sets one for each file."""
    training = config.training
    seq_length, seed = config.model.seq_length, training.seed
    if config.data.sft:
        found = build_sft_validation_sets(config.data, seq_length=seq_length, seed=seed, tokenizer=tokenizer)
    else:
        found = build_validation_sets(
            config.data, seq_length=seq_length, seed=seed, tokenizer=tokenizer, vocab_size=config.model.vocab_size
        )
    if not training.multiple_validation_sets:
        return {"valid": ConcatDataset(found)}
    names = training.validation_set_names or tuple(map(str, range(len(found))))
    return {f"valid-{name}": dataset for name, dataset in zip(names, found, strict=True)}
