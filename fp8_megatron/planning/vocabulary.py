"""The vocabulary of a plan: no tokenizer is read."""

from __future__ import annotations

from ..config.schema import Config
from ..data import tokenizer

#: GPT-2's, for a model whose tokenizer gives the size.
_GPT2_VOCAB_SIZE = 50257


def vocab_size(config: Config) -> int:
    """Tokens of the vocabulary: the configuration's, or GPT-2's if the tokenizer gives it."""
    return _GPT2_VOCAB_SIZE if config.model.vocab_size is None else config.model.vocab_size


def padded_vocab_size(config: Config) -> int:
    """Rows of the embedding."""
    tp = config.parallel.tensor_model_parallel_size
    return tokenizer.padded_vocab_size(vocab_size(config), config.model.make_vocab_size_divisible_by, tp)
