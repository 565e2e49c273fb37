"""The specification of the block-scaled GEMM's operands: FP8 with a scale for each 1×128 block or each 128×128 tile.

The recipe is DeepSeek-V3's (arXiv 2412.19437, section 3.3). Activations and gradients have a scale for each 128
elements along the GEMM's K, weights one for each 128×128 tile. The last block may be shorter; it counts as padded with
zeros. A scale is FP32 and dequantises. `reference.scale_from_amax` computes it: a block of zeros has scale 1, a block
with an inf or a NaN has scale NaN.

Scales are laid out for cuBLASLt ("128-element 1D and 128x128 2D block scaling" of its manual), with L = ⌈K / 128⌉:

- of blocks, FP32 [L, R] for an operand [R, K]: ``scales[j, i]`` belongs to ``x[i, 128j : 128j + 128]``;
- of tiles, FP32 [⌈R / 128⌉, L rounded up to a multiple of 4]: ``scales[i, j]`` belongs to
  ``w[128i : 128i + 128, 128j : 128j + 128]``. The columns from L on are padding, and hold 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ...dtypes import FP8_DTYPES, FP8_GEMM_MULTIPLE, GEMM_BLOCK
from ..reference import decode, encode, scale_from_amax
from ..registration import operator
from ..shapes import cdiv, fp32, payload_like, round_up

#: cuBLASLt reads the scales of tiles with a row stride that is a multiple of this.
TILE_SCALES_MULTIPLE = 4


def block_scales_shape(rows: int, columns: int) -> tuple[int, int]:
    """The shape of the scales of 1×128 blocks of an operand [rows, columns]."""
    return cdiv(columns, GEMM_BLOCK), rows


def tile_scales_shape(rows: int, columns: int) -> tuple[int, int]:
    """The shape of the scales of 128×128 tiles of an operand [rows, columns], padding included."""
    return cdiv(rows, GEMM_BLOCK), round_up(cdiv(columns, GEMM_BLOCK), TILE_SCALES_MULTIPLE)


def blocks_like(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A cast of `shape`, rows and columns, in blocks without values, on `like`'s device: payload and scales."""
    rows, columns = shape
    return payload_like(like, shape, dtype), fp32(like, *block_scales_shape(rows, columns))


def check_block_columns(columns: int, what: str) -> None:
    """Refuse a width that kernels which compute and cast into blocks do not take.

    Raises:
        ValueError: not a multiple of 128.
    """
    if columns % GEMM_BLOCK:
        raise ValueError(f"{what} in blocks has a multiple of {GEMM_BLOCK} columns, not {columns}")


def _blocks(x: Tensor, dtype: torch.dtype, *, wanted: bool) -> tuple[Tensor, Tensor]:
    """A cast of `x` without values; empty unless `wanted`."""
    return blocks_like(x, x.shape, dtype) if wanted else (payload_like(x, (0,), dtype), fp32(x, 0))


def _tiles(w: Tensor, dtype: torch.dtype, *, wanted: bool = True) -> tuple[Tensor, Tensor]:
    return payload_like(w, w.shape, dtype, wanted=wanted), fp32(w, *(tile_scales_shape(*w.shape) if wanted else (0,)))


def _check_sizes(x: Tensor) -> None:
    rows, columns = x.shape
    if rows % FP8_GEMM_MULTIPLE or columns % FP8_GEMM_MULTIPLE:
        raise ValueError(
            f"block-scaled operands have sizes in multiples of {FP8_GEMM_MULTIPLE}, not {rows} × {columns}"
        )


def _check_activation(x: Tensor, dtype: torch.dtype, rowwise: bool, transposed: bool) -> None:
    assert dtype in FP8_DTYPES, dtype
    _check_sizes(x)
    if not (rowwise or transposed):
        raise ValueError("quantisation into no layout: set rowwise, transposed or both")


def _check_weight(w: Tensor, dtype: torch.dtype, rowwise: bool, transposed: bool) -> None:
    _check_activation(w, dtype, rowwise, transposed)


def _check_payload(payload: Tensor) -> None:
    assert payload.dtype in FP8_DTYPES, payload.dtype
    _check_sizes(payload)


@operator(
    gpu=".blocks_triton",
    fake=lambda x, dtype, rowwise, transposed, column_sums: (
        *_blocks(x, dtype, wanted=rowwise),
        *_blocks(x.t(), dtype, wanted=transposed),
        fp32(x, x.shape[1] if column_sums else 0),
    ),
    check=_check_activation,
)
def quantize_blocks(
    x: Tensor,
    dtype: torch.dtype,
    *,
    rowwise: bool = True,
    transposed: bool = False,
    column_sums: bool = False,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Quantise `x` [M, K] with a scale for each block of 128 along K, and its transpose with one for each 128 along M.

    The two layouts hold different numbers, because a block of one crosses 128 blocks of the other.

    Args:
        x: BF16, FP16 or FP32.
        column_sums: also sum the columns (a bias's gradient).
        power_of_two: round the scales up to powers of two.

    Returns:
        payload [M, K], its scales [⌈K / 128⌉, M] (both empty unless `rowwise`), transpose [K, M], its scales
        [⌈M / 128⌉, K] (both empty unless `transposed`), column sums FP32 [K] (empty unless `column_sums`).

    Raises:
        ValueError: M or K is not a multiple of 16, or neither layout is requested.
    """
    along_k = _cast_blocks(x, dtype, power_of_two) if rowwise else _blocks(x, dtype, wanted=False)
    along_m = _cast_blocks(x.t(), dtype, power_of_two) if transposed else _blocks(x, dtype, wanted=False)
    return *along_k, *along_m, x.float().sum(dim=0) if column_sums else fp32(x, 0)


def _cast_blocks(x: Tensor, dtype: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    blocks = _filled_up(x.float(), rows_too=False).view(rows, -1, GEMM_BLOCK)
    scales = scale_from_amax(blocks.abs().amax(dim=2), dtype, power_of_two=power_of_two)
    payload = encode(blocks, scales[:, :, None], dtype).view(rows, -1)[:, :columns]
    return payload.contiguous(), scales.t().contiguous()


@operator(
    gpu=".blocks_triton",
    fake=lambda w, dtype, rowwise, transposed: (
        *_tiles(w, dtype, wanted=rowwise),
        *_tiles(w.t(), dtype, wanted=transposed),
    ),
    check=_check_weight,
)
def quantize_tiles(
    w: Tensor, dtype: torch.dtype, *, rowwise: bool = True, transposed: bool = False, power_of_two: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise a weight `w` [N, K] with a scale for each tile of 128×128, in either layout or both.

    Returns:
        payload [N, K], its scales (both empty unless `rowwise`), transpose [K, N], its scales (both empty unless
        `transposed`). A tile's transpose keeps its scale.

    Raises:
        ValueError: N or K is not a multiple of 16, or neither layout is requested.
    """
    payload, scales = _cast_tiles(w, dtype, power_of_two)
    over = transpose_tiles(payload, scales) if transposed else _tiles(w, dtype, wanted=False)
    return *((payload, scales) if rowwise else _tiles(w, dtype, wanted=False)), *over


def _cast_tiles(w: Tensor, dtype: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    rows, columns = w.shape
    full = _filled_up(w.float(), rows_too=True)
    tiles = full.view(full.shape[0] // GEMM_BLOCK, GEMM_BLOCK, -1, GEMM_BLOCK)
    scales = scale_from_amax(tiles.abs().amax(dim=(1, 3)), dtype, power_of_two=power_of_two)
    payload = encode(tiles, scales[:, None, :, None], dtype).view_as(full)[:rows, :columns]
    return payload.contiguous(), _padded(scales)


@operator(gpu=".blocks_triton", fake=lambda payload: _tiles(payload.t(), payload.dtype), check=_check_payload)
def transpose_tiles(payload: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [N, K] of `quantize_tiles` and its scales → its transpose [K, N] and the transpose's scales, exactly.

    Raises:
        ValueError: N or K is not a multiple of 16.
    """
    num_columns = cdiv(payload.shape[1], GEMM_BLOCK)
    return payload.t().contiguous(), _padded(scales[:, :num_columns].t())


def dequantize_blocks(payload: Tensor, scales: Tensor) -> Tensor:
    """An operand [R, K] with scales of blocks or of tiles (the shape tells which) → FP32 [R, K].

    Raises:
        ValueError: the scales have neither shape.
    """
    return decode_tiles(payload, scales) if has_tile_scales(payload, scales) else decode_blocks(payload, scales)


def decode_blocks(payload: Tensor, scales: Tensor) -> Tensor:
    """FP32 [R, K] of an operand with scales of blocks [⌈K / 128⌉, R], with any strides."""
    return decode(payload) * scales.t().repeat_interleave(GEMM_BLOCK, dim=1)[:, : payload.shape[1]]


def decode_tiles(payload: Tensor, scales: Tensor) -> Tensor:
    """FP32 [R, K] of an operand with scales of tiles [⌈R / 128⌉, ≥ ⌈K / 128⌉], with any strides."""
    return decode_blocks(payload, scales.repeat_interleave(GEMM_BLOCK, dim=0)[: payload.shape[0]].t())


def has_tile_scales(payload: Tensor, scales: Tensor) -> bool:
    """Whether an operand's scales are those of tiles rather than of blocks, by their shape.

    If the number of rows is a multiple of 16, the two shapes always differ.

    Raises:
        ValueError: the scales have neither shape, or are not contiguous FP32.
    """
    shape, rows, columns = tuple(scales.shape), *payload.shape
    if scales.dtype == torch.float32 and scales.is_contiguous():
        if shape == block_scales_shape(rows, columns):
            return False
        if shape == tile_scales_shape(rows, columns):
            return True
    of_blocks, of_tiles = list(block_scales_shape(rows, columns)), list(tile_scales_shape(rows, columns))
    raise ValueError(
        f"scales of an operand [{rows}, {columns}] are contiguous FP32 {of_blocks} for 1×128 blocks or {of_tiles} for "
        f"128×128 tiles, not {scales.dtype} {list(shape)} with strides {scales.stride()}"
    )


def _filled_up(x: Tensor, *, rows_too: bool) -> Tensor:
    """`x` padded with zeros to whole blocks along K and, if requested, along its rows."""
    rows, columns = x.shape
    below = round_up(rows, GEMM_BLOCK) - rows if rows_too else 0
    return F.pad(x, (0, round_up(columns, GEMM_BLOCK) - columns, 0, below))


def _padded(scales: Tensor) -> Tensor:
    """Scales of tiles with the padding that cuBLASLt reads over."""
    columns = scales.shape[1]
    return F.pad(scales, (0, round_up(columns, TILE_SCALES_MULTIPLE) - columns), value=1.0).contiguous()
