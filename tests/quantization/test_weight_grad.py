"""A weight's gradient that writes itself: in FP8 with a delayed scale, or into a sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import E4M3, E5M2, GRAD_BLOCK, MAX_FINITE
from fp8_megatron.formats.format import Quantized
from fp8_megatron.formats.tensorwise import Tensorwise
from fp8_megatron.quantization.amax_history import AmaxHistory
from fp8_megatron.quantization.recipe import WEIGHT_GRAD_HEADROOM, Recipe
from fp8_megatron.quantization.stats import snr_db
from fp8_megatron.quantization.weight_grad import GradPlace, WeightGrad

SHAPE, TOKENS = (48, 80), 64
CPU = torch.device("cpu")


def make_history() -> tuple[AmaxHistory, Recipe]:
    history = AmaxHistory(4, "max", power_of_two=False)
    return history, Recipe("delayed", False, history, delays_weight_grads=True)


def make_grad(
    recipe_scale: object,
    size: float = 1.0,
    seed: int = 0,
    shape: tuple[int, int] = SHAPE,
    device: torch.device = CPU,
) -> tuple[WeightGrad, Tensor]:
    """A gradient, and its value in FP64."""
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(shape[0], TOKENS, generator=generator).to(device, E5M2)
    x = torch.randn(shape[1], TOKENS, generator=generator).to(device, E4M3)
    g_t = Quantized(g, None, torch.tensor([0.25 * size], device=device), Tensorwise(E5M2))
    x_t = Quantized(x, None, torch.tensor([0.5], device=device), Tensorwise(E4M3))
    exact = g.double() @ x.double().t() * (0.125 * size)
    return WeightGrad(g_t, x_t, torch.bfloat16, recipe_scale), exact  # type: ignore[arg-type]


def test_the_first_step_takes_blocks_and_gives_the_next_its_scale() -> None:
    history, recipe = make_history()
    scale = recipe.linear_quantizers().weight_grad
    history.allocate(CPU)
    assert scale is not None
    grad, exact = make_grad(scale)
    assert not grad.writes_fp8
    wide = grad.wide()
    assert snr_db(exact, wide) > 45
    history.update(None)
    assert grad.writes_fp8
    expected = wide.abs().max().float() * WEIGHT_GRAD_HEADROOM / MAX_FINITE[E4M3]
    torch.testing.assert_close(history.scale_of(scale.slot)[0], expected)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_written_in_fp8_with_one_scale_and_the_rest_zero(size: float) -> None:
    history, recipe = make_history()
    scale = recipe.linear_quantizers().weight_grad
    history.allocate(CPU)
    make_grad(scale, size)[0].wide()
    history.update(None)
    grad, exact = make_grad(scale, size, seed=1)
    padded = 2 * SHAPE[0] * SHAPE[1]
    payload, scales = torch.full((padded,), torch.nan).to(E4M3), torch.full((padded // GRAD_BLOCK,), torch.nan)
    grad.write_fp8_(payload, scales)
    assert (scales == history.scale_of(scale.slot)).all()  # type: ignore[union-attr]
    numel = exact.numel()
    assert snr_db(exact.view(-1), payload[:numel].float() * scales[0]) > 30.5
    assert not payload[numel:].float().any()


@pytest.mark.parametrize(
    "kind",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.gpu,
        ),
    ],
)
@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (SHAPE, slice(None)),
        ((2048, 512), slice(0, None, 16)),
        ((2576, 512), slice(0, 2560, 16)),  # the 161st row is no multiple of 16 rows
        ((128, 8192), slice(0, None, 8)),
    ],
)
def test_what_was_written_is_counted_in_a_sample_of_rows(
    shape: tuple[int, int], expected: slice, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its GEMM has the sample's rows alone. A gradient that is known needs none."""
    device = torch.device(kind)
    history, recipe = make_history()
    scale = recipe.linear_quantizers().weight_grad
    history.allocate(device)
    assert scale is not None
    make_grad(scale, shape=shape, device=device)[0].wide()
    history.update(None)
    grad, exact = make_grad(scale, seed=1, shape=shape, device=device)
    payload = torch.zeros(exact.numel() + 256, dtype=E4M3, device=device)
    grad.write_fp8_(payload, torch.empty(payload.numel() // GRAD_BLOCK, device=device))
    wide, products = grad.wide(), []

    multiply = Quantized.multiply

    def seen(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
        products.append(multiply(a, b, dtype))
        return products[-1]

    monkeypatch.setattr(Quantized, "multiply", seen)
    for known in (None, wide.view(-1)):
        rows, written = grad.sample(payload, known)
        torch.testing.assert_close(rows, wide[expected])
        assert torch.equal(written.float(), payload[: exact.numel()].view(shape)[expected].float())
        assert rows.is_contiguous() and written.is_contiguous() and rows.shape[0] % 16 == 0
    assert [product.shape for product in products] == [rows.shape]


def test_a_gradient_that_was_zero_is_not_written_in_fp8() -> None:
    """Another slot has a scale. Its own comes from its first value, a step later because the host learns it late."""
    history, recipe = make_history()
    scale, other = (recipe.linear_quantizers().weight_grad for _ in range(2))
    history.allocate(torch.device("cpu"))
    assert scale is not None and other is not None
    for size, expected in ((0.0, False), (1e-3, False), (1e-3, False), (1e-3, True)):
        grad, _ = make_grad(scale, size=size)
        known, _ = make_grad(other)
        assert grad.writes_fp8 is expected
        for each in (grad, known):
            each.wide()
        history.update(None)
        assert known.writes_fp8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_sum_is_rounded_once_a_micro_batch(dtype: torch.dtype) -> None:
    """Not once more in the 16 bits of a gradient alone: against float64."""
    total, exact = torch.full(SHAPE, torch.nan, dtype=dtype), torch.zeros(SHAPE, dtype=torch.float64)
    for micro_batch in range(4):
        grad, own = make_grad(None, size=3.0 ** (micro_batch - 2), seed=micro_batch)
        before = total.double() if micro_batch else torch.zeros_like(exact)
        grad.write_(GradPlace(total, None, adds=micro_batch > 0))
        # FP32 holds the products' sum to 2^-20 of its terms; then one rounding.
        slack = 2.0**-20 * (own.abs() + before.abs()) + 2.0**-18 * 3.0 ** (micro_batch - 2)
        rounding = torch.finfo(dtype).eps / 2 * (before + own).abs()
        assert ((total.double() - (before + own)).abs() <= rounding + slack).all(), micro_batch
        exact += own
    least = {torch.bfloat16: 48, torch.float16: 65, torch.float32: 120}[dtype]
    assert snr_db(exact, total) > least


def test_a_delayed_scale_that_has_no_amax_yet_gets_it_from_a_sum() -> None:
    history, recipe = make_history()
    scale = recipe.linear_quantizers().weight_grad
    history.allocate(CPU)
    assert scale is not None
    total = torch.empty(SHAPE, dtype=torch.bfloat16)
    for micro_batch in range(2):
        grad, exact = make_grad(scale, size=1 + micro_batch, seed=0)
        grad.write_(GradPlace(total, None, adds=micro_batch > 0))
    assert snr_db(exact * 1.5, total) > 40
    history.update(None)
    expected = exact.abs().max().float() * WEIGHT_GRAD_HEADROOM / MAX_FINITE[E4M3]
    torch.testing.assert_close(history.scale_of(scale.slot)[0], expected, rtol=2**-8, atol=0)


def test_every_micro_batchs_amax_counts() -> None:
    history, recipe = make_history()
    scales = [recipe.linear_quantizers().weight_grad for _ in range(2)]
    history.allocate(CPU)
    for scale in scales:
        make_grad(scale)[0].wide()
    history.update(None)
    largest = [0.0, 0.0]
    for micro_batch, size in enumerate([1.0, 40.0, 2.0]):
        for index, scale in enumerate(scales):
            grad, exact = make_grad(scale, size * (1 + index), seed=micro_batch)
            payload = torch.empty(exact.numel(), dtype=E4M3)
            grad.write_fp8_(payload, torch.empty(exact.numel() // GRAD_BLOCK))
            assert torch.isfinite(payload.float()).all()  # 40 times what was seen: saturated
            largest[index] = max(largest[index], exact.abs().max().item())
    history.update(None)
    for scale, amax in zip(scales, largest, strict=True):
        assert scale is not None
        given = history.scale_of(scale.slot).item() * MAX_FINITE[E4M3] / WEIGHT_GRAD_HEADROOM
        assert given == pytest.approx(amax, rel=1e-6)
        assert history.inverse_of(scale.slot).item() == pytest.approx(1 / history.scale_of(scale.slot).item(), rel=1e-6)


def test_a_validation_pass_leaves_no_amax() -> None:
    history, recipe = make_history()
    scale = recipe.linear_quantizers().weight_grad
    history.allocate(CPU)
    make_grad(scale)[0].wide()
    history.update(None)
    before = history.scale_of(scale.slot).clone()  # type: ignore[union-attr]
    history.written_amax_of(scale.slot).fill_(1e6)  # type: ignore[union-attr]
    history.discard_current_step()
    history.update(None)
    assert torch.equal(history.scale_of(scale.slot), before)  # type: ignore[union-attr]


def test_scales_stay_where_they_are_once_a_step_is_recorded() -> None:
    """A graph reads them at the addresses it was recorded with; their values are those of a history that moves on."""
    histories = []
    for keeps in (False, True):
        history = AmaxHistory(4, "max", power_of_two=False)
        slots = [history.add_slot(E4M3) for _ in range(3)]
        history.allocate(CPU)
        history.update(None)
        if keeps:
            history.keep_addresses()
        taken = [(history.scale_of(slot), history.inverse_of(slot)) for slot in slots]
        for step in range(3):
            for slot in slots:
                history.raise_amax(slot, torch.tensor([1.0 + slot + step]))
            history.update(None)
            now = [(history.scale_of(slot), history.inverse_of(slot)) for slot in slots]
            same = [
                before.data_ptr() == after.data_ptr()
                for pair in zip(taken, now, strict=True)
                for before, after in zip(*pair, strict=True)
            ]
            assert all(same) if keeps else not any(same)
        histories.append(torch.cat([value for pair in now for value in pair]))
        assert history.state_dict()["scale"].tolist() == [float(scale) for scale, _ in now]
    assert torch.equal(*histories) and len(histories[0].unique()) == 6


def test_without_the_setting_no_slot_is_taken() -> None:
    history = AmaxHistory(4, "max", power_of_two=False)
    assert Recipe("delayed", False, history).linear_quantizers().weight_grad is None
    assert Recipe("tensorwise", False, None, delays_weight_grads=True).linear_quantizers().weight_grad is None
