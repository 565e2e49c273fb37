"""What a cast to FP8 makes zero: the specification of `count_underflow_`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..registration import operator

#: From this many elements on, one block of 128 in 16 is looked at: all of GPT-7B's gradients would be read once more.
SAMPLED_FROM = 2**20
SAMPLE_BLOCK, SAMPLE_EVERY = 128, 16


def sampling(numel: int) -> tuple[int, int]:
    """Blocks of `SAMPLE_BLOCK` elements looked at of a flat tensor, and the distance from one to the next in blocks.

    The last block of a tensor that is looked at whole may be a part of one; a part is never in a sample.
    """
    if numel < SAMPLED_FROM:
        return -(-numel // SAMPLE_BLOCK), 1
    return -(-(numel // SAMPLE_BLOCK) // SAMPLE_EVERY), SAMPLE_EVERY


@operator(gpu=".underflow_triton", mutates=["counts"])
def count_underflow_(value: Tensor, payload: Tensor, counts: Tensor) -> None:
    """Add to `counts` the non-zero elements of `value`, and how many of them are zero in `payload`; nothing waits.

    From `SAMPLED_FROM` elements on both are of an even sample: blocks 0, 16, 32, … (see `sampling`).

    Args:
        value: flat [n], any float dtype; payload: FP8 [n].
        counts: int64 [2].
    """
    codes = payload.view(torch.uint8)
    if value.numel() >= SAMPLED_FROM:
        whole = value.numel() // SAMPLE_BLOCK * SAMPLE_BLOCK
        value, codes = (x[:whole].view(-1, SAMPLE_BLOCK)[::SAMPLE_EVERY] for x in (value, codes))
    nonzero = value != 0
    is_zero = codes.bitwise_and(0x7F) == 0
    counts += torch.stack([nonzero.sum(), (nonzero & is_zero).sum()])
