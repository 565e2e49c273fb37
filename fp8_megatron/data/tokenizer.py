"""Tokenizers: text to token ids and back, with the attributes that megatron-core's datasets read.

The kinds have Megatron's names and give the ids that Megatron-LM 0.20 gives.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError

if TYPE_CHECKING:  # a wrong path is told before anything heavy is imported
    import numpy as np

#: Three names of one kind: a SentencePiece model, whose end of sequence ends a document.
SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")

#: A name on the Hugging Face hub. A path that is none starts with ``/``, ``.`` or ``~``, or has more parts.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class Tokenizer(ABC):
    """The interface that preprocessing and megatron-core's datasets need.

    `encode` never adds `eod`: preprocessing does.
    """

    #: Token ids are below this. The model's vocabulary is this size, padded.
    vocab_size: int
    #: End-of-document id.
    eod: int
    #: Megatron-core masks this id out of the loss. No token has id -1: sequences are packed, never padded.
    pad: int = -1
    #: The spaces in front of which a text may be cut; None: nowhere.
    _cut: re.Pattern[str] | None = None
    #: Whether a space is put in front of each text, so that a part does not have its own.
    _adds_space: bool = False

    def __init__(self, vocab_size: int, eod: int, model: str | None):
        self.vocab_size = vocab_size
        self.eod = eod
        # Megatron-core includes this in the description that is the key of its dataset caches.
        self.unique_identifiers = {"class": type(self).__name__, "tokenizer_path": [model], "vocab_size": vocab_size}

    def encode(self, text: str) -> list[int]:
        """Token ids of one text."""
        return self.encode_batch([text])[0]

    def encode_beginning(self, text: str) -> list[int]:
        """Token ids of a text that goes on: without tokens that the tokenizer puts behind a text."""
        return self.encode(text)

    def encode_part(self, text: str) -> list[int]:
        """Token ids of a piece of a text: without tokens that the tokenizer puts around a text."""
        return self.encode(text)

    def token_id(self, token: str) -> int | None:
        """The id of one token by its name; None if there is none of this name."""
        ids = self.encode_part(token)
        return ids[0] if len(ids) == 1 else None

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """All token ids of several texts, int32 [tokens], and how many each text has, int64 [texts]."""
        return _flat(self.encode_batch(texts))

    def parts(self, text: str, least: int) -> list[str]:
        """A text in parts of about `least` characters or more, whose ids in a row are the ids of the text.

        One part if the tokenizer is not known to allow cuts.
        """
        parts, start = [], 0
        while self._cut is not None and (found := self._cut.search(text, start + least)):
            parts.append(text[start : found.start()])
            start = found.end() if self._adds_space else found.start()
        return [*parts, text[start:]]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, in order. Uses one thread, because callers run one process per core."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece ``.model`` file.

    Texts are encoded in parts (`parts`) where that gives the same ids, which is about 1.5 times as fast. It does for a
    BPE model with bytes and without normalisation in which no piece crosses the start of a word, such as Llama's and
    those of `fp8-megatron tokenize`. Without bytes, unknown characters beside each other are one id, across words too.
    """

    # Spaces belong to the next word. SentencePiece writes a space as ▁ (U+2581), and reads ▁ as a space.
    _BETWEEN_WORDS = re.compile(r"(?<=[^\s\u2581]) (?=[^\s\u2581])")
    _OVER_WORDS = re.compile(r"[^\u2581][\u2581 ]")
    _PART_CHARACTERS = 512

    def __init__(self, model: str):
        import sentencepiece

        check_tokenizer_path("SentencePieceTokenizer", model)
        path = Path(model)
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=model)
            self._processor.serialized_model_proto()  # a part that is not UTF-8 is found here
        except (RuntimeError, OSError, ValueError) as error:
            raise UserError(
                f"tokenizer model {model} ({path.stat().st_size} bytes) is not a SentencePiece model: "
                f"give the .model file (not .vocab), or --tokenizer-type HuggingFaceTokenizer for a Hugging Face folder"
            ) from error
        eod = self._processor.eos_id()
        if eod < 0:
            raise UserError(
                f"tokenizer model {model} has no end-of-sequence token (eos_id = {eod}), which ends each document: "
                f"train it with tools/train_tokenizer.py, or with SentencePiece's --eos_id=1"
            )
        super().__init__(self._processor.vocab_size(), eod, model)
        self._set_cut()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts), num_threads=1)

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        parts = [self.parts(text, self._PART_CHARACTERS) for text in texts]
        # Arrays, which older versions of SentencePiece do not make, cost less than lists.
        encode = getattr(self._processor, "EncodeAsNumpy", self._processor.encode)
        ids, lengths = _flat(encode(list(chain.from_iterable(parts)), num_threads=1))
        return ids, sums_of_runs(lengths, [len(own) for own in parts])

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode([int(token) for token in ids])

    def token_id(self, token: str) -> int | None:
        token_id = self._processor.piece_to_id(token)
        return None if token_id == self._processor.unk_id() else token_id

    def _set_cut(self) -> None:
        """Let texts be cut between two words if that is exact."""
        from sentencepiece import sentencepiece_model_pb2

        model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
        model.ParseFromString(self._processor.serialized_model_proto())
        if (
            model.trainer_spec.model_type == model.trainer_spec.BPE
            and model.trainer_spec.byte_fallback
            and not model.trainer_spec.treat_whitespace_as_suffix
            and model.normalizer_spec.name == "identity"
            and not any(self._OVER_WORDS.search(piece.piece) for piece in model.pieces)
        ):
            self._cut = self._BETWEEN_WORDS
            self._adds_space = model.normalizer_spec.add_dummy_prefix


class NullTokenizer(Tokenizer):
    """A tokenizer without a model: text is token ids separated by spaces.

    Args:
        vocab_size: ids are below it.
        eod: ends a document. Default: the last id.
    """

    def __init__(self, vocab_size: int, eod: int | None = None):
        if vocab_size < 2:
            raise UserError(f"--vocab-size {vocab_size} leaves no token beside end-of-document: give at least 2")
        if eod is not None and eod >= vocab_size:
            raise UserError(f"--null-tokenizer-eod-id {eod} is outside --vocab-size {vocab_size}: give a smaller one")
        super().__init__(vocab_size, vocab_size - 1 if eod is None else eod, None)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._ids(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(token)) for token in ids)

    def _ids(self, text: str) -> list[int]:
        try:
            if not text.isascii() or "_" in text:  # int() takes digits of other scripts, and underscores
                raise UserError("other characters than digits")
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise UserError(
                f"NullTokenizer reads token ids separated by spaces, found {text[:40]!r}: give ids, or train with "
                f"--tokenizer-type SentencePieceTokenizer for text"
            ) from error
        outside = [token for token in ids if not 0 <= token < self.vocab_size]
        if outside:
            raise UserError(
                f"token id {outside[0]} is outside --vocab-size {self.vocab_size}: give ids from 0 to "
                f"{self.vocab_size - 1}, or train with a larger --vocab-size"
            )
        return ids


def sums_of_runs(values: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """The sums of runs of these sizes, int64, which may be 0."""
    import numpy as np

    return np.diff(np.cumsum(np.concatenate(([0], values)))[np.cumsum([0, *sizes])])


def _flat(encoded: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Lists or arrays of ids, in one array, and the length of each."""
    import numpy as np

    lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
    if encoded and isinstance(encoded[0], np.ndarray):
        return np.concatenate(encoded), lengths
    return np.fromiter(chain.from_iterable(encoded), dtype=np.int32, count=int(lengths.sum())), lengths


def check_tokenizer_path(tokenizer_type: str, model: str) -> None:
    """Check that a tokenizer's file or folder exists. Its content is not read.

    The name of a HuggingFaceTokenizer may also be one of the hub, which is not asked.

    Raises:
        UserError: it does not exist, or is a folder instead of a file.
    """
    path = Path(model)
    if tokenizer_type in (*SENTENCEPIECE_TYPES, "TikTokenizer") and not path.is_file():
        kind = "is a folder, not a file" if path.is_dir() else "does not exist"
        fix = "the .json vocabulary" if tokenizer_type == "TikTokenizer" else "the .model file of fp8-megatron tokenize"
        raise UserError(f"tokenizer model {model} {kind}: give {fix}")
    if tokenizer_type == "HuggingFaceTokenizer" and not path.is_dir():
        if path.suffix == ".json" and path.is_file():
            return
        if not path.exists() and _HUB_ID.fullmatch(model) and path.suffix != ".json":
            return
        kind = "is a file, not a folder" if path.exists() else "does not exist"
        raise UserError(
            f"tokenizer folder {model} {kind}: a HuggingFaceTokenizer is a local folder with "
            f"tokenizer.json (save_pretrained() writes one), or a name of the Hugging Face hub"
        )


def padded_vocab_size(vocab_size: int, make_divisible_by: int, tp: int) -> int:
    """`vocab_size` rounded up to a multiple of ``make_divisible_by · tp``, so that `tp` ranks get equal parts."""
    multiple = make_divisible_by * tp
    return -(-vocab_size // multiple) * multiple
