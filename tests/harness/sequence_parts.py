"""Sequences that ranks share, put together again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def whole_of(parts: Sequence[Tensor]) -> Tensor:
    """The whole [s, …] of every rank's `SequencePart` [s / n, …], in rank order."""
    firsts, seconds = zip(*(part.chunk(2) for part in parts), strict=True)
    return torch.cat([*firsts, *reversed(seconds)])
