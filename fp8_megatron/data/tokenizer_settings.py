"""Which tokenizer a run or a tool uses: its settings, their checks, and the tokenizer that they name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from ..config.ignored import TOKENIZER_TYPES, TOKENIZERS_READING
from ..config.words import flag_name
from ..errors import UserError
from .byte_pair_tokenizers import GPT2BPETokenizer, TikTokenizer
from .tokenizer import SENTENCEPIECE_TYPES, NullTokenizer, SentencePieceTokenizer, Tokenizer, check_tokenizer_path
from .transformers_tokenizer import HuggingFaceTokenizer


@dataclass(frozen=True)
class TokenizerOptions:
    """What some kinds of tokenizer take beside their model. Each field is a flag of Megatron's by that name.

    Attributes:
        vocab_file, merge_file: of a GPT2BPETokenizer.
        tiktoken_pattern: how a TikTokenizer cuts text into words.
        tiktoken_num_special_tokens: ids of a TikTokenizer before those of its file.
        tokenizer_special_tokens: tokens that are never cut.
        tokenizer_hf_no_include_special_tokens: a HuggingFaceTokenizer adds no tokens around a text.
        null_tokenizer_eod_id: what ends a document of a NullTokenizer.
    """

    vocab_file: str | None = None
    merge_file: str | None = None
    tiktoken_pattern: Literal["v1", "v2"] = "v2"
    tiktoken_num_special_tokens: int = 1000
    tokenizer_special_tokens: tuple[str, ...] = ()
    tokenizer_hf_no_include_special_tokens: bool = False
    null_tokenizer_eod_id: int | None = None

    @classmethod
    def of(cls, settings: Any) -> TokenizerOptions:
        """The options among the attributes of a configuration's section or of a command line."""
        values: dict[str, Any] = {field.name: getattr(settings, field.name) for field in fields(cls)}
        return cls(**values | {"tokenizer_special_tokens": tuple(values["tokenizer_special_tokens"])})


def tokenizer_problems(tokenizer_type: str, model: str | None, options: TokenizerOptions) -> list[str]:
    """What is missing, ignored or not there of a tokenizer's settings; one line each. No file's content is read."""
    problems = []
    defaults = TokenizerOptions()
    for name, kinds in TOKENIZERS_READING.items():
        value = getattr(options, name)
        if value != getattr(defaults, name) and tokenizer_type not in kinds:
            shown = " ".join(value) if isinstance(value, tuple) else value
            problems.append(
                f"{name}({shown}) has no effect under tokenizer_type({tokenizer_type}); drop it or choose "
                f"--tokenizer-type {' or '.join(kinds)}"
            )
    if tokenizer_type == "GPT2BPETokenizer":
        for name, usual in (("vocab_file", "gpt2-vocab.json"), ("merge_file", "gpt2-merges.txt")):
            value = getattr(options, name)
            flag = flag_name(name)
            if value is None:
                problems.append(f"GPT2BPETokenizer needs {flag}: its {usual}")
            elif not Path(value).is_file():
                problems.append(f"{flag} {value} is not a file: give the {usual} of the tokenizer")
    elif tokenizer_type != "NullTokenizer":
        if not model:
            problems.append(f"{tokenizer_type} needs --tokenizer-model: {_MODELS[tokenizer_type]}")
        else:
            try:
                check_tokenizer_path(tokenizer_type, model)
            except UserError as error:
                problems.append(str(error))
    return problems


_MODELS = {
    **dict.fromkeys(SENTENCEPIECE_TYPES, "the .model file"),
    "HuggingFaceTokenizer": "the Hugging Face folder, or its name on the hub",
    "TikTokenizer": "the .json vocabulary",
}


def build_tokenizer(
    tokenizer_type: str,
    tokenizer_model: str | None,
    vocab_size: int | None = None,
    options: TokenizerOptions | None = None,
) -> Tokenizer:
    """The tokenizer that --tokenizer-type, --tokenizer-model and --vocab-size name.

    Args:
        tokenizer_type: one of `TOKENIZER_TYPES`.
        tokenizer_model: the model file or folder; None for GPT2BPETokenizer and NullTokenizer.
        vocab_size: of the model. NullTokenizer and TikTokenizer use it; other tokenizers must fit into it.
        options: what the kind takes beside these.

    Raises:
        UserError: the model is missing or bad, has no end-of-sequence token, or does not fit into `vocab_size`.
    """
    options = options or TokenizerOptions()
    if tokenizer_type not in TOKENIZER_TYPES:
        raise UserError(f"--tokenizer-type {tokenizer_type} is unknown: choose {', '.join(TOKENIZER_TYPES)}")
    problems = tokenizer_problems(tokenizer_type, tokenizer_model, options)
    if problems:
        raise UserError("\n".join(problems))
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None:
            raise UserError("NullTokenizer has no vocabulary of its own: set --vocab-size")
        return NullTokenizer(vocab_size, options.null_tokenizer_eod_id)
    tokenizer = _built(tokenizer_type, tokenizer_model or "", vocab_size, options)
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"--vocab-size {vocab_size} is smaller than the vocabulary of {tokenizer_model or options.vocab_file} "
            f"({tokenizer.vocab_size}): leave --vocab-size out, or raise it to {tokenizer.vocab_size}"
        )
    return tokenizer


def _built(kind: str, model: str, vocab_size: int | None, options: TokenizerOptions) -> Tokenizer:
    special = options.tokenizer_special_tokens
    if kind == "GPT2BPETokenizer":
        assert options.vocab_file is not None and options.merge_file is not None
        return GPT2BPETokenizer(options.vocab_file, options.merge_file, special_tokens=special)
    if kind == "TikTokenizer":
        return TikTokenizer(
            model,
            pattern=options.tiktoken_pattern,
            vocab_size=vocab_size,
            num_special_tokens=options.tiktoken_num_special_tokens,
            special_tokens=special,
        )
    if kind == "HuggingFaceTokenizer":
        includes = not options.tokenizer_hf_no_include_special_tokens
        return HuggingFaceTokenizer(model, special_tokens=special, include_special_tokens=includes)
    return SentencePieceTokenizer(model)
