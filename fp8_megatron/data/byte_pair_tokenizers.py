"""Byte-level BPE tokenizers from their files: GPT-2's vocabulary and merges, and tiktoken's ranks."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from .tokenizer import Tokenizer

_END_OF_TEXT = "<|endoftext|>"

#: Ids of a TikTokenizer without --vocab-size.
_TIKTOKEN_VOCAB_SIZE = 1 << 17
#: Special tokens that every TikTokenizer has, at the first ids.
_TIKTOKEN_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_BETWEEN_LETTERS = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
_TIKTOKEN_KEYS = {"rank", "token_bytes", "token_str"}


def _pattern(*alternatives: str) -> str:
    return "|".join(alternatives)


_OPTIONAL_SIGN = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = (r"\s+(?!\S)", r"\s+")
#: How text is cut into words before pairs are merged, by --tiktoken-pattern: these are part of the file format. v1
#: takes a word of letters whole. v2 starts a new word before a capital letter. Both take digits one by one.
_TIKTOKEN_PATTERNS = {
    "v1": _pattern(_OPTIONAL_SIGN + r"+\p{L}+", r"\p{N}", r" ?[^\s\p{L}\p{N}]++[\r\n]*", r"\s*[\r\n]", *_SPACES),
    "v2": _pattern(
        f"{_OPTIONAL_SIGN}{_UPPER}*{_LOWER}+",
        f"{_OPTIONAL_SIGN}{_UPPER}+{_LOWER}*",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        *_SPACES,
    ),
}


class GPT2BPETokenizer(Tokenizer):
    """GPT-2's byte-level BPE. ``<|endoftext|>`` ends a document, in a text too.

    Args:
        vocab_file: JSON object of token → id (gpt2-vocab.json).
        merge_file: one merge a line (gpt2-merges.txt).
        special_tokens: further tokens that are never cut. Those that the vocabulary lacks go behind its last id.
    """

    def __init__(self, vocab_file: str, merge_file: str, *, special_tokens: Sequence[str] = ()):
        try:
            from tokenizers import AddedToken, decoders, models, pre_tokenizers
            from tokenizers import Tokenizer as Model
        except ImportError as error:
            raise UserError("GPT2BPETokenizer needs tokenizers: pip install tokenizers") from error
        try:
            model = Model(models.BPE.from_file(vocab_file, merge_file))
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a panic of Rust is no Exception
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise UserError(
                f"--vocab-file {vocab_file} and --merge-file {merge_file} are no byte-level BPE ({reason}): give "
                f"GPT-2's gpt2-vocab.json and gpt2-merges.txt, or copy them again"
            ) from error
        eod = model.token_to_id(_END_OF_TEXT)
        if eod is None:
            raise UserError(f"--vocab-file {vocab_file} has no {_END_OF_TEXT}, which ends each document: give GPT-2's")
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        for token in (_END_OF_TEXT, *special_tokens):
            model.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        self._model = model
        super().__init__(max(model.get_vocab().values()) + 1, eod, vocab_file)  # ids may leave some out
        self._cut = _cut_between_words(special_tokens)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            return [self._model.encode(text, add_special_tokens=False).ids for text in texts]
        except TypeError as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"the GPT-2 tokenizer cannot encode the text ({reason})") from error

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode([int(token) for token in ids], skip_special_tokens=False))

    def save(self, folder: Path) -> None:
        """Write the files that transformers loads."""
        self._model.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END_OF_TEXT),
            "clean_up_tokenization_spaces": False,
            "model_max_length": 10**30,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


class TikTokenizer(Tokenizer):
    """BPE by tiktoken, from a JSON list of ``{"rank": 0, "token_bytes": base64, "token_str": …}``.

    The first ids are special tokens, then come the ranks. ``</s>`` ends a document. Special tokens in a text become
    their ids.

    Args:
        model: the JSON file.
        pattern: v1 or v2.
        vocab_size: all ids; the file's last ranks are left out. Default: 131,072.
        num_special_tokens: how many ids special tokens take; unnamed ones fill up.
        special_tokens: their names, at least `_TIKTOKEN_SPECIAL_TOKENS`. Default: these.
    """

    def __init__(
        self,
        model: str,
        *,
        pattern: str = "v2",
        vocab_size: int | None = None,
        num_special_tokens: int = 1000,
        special_tokens: Sequence[str] = (),
    ):
        try:
            import tiktoken
        except ImportError as error:
            raise UserError("TikTokenizer needs tiktoken: pip install tiktoken") from error
        vocab_size = vocab_size or _TIKTOKEN_VOCAB_SIZE
        names = tuple(special_tokens) or _TIKTOKEN_SPECIAL_TOKENS
        _check_special_tokens(names, num_special_tokens, vocab_size)
        names += tuple(f"<SPECIAL_{index}>" for index in range(len(names), num_special_tokens))
        special = {name: index for index, name in enumerate(names)}
        ranks = _ranks(model, vocab_size - num_special_tokens)
        self._model = tiktoken.Encoding(
            name=Path(model).stem,
            pat_str=_TIKTOKEN_PATTERNS[pattern],
            mergeable_ranks={token: num_special_tokens + rank for token, rank in ranks.items()},
            special_tokens=special,
        )
        super().__init__(vocab_size, special["</s>"], model)
        self._cut = _cut_between_words(names)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._model.encode(text, allowed_special="all") for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(token) for token in ids])


def _cut_between_words(special_tokens: Sequence[str]) -> re.Pattern[str] | None:
    """Where a text may be cut: none of the patterns takes a letter and a space behind it into one word."""
    return None if any(" " in token for token in special_tokens) else _BETWEEN_LETTERS


def _check_special_tokens(names: Sequence[str], num_special_tokens: int, vocab_size: int) -> None:
    missing = [name for name in _TIKTOKEN_SPECIAL_TOKENS if name not in names]
    if missing or len(set(names)) < len(names):
        problem = f"has no {missing[0]}" if missing else "names a token twice"
        raise UserError(
            f"--tokenizer-special-tokens {' '.join(names)} {problem}: give each of "
            f"{' '.join(_TIKTOKEN_SPECIAL_TOKENS)} once, then others"
        )
    if not len(names) <= num_special_tokens < vocab_size:
        raise UserError(
            f"--tiktoken-num-special-tokens {num_special_tokens} has to be at least the {len(names)} named special "
            f"tokens and less than the vocabulary, {vocab_size}"
        )


def _ranks(path: str, count: int) -> dict[bytes, int]:
    """Token → rank of the first `count` entries.

    Raises:
        UserError: the file is none of this format, or has fewer entries.
    """
    try:
        entries: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(entries, list):
            raise ValueError(f"it holds a {type(entries).__name__}, not a list")
        if len(entries) < count:
            raise UserError(
                f"--tokenizer-model {path} has {len(entries)} tokens, {count} are needed for --vocab-size: lower "
                f"--vocab-size by {count - len(entries)}"
            )
        ranks = {}
        for index, entry in enumerate(entries[:count]):
            if not isinstance(entry, dict) or not entry.keys() <= _TIKTOKEN_KEYS or entry.get("rank") != index:
                raise ValueError(f"entry {index} is not an object with rank {index}, token_bytes and token_str")
            token = base64.b64decode(entry["token_bytes"], validate=True)
            if token in ranks or (index < 256 and token != bytes([index])):
                raise ValueError(
                    f"entry {index} is {token!r}: the first 256 are the bytes in order, and each is there once"
                )
            ranks[token] = index
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError, binascii.Error) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"--tokenizer-model {path} is not a vocabulary of tiktoken ({reason}): give the .json list of rank, "
            f"token_bytes and token_str"
        ) from error
    return ranks
