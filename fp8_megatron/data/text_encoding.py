"""Text to tokens in worker processes: a batch each, and a long document in parts."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, islice
from typing import Any, Literal, NamedTuple

import numpy as np

from .documents import RawBatch, SentenceSplitter, parse_batch
from .pools import freeing_nothing_of_the_parent, process_pool, results_in_order
from .token_writer import TokenizedDocuments, token_dtype
from .tokenizer import Tokenizer, sums_of_runs
from .tokenizer_settings import TokenizerOptions, build_tokenizer

#: Batches in flight per worker: enough to keep it busy, few enough to limit memory.
_BATCHES_PER_WORKER = 4


@dataclass(frozen=True)
class TextEncoding:
    """How text becomes tokens; the same in every worker."""

    tokenizer_type: str
    tokenizer_model: str | None
    vocab_size: int | None
    options: TokenizerOptions
    json_keys: tuple[str, ...]
    append_eod: bool
    skip_errors: bool
    split_sentences: bool
    keep_newlines: bool
    language: str

    @property
    def level(self) -> str:
        """What one sequence of the output is."""
        return "sentence" if self.split_sentences else "document"


@dataclass(frozen=True)
class EncodedBatch:
    """A worker's result: the documents of each JSON key."""

    tokens: dict[str, TokenizedDocuments]
    num_documents: int
    num_empty: int
    text_bytes: int
    bytes_consumed: int
    errors: tuple[str, ...]


@lru_cache(maxsize=1)
def load_tokenizer(encoding: TextEncoding) -> Tokenizer:
    """This process's tokenizer, built once."""
    return build_tokenizer(encoding.tokenizer_type, encoding.tokenizer_model, encoding.vocab_size, encoding.options)


@lru_cache(maxsize=1)
def load_splitter(encoding: TextEncoding) -> SentenceSplitter | None:
    """This process's splitter of sentences, built once; None if documents stay whole."""
    if not encoding.split_sentences:
        return None
    return SentenceSplitter(encoding.language, keep_newlines=encoding.keep_newlines)


class _Documents:
    """The documents of a batch, not yet encoded. A document is the texts that are encoded one by one.

    Raises:
        ValueError: a malformed document, unless it is skipped; the message names ``file:line``.
    """

    def __init__(self, encoding: TextEncoding, batch: RawBatch) -> None:
        self._encoding, self._batch = encoding, batch
        self._parsed = parse_batch(batch, encoding.json_keys, skip_errors=encoding.skip_errors)
        self._of_key = {
            key: [_sentences(encoding, text) for text in texts] for key, texts in self._parsed.texts.items()
        }
        self.texts = [text for documents in self._of_key.values() for text in chain.from_iterable(documents)]

    @property
    def places(self) -> str:
        """The first and the last ``file:line``."""
        return " to ".join(self._parsed.places[:: max(1, len(self._parsed.places) - 1)])

    def encoded(self, ids: np.ndarray, lengths: np.ndarray) -> EncodedBatch:
        """The batch, of the ids of `texts`. A document without tokens keeps its place, without a sequence."""
        tokenizer, batch = load_tokenizer(self._encoding), self._batch
        ids = ids.astype(token_dtype(tokenizer.vocab_size), copy=False)
        tokens, num_empty, first, start = {}, 0, 0, 0
        for key, documents in self._of_key.items():
            sizes = np.fromiter(map(len, documents), dtype=np.int64, count=len(documents))
            own = lengths[first : first + sizes.sum()]
            first, end = first + len(own), start + int(own.sum())
            counts = np.bincount(np.repeat(np.arange(len(sizes)), sizes)[own > 0], minlength=len(sizes))
            own, own_ids, start = own[own > 0], ids[start:end], end
            num_empty += int((counts == 0).sum())
            if self._encoding.append_eod:
                last = np.cumsum(counts)[counts > 0] - 1
                own_ids = np.insert(own_ids, np.cumsum(own)[last], tokenizer.eod)
                own[last] += 1
            tokens[key] = TokenizedDocuments(own_ids, own.astype(np.int32), counts.astype(np.int32))
        errors = tuple(self._parsed.errors)
        return EncodedBatch(
            tokens, len(self._parsed.places), num_empty, len(batch.content), batch.bytes_consumed, errors
        )


class _Chunk(NamedTuple):
    """Parts of long documents that one worker encodes, and where the documents are."""

    places: str
    texts: list[str]


class _LongDocuments:
    """Documents that are so long that several workers encode parts of them.

    Attributes:
        chunks: of about `chunk_characters` each, or a little more.
    """

    def __init__(self, documents: _Documents, tokenizer: Tokenizer, chunk_characters: int) -> None:
        self._documents = documents
        parts = [tokenizer.parts(text, chunk_characters) for text in documents.texts]
        self._num_parts = [len(own) for own in parts]
        self.chunks, size = [_Chunk(documents.places, [])], 0
        for part in chain.from_iterable(parts):
            if size >= chunk_characters:
                self.chunks.append(_Chunk(documents.places, []))
                size = 0
            self.chunks[-1].texts.append(part)
            size += len(part)

    def join(self, encoded: Iterable[tuple[np.ndarray, np.ndarray]]) -> EncodedBatch:
        """The batch, of the chunks as `Tokenizer.encode_flat` gives them."""
        ids, lengths = (np.concatenate(of_chunks) for of_chunks in zip(*encoded, strict=True))
        return self._documents.encoded(ids, sums_of_runs(lengths, self._num_parts))


def encode(encoding: TextEncoding, batch: RawBatch) -> EncodedBatch:
    """Parse and tokenise one batch.

    Raises:
        ValueError: a malformed document, unless it is skipped; the message names ``file:line``.
    """
    documents = _Documents(encoding, batch)
    return documents.encoded(*_encode_texts(encoding, documents.places, documents.texts))


def _encode_texts(encoding: TextEncoding, places: str, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    try:
        return load_tokenizer(encoding).encode_flat(texts)
    except ValueError as error:
        raise ValueError(f"{places}: {error}") from error


def _work(encoding: TextEncoding, task: RawBatch | _Chunk) -> EncodedBatch | tuple[np.ndarray, np.ndarray]:
    return _encode_texts(encoding, *task) if isinstance(task, _Chunk) else encode(encoding, task)


def _sentences(encoding: TextEncoding, document: str | list[str]) -> list[str]:
    """The texts of a document that are encoded one by one."""
    texts = [document] if isinstance(document, str) else document
    splitter = load_splitter(encoding)
    return texts if splitter is None else [sentence for text in texts for sentence in splitter.split(text)]


def encode_all(
    encoding: TextEncoding, batches: Iterator[RawBatch], num_workers: int, *, batch_bytes: int
) -> Iterator[EncodedBatch]:
    """Encode every batch, in order, so that the output does not depend on `num_workers`.

    Args:
        batch_bytes: the size of batches that are not longer because of their documents.
    """
    if num_workers == 1:
        for batch in batches:
            yield encode(encoding, batch)
        return
    # Forked workers start with the tokenizer that this process has already loaded.
    method: Literal["fork"] | None = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    executor = process_pool(num_workers, method=method)
    cut: deque[_LongDocuments | None] = deque()

    def tasks() -> Iterator[RawBatch | _Chunk]:
        for batch in batches:
            long = None
            if len(batch.content) > 3 * batch_bytes and not encoding.split_sentences:
                long = _LongDocuments(_Documents(encoding, batch), load_tokenizer(encoding), batch_bytes)
            cut.append(long if long is not None and len(long.chunks) > 1 else None)
            yield from [batch] if cut[-1] is None else cut[-1].chunks

    most = _BATCHES_PER_WORKER * num_workers
    with freeing_nothing_of_the_parent():
        try:
            results: Iterator[Any] = results_in_order(executor, partial(_work, encoding), tasks(), most=most)
            for result in results:
                long = cut.popleft()
                if long is None:
                    yield result
                else:
                    yield long.join([result, *islice(results, len(long.chunks) - 1)])
        except BrokenProcessPool as error:
            raise ValueError(
                f"a worker process died, probably out of memory: give fewer --workers than {num_workers}"
            ) from error
