"""Casts of a layer that share launches: each has the bits of the operator that it stands for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import E4M3, E5M2, StorageDtype
from fp8_megatron.kernels import ops
from fp8_megatron.kernels.quantize import reference as quantize
from fp8_megatron.kernels.quantize.layer import SUM_ROWS
from fp8_megatron.quantization.stats import snr_db

on_each_device = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with FP8")],
        ),
    ],
)
#: Tokens and columns of an output gradient, and the weight's columns. 20,000 tokens take several tiles a program.
SHAPES = [(16, 32, 48), (260, 1008, 32), (1028, 512, 2064), (20_000, 1024, 128)]
FP32_DB = 110.0


def same_bytes(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def gradient(rows: int, columns: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return (torch.randn(rows, columns, generator=generator) * 1e-3).to(dtype).to(device)


def weight_of(rows: int, columns: int, device: str, storage: StorageDtype) -> ops.StoredWeight:
    value = torch.randn(rows, columns, generator=torch.Generator().manual_seed(2))
    if storage is StorageDtype.FP8:
        return ops.StoredWeight(value.to(E4M3).to(device), torch.full((1,), 0.5, device=device), None)
    payload = torch.empty(rows * columns, dtype=torch.float16)
    scales = torch.empty(payload.numel() // 16)
    ops.quantize_blockwise_(value.view(-1), payload, scales)
    cast_scale = torch.full((1,), float(value.abs().max()) / 448.0)
    return ops.StoredWeight(payload.view(rows, columns).to(device), scales.to(device), cast_scale.to(device))


def in_fp8(weight: ops.StoredWeight, *, transposed: bool) -> Tensor:
    if weight.cast_scale is None:
        return weight.payload.t().contiguous() if transposed else weight.payload
    return ops.quantize_weight(weight.payload, weight.scales, weight.cast_scale, E4M3, transposed=transposed)


@on_each_device
@pytest.mark.parametrize("storage", [StorageDtype.FP8, StorageDtype.FP16], ids=str)
@pytest.mark.parametrize("bias_dtype", [None, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("current", [True, False], ids=["current", "given"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_input_beside_a_weight_and_a_bias(
    device: str, shape: tuple[int, int, int], current: bool, bias_dtype: torch.dtype | None, storage: StorageDtype
) -> None:
    rows, columns, outputs = shape
    weight = weight_of(outputs, columns, device, storage)
    bias = None
    if bias_dtype is not None:
        bias = torch.randn(outputs, generator=torch.Generator().manual_seed(1)).to(bias_dtype).to(device)
    scale = None if current else torch.full((1,), 1e-6, device=device)
    for dtype, transposed in ((torch.bfloat16, True), (torch.float32, False)):
        x = gradient(rows, columns, device, dtype)
        seen, wanted = (None, None) if current else (torch.zeros(3, device=device), torch.zeros(3, device=device))
        payload, payload_t, taken, weight_cast, bias_cast = ops.quantize_layer_input(
            x, weight, bias, E4M3, output_dtype=torch.bfloat16, scale=scale, amax_out=seen, transposed=transposed
        )
        if scale is None:
            expected = ops.quantize_current(x, E4M3, transposed=transposed)
            assert torch.equal(taken, expected[2])
        else:
            expected = (*ops.quantize_with_scale(x, scale, E4M3, transposed=transposed, amax_out=wanted), scale)
            assert taken.numel() == 0 and seen is not None and wanted is not None
            assert torch.equal(seen, wanted) and seen[1] > 0
        assert same_bytes(payload, expected[0])
        assert same_bytes(payload_t, expected[1]) and payload_t.numel() == transposed * x.numel()
        if storage is StorageDtype.FP8:
            assert weight_cast.numel() == 0
        else:
            assert same_bytes(weight_cast, in_fp8(weight, transposed=False))
        if bias is None or bias_dtype is torch.bfloat16:
            assert bias_cast.numel() == 0
        else:
            assert torch.equal(bias_cast, bias.bfloat16())


@on_each_device
@pytest.mark.parametrize("storage", [StorageDtype.FP8, StorageDtype.FP16], ids=str)
@pytest.mark.parametrize("column_sums", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("current", [True, False], ids=["current", "given"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_gradient_beside_a_weight(
    device: str,
    shape: tuple[int, int, int],
    current: bool,
    transposed: bool,
    column_sums: bool,
    storage: StorageDtype,
) -> None:
    rows, columns, inputs = shape
    x, weight = gradient(rows, columns, device), weight_of(columns, inputs, device, storage)
    scale = None if current else torch.full((1,), 1e-8, device=device)
    seen, wanted = (None, None) if current else (torch.zeros(3, device=device), torch.zeros(3, device=device))
    payload, payload_t, sums, taken, weight_t = ops.quantize_layer_grad(
        x, weight, E5M2, scale=scale, amax_out=seen, transposed=transposed, column_sums=column_sums
    )
    expected = ops.quantize_grad_output(x, E5M2, scale=scale, amax_out=wanted, transposed=transposed)
    assert same_bytes(payload, expected[0]) and same_bytes(payload_t, expected[1])
    assert torch.equal(taken, expected[3]) and same_bytes(weight_t, in_fp8(weight, transposed=True))
    if seen is not None and wanted is not None:
        assert torch.equal(seen, wanted) and seen[1] > 0
    assert sums.shape == (-(-rows // SUM_ROWS) if column_sums else 0, columns)
    if column_sums:
        parts = torch.stack([part.double().sum(dim=0) for part in x.split(SUM_ROWS)])
        assert snr_db(sums, parts) > FP32_DB
        whole = ops.sum_partial_sums(sums)
        assert snr_db(whole, x.double().sum(dim=0)) > FP32_DB
        if device == "cuda":  # the order is fixed
            assert torch.equal(whole, expected[2])
    # On the CPU, whose divisions the specification means.
    exact = quantize.quantize_grad_output(x.cpu(), E5M2, None if scale is None else scale.cpu(), False, None, True)
    assert same_bytes(payload.cpu(), exact[0]) and torch.equal(taken.cpu(), exact[3])


@on_each_device
@pytest.mark.parametrize("storage", [StorageDtype.FP8, StorageDtype.FP16], ids=str)
@pytest.mark.parametrize("padding", [0, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_gradient_is_stored_while_sums_are_added(
    device: str, shape: tuple[int, int, int], padding: int, storage: StorageDtype
) -> None:
    rows, columns, _ = shape
    grad = gradient(rows, columns, device).view(-1)
    numel = -(-grad.numel() // 128) * 128 + padding
    dtype = E4M3 if storage is StorageDtype.FP8 else torch.float16

    def place() -> tuple[Tensor, Tensor]:
        return torch.full((numel,), 1.0, device=device).to(dtype), torch.ones(numel // 128, device=device)

    partial_sums = gradient(-(-rows // SUM_ROWS), columns, device).float()
    written, expected = place(), place()
    sums = ops.quantize_blockwise_and_sum_(grad, *written, partial_sums)
    ops.quantize_blockwise_(grad, *expected)
    assert same_bytes(written[0], expected[0]) and torch.equal(written[1], expected[1])
    assert torch.equal(sums, ops.sum_partial_sums(partial_sums))
    assert snr_db(sums, partial_sums.double().sum(dim=0)) > FP32_DB
