"""The specification of the grouped FP8 GEMMs in plain PyTorch: each group of rows has an expert's weight.

Group e is rows [offsets[e], offsets[e + 1]). Groups start at multiples of `GROUP_ROWS`; their last rows may be padding,
which is zero. Offsets stay on the device, so that no host waits for the counts of tokens.

Operands have one scale a tensor and a matrix of the weight, or those of `quantize.blocks`: each `GEMM_BLOCK` elements
of a row have one along the sum, and each tile of a weight. A group's rows are whole blocks, so that a block of a weight
gradient's sum is one expert's.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ...dtypes import E4M3, E5M2, FP8_DTYPES, FP8_GEMM_MULTIPLE, GEMM_BLOCK, GRAD_BLOCK, GROUP_ROWS
from ..quantize.blocks import block_scales_shape, decode_blocks, decode_tiles
from ..quantize.blockwise import store_state_
from ..reference import decode
from ..registration import operator


def _check_operands(a: Tensor, b: Tensor, offsets: Tensor) -> None:
    if a.dtype not in FP8_DTYPES or b.dtype not in FP8_DTYPES or (a.dtype == E5M2 and b.dtype == E5M2):
        raise ValueError(f"grouped GEMM takes E4M3×E4M3, E4M3×E5M2 or E5M2×E4M3, not {a.dtype} × {b.dtype}")
    if not (a.is_contiguous() and b.is_contiguous()):
        raise ValueError(f"grouped GEMM takes contiguous operands, not strides {a.stride()} × {b.stride()}")
    for size in (*a.shape, *b.shape[-2:]):
        if size % FP8_GEMM_MULTIPLE:
            raise ValueError(
                f"grouped GEMM sizes are multiples of {FP8_GEMM_MULTIPLE}; operands are {list(a.shape)} and "
                f"{list(b.shape)}"
            )
    assert offsets.dtype == torch.int32 and offsets.ndim == 1, (offsets.dtype, offsets.shape)


def _check_grouped_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor) -> None:
    _check_operands(a, b, offsets)
    if b.ndim != 3 or a.shape[1] != b.shape[2]:
        raise ValueError(f"grouped GEMM operands are [R, K] and [E, N, K], not {list(a.shape)} and {list(b.shape)}")
    assert len(offsets) == b.shape[0] + 1 and a.shape[0] % GROUP_ROWS == 0, (a.shape, b.shape, offsets.shape)
    if scale_a.ndim == 1:
        assert scale_a.shape == (1,) and scale_b.shape == (b.shape[0],), (scale_a.shape, scale_b.shape)
        return
    if b.shape[1] % GEMM_BLOCK or b.shape[2] % GEMM_BLOCK:
        raise ValueError(f"experts' weights in tiles have sizes in multiples of {GEMM_BLOCK}, not {list(b.shape)}")
    _check_blocks(a, scale_a)
    tiles = tuple(size // GEMM_BLOCK for size in b.shape[1:])
    assert scale_b.shape[:2] == (b.shape[0], tiles[0]) and scale_b.shape[2] >= tiles[1], (scale_b.shape, b.shape)


def _check_blocks(operand: Tensor, scale: Tensor) -> None:
    assert scale.shape == block_scales_shape(*operand.shape) and scale.is_contiguous(), (scale.shape, operand.shape)


@operator(
    gpu=".gemm_triton",
    fake=lambda a, b: a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16),
    check=_check_grouped_mm,
)
def grouped_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor) -> Tensor:
    """out[r] = (a[r] · scale_a) @ (b[e] · scale_b[e])ᵀ for each row r of group e. The reference accumulates in FP32,
    Hopper in its shorter accumulator.

    Args:
        a: FP8 [R, K]. b: FP8 [E, N, K], contiguous.
        scale_a: FP32 [1], or of blocks [K / 128, R]. scale_b: FP32 [E], or of tiles [E, N / 128, ≥ K / 128]; with any
            strides.
        offsets: int32 [E + 1], multiples of `GROUP_ROWS`.

    Returns:
        BF16 [R, N]. Rows behind the last group are not written.
    """
    out = torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)
    rows, has_blocks = _rows(a, scale_a), scale_a.ndim == 2
    for e, (start, stop) in enumerate(_groups(offsets)):
        if has_blocks:
            out[start:stop] = rows[start:stop] @ decode_tiles(b[e], scale_b[e]).t()
        else:
            out[start:stop] = (rows[start:stop] @ decode(b[e]).t()) * (scale_a * scale_b[e])
    return out


def _rows(operand: Tensor, scale: Tensor) -> Tensor:
    """FP32 values of an operand with scales of blocks; of one with a scale, the values of its payload."""
    return decode(operand) if scale.ndim == 1 else decode_blocks(operand, scale)


def _check_wgrad(out: Tensor, g_t: Tensor, x_t: Tensor, scale_g: Tensor, scale_x: Tensor, offsets: Tensor) -> None:
    _check_operands(g_t, x_t, offsets)
    shape = (len(offsets) - 1, g_t.shape[0], x_t.shape[0])
    if out.shape != shape or g_t.shape[1] != x_t.shape[1]:
        raise ValueError(
            f"grouped weight gradients of [N, R] and [K, R] are [E, N, K], not {list(out.shape)} of "
            f"{list(g_t.shape)} and {list(x_t.shape)} in {len(offsets) - 1} groups"
        )
    assert out.is_contiguous(), out.stride()
    assert scale_g.ndim == scale_x.ndim, (scale_g.shape, scale_x.shape)
    if scale_g.ndim == 2:
        _check_blocks(g_t, scale_g)
        _check_blocks(x_t, scale_x)


@operator(gpu=".gemm_triton", mutates=["out"], check=_check_wgrad)
def grouped_wgrad_(
    out: Tensor, g_t: Tensor, x_t: Tensor, scale_g: Tensor, scale_x: Tensor, offsets: Tensor, *, adds: bool = False
) -> None:
    """out[e] = (g_t · scale_g)[:, group e] @ (x_t · scale_x)[:, group e]ᵀ, or added to it and
    rounded once. An expert without rows has the gradient zero.

    Args:
        out: BF16 or FP32 [E, N, K].
        g_t: FP8 [N, R]. x_t: FP8 [K, R]. scale_g, scale_x: FP32 [1], or of blocks [R / 128, N] and [R / 128, K].
        offsets: see `grouped_mm`.
    """
    for grad, product in zip(out, _wgrads(g_t, x_t, scale_g, scale_x, offsets), strict=True):
        grad.copy_(grad.float() + product if adds else product)


def _check_wgrad_to_fp8(
    out: Tensor, scales: Tensor, g_t: Tensor, x_t: Tensor, scale_g: Tensor, scale_x: Tensor, offsets: Tensor
) -> None:
    _check_wgrad(out, g_t, x_t, scale_g, scale_x, offsets)
    assert out.dtype == E4M3 and scales.numel() * GRAD_BLOCK == out.numel(), (out.dtype, scales.shape)
    if x_t.shape[0] % GRAD_BLOCK:
        raise ValueError(f"a gradient's rows of {x_t.shape[0]} are no whole blocks of {GRAD_BLOCK}")


@operator(gpu=".gemm_triton", mutates=["out", "scales"], check=_check_wgrad_to_fp8)
def grouped_wgrad_to_fp8_(
    out: Tensor, scales: Tensor, g_t: Tensor, x_t: Tensor, scale_g: Tensor, scale_x: Tensor, offsets: Tensor
) -> None:
    """`grouped_wgrad_` with its FP32 result cast to E4M3, as `quantize_blockwise_` casts: the sum exists in no other
    form.

    Args:
        out: E4M3 [E, N, K], K a multiple of `GRAD_BLOCK`. scales: FP32 [E · N · K / GRAD_BLOCK], powers of two.
    """
    products = _wgrads(g_t, x_t, scale_g, scale_x, offsets)
    for payload, its_scales, product in zip(out, scales.view(out.shape[0], -1), products, strict=True):
        store_state_(product, payload.view(-1), its_scales)


def _wgrads(g_t: Tensor, x_t: Tensor, scale_g: Tensor, scale_x: Tensor, offsets: Tensor) -> list[Tensor]:
    g, x = _rows(g_t, scale_g), _rows(x_t, scale_x)
    products = [g[:, start:stop] @ x[:, start:stop].t() for start, stop in _groups(offsets)]
    return products if scale_g.ndim == 2 else [product * (scale_g * scale_x) for product in products]


def _groups(offsets: Tensor) -> list[tuple[int, int]]:
    return list(pairwise(offsets.tolist()))
