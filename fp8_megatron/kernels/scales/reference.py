"""The specification of amax histories and of underflow counts (values that a cast makes zero), in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference import round_up_to_power_of_two
from ..registration import operator

#: From this many elements on, only every 16th block of 128 is counted. Counting all reads GPT-7B's gradients again.
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
    """Push a step's amaxes into the history, reset them, and return the next step's scales (delayed scaling).

    If an amax is 0 or not finite, its scale stays that of `previous`.

    Args:
        amax: FP32 [n], the step's amaxes. `written`, FP32 [n, places, stride], has other amaxes of the same slots in
            ``[..., 0]``; the largest counts. Both are set to 0.
        history: FP32 [length, n], the latest first; the oldest row is dropped.
        fp_max: FP32 [n], the payload magnitude that an amax is mapped to.
        previous: FP32 [n, stride], the last scales in column 0.
        keeps_largest: scales come from the largest finite amax of the history; otherwise from the step's amax.
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
    """How many blocks of `SAMPLE_BLOCK` elements of a flat tensor are counted, and the distance between them in blocks.

    If the whole tensor is counted, its last block may be partial. A sample has no partial block.
    """
    if numel < SAMPLED_FROM:
        return -(-numel // SAMPLE_BLOCK), 1
    return -(-(numel // SAMPLE_BLOCK) // SAMPLE_EVERY), SAMPLE_EVERY


@operator(gpu=".underflow_triton", mutates=["counts"])
def count_underflow_(value: Tensor, payload: Tensor, counts: Tensor) -> None:
    """Add to `counts` the number of non-zero elements of `value`, and how many of them are zero in `payload`. No host
    sync.

    From `SAMPLED_FROM` elements on, both count an even sample: blocks 0, 16, 32, … (see `sampling`).

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
