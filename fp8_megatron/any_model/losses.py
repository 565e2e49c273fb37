"""The losses of transformers' language models, over 16-bit logits as they are.

transformers copies the logits to FP32 first. The copy, its logarithms of the softmax and their gradient are four bytes
an element each. Here the softmax is computed in FP32 from each logit as it is read, and the gradient is 16-bit, as the
logits are. Compiled models keep transformers' own, which the compiler fuses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from ..nn.cross_entropy import vocab_parallel_cross_entropy
from .heads import output_embeddings

#: Module of transformers that has the losses.
_THEIRS = "transformers.loss.loss_utils"
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_IGNORED = -100


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = _IGNORED,
    shift_labels: Tensor | None = None,
    **unused: Any,
) -> Tensor:
    """The loss of the next token, as transformers' ``ForCausalLMLoss``; of logits in 32 bits, and where it is
    compiled, it is that one.

    Args:
        logits: [..., V]. They stay as they are in backward.
        labels: int64 [b, s], or without a next one at the end `shift_labels`, of the shape of the logits' tokens.
        num_items_in_batch: what divides the sum over tokens. None: the tokens that are not ignored.
        ignore_index: the label of a token without a loss.

    Returns:
        FP32 [].

    Raises:
        ValueError: there are not as many labels as tokens.
    """
    if not _takes(logits):
        return _theirs("ForCausalLMLoss")(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **unused
        )
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return _mean_loss(logits, shift_labels, vocab_size, num_items_in_batch, ignore_index)


def masked_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = _IGNORED,
    **unused: Any,
) -> Tensor:
    """The loss of masked tokens, as transformers' ``ForMaskedLMLoss``. Arguments as of `causal_lm_loss`."""
    if not _takes(logits):
        return _theirs("ForMaskedLMLoss")(logits, labels, vocab_size, num_items_in_batch, ignore_index, **unused)
    return _mean_loss(logits, labels, vocab_size, num_items_in_batch, ignore_index)


#: By transformers' names of them.
_OURS: dict[str, Callable[..., Tensor]] = {"ForCausalLMLoss": causal_lm_loss, "ForMaskedLMLoss": masked_lm_loss}


def take_16_bit_logits(model: torch.nn.Module) -> None:
    """Give the models of transformers in `model` the losses above, where they have transformers' own."""
    if _THEIRS not in sys.modules:
        return
    mapping = sys.modules[_THEIRS].LOSS_MAPPING
    for module in model.modules():
        is_theirs = isinstance(getattr(type(module), "loss_function", None), property)
        if not is_theirs or hasattr(module, "_loss_function"):
            continue
        kind = getattr(module, "loss_type", None)
        if kind is None and output_embeddings(module) is not None:
            kind = "ForCausalLM"  # as transformers takes it, of GPT-2 for example
        loss = mapping.get(kind)
        name = next((each for each in _OURS if loss is not None and loss is _theirs(each)), None)
        if name is not None:
            cast(Any, module).loss_function = _OURS[name]


def _takes(logits: Tensor) -> bool:
    is_plain = type(logits) is Tensor  # no DTensor
    return is_plain and logits.dtype in _SIXTEEN_BITS and not torch.compiler.is_compiling()


def _theirs(name: str) -> Callable[..., Tensor]:
    loss: Callable[..., Tensor] = getattr(sys.modules[_THEIRS], name)
    return loss


def _mean_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items: Tensor | int | None, ignore_index: int
) -> Tensor:
    tokens, labels = logits.reshape(-1, vocab_size).contiguous(), labels.reshape(-1).to(logits.device)
    if len(tokens) != len(labels):
        raise ValueError(f"{len(labels)} labels do not match the logits of {len(tokens)} tokens")
    has_loss = labels != ignore_index
    is_known = (labels >= 0) & (labels < vocab_size)
    torch._assert_async((is_known | ~has_loss).all(), f"a label is neither below {vocab_size} nor {ignore_index}")
    losses = vocab_parallel_cross_entropy(tokens, labels, None, keeps_logits=True)
    total = torch.where(has_loss, losses, 0.0).sum()
    if num_items is None:
        num_items = has_loss.sum()
    return total / (num_items.to(total.device) if isinstance(num_items, Tensor) else num_items)
