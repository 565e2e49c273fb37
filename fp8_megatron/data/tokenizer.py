"""Tokenizers: text to token ids and back, with the attributes that megatron-core's datasets read."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from ..errors import UserError

#: Values of --tokenizer-type.
TOKENIZER_TYPES = ("SentencePieceTokenizer", "HuggingFaceTokenizer", "NullTokenizer")


#: Files of a Hugging Face tokenizer that are JSON objects.
JSON_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "generation_config.json",
)


class Tokenizer(ABC):
    """The interface that preprocessing and megatron-core's datasets need.

    `encode` adds no special tokens: preprocessing appends `eod` itself.
    """

    #: Token ids are below this. The model's vocabulary is this size, padded.
    vocab_size: int
    #: End-of-document id.
    eod: int
    #: Megatron-core masks this id out of the loss. No token has id -1: sequences are packed, never padded.
    pad: int = -1

    def __init__(self, vocab_size: int, eod: int, model: str | None):
        self.vocab_size = vocab_size
        self.eod = eod
        # Megatron-core includes this in the description that is the key of its dataset caches.
        self.unique_identifiers = {"class": type(self).__name__, "tokenizer_path": [model], "vocab_size": vocab_size}

    def encode(self, text: str) -> list[int]:
        """Token ids of one text."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, in order. Uses one thread, because callers run one process per core."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece ``.model`` file.

    Words are encoded one by one and cached if that gives the same ids; this is two to four times as fast. The ids are
    the same for a BPE model in which no piece crosses the start of a word, a newline or a tab, such as
    `fp8-megatron tokenize` makes.
    """

    # Spaces belong to the next word. SentencePiece writes a space as ▁ (U+2581), and reads ▁ as a space.
    _WORDS = re.compile(r"[\n\t]|[ \u2581]*[^ \u2581\n\t]+|[ \u2581]+")
    _MAX_CACHED_WORDS = 400_000
    _OVER_WORDS = re.compile(r"[^\u2581]\u2581|.[\n\t]|[\n\t].", re.DOTALL)

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
        self._ids_of_word: dict[str, list[int]] | None = {} if self._is_wordwise() else None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self._ids_of_word is None:
            return self._processor.encode(list(texts), num_threads=1)
        known = self._ids_of_word
        if len(known) > self._MAX_CACHED_WORDS:
            known.clear()
        words_of_texts = [self._WORDS.findall(text) for text in texts]
        new = list({word for words in words_of_texts for word in words if word not in known})
        known.update(zip(new, self._processor.encode(new, num_threads=1), strict=True))
        return [list(chain.from_iterable(map(known.__getitem__, words))) for words in words_of_texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode([int(token) for token in ids])

    def _is_wordwise(self) -> bool:
        """Whether encoding word by word is exact: no normalisation, nothing added, and no piece crosses words."""
        from sentencepiece import sentencepiece_model_pb2

        model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
        model.ParseFromString(self._processor.serialized_model_proto())
        normalizer = model.normalizer_spec
        return (
            model.trainer_spec.model_type == model.trainer_spec.BPE
            and not model.trainer_spec.treat_whitespace_as_suffix
            and normalizer.name == "identity"
            and not (normalizer.add_dummy_prefix or normalizer.remove_extra_whitespaces)
            and not any(self._OVER_WORDS.search(piece.piece) for piece in model.pieces)
        )


class HuggingFaceTokenizer(Tokenizer):
    """A local Hugging Face tokenizer folder (``tokenizer.json``, ``tokenizer_config.json``); nothing is downloaded."""

    def __init__(self, model: str):
        check_tokenizer_path("HuggingFaceTokenizer", model)
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise UserError("HuggingFaceTokenizer needs transformers: pip install transformers") from error
        check_json_files(Path(model))
        try:
            # No code of the folder runs, and nobody is asked whether it should.
            self._tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
            eod, num_tokens = self._tokenizer.eos_token_id, len(self._tokenizer)
            self._tokenizer("a", add_special_tokens=False)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a damaged file raises almost anything; a panic of Rust is no Exception
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise UserError(
                f"tokenizer folder {model} cannot be loaded by transformers ({reason}): it needs the "
                f"tokenizer.json and tokenizer_config.json that save_pretrained() writes; copy them again"
            ) from error
        if eod is None:
            raise UserError(
                f"tokenizer folder {model} has no end-of-sequence token, which ends each document: "
                f"set eos_token in its tokenizer_config.json"
            )
        super().__init__(num_tokens, eod, model)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        try:
            return self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        except (TypeError, KeyError, OverflowError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"the Hugging Face tokenizer cannot encode the text ({reason})") from error

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def check_json_files(folder: Path) -> None:
    """Check that the JSON files of a Hugging Face tokenizer are JSON objects.

    Raises:
        UserError: names the file and the fault.
    """
    for name in JSON_FILES:
        path = folder / name
        if not path.is_file():
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            reason = "it nests too deeply" if isinstance(error, RecursionError) else error
            raise UserError(f"tokenizer file {path} is not JSON ({reason}): copy it again") from error
        if not isinstance(content, dict):
            raise UserError(f"tokenizer file {path} holds a {type(content).__name__}, not an object: copy it again")


class NullTokenizer(Tokenizer):
    """A tokenizer without a model: text is token ids separated by spaces. The last id ends a document."""

    def __init__(self, vocab_size: int):
        if vocab_size < 2:
            raise UserError(f"--vocab-size {vocab_size} leaves no token beside end-of-document: give at least 2")
        super().__init__(vocab_size, vocab_size - 1, None)

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
                f"NullTokenizer reads token ids separated by spaces, found {text[:40]!r}: "
                f"give --tokenizer-type SentencePieceTokenizer for text"
            ) from error
        outside = [token for token in ids if not 0 <= token < self.vocab_size]
        if outside:
            raise UserError(f"token id {outside[0]} is outside --vocab-size {self.vocab_size}: raise --vocab-size")
        return ids


def check_tokenizer_path(tokenizer_type: str, model: str) -> None:
    """Check that a tokenizer's file or folder exists. Its content is not read. NullTokenizer has none.

    Raises:
        UserError: it does not exist, or is a folder instead of a file.
    """
    path = Path(model)
    if tokenizer_type == "SentencePieceTokenizer" and not path.is_file():
        kind = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise UserError(f"tokenizer model {model} {kind}: give the .model file of tools/train_tokenizer.py")
    if tokenizer_type == "HuggingFaceTokenizer" and not path.is_dir():
        kind = "is a file, not a folder" if path.exists() else "does not exist"
        raise UserError(
            f"tokenizer folder {model} {kind}: a HuggingFaceTokenizer is a local folder with "
            f"tokenizer.json (save_pretrained() writes one)"
        )


def build_tokenizer(tokenizer_type: str, tokenizer_model: str | None, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer that --tokenizer-type, --tokenizer-model and --vocab-size name.

    Args:
        tokenizer_type: SentencePieceTokenizer, HuggingFaceTokenizer or NullTokenizer.
        tokenizer_model: the model file or folder; None for NullTokenizer.
        vocab_size: of the model. NullTokenizer uses it; other tokenizers must fit into it.

    Raises:
        UserError: the model is missing or bad, has no end-of-sequence token, or does not fit into `vocab_size`.
    """
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None:
            raise UserError("NullTokenizer has no vocabulary of its own: set --vocab-size")
        return NullTokenizer(vocab_size)
    kinds = {"SentencePieceTokenizer": SentencePieceTokenizer, "HuggingFaceTokenizer": HuggingFaceTokenizer}
    if tokenizer_type not in kinds:
        raise UserError(f"--tokenizer-type {tokenizer_type} is unknown: choose {', '.join(kinds)} or NullTokenizer")
    if not tokenizer_model:
        raise UserError(f"{tokenizer_type} needs --tokenizer-model: the .model file, or the Hugging Face folder")
    tokenizer = kinds[tokenizer_type](tokenizer_model)
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"--vocab-size {vocab_size} is smaller than the vocabulary of {tokenizer_model} ({tokenizer.vocab_size}): "
            f"leave --vocab-size out, or raise it to {tokenizer.vocab_size}"
        )
    return tokenizer


def padded_vocab_size(vocab_size: int, make_divisible_by: int, tp: int) -> int:
    """`vocab_size` rounded up to a multiple of ``make_divisible_by · tp``, so that `tp` ranks get equal parts."""
    multiple = make_divisible_by * tp
    return -(-vocab_size // multiple) * multiple
