"""The specification of how rows are grouped by expert, brought there and summed again, in plain PyTorch.

A token has one row for each expert that it is routed to. The rows of an expert are a group: they lie side by side, in
the order of tokens, and groups in the order of experts. A group starts at a multiple of `GROUP_ROWS`. Rows between its
last token and the next group are padding. Rows from ``offsets[E]`` on belong to nobody: nobody reads them, and kernels
leave them unwritten.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...dtypes import FP8_DTYPES, GEMM_BLOCK, GROUP_ROWS
from ..quantize.blocks import block_scales_shape, decode_blocks, quantize_blocks
from ..registration import operator
from ..shapes import fp32, layouts


class Groups(NamedTuple):
    """Where the rows of experts lie: what `routed_rows` returns.

    Attributes:
        offsets: int32 [E + 1]. source: int32 [R]. rows: int32 [T, k].
    """

    offsets: Tensor
    source: Tensor
    rows: Tensor

    @property
    def num_groups(self) -> int:
        """E."""
        return len(self.offsets) - 1


def most_rows(num_tokens: int, top_k: int, num_experts: int, capacity: int | None = None) -> int:
    """The most rows that tokens with at most `top_k` experts each take, padding included: a multiple of GROUP_ROWS.

    Args:
        capacity: the most tokens of an expert; None: all.
    """
    routed = num_tokens * min(top_k, num_experts)
    filled = (routed + min(routed, num_experts) * (GROUP_ROWS - 1)) // GROUP_ROWS
    if capacity is not None:
        filled = min(filled, num_experts * -(-capacity // GROUP_ROWS))
    return filled * GROUP_ROWS


def _check_routing(routing_map: Tensor, num_rows: int) -> None:
    assert routing_map.ndim == 2 and routing_map.dtype == torch.bool, (routing_map.shape, routing_map.dtype)
    assert num_rows % GROUP_ROWS == 0 and routing_map.numel() < 2**31, (num_rows, routing_map.shape)


@operator(
    gpu=".rows_triton",
    fake=lambda routing_map, num_rows, top_k: (
        routing_map.new_empty(routing_map.shape[1] + 1, dtype=torch.int32),
        routing_map.new_empty(num_rows, dtype=torch.int32),
        routing_map.new_empty((routing_map.shape[0], top_k), dtype=torch.int32),
    ),
    check=_check_routing,
)
def routed_rows(routing_map: Tensor, num_rows: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where the rows of experts lie, from which token goes to which expert.

    Args:
        routing_map: bool [T, E], at most `top_k` true in a row.
        num_rows: room for rows, R: a multiple of GROUP_ROWS, at least what the map needs (`most_rows` is enough).

    Returns:
        offsets int32 [E + 1], the first row of each group, and of nobody; source int32 [R], token · E + expert of a
        row, or -1 for a row without a token; rows int32 [T, top_k], the rows of a token in the order of experts, -1
        after the last.
    """
    num_experts = routing_map.shape[1]
    sizes = (routing_map.sum(dim=0) + GROUP_ROWS - 1) // GROUP_ROWS * GROUP_ROWS
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    assert offsets[-1] <= num_rows, f"{int(offsets[-1])} rows of experts have room for {num_rows}"
    row = (offsets[:-1] + routing_map.cumsum(0) - 1).int()  # of each token and expert
    token, expert = routing_map.nonzero(as_tuple=True)
    source = row.new_full((num_rows,), -1)
    source[row[token, expert]] = (token * num_experts + expert).int()
    rows = row.new_full((len(routing_map), top_k), -1)
    rows[token, (routing_map.cumsum(1) - 1)[token, expert]] = row[token, expert]
    return offsets.int(), source, rows


def _check_gather(x: Tensor, source: Tensor, transposed: bool) -> None:
    assert x.ndim == 2 and x.shape[1] % 16 == 0 and len(source) % GROUP_ROWS == 0, (x.shape, source.shape)
    assert x.dtype in FP8_DTYPES or not transposed, x.dtype


@operator(
    gpu=".rows_triton",
    fake=lambda x, source, rowwise, transposed: layouts(
        x.new_empty((len(source), x.shape[1])), x.dtype, rowwise=rowwise, transposed=transposed
    ),
    check=_check_gather,
)
def gather_rows(
    x: Tensor,
    source: Tensor,
    num_experts: int,
    offsets: Tensor,
    *,
    rowwise: bool = True,
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    """The rows of experts, from those of tokens; zeros where a row has no token.

    Args:
        x: [T, H], FP8 or another dtype; H is a multiple of 16.
        source, offsets: of `routed_rows`, over `num_experts` experts.
        transposed: of FP8 alone.

    Returns:
        [R, H] (empty unless `rowwise`), its transpose [H, R] (empty unless `transposed`).
    """
    token = (source.clamp(min=0) // num_experts).long()
    codes = x.view(torch.uint8) if x.dtype in FP8_DTYPES else x
    rows = torch.where(source[:, None] < 0, torch.zeros_like(codes[:1]), codes[token]).view(x.dtype)
    empty = rows.new_empty(0)
    return rows if rowwise else empty, rows.t().contiguous() if transposed else empty


def _check_gather_blocks(x: Tensor, scales: Tensor, source: Tensor, rowwise: bool, transposed: bool) -> None:
    assert x.ndim == 2 and x.dtype in FP8_DTYPES and x.stride(1) == 1, (x.dtype, x.shape, x.stride())
    assert scales.shape == block_scales_shape(*x.shape) and len(source) % GROUP_ROWS == 0, (scales.shape, x.shape)
    if x.shape[1] % GEMM_BLOCK:
        raise ValueError(f"experts' rows in blocks have a multiple of {GEMM_BLOCK} elements, not {x.shape[1]}")
    if not (rowwise or transposed):
        raise ValueError("rows into no layout: set rowwise, transposed or both")


def _block_layouts(x: Tensor, num_rows: int, *, rowwise: bool, transposed: bool) -> tuple[Tensor, ...]:
    rows = x.new_empty((num_rows, x.shape[1]))
    scales, scales_t = block_scales_shape(*rows.shape), block_scales_shape(rows.shape[1], num_rows)
    payload, payload_t = layouts(rows, x.dtype, rowwise=rowwise, transposed=transposed)
    return payload, fp32(x, *(scales if rowwise else (0,))), payload_t, fp32(x, *(scales_t if transposed else (0,)))


@operator(
    gpu=".rows_triton",
    fake=lambda x, source, rowwise, transposed: _block_layouts(x, len(source), rowwise=rowwise, transposed=transposed),
    check=_check_gather_blocks,
)
def gather_blocks(
    x: Tensor,
    scales: Tensor,
    source: Tensor,
    num_experts: int,
    offsets: Tensor,
    *,
    rowwise: bool = True,
    transposed: bool = False,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`gather_rows` of tokens with scales of blocks, which go with their rows. Blocks of the transpose lie along the
    rows of an expert, so its values are cast again, which rounds them twice. If all scales are powers of two, only what
    becomes subnormal is rounded again (arXiv 2412.19437, section 3.3.2).

    Args:
        x: FP8 [T, H], the rows with any stride; H is a multiple of 128. scales: FP32 [H / 128, T], with any strides.
        power_of_two: of the transpose's scales.

    Returns:
        [R, H] and its scales [H / 128, R] (both empty unless `rowwise`), its transpose [H, R] and the scales of that
        one [R / 128, H] (both empty unless `transposed`). A row without a token has zeros, and the scale 1.
    """
    token, has_token = (source.clamp(min=0) // num_experts).long(), source >= 0
    codes = torch.where(has_token[:, None], x.view(torch.uint8)[token], 0).view(x.dtype)
    of_rows = torch.where(has_token, scales[:, token], 1.0).contiguous()
    empty, no_scales = codes.new_empty(0), of_rows.new_empty(0)
    columns, scales_t = empty, no_scales
    if transposed:
        values = decode_blocks(codes, of_rows)
        settings = dict(rowwise=False, transposed=True, power_of_two=power_of_two)
        _, _, columns, scales_t, _ = quantize_blocks(values, x.dtype, **settings)
    return codes if rowwise else empty, of_rows if rowwise else no_scales, columns, scales_t


@operator(gpu=".rows_triton", fake=lambda y, rows: y.new_empty((len(rows), y.shape[1])))
def sum_rows(y: Tensor, rows: Tensor) -> Tensor:
    """[T, H]: the sum of each token's rows of `y` [R, H], in FP32 and in the order of experts, rounded once.

    Args:
        rows: int32 [T, k] of `routed_rows`.
    """
    total = torch.zeros((len(rows), y.shape[1]), dtype=torch.float32, device=y.device)
    for row in rows.long().unbind(1):
        total += torch.where(row[:, None] < 0, 0.0, y[row.clamp(min=0)].float())
    return total.to(y.dtype)
