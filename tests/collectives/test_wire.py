"""WireTensor: stored values come back within rounding, the byte counts are right, and slices are views."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp8_megatron.collectives.wire import OwnRow, WireTensor, accumulate_rows_
from fp8_megatron.dtypes import GRAD_BLOCK, StorageDtype

CPU = torch.device("cpu")
DTYPES = [StorageDtype.FP8, StorageDtype.BF16, StorageDtype.FP32]
WIRE_DTYPES = pytest.mark.parametrize("dtype", DTYPES)


def gaussian(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def stored(value: Tensor, dtype: StorageDtype = StorageDtype.FP8) -> WireTensor:
    tensor = WireTensor.empty(value.numel(), dtype, CPU)
    tensor.store_(value)
    return tensor


@WIRE_DTYPES
def test_what_is_stored_comes_back(dtype: StorageDtype) -> None:
    """Half a unit in the last place of a normal number, relative: 2⁻⁴ in E4M3, 2⁻⁸ in BF16, 0 in FP32. An E4M3 number
    below 2⁻⁶ times the scale is subnormal: half its step is 2⁻¹⁰ scales, and the scale at most amax / 224."""
    value = gaussian(10 * GRAD_BLOCK)
    tensor = stored(value, dtype)
    relative = {StorageDtype.FP8: 2**-4, StorageDtype.BF16: 2**-8, StorageDtype.FP32: 0.0}[dtype]
    amax = value.view(-1, GRAD_BLOCK).abs().amax(dim=1).repeat_interleave(GRAD_BLOCK)
    absolute = amax / 224 * 2**-10 if dtype is StorageDtype.FP8 else torch.zeros_like(value)
    loaded = tensor.load()
    assert loaded.dtype == torch.float32 and tensor.dtype is dtype
    assert ((loaded - value).abs() <= torch.maximum(relative * value.abs(), absolute)).all()
    assert relative == 0.0 or not torch.equal(loaded, value)


def test_bytes() -> None:
    """1 byte an element and one FP32 scale for 128 of them."""
    sizes = {dtype: WireTensor.empty(1280, dtype, CPU).nbytes for dtype in DTYPES}
    assert sizes == {StorageDtype.FP8: 1280 + 40, StorageDtype.BF16: 2560, StorageDtype.FP32: 5120}


@WIRE_DTYPES
def test_slices_are_views(dtype: StorageDtype) -> None:
    value = gaussian(6 * GRAD_BLOCK)
    tensor = stored(value, dtype)
    part = tensor.slice(2 * GRAD_BLOCK, 5 * GRAD_BLOCK)
    assert torch.equal(part.load(), tensor.load()[2 * GRAD_BLOCK : 5 * GRAD_BLOCK])
    part.store_(torch.full((3 * GRAD_BLOCK,), 2.0))
    assert tensor.load()[2 * GRAD_BLOCK : 5 * GRAD_BLOCK].eq(2.0).all()
    assert torch.equal(tensor.load()[: 2 * GRAD_BLOCK], stored(value, dtype).load()[: 2 * GRAD_BLOCK])


@pytest.mark.parametrize("memory", [StorageDtype.FP8, StorageDtype.BF16])
@pytest.mark.parametrize("dtype", [StorageDtype.FP8, StorageDtype.BF16])
def test_carved_storage_lies_in_the_tensor(memory: StorageDtype, dtype: StorageDtype) -> None:
    outer = WireTensor.empty(8 * GRAD_BLOCK, memory, CPU)
    value = gaussian(4 * GRAD_BLOCK)
    carved = outer.carve(4 * GRAD_BLOCK, dtype)
    carved.store_(value)
    assert torch.equal(carved.load(), stored(value, dtype).load())
    own = [(part.data_ptr(), part.data_ptr() + part.nbytes) for part in outer.byte_views()]
    for part in carved.byte_views():
        assert any(start <= part.data_ptr() and part.data_ptr() + part.nbytes <= end for start, end in own)


def test_carving_too_much_is_refused() -> None:
    with pytest.raises(AssertionError, match="no room"):
        WireTensor.empty(4 * GRAD_BLOCK, StorageDtype.FP8, CPU).carve(4 * GRAD_BLOCK, StorageDtype.BF16)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_value_makes_its_block_nan(bad: float) -> None:
    value = gaussian(4 * GRAD_BLOCK)
    value[GRAD_BLOCK + 5] = bad
    is_nan = stored(value).load().isnan().view(4, GRAD_BLOCK)
    assert is_nan[1].all() and not is_nan[[0, 2, 3]].any()
    loaded = stored(value, StorageDtype.BF16).load()
    assert torch.equal(loaded.isfinite(), value.isfinite())


@WIRE_DTYPES
@pytest.mark.parametrize("num_rows", [1, 3, 4])
def test_rows_are_summed_in_order(dtype: StorageDtype, num_rows: int) -> None:
    """Bitwise what FP32 gives row by row: the factor goes into the scales or the row, then the rows are added."""
    size = 2 * GRAD_BLOCK
    rows = stored(gaussian(num_rows * size), dtype)
    factor = 1.0 / num_rows
    values = [rows.slice(row * size, (row + 1) * size) for row in range(num_rows)]
    scaled = []
    for value in values:
        if value.scales is None:
            scaled.append(value.payload.float() * factor)
        else:
            scaled.append(value.payload.float() * (value.scales * factor).repeat_interleave(GRAD_BLOCK))
    expected = scaled[0].clone()
    for value_ in scaled[1:]:
        expected += value_
    result = torch.full((size,), math.nan)
    accumulate_rows_(rows, num_rows, result, factor=factor, add=False)
    assert torch.equal(result, expected)
    rounded = result.bfloat16()
    accumulate_rows_(rows, num_rows, rounded, factor=factor, add=False)
    assert torch.equal(rounded, expected.bfloat16())
    own = OwnRow(num_rows - 1, stored(values[-1].load(), dtype))
    values[-1].payload.view(torch.uint8).fill_(0x7F)  # NaN: not to be read
    accumulate_rows_(rows, num_rows, rounded, factor=factor, add=False, own=own)
    assert torch.equal(rounded, expected.bfloat16())
    values[-1].store_(own.values.load())
    before = result.clone()
    accumulate_rows_(rows, num_rows, result, factor=factor, add=True)
    # The rows are added one after another to what is there: another order than adding their sum.
    torch.testing.assert_close(result, before + expected, rtol=num_rows * 2**-23, atol=num_rows * 2**-23)
    assert not torch.equal(result, before)


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ValueError, match="fp16 does not cross the wire"):
        WireTensor.empty(128, StorageDtype.FP16, CPU)
    with pytest.raises(ValueError, match="130 elements are no whole number of blocks"):
        WireTensor.empty(130, StorageDtype.FP8, CPU)
