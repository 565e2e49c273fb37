"""The scale of a ScalingTensor. MS-AMP's scale quantises: payload = value · scale, and scale_inv = 1 / scale."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..dtype import Dtypes, Floating, QType


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class ScalingMeta:
    """A qtype, its scale and the amaxes that give it.

    Args:
        qtype: the payload's format.
        scale, scale_inv: FP32 scalars; 1 without.
        amax: FP32 [window_size], the newest first; zeros without.
        window_size: how many amaxes are kept.
        group: the ranks that agree on the amax in a cast with ``sync``.
        device: where new tensors are; the GPU if there is one.
    """

    in_time_scaling: ClassVar[bool] = True

    def __init__(
        self,
        qtype: QType,
        scale: Tensor | None = None,
        scale_inv: Tensor | None = None,
        amax: Tensor | None = None,
        window_size: int = 1,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        device = _default_device() if device is None else device
        self.qtype = qtype
        self.scale = torch.ones((), device=device) if scale is None else scale
        self.scale_inv = torch.ones((), device=device) if scale_inv is None else scale_inv
        self.amax = torch.zeros(window_size, device=device) if amax is None else amax
        self.amax_counter = torch.zeros((), dtype=torch.int32)
        self.window_size = window_size
        self.group = group
        self.locked = False

    @staticmethod
    def compute_scaling_factor(amax: Tensor, scale: Tensor, fp_max: float, margin: int) -> Tensor:
        """The largest power of two that keeps `amax` within `fp_max` (FP8-LM, arXiv 2310.18313, section 2.2).

        Args:
            amax: largest magnitudes, FP32. scale: taken where an amax is 0, inf or NaN.
            fp_max: the format's largest finite number. margin: powers of two of room above it.
        """
        exponent = torch.floor(torch.log2(fp_max / amax)) - margin
        usable = (amax > 0) & torch.isfinite(amax)
        return torch.where(usable, torch.exp2(torch.where(usable, exponent, torch.zeros_like(exponent))), scale)

    def is_warmup(self) -> bool:
        """Whether the window still has empty places."""
        return bool(self.amax_counter < self.window_size)

    def is_in_time_scaling(self) -> bool:
        """Whether a cast takes its scale from the values that it casts."""
        return ScalingMeta.in_time_scaling and (self.window_size == 1 or self.is_warmup())

    @staticmethod
    @contextlib.contextmanager
    def in_time_scaling_context(enabled: bool) -> Iterator[None]:
        """Switch scales from the values themselves on or off inside the block."""
        before, ScalingMeta.in_time_scaling = ScalingMeta.in_time_scaling, enabled
        try:
            yield
        finally:
            ScalingMeta.in_time_scaling = before

    def reset_scaling_factor(self, qtype: QType | None = None) -> None:
        """Take the scale that the newest amax gives; 32-bit floats and BF16 need none."""
        qtype = self.qtype if qtype is None else qtype
        if qtype in (Dtypes.kfloat32, Dtypes.kbfloat16):
            self.scale.fill_(1)
        else:
            self.scale.copy_(self.compute_scaling_factor(self.amax[0], self.scale, Floating.qfp_max[qtype], 0))

    def copy_(self, src: ScalingMeta) -> None:
        """Take on the values of `src` in place."""
        self.qtype, self.window_size = src.qtype, src.window_size
        for name in ("scale", "scale_inv", "amax", "amax_counter"):
            getattr(self, name).copy_(getattr(src, name))

    def clone(self) -> ScalingMeta:
        """A copy with tensors of its own and the same group."""
        group, self.group = self.group, None
        try:
            copied = copy.deepcopy(self)
        finally:
            self.group = group
        copied.group = group
        return copied

    def to(self, device: torch.device | str) -> ScalingMeta:
        """Move the tensors."""
        self.scale, self.scale_inv, self.amax = (t.to(device) for t in (self.scale, self.scale_inv, self.amax))
        return self

    def cuda(self) -> ScalingMeta:
        """Move the tensors to the GPU."""
        return self.to("cuda")

    @property
    def is_cuda(self) -> bool:
        """Whether the tensors are on a GPU."""
        return self.scale.is_cuda

    def __repr__(self) -> str:
        return (
            f"ScalingMeta(qtype={self.qtype}, scale={self.scale.item():g}, scale_inv={self.scale_inv.item():g}, "
            f"amax={self.amax.max().item():g}, window_size={self.window_size})"
        )
