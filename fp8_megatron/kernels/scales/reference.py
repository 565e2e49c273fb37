"""The specification of amax histories and of counts of what a cast makes zero, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference import round_up_to_power_of_two
from ..registration import operator

#: From this many elements on, one block of 128 in 16 is looked at: all of GPT-7B's gradients would be read once more.
SAMPLED_FROM = 2**20
SAMPLE_BLOCK, SAMPLE_EVERY = 128, 16


@operator(
    gpu=".amax_history_triton",
    fake=lambda a: (torch.empty_like(a.previous), torch.empty_like(a.previous)),
    mutates=["amax", "written", "history"],
)
def update_amax_history_(
    amax: Tensor,
    written: Tensor,
    history: Tensor,
    fp_max: Tensor,
    previous: Tensor,
    keeps_largest: bool,
    power_of_two: bool,
) -> tuple[Tensor, Tensor]:
    """Push a step's amaxes into the history, forget them, and give the next step's scales (delayed scaling).

    A scale stands where its amax is 0 or not finite: `previous` then stays.

    Args:
        amax: FP32 [n], the step's amaxes, and `written` FP32 [n, places, stride], others of the same slots in
            ``[..., 0]``: the larger counts. Both become 0.
        history: FP32 [length, n], the latest first; the oldest row leaves.
        fp_max: FP32 [n], what an amax is to become.
        previous: FP32 [n, stride], the last scales in column 0.
        keeps_largest: scales come from the largest finite amax of the history, else from the step's.
        power_of_two: scales are rounded up to powers of two.

    Returns:
        Scales and their reciprocals, FP32 [n, stride] with the values in column 0.
    """
    newest = torch.maximum(amax, written[:, :, 0].amax(dim=1))
    history.copy_(torch.cat([newest[None], history[:-1]]))
    counted = torch.where(torch.isfinite(history), history, 0.0).amax(dim=0) if keeps_largest else newest
    scale = counted / fp_max
    if power_of_two:
        scale = round_up_to_power_of_two(scale)
    scale = torch.where(torch.isfinite(counted) & (counted > 0), scale, previous[:, 0])
    amax.zero_()
    written.zero_()
    scales, inverses = torch.zeros_like(previous), torch.zeros_like(previous)
    scales[:, 0], inverses[:, 0] = scale, scale.reciprocal()
    return scales, inverses


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
