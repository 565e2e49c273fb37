"""Writers of Megatron's .bin/.idx pairs. Files get their names when they are complete."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..outputs import writing_to
from .indexed import write_index
from .temporary_files import clear_leftover_files, temporary_path

_COPY_BYTES = 1 << 26


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """The dtype of the tokens of a vocabulary, as in Megatron, which takes 16 bits below 65,500 tokens."""
    return np.uint16 if vocab_size < 65500 else np.int32


@dataclass(frozen=True, eq=False)
class TokenizedDocuments:
    """Documents as tokens.

    Attributes:
        ids: all tokens, [tokens].
        lengths: tokens of each sequence, int32 [sequences]. No sequence is empty.
        counts: sequences of each document, int32 [documents]. A document without tokens has none.
    """

    ids: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray

    def every(self, first: int, step: int) -> TokenizedDocuments:
        """Documents `first`, `first` + `step`, …"""
        chosen = np.zeros(len(self.counts), dtype=bool)
        chosen[first::step] = True
        sequences = np.repeat(chosen, self.counts)
        tokens = np.repeat(sequences, self.lengths)
        return TokenizedDocuments(self.ids[tokens], self.lengths[sequences], self.counts[chosen])


class DatasetWriter:
    """One .bin/.idx pair, under temporary names until `commit`. Leaving the context without it removes the files. Those
    that a kill left are removed by the next writer of the pair.
    """

    def __init__(self, prefix: str, dtype: type[np.number]):
        self.prefix = prefix
        self.num_tokens = 0
        self.num_documents = 0
        self._dtype = np.dtype(dtype)
        self._lengths: list[np.ndarray] = []
        self._document_ends: list[np.ndarray] = []
        self._num_sequences = 0
        paths = {kind: Path(f"{prefix}.{kind}") for kind in ("bin", "idx")}
        self._temporary = {kind: temporary_path(path) for kind, path in paths.items()}
        self._file = open(self._temporary["bin"], "wb")  # noqa: SIM115
        self._temporary["idx"].touch()
        for path in paths.values():
            clear_leftover_files(path)

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # closing writes buffered bytes; an earlier error has told of a full disk
            self._file.close()
        for path in self._temporary.values():
            path.unlink(missing_ok=True)

    def add(self, documents: TokenizedDocuments) -> None:
        """Append documents."""
        with writing_to(Path(f"{self.prefix}.bin"), "--output-prefix"):
            self._file.write(np.ascontiguousarray(documents.ids).data)
        self._add_to_index(documents.lengths, np.cumsum(documents.counts), len(documents.ids))

    def append_tokens(self, bin_path: Path, lengths: np.ndarray, document_ends: np.ndarray) -> None:
        """Append another dataset: its .bin file, int32 [sequences], and the end of each document in sequences."""
        with writing_to(Path(f"{self.prefix}.bin"), "--output-prefix"), bin_path.open("rb") as source:
            while part := source.read(_COPY_BYTES):
                self._file.write(part)
        self._add_to_index(lengths, document_ends, int(lengths.sum(dtype=np.int64)))

    def append(self, other: DatasetWriter) -> None:
        """Append what another writer holds, which has not been committed."""
        other._file.flush()
        self.append_tokens(other._temporary["bin"], *other._index())

    def _add_to_index(self, lengths: np.ndarray, document_ends: np.ndarray, num_tokens: int) -> None:
        self._lengths.append(lengths)
        self._document_ends.append(document_ends.astype(np.int64) + self._num_sequences)
        self._num_sequences += len(lengths)
        self.num_documents += len(document_ends)
        self.num_tokens += num_tokens

    def _index(self) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of each sequence, and the end of each document in sequences."""
        none = np.zeros(0, dtype=np.int32)
        return np.concatenate([none, *self._lengths]), np.concatenate([none.astype(np.int64), *self._document_ends])

    def commit(self) -> None:
        """Write the index and rename both files. An index never stands beside another run's tokens."""
        with writing_to(Path(f"{self.prefix}.bin"), "--output-prefix"):
            self._file.close()
        with writing_to(Path(f"{self.prefix}.idx"), "--output-prefix"):
            write_index(self._temporary["idx"], self._dtype, *self._index())
            Path(f"{self.prefix}.idx").unlink(missing_ok=True)
            for kind, path in self._temporary.items():
                path.replace(f"{self.prefix}.{kind}")


class PartitionedWriter:
    """A dataset whose documents are dealt out to partitions one by one, and joined partition by partition.

    So does Megatron's tool with several partitions. One partition keeps the order of the documents.
    """

    def __init__(self, prefix: str, dtype: type[np.number], num_partitions: int = 1):
        names = [prefix, *(f"{prefix}_{index}" for index in range(1, num_partitions))]
        self._parts = [DatasetWriter(name, dtype) for name in names]
        self._files = ExitStack()

    def __enter__(self) -> PartitionedWriter:
        for part in self._parts:
            self._files.enter_context(part)
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    @property
    def prefix(self) -> str:
        """The prefix of the dataset's files."""
        return self._parts[0].prefix

    @property
    def num_documents(self) -> int:
        """Documents so far, those without tokens included."""
        return sum(part.num_documents for part in self._parts)

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return sum(part.num_tokens for part in self._parts)

    def add(self, documents: TokenizedDocuments) -> None:
        """Deal out documents."""
        if len(self._parts) == 1:
            self._parts[0].add(documents)
            return
        size, done = len(self._parts), self.num_documents
        for index, part in enumerate(self._parts):
            part.add(documents.every((index - done) % size, size))

    def commit(self) -> None:
        """Join the partitions, and give the files their names."""
        first, *others = self._parts
        for part in others:
            first.append(part)
            part.num_documents = part.num_tokens = 0
        first.commit()
