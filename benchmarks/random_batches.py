"""Batches for training a tiny model: sequences of a text at random places."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def random_batches(text: Tensor, *, seed: int, batch_size: int, seq_length: int) -> Iterator[dict[str, Tensor]]:
    """Endless batches as a training step takes them; the same for one seed.

    Args:
        text: tokens, int64 [num_tokens].
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(text) - seq_length, (batch_size, 1), generator=generator)
        taken = text[starts + torch.arange(seq_length + 1)]
        yield {
            "tokens": taken[:, :-1].contiguous(),
            "labels": taken[:, 1:].contiguous(),
            "position_ids": torch.arange(seq_length).expand(batch_size, -1),
            "loss_mask": torch.ones(batch_size, seq_length),
        }
