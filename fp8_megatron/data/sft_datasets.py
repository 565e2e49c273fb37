"""Training, validation and test datasets of --sft: conversations packed into samples, with a loss over answers."""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.megatron_dataset import MegatronDataset
from torch.utils.data import Dataset

from ..config.schema import DataConfig
from ..errors import UserError
from .datasets import DatasetBuilder, Datasets
from .sft_encoding import ConversationEncoding
from .sft_files import ConversationFile, open_conversations
from .splits import SPLITS, blends_of_splits, builder_sources, cache_folder, process_group, remedies
from .token_files import Blend
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass
class SFTDatasetConfig(GPTDatasetConfig):
    """megatron-core's settings of a dataset, and those of conversations.

    Attributes:
        packs: fill a sample with conversations of any lines; False: with those of one line.
        files: the conversations of each path.
    """

    packs: bool = True
    files: dict[str, ConversationFile] | None = None


@dataclass(frozen=True)
class Packed:
    """Conversations laid out in samples.

    Attributes:
        packs: the conversations of each sample, in their order.
        num_cut, num_dropped: conversations whose end does not fit into a sample, and those without an answer in it.
        num_tokens: positions of all samples that hold a conversation.
    """

    packs: list[list[int]]
    num_cut: int
    num_dropped: int
    num_tokens: int


class SFTDataset(MegatronDataset):
    """Samples of conversations. Pass after pass, every sample comes once, in an order of the pass's own.

    A conversation of n tokens takes n - 1 positions: its last token is only predicted. What does not fit into a sample
    is cut off at its end. Positions start at 0 in each conversation and in the padding behind the last one, which
    counts for nothing.

    Args:
        dataset: the file.
        dataset_path: its path.
        indices: the lines to read.
        num_samples: the length of the dataset; None: one pass.
        index_split: which split this is.
        config: `SFTDatasetConfig`.
    """

    def __init__(
        self,
        dataset: ConversationFile,
        dataset_path: str,
        indices: np.ndarray,
        num_samples: int | None,
        index_split: Any,
        config: SFTDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        packed = pack(dataset, indices, config.sequence_length, packs=config.packs)
        self._packs = packed.packs
        self._pass, self._order = -1, np.zeros(0, dtype=np.int64)
        if not self._packs:
            raise UserError(
                f"{dataset_path}: no conversation has an answer within --seq-length {config.sequence_length}; raise it"
            )
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            self._tell(packed)

    def _tell(self, packed: Packed) -> None:
        seq_length = self.config.sequence_length
        logger.info(
            "%s, %s: %d samples, %.1f%% of their positions filled",
            self.dataset_path,
            self.index_split.name,
            len(packed.packs),
            100 * packed.num_tokens / (len(packed.packs) * seq_length),
        )
        if packed.num_cut:
            logger.warning(
                "%s, %s: %d conversations are longer than --seq-length %d and are cut off; %d have no answer left and "
                "are dropped",
                self.dataset_path,
                self.index_split.name,
                packed.num_cut,
                seq_length,
                packed.num_dropped,
            )

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: ConversationFile) -> int:
        """Lines: --split cuts between them."""
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: SFTDatasetConfig) -> ConversationFile:
        """The file of a path."""
        assert config.files is not None
        return config.files[dataset_path]

    def __len__(self) -> int:
        return len(self._packs) if self.num_samples is None else int(self.num_samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        number, place = divmod(int(index), len(self._packs))
        if number != self._pass:
            order = np.random.default_rng((self.config.random_seed, number)).permutation(len(self._packs))
            self._pass, self._order = number, order
        pad = self.config.tokenizer.eod
        return sample_of(self.dataset, self._packs[self._order[place]], self.config.sequence_length, pad=pad)

    def most_documents(self) -> int:
        """Conversations of the sample that has the most, and its padding."""
        return max(map(len, self._packs)) + 1


def pack(file: ConversationFile, lines: np.ndarray, seq_length: int, *, packs: bool) -> Packed:
    """Lay out the conversations of `lines` in samples of `seq_length` positions.

    Args:
        packs: conversations of any lines share a sample. False: a sample is a line; conversations that begin behind its
            end are dropped.
    """
    sizes = np.diff(np.asarray(file.conversation_ends), prepend=0) - 1
    groups: list[list[int]] = []
    whole: list[int] = []
    num_cut = num_dropped = 0
    for line in lines.tolist():
        group: list[int] = []
        space = seq_length
        for conversation in file.line(line):
            space = seq_length if packs else space
            num_cut += int(sizes[conversation] > space)
            if _has_answer(file, conversation, space):
                group.append(conversation)
                space -= min(int(sizes[conversation]), space)
            else:
                num_dropped += 1
        if packs:
            whole += group
        elif group:
            groups.append(group)
    clipped = np.minimum(sizes, seq_length)
    if packs:
        groups = [[whole[item] for item in items] for items in pack_best_fit(clipped[whole], seq_length)]
    num_tokens = sum(min(int(clipped[group].sum()), seq_length) for group in groups)
    return Packed(groups, num_cut, num_dropped, num_tokens)


def _has_answer(file: ConversationFile, conversation: int, space: int) -> bool:
    """Whether a token of an answer is predicted within the first `space` positions of a conversation."""
    where = file.conversation(conversation)
    return bool(file.is_answer[where.start + 1 : min(where.start + 1 + space, where.stop)].any())


def sample_of(
    file: ConversationFile, conversations: Sequence[int], seq_length: int, *, pad: int
) -> dict[str, torch.Tensor]:
    """Conversations one after the other, as `loader.SAMPLE_KEYS` has them, each tensor [seq_length].

    Args:
        pad: the token at positions that hold no conversation, which count for nothing.
    """
    tokens = np.full(seq_length, pad, dtype=np.int64)
    labels = np.full(seq_length, pad, dtype=np.int64)
    loss_mask = np.zeros(seq_length, dtype=np.float32)
    position_ids = np.zeros(seq_length, dtype=np.int64)
    start = 0
    for conversation in conversations:
        where = file.conversation(conversation)
        text, is_answer = file.tokens[where], file.is_answer[where]
        length = min(len(text) - 1, seq_length - start)
        end = start + length
        tokens[start:end] = text[:length]
        labels[start:end] = text[1 : length + 1]
        loss_mask[start:end] = is_answer[1 : length + 1]
        position_ids[start:end] = np.arange(length)
        start = end
    position_ids[start:] = np.arange(seq_length - start)
    arrays = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": position_ids}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def most_conversations(dataset: Dataset) -> int:
    """How many documents, with the padding, the sample of an `SFTDataset` or of a blend has that has the most."""
    return max(part.most_documents() for part in getattr(dataset, "datasets", [dataset]))


def build_sft_datasets(
    data: DataConfig, *, seq_length: int, seed: int, sizes: Sequence[int], tokenizer: Tokenizer
) -> Datasets:
    """The datasets of the conversations that --data-path or --train-data-path … name. All ranks call this together.

    Args:
        data: what to read.
        seq_length: positions of a sample.
        seed: of the order of the samples.
        sizes: samples of training, validation and test; 0 for no dataset. A dataset repeats its conversations.
        tokenizer: gives the end-of-document id.

    Raises:
        UserError: bad paths, blends, --split, lines or templates, or a split without lines.
    """
    if not any(sizes):
        return Datasets(None, None, None)
    blends = blends_of_splits(data, sizes)
    return Datasets(*_build(data, blends, sizes, seq_length, seed, tokenizer))


def build_sft_validation_sets(data: DataConfig, *, seq_length: int, seed: int, tokenizer: Tokenizer) -> list[Dataset]:
    """The validation split of each file, every sample once: for --full-validation. All ranks call this together.

    Takes the arguments of `build_sft_datasets`, and raises its errors.
    """
    blend = blends_of_splits(data, (0, 1, 0))[1]
    assert blend is not None
    alone = [(None, Blend((path,), None), None) for path in blend.prefixes]
    return [_build(data, one, (0, None, 0), seq_length, seed, tokenizer)[1] for one in alone]


def _build(
    data: DataConfig,
    blends: Sequence[Blend | None],
    sizes: Sequence[int | None],
    seq_length: int,
    seed: int,
    tokenizer: Tokenizer,
) -> list[Any]:
    paths = sorted({path for blend in blends if blend for path in blend.prefixes})
    assert data.tokenizer_model is not None
    encoding = ConversationEncoding(
        data.tokenizer_model, data.tokenizer_special_tokens, data.sft_tokenizer_prompt_format, data.sft_chat_template
    )
    files = {path: open_conversations(path, encoding, data.data_cache_path) for path in paths}
    blends = [blend and _weighted(blend, partial(_num_samples, data, files, seq_length)) for blend in blends]
    config = SFTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        path_to_cache=str(cache_folder([Path(path).resolve() for path in paths], data.data_cache_path, kind="blend")),
        tokenizer=tokenizer,
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=False,
        create_attention_mask=False,
        num_dataset_builder_threads=data.num_dataset_builder_threads,
        packs=data.sft_packing,
        files=files,
        **builder_sources(data, blends),
    )
    if config.split_matrix is not None:
        # A split without samples has no dataset, and may have no lines.
        config.split_matrix = [
            part if size != 0 else None for part, size in zip(config.split_matrix, sizes, strict=True)
        ]
    _check_lines(data, config, blends, files)
    with process_group():
        return list(DatasetBuilder(SFTDataset, list(sizes), lambda: True, config).build())


def _weighted(blend: Blend, num_samples: Callable[[str], int]) -> Blend:
    """A blend of several files with their numbers of samples as default weights: all are read equally often."""
    if len(blend.prefixes) == 1:
        return Blend(blend.prefixes, None)
    return Blend(blend.prefixes, blend.weights or tuple(float(num_samples(path)) for path in blend.prefixes))


def _num_samples(data: DataConfig, files: dict[str, ConversationFile], seq_length: int, path: str) -> int:
    """Samples of one pass over a file, and 1 for a file that has none: `SFTDataset` names it."""
    file = files[path]
    return max(1, len(pack(file, np.arange(len(file)), seq_length, packs=data.sft_packing).packs))


def _check_lines(
    data: DataConfig, config: SFTDatasetConfig, blends: Sequence[Blend | None], files: dict[str, ConversationFile]
) -> None:
    """Raise UserError if a needed split has no line of a file."""
    for number, (split, blend) in enumerate(zip(SPLITS, blends, strict=True)):
        part = config.split_matrix[number] if config.split_matrix is not None else (0.0, 1.0)
        for path in blend.prefixes if blend else ():
            num_lines = len(files[path])
            start, end = (round(bound * num_lines) for bound in part or (0.0, 0.0))
            if start == end:
                raise UserError(
                    f"with --split {data.split}, the {split} part of {path} has none of its {num_lines} lines: "
                    f"{remedies(data, split, 'conversations')}"
                )


def pack_best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Items in packs: from the longest to the shortest, each goes where it leaves the least space.

    Best-fit decreasing: at most 11/9 of the fewest packs, and one more (Johnson et al., SIAM J. Comput. 3, 1974).

    Args:
        lengths: int [n], each at most `capacity`. Equal lengths are taken in their order.
        capacity: the length of a pack.

    Returns:
        The items of each pack, the longest first.
    """
    assert len(lengths) == 0 or int(lengths.max()) <= capacity
    packs: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # by their space
    spaces: list[int] = []  # the keys of `by_space`, sorted
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        place = bisect_left(spaces, length)
        if place == len(spaces):
            pack, space = len(packs), capacity
            packs.append([])
        else:
            space = spaces[place]
            pack = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[place]
        packs[pack].append(item)
        left = space - length
        if left not in by_space:
            by_space[left] = []
            insort(spaces, left)
        by_space[left].append(pack)
    return packs
