"""Quantizers against the reference, under current and under delayed scaling."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import E4M3, E5M2, MAX_FINITE
from fp8_megatron.formats.format import Quantized
from fp8_megatron.formats.tensorwise import Tensorwise
from fp8_megatron.kernels import reference
from fp8_megatron.quantization.amax_history import AmaxHistory
from fp8_megatron.quantization.recipe import AmaxSync, Quantizer, Recipe
from fp8_megatron.quantization.sources import TensorSource


def random_input(seed: int, size: float = 1.0) -> Tensor:
    return (torch.randn(48, 32, generator=torch.Generator().manual_seed(seed)) * size).bfloat16()


def delayed(power_of_two: bool = False) -> Recipe:
    return Recipe("delayed", power_of_two, AmaxHistory(4, "max", power_of_two=power_of_two))


def cast(quantizer: Quantizer, x: Tensor, *, transposed: bool = False, sync: AmaxSync | None = None) -> Quantized:
    return quantizer.quantize(TensorSource(x, transposed=transposed), sync=sync)


def assert_is(operand: Quantized, x: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    """The operand is `x` encoded with `scale`, bit for bit, in both layouts."""
    payload = reference.encode(x, scale, dtype)
    assert torch.equal(operand.scale, scale)
    assert torch.equal(operand.payload.view(torch.uint8), payload.view(torch.uint8))
    assert torch.equal(operand.payload_t.view(torch.uint8), payload.t().contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_current_scaling_is_the_reference(dtype: torch.dtype, power_of_two: bool) -> None:
    x = random_input(0)
    operand = cast(Quantizer(Tensorwise(dtype, power_of_two)), x, transposed=True)
    assert_is(operand, x, reference.scale_from_amax(reference.amax(x), dtype, power_of_two=power_of_two), dtype)
    assert cast(Quantizer(Tensorwise(dtype, power_of_two)), x).payload_t is None


def test_shared_amax_gives_the_shared_scale() -> None:
    x, whole_amax = random_input(0), 100.0

    def sync(amax: Tensor) -> None:
        assert torch.equal(amax, reference.amax(x))
        amax.fill_(whole_amax)

    operand = cast(Quantizer(Tensorwise(E4M3)), x, transposed=True, sync=sync)
    assert_is(operand, x, torch.tensor([whole_amax / 448.0]), E4M3)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_delayed_scaling_uses_the_last_steps_amax(power_of_two: bool) -> None:
    recipe = delayed(power_of_two)
    quantizers, other = recipe.linear_quantizers(), recipe.linear_quantizers()
    history = recipe.history
    assert history is not None
    history.allocate(torch.device("cpu"))
    slots = {quantizer.slot for pair in (quantizers, other) for quantizer in (pair.input, pair.grad_output)}
    assert slots == {0, 1, 2, 3}

    def scale_of(x: Tensor, dtype: torch.dtype) -> Tensor:
        return reference.scale_from_amax(reference.amax(x), dtype, power_of_two=power_of_two)

    first, second = random_input(1), random_input(2, size=0.25)
    # Cold: current scaling, as if there were no history; but the amax is recorded.
    assert_is(cast(quantizers.input, first, transposed=True), first, scale_of(first, E4M3), E4M3)
    assert_is(cast(quantizers.grad_output, second, transposed=True), second, scale_of(second, E5M2), E5M2)
    history.update(None)
    # Warm: the last step's scale, for any new values; each role has its own.
    large = random_input(3, size=50.0)
    assert_is(cast(quantizers.input, large, transposed=True), large, scale_of(first, E4M3), E4M3)
    assert_is(cast(quantizers.grad_output, large, transposed=True), large, scale_of(second, E5M2), E5M2)
    saturated = reference.decode(cast(quantizers.input, large).payload).abs() == MAX_FINITE[E4M3]
    assert saturated.any()  # delayed scaling clamps what outgrows it
    history.update(None)
    assert_is(cast(quantizers.input, first, transposed=True), first, scale_of(large, E4M3), E4M3)
    # The other layer's slots never saw a value: it has no delayed scales yet.
    assert other.input.known_scale() is None and other.grad_output.known_scale() is None
    assert_is(cast(other.input, large, transposed=True), large, scale_of(large, E4M3), E4M3)


def test_all_micro_batches_and_recomputed_forwards_of_a_step_see_one_scale() -> None:
    recipe = delayed()
    quantizer = recipe.linear_quantizers().input
    history = recipe.history
    assert history is not None
    history.allocate(torch.device("cpu"))
    cast(quantizer, random_input(0))
    history.update(None)
    before = cast(quantizer, random_input(1))
    cast(quantizer, random_input(2, size=100.0))
    again = cast(quantizer, random_input(1))
    assert torch.equal(before.scale, again.scale)
    assert torch.equal(before.payload.view(torch.uint8), again.payload.view(torch.uint8))
    history.update(None)
    # An operand kept over the end of the step keeps the scale that it was quantised with.
    assert torch.equal(before.scale, again.scale) and not torch.equal(
        before.scale, cast(quantizer, random_input(1)).scale
    )
    torch.testing.assert_close(history.scale[0] * 448.0, reference.amax(random_input(2, size=100.0))[0])
