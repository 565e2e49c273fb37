"""Rows of an operand that ranks share: gathering the casts equals casting the gathered rows, for every format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import E4M3, E5M2
from fp8_megatron.formats.blockwise import Blocks
from fp8_megatron.formats.format import Format, Quantized
from fp8_megatron.formats.tensorwise import Tensorwise
from fp8_megatron.kernels import reference
from fp8_megatron.nn.rows import LocalRows, OperandRows, gather_operand
from fp8_megatron.quantization.sources import TensorSource
from tests.harness.ranks import RankPool, on_default_group

ROWS, COLUMNS = 128, 256


def _values(num_ranks: int) -> Tensor:
    sizes = 10.0 ** torch.arange(num_ranks).repeat_interleave(ROWS)[:, None]
    return torch.randn(num_ranks * ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * sizes


def _cast(values: Tensor, whole: Tensor, format: Format) -> Quantized:
    """`values`, a part of `whole`, in both layouts."""
    if not format.takes_scale:
        return format.cast(values, transposed=True)
    scale = reference.scale_from_amax(reference.amax(whole), format.dtype, power_of_two=False)
    return TensorSource(values, transposed=True).quantize(format, scale)


def _bits(operand: Quantized) -> tuple[Tensor, Tensor]:
    return operand.payload.view(torch.uint8), operand.scale


def _seen(rows: OperandRows) -> dict[str, list[tuple[Tensor, Tensor]]]:
    parts = sorted(rows.parts(), key=lambda part: part[0].start)
    return {
        "parts": [_bits(part) for _, part in parts],
        "whole": [_bits(rows.whole())],
        "columns": [_bits(rows.columns())],
    }


def _gather(group: torch.distributed.ProcessGroup, format: Format) -> dict[str, list[tuple[Tensor, Tensor]]]:
    whole = _values(group.size())
    part = _cast(whole.chunk(group.size())[group.rank()], whole, format)
    rows = gather_operand(part, group)
    assert rows.num_rows == whole.shape[0]
    return _seen(rows)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", [Tensorwise, Blocks])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_gathered_is_the_cast_of_the_whole(
    ranks: RankPool, num_ranks: int, kind: type[Tensorwise | Blocks], dtype: torch.dtype
) -> None:
    format, values = kind(dtype), _values(num_ranks)
    expected = _seen(LocalRows(_cast(values, values, format)))
    for seen in ranks.run(on_default_group, _gather, format, num_ranks=num_ranks):
        for layout in ("whole", "columns"):
            assert all(torch.equal(a, b) for a, b in zip(seen[layout][0], expected[layout][0], strict=True)), layout
        payload = torch.cat([payload for payload, _ in seen["parts"]])
        assert torch.equal(payload, expected["whole"][0][0])
        if kind is Blocks:
            scales = torch.cat([scale for _, scale in seen["parts"]], dim=1)
            assert torch.equal(scales, expected["whole"][0][1])
