"""The specification of the end of a step under delayed scaling, in plain PyTorch (see `quantization.amax_history`)."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..registration import operator


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
    """Push a step's amaxes into the history, forget them, and give the next step's scales.

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
        scale = reference.round_up_to_power_of_two(scale)
    scale = torch.where(torch.isfinite(counted) & (counted > 0), scale, previous[:, 0])
    amax.zero_()
    written.zero_()
    scales, inverses = torch.zeros_like(previous), torch.zeros_like(previous)
    scales[:, 0], inverses[:, 0] = scale, scale.reciprocal()
    return scales, inverses
