"""Gradient storage: what is written, added, refused and zeroed; padding never shows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import CHUNK, E4M3, GRAD_BLOCK, LEVELS, StorageDtype
from fp8_megatron.kernels import ops
from fp8_megatron.kernels.quantize import blockwise
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db
from fp8_megatron.sharding.gradient import GradState
from fp8_megatron.sharding.partition import StorageClass, partition
from fp8_megatron.sharding.storage import MAX_BF16_MICRO_BATCHES, ModelStorage
from fp8_megatron.sharding.whole_grads import WholeGradBuffer

SHAPES = {"a": (64, 64), "b": (30, 50), "c": (128, 96)}  # b is padded


def make_buffer(dtype: StorageDtype) -> tuple[WholeGradBuffer, dict[str, torch.nn.Parameter]]:
    params = {name: torch.nn.Parameter(ScaledTensor.quantize(torch.ones(shape))) for name, shape in SHAPES.items()}
    (space,) = partition(params.items())
    buffer = WholeGradBuffer(space, dtype)
    buffer.become_main_grad()
    return buffer, params


def random_grads(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * 10.0 ** (seed - 4)).bfloat16()
        for name, shape in SHAPES.items()
    }


def write(params: dict[str, torch.nn.Parameter], grads: dict[str, Tensor]) -> None:
    for name, grad in grads.items():
        params[name].main_grad.accumulate_(grad)  # type: ignore[attr-defined]


def values(buffer: WholeGradBuffer) -> dict[str, Tensor]:
    """Stored gradients in FP32; asserts that the padding is zero."""
    flat = blockwise.load_state(buffer.payload, buffer.scales)
    for slot in buffer.space.slots:
        assert not slot.padded_slice(flat)[slot.numel :].any(), f"padding of {slot.name}"
    return {slot.name: slot.slice(flat) for slot in buffer.space.slots}


def test_fp8_is_one_quantisation_per_block() -> None:
    buffer, params = make_buffer(StorageDtype.FP8)
    grads = random_grads(0)
    write(params, grads)
    assert buffer.payload.dtype == E4M3 and buffer.scales is not None
    assert buffer.scales.numel() == buffer.space.numel // GRAD_BLOCK
    stored = values(buffer)
    for name, grad in grads.items():
        padded = torch.nn.functional.pad(grad.view(-1), (0, -grad.numel() % CHUNK))
        payload, scales = torch.empty_like(padded, dtype=E4M3), torch.empty(padded.numel() // GRAD_BLOCK)
        blockwise.quantize_blockwise_(padded, payload, scales)
        expected = blockwise.dequantize_blockwise(payload, scales)[: grad.numel()].view(grad.shape)
        assert torch.equal(stored[name], expected)
        assert snr_db(stored[name], grad) > 31.0  # one rounding to E4M3, 31.5 dB, less 0.5 for the sample


def test_fp8_refuses_a_second_micro_batch() -> None:
    buffer, params = make_buffer(StorageDtype.FP8)
    write(params, random_grads(0))
    with pytest.raises(AssertionError, match="a: a second micro-batch cannot be added"):
        write(params, random_grads(1))
    buffer.reset()
    write(params, random_grads(1))
    assert snr_db(values(buffer)["a"], random_grads(1)["a"]) > 31.0


@pytest.mark.parametrize(
    ("dtype", "least_db"),
    # Three roundings to BF16 (first written, then two sums), each 55.6 dB: 50.8, less 1; FP32 has 96 dB more.
    [(StorageDtype.BF16, 49.8), (StorageDtype.FP32, 140.0)],
)
def test_accumulators_add_micro_batches(dtype: StorageDtype, least_db: float) -> None:
    buffer, params = make_buffer(dtype)
    for step in range(2):  # the second step overwrites the first
        buffer.reset()
        micro_batches = [random_grads(seed) for seed in (2 + step, 4, 3)]
        for grads in micro_batches:
            write(params, grads)
        stored = values(buffer)
        for name in SHAPES:
            exact = torch.stack([grads[name].double() for grads in micro_batches]).sum(dim=0)
            assert snr_db(stored[name], exact) > least_db


@pytest.mark.parametrize("num_micro_batches", [2, 32, 33, 256, 1024])
@pytest.mark.parametrize("noise", [0.0, 0.5], ids=["equal", "correlated"])
@pytest.mark.parametrize("kind", [StorageClass.LINEAR, StorageClass.MATRIX])
def test_the_default_keeps_30_db_of_any_number_of_micro_batches(
    num_micro_batches: int, noise: float, kind: StorageClass
) -> None:
    """In BF16, a sum of k equal gradients rounds each addend to a unit of 2⁻⁸ · k: 36 dB are left of 32, 30 of 64 and 4
    of 1,024. FP32 keeps 2¹⁶ times as fine a unit."""
    formats = ModelStorage(num_micro_batches=num_micro_batches).of_grads(kind)
    params = {"a": torch.nn.Parameter(torch.ones(32, 64))}
    (space,) = partition(params.items())
    buffer = WholeGradBuffer(space, formats.local)
    buffer.become_main_grad()
    generator = torch.Generator().manual_seed(1)
    shared, exact = torch.randn(32, 64, generator=generator), torch.zeros(32, 64, dtype=torch.float64)
    for _ in range(num_micro_batches):
        grad = (shared + noise * torch.randn(32, 64, generator=generator)).bfloat16()
        exact += grad.double()
        params["a"].main_grad.accumulate_(grad)  # type: ignore[attr-defined]
    assert snr_db(buffer.flat(buffer.gradients[0]).view(32, 64), exact) > 35.0
    assert buffer.nbytes == space.numel * (2 if num_micro_batches <= MAX_BF16_MICRO_BATCHES else 4)
    asked_for = ModelStorage(num_micro_batches=num_micro_batches, accumulator=StorageDtype.BF16)
    assert asked_for.of_grads(kind).local is StorageDtype.BF16


@pytest.mark.parametrize(("num_micro_batches", "expected"), [(1, "bf16"), (32, "bf16"), (33, "fp32")])
def test_bf16_gradients_are_added_up_in_fp32_too(num_micro_batches: int, expected: str) -> None:
    stored = replace(LEVELS["O3"], main_grad=StorageDtype.BF16)
    local = ModelStorage(stored, num_micro_batches=num_micro_batches).of_grads(StorageClass.LINEAR).local
    assert local is StorageDtype(expected)


@pytest.mark.parametrize("dtype", [StorageDtype.FP8, StorageDtype.BF16, StorageDtype.FP32])
def test_slots_that_no_gradient_reached_are_zero(dtype: StorageDtype) -> None:
    buffer, params = make_buffer(dtype)
    write(params, random_grads(0))
    buffer.reset()
    grads = random_grads(1)
    del grads["b"]
    write(params, grads)
    buffer.finish()
    stored = values(buffer)
    assert not stored["b"].any() and stored["a"].any() and stored["c"].any()
    norm = ops.squared_norm(buffer.payload, buffer.scales).item()
    exact = sum(value.double().square().sum().item() for value in stored.values())
    # FP32 sum of 22,000 squares in partial sums: far better than 10⁻⁵.
    assert norm == pytest.approx(exact, rel=1e-5)


def test_a_gradient_says_what_is_stored() -> None:
    buffer, params = make_buffer(StorageDtype.BF16)
    own = buffer.gradients[0]
    assert own is params["a"].main_grad and own.state is GradState.EMPTY  # type: ignore[attr-defined]
    states = []
    for seed in range(3):
        write(params, random_grads(seed))
        states.append(own.state)
    buffer.reset()
    assert [*states, own.state] == [GradState.ONE, GradState.SUM, GradState.SUM, GradState.EMPTY]


def test_a_gradient_of_another_shape_is_refused() -> None:
    _, params = make_buffer(StorageDtype.FP32)
    with pytest.raises(AssertionError, match=r"a: gradient .*64, 32"):
        params["a"].main_grad.accumulate_(torch.ones(64, 32))  # type: ignore[attr-defined]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [StorageDtype.FP8, StorageDtype.BF16, StorageDtype.FP32])
def test_bad_gradients_make_the_norm_bad(dtype: StorageDtype, bad: float) -> None:
    buffer, params = make_buffer(dtype)
    grads = random_grads(0)
    grads["b"][29, 49] = bad
    write(params, grads)
    assert not ops.squared_norm(buffer.payload, buffer.scales).isfinite()


def test_main_grad_has_one_owner_and_its_bytes() -> None:
    fp8, _ = make_buffer(StorageDtype.FP8)
    assert fp8.scales is not None
    # One byte an element and 4/128 for scales: 1.03 bytes a parameter.
    assert fp8.payload.nbytes == fp8.space.numel and fp8.scales.nbytes == fp8.space.numel // 32
    assert make_buffer(StorageDtype.FP32)[0].scales is None
