"""From micro-batches to losses: the functions that megatron-core's schedules call for each micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..data.document_bounds import CU_SEQLENS, NUM_TOKENS

Batch = dict[str, Tensor]


def take_step(loader: Iterator[Batch], num_micro_batches: int, device: torch.device) -> list[Batch]:
    """Copy one step's micro-batches to the device. Every model chunk of the rank iterates over the same list."""
    return [
        {key: tensor.to(device, non_blocking=True) for key, tensor in next(loader).items()}
        for _ in range(num_micro_batches)
    ]


def forward_step(
    batches: Iterator[Batch], model: torch.nn.Module, mean_tokens: Tensor | None = None
) -> tuple[Tensor, Any]:
    """Run one micro-batch through one model chunk; returns the output and the loss function for it.

    Args:
        mean_tokens: see `masked_mean_loss`.
    """
    batch = next(batches)
    # megatron-core passes what it calls the attention mask on to every layer: see `mcore.attention.CoreAttention`.
    output = model(batch["tokens"], batch["position_ids"], batch.get(CU_SEQLENS), labels=batch["labels"])
    if mean_tokens is None:
        mean_tokens = batch.get(NUM_TOKENS)
    return output, partial(masked_mean_loss, batch["loss_mask"], mean_tokens=mean_tokens)


def masked_mean_loss(
    loss_mask: Tensor, loss_per_token: Tensor, *, mean_tokens: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss over unmasked tokens, in nats: once to differentiate, once to report.

    Ranks that share a sequence each have a summand of the mean. megatron-core multiplies what is differentiated by
    their number, because the mean over replicas divides by it.

    Args:
        loss_mask, loss_per_token: [b, s], of this rank's tokens.
        mean_tokens: FP32 [1]; the sum of losses is divided by it. With --calculate-per-token-loss, the unmasked tokens
            of a micro-batch in the mean over the global batch. Otherwise those of the micro-batch, over all ranks that
            share its sequences; None: this rank has the whole sequences.
    """
    mask = loss_mask.view(-1).float()
    # Without a token there is no loss: 0 / 1e-30 is 0.
    num_tokens = mask.sum().clamp(min=1.0) if mean_tokens is None else mean_tokens.squeeze().clamp(min=1e-30)
    loss = (loss_per_token.float().view(-1) * mask).sum() / num_tokens
    return loss, {"loss": loss.detach().clone()}
