"""The flags of tools that name a tokenizer, as in training."""

from __future__ import annotations

import argparse

from ..config.schema import DataConfig, TokenizerType
from ..data.tokenizer_settings import TOKENIZER_TYPES
from .arguments import Parser, nonempty, whole


def tokenizer_type_of(arguments: argparse.Namespace) -> TokenizerType:
    """The kind of tokenizer, with the default filled in as in training."""
    kind: TokenizerType | None = arguments.tokenizer_type
    files = {"vocab_file": arguments.vocab_file, "merge_file": arguments.merge_file}
    return DataConfig(tokenizer_type=kind, **files).tokenizer_kind


def add_tokenizer_arguments(parser: Parser) -> None:
    """--tokenizer-type and what goes with it."""
    parser.add_argument(
        "--tokenizer-type",
        choices=TOKENIZER_TYPES,
        help="as in training (GPT2BPETokenizer with --vocab-file or --merge-file, else SentencePieceTokenizer)",
    )
    parser.add_argument(
        "--tokenizer-model",
        type=nonempty,
        help="SentencePiece .model, tiktoken .json, Hugging Face tokenizer folder or name on the hub",
    )
    parser.add_argument("--vocab-file", type=nonempty, help="of a GPT2BPETokenizer: gpt2-vocab.json")
    parser.add_argument("--merge-file", type=nonempty, help="of a GPT2BPETokenizer: gpt2-merges.txt")
    parser.add_argument("--vocab-size", type=whole(least=2), help="of a NullTokenizer or a TikTokenizer")
    parser.add_argument("--tiktoken-pattern", choices=("v1", "v2"), default="v2", help="of a TikTokenizer (v2)")
    parser.add_argument(
        "--tiktoken-num-special-tokens", type=whole(), default=1000, help="of a TikTokenizer: ids before the file's"
    )
    parser.add_argument(
        "--tokenizer-special-tokens", nargs="+", default=[], type=nonempty, help="tokens that are never cut"
    )
    parser.add_argument(
        "--tokenizer-hf-no-include-special-tokens",
        action="store_true",
        help="a HuggingFaceTokenizer adds no tokens around a text, such as a Llama's BOS",
    )
    parser.add_argument(
        "--null-tokenizer-eod-id", type=whole(least=0), help="of a NullTokenizer: what ends a document (the last id)"
    )
