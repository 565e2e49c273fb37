"""Where a layer's gradients go, and how the gradient of its output is cast."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ..quantization.early_cast import EarlyCast
from ..quantization.recipe import AmaxSync, Quantizer
from ..quantization.sources import CastGrad, GradSource
from ..quantization.weight_grad import GradPlace, WeightGrad


class MainGrad(Protocol):
    """Where a parameter's gradient goes. The owner of the storage decides its form (FP8, BF16 or FP32 accumulator)."""

    def note_forward(self) -> None:
        """A forward begins whose backward will give a gradient."""

    @property
    def is_wanted(self) -> bool:
        """Whether the backward that runs is to give the parameter a gradient; asked before the rest."""

    def place(self, *, fp8: bool) -> GradPlace | None:
        """Where the weight's next gradient is written, before `written`. None: its values go to `accumulate_`.

        Args:
            fp8: the writer can write E4M3 (`WeightGrad.writes_fp8`).
        """

    def written(self, grad: WeightGrad) -> None:
        """The place holds a gradient; `grad` is what wrote it."""

    def accumulate_(self, grad: Tensor) -> None:
        """Add one micro-batch's gradient (any float dtype, the parameter's shape)."""


def cast_grad(
    grad_output: Tensor,
    quantizer: Quantizer,
    early_cast: EarlyCast | None,
    *,
    has_bias: bool,
    transposed: bool = True,
    sync: AmaxSync | None = None,
) -> CastGrad:
    """The output gradient [..., N] in FP8, with column sums for a bias.

    Takes the early cast if there is one (it always has column sums); otherwise casts here.
    """
    made = None if early_cast is None else early_cast.take(grad_output)
    if made is not None:
        probe = quantizer.probe
        if probe is not None and probe.is_due:
            probe.measure_source(GradSource(grad_output.view(-1, grad_output.shape[-1])), made)
        return made
    return quantizer.quantize(GradSource(as_matrix(grad_output), has_bias, transposed), sync=sync)


def as_matrix(x: Tensor) -> Tensor:
    """[..., K] → [T, K]. A matrix stays the same tensor: a view costs the host 1 µs."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def as_rows(x: Tensor, multiple: int) -> Tensor:
    """[..., K] → [T, K] with rows of zeros up to a multiple of `multiple`, which is at least one."""
    matrix = as_matrix(x)
    rows = matrix.shape[0]
    padding = -rows % multiple if rows else multiple
    return F.pad(matrix, (0, 0, 0, padding)) if padding else matrix


def as_whole_rows(x: Tensor, multiple: int) -> Tensor:
    """`x` [..., K] itself where it has a multiple of `multiple` rows that lie together, otherwise `as_rows`."""
    rows = x.numel() // x.shape[-1]
    return x if rows and rows % multiple == 0 and x.is_contiguous() else as_rows(x, multiple)


def with_leading(y: Tensor, leading: torch.Size) -> Tensor:
    """A new matrix [T, N] becomes [*leading, N], without the rows that `as_rows` added.

    It is no view, because autograd forbids to write to a view that a function returns (``y += residual``).
    """
    return y if y.shape[:-1] == leading else y.resize_(*leading, y.shape[1])


def delivered(grad: Tensor | None, param: Tensor | None) -> Tensor | None:
    """Give a vector's FP32 gradient to `param.main_grad` if that exists, and return None for autograd.

    Autograd would round the gradient to the parameter's dtype and take three launches to deliver it. It does so where
    the parameter has hooks that are to see the gradient (``register_hook``).
    """
    main_grad: MainGrad | None = getattr(param, "main_grad", None)
    if param is None or grad is None or main_grad is None or param._backward_hooks:
        return grad if param is not None else None
    if main_grad.is_wanted:
        main_grad.accumulate_(grad)
    return None
