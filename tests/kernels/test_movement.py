"""Updates that arrive: how far parameters move under low-precision state, against float64 AdamW."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import E4M3
from fp8_megatron.kernels import ops

N, BLOCK = 16 * 256, 256
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
MOMENTS = {
    "fp32": (FP32, FP32),
    "O3": (E4M3, FP16),
    "fp8": (E4M3, E4M3),
    "bf16": (BF16, BF16),
    "companded": (torch.int8, torch.uint8),
    "uint8": (FP32, torch.uint8),
}


def storage(value: Tensor, dtype: torch.dtype) -> ops.FlatState:
    if dtype in (FP32, BF16):
        return ops.FlatState(value.to(dtype))
    payload, scales = torch.empty(value.numel(), dtype=dtype), torch.empty(value.numel() // BLOCK)
    ops.quantize_blockwise_(value, payload, scales)
    return ops.FlatState(payload, scales)


class Run:
    """AdamW over stored state, and in float64 from the same stored start, with the same gradients."""

    def __init__(
        self,
        start: Tensor,
        moments: str,
        master: torch.dtype | str,
        lr: float,
        weight_decay: float = 0.0,
        beta2: float = 0.95,
    ) -> None:
        self.hyper = ops.AdamHyper(lr, 0.9, beta2, 1e-15, weight_decay, decoupled=True)
        self.moments = [storage(torch.zeros(start.numel()), dtype) for dtype in MOMENTS[moments]]
        self.split: list[Tensor] | None = None
        if isinstance(master, str):
            self.scale = torch.full((1,), 2.0**-10)
            self.split = [*ops.split_master(start, self.scale)]
        else:
            self.master = storage(start, master)
        self.exact = self.value().double()
        self.start = self.exact.clone()
        self.m, self.v = torch.zeros_like(self.exact), torch.zeros_like(self.exact)
        self.count = 0

    def value(self) -> Tensor:
        """The master, FP32 [n]."""
        return ops.join_master(*self.split, self.scale) if self.split else ops.load_state(*self.master)

    def step(self, grad: Tensor) -> None:
        self.count += 1
        one, count = torch.ones(1), torch.tensor([float(self.count)])
        if self.split:
            tensor = torch.zeros(1, dtype=torch.int32)
            state = ops.SplitAdamState(
                ops.FlatState(grad), *self.moments, *self.split, self.scale.clone(), self.scale, tensor
            )
            ops.adamw_split_step_(state, self.hyper, grad_factor=one, step=count, chunk_amax=torch.empty(1))
        else:
            state = ops.AdamState(ops.FlatState(grad), *self.moments, self.master)
            ops.adamw_step_(state, self.hyper, grad_factor=one, step=count)
        lr, beta1, beta2, eps, weight_decay, _ = self.hyper
        g = grad.double()
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g * g
        m_hat, v_hat = self.m / (1 - beta1**self.count), self.v / (1 - beta2**self.count)
        self.exact = self.exact - lr * (m_hat / (v_hat.sqrt() + eps) + weight_decay * self.exact)

    def moved(self) -> tuple[Tensor, Tensor]:
        """Movement in float64: stored, exact."""
        return self.value().double() - self.start, self.exact - self.start


def weights(seed: int = 0) -> Tensor:
    """|w| ≈ 0.02, of both signs, over three binades."""
    generator = torch.Generator().manual_seed(seed)
    return 0.02 * torch.exp2(torch.rand(N, generator=generator) - 0.5) * torch.randn(N, generator=generator).sign()


MASTERS: dict[str, torch.dtype | str] = {"fp16": FP16, "bf16": BF16, "split": "split"}


@pytest.mark.parametrize("lr", [1e-6, *(pytest.param(lr, marks=pytest.mark.slow) for lr in (1e-3, 3e-5, 6e-6, 1e-7))])
@pytest.mark.parametrize("master", MASTERS)
def test_updates_of_any_size_arrive(master: str, lr: float) -> None:
    """200 steps in one direction: 98% of the exact movement on average, and no element is biased.

    A step of size u on a grid of step s adds a variance of at most u·s: the movement scatters by √(200·u·s) an element.
    """
    run = Run(weights(), "fp32", MASTERS[master], lr)
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(N, generator=generator).sign()
    for _ in range(200):
        run.step(direction * (0.5 + torch.rand(N, generator=generator)))
    stored, exact = run.moved()
    step = 2.0 ** {"fp16": -16, "bf16": -13, "split": -17}[master] * 2  # of numbers below 2⁻⁵; as much again for 2⁻⁴
    scatter = math.sqrt(200 * lr * step) + step
    assert (stored / exact).mean().item() == pytest.approx(1.0, abs=0.02 + 4 * scatter / (200 * lr * math.sqrt(N)))
    error = (stored - exact).abs()
    assert (error <= 6 * scatter + 1e-3 * exact.abs()).all()
    for part in (direction > 0, direction < 0, run.start > 0, run.start.abs() < 2.0**-6):
        kept = (stored[part] / exact[part]).mean().item()
        assert kept == pytest.approx(1.0, abs=0.02 + 6 * scatter / (200 * lr * math.sqrt(int(part.sum()))))


@pytest.mark.parametrize(
    "moments",
    ["O3", "companded", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("fp32", "fp8", "bf16"))],
)
def test_small_updates_arrive_from_any_moments(moments: str) -> None:
    """Fine-tuning, 400 steps at 1e-6 of gradients with as much noise as signal: 98% of the movement."""
    run = Run(weights(), moments, FP16, 1e-6)
    generator = torch.Generator().manual_seed(1)
    drift = torch.randn(N, generator=generator).sign()
    for _ in range(400):
        run.step(drift + torch.randn(N, generator=generator))
    stored, exact = run.moved()
    # An element scatters by √(400 · 1e-6 · 2⁻¹⁵) = 1.1e-4, as far as it moves; 4,096 of them by 2% · 0.9.
    kept = (stored * exact.sign()).mean() / exact.abs().mean()
    assert kept.item() == pytest.approx(1.0, abs=0.04)


@pytest.mark.parametrize("lr", [3e-4, 1e-7, pytest.param(1e-5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("master", MASTERS)
def test_decay_without_gradients_arrives(master: str, lr: float) -> None:
    """Weight decay of 0.1 moves 3·10⁻⁵ of a weight in a step, or 10⁻⁸, which FP32 cannot add to it."""
    start = weights().abs().repeat(8)
    run = Run(start, "fp32", MASTERS[master], lr, weight_decay=0.1)
    zeros = torch.zeros_like(start)
    num_steps = 100
    for _ in range(num_steps):
        run.step(zeros)
    stored, exact = run.moved()
    # 32,768 elements that each move by u of a step s in all scatter by √(u·s) around u, their mean by 1/181 of that.
    step = 2.0 ** {"fp16": -16, "bf16": -13, "split": -17}[master]
    mean = exact.mean().abs().item()
    assert stored.mean().item() / -mean == pytest.approx(1.0, abs=0.02 + 4 * math.sqrt(step / mean / start.numel()))


@pytest.mark.parametrize(
    "moments", ["O3", "companded", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("fp8", "bf16"))]
)
def test_elements_whose_gradients_stop_come_to_rest(moments: str) -> None:
    """Beside live ones: mean drift below one learning rate in the steps that follow, and none twice as far as exact."""
    run = Run(torch.zeros(N), moments, FP32, 1e-3)
    generator = torch.Generator().manual_seed(0)
    size = 10.0 ** (-3 * torch.rand(N, generator=generator))
    stops = torch.rand(N, generator=generator) < 0.25
    for step in range(500):
        grad = size * torch.randn(N, generator=generator)
        run.step(torch.where(stops, 0.0, grad) if step >= 60 else grad)
        if step == 180:
            at_rest, exact_at_rest = (value[stops].clone() for value in run.moved())
    stored, exact = (value[stops] for value in run.moved())
    assert (stored - at_rest).abs().mean().item() < 1e-3
    assert ((stored - at_rest) - (exact - exact_at_rest)).mean().abs().item() < 1e-4


@pytest.mark.parametrize("moments", ["O3", "companded"])
def test_an_outlier_does_not_set_its_block_mates_free(moments: str) -> None:
    """10⁸ times as large as the rest of its block, in every step: the others move no farther than twice FP32's way."""
    run = Run(torch.zeros(N), moments, FP32, 1e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        grad = torch.randn(N, generator=generator)
        grad[::BLOCK] *= 1e8
        run.step(grad)
    stored, exact = run.moved()
    stored[::BLOCK] = exact[::BLOCK] = 0.0
    assert stored.square().mean().sqrt() < 2.0 * exact.square().mean().sqrt()


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize("moments", ["companded", "uint8"])
def test_elements_that_are_small_in_their_block_move_as_far(moments: str, beta2: float) -> None:
    """Gradients of 1 … 10⁻⁴ of the block's largest: within 2% of the exact movement down to 10⁻³, at most 1.05 below.

    The projection of the movement on the exact one, over 4,096 elements a size. An element of 10⁻³ is off by 0.23 of
    its way (12.7 dB), so the projection by 0.004. The bound on updates cuts some of the noise of int8 first moments,
    from 10⁻³ on.
    """
    run = Run(torch.zeros(5 * N), moments, FP32, 1e-3, beta2=beta2)
    generator = torch.Generator().manual_seed(0)
    order = torch.arange(5 * N) % 5
    size, drift = 10.0 ** -order.float(), 0.3 * torch.randn(5 * N, generator=generator)
    for step in range(600):
        if step == 150:
            before = run.moved()
        run.step(size * (drift + torch.randn(5 * N, generator=generator)))
    stored, exact = (value - at for value, at in zip(run.moved(), before, strict=True))
    kept = [((stored * exact)[order == k].sum() / exact[order == k].square().sum()).item() for k in range(5)]
    assert kept[:3] == pytest.approx([1.0] * 3, abs=0.02)
    assert (0.98 if moments == "uint8" else 0.96) < kept[3] < 1.02
    assert (0.93 if moments == "uint8" else 0.7) < kept[4] < 1.05


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("moments", ["O3", "fp8", "companded"])
def test_powers_of_two_of_the_gradient_change_no_code(moments: str, device: str) -> None:
    """Adam does not depend on the scale of the loss. From 2⁻³⁶ to 2⁶⁰ times the gradient, three steps store the same
    codes, with scales that many times as large."""
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(N, generator=generator) * 10.0 ** (-4 * torch.rand(N, generator=generator)) for _ in range(3)]

    def codes(power: int) -> tuple[list[Tensor], list[Tensor]]:
        state = [storage(torch.zeros(N), dtype) for dtype in MOMENTS[moments]]
        state = [ops.FlatState(*(tensor.to(device) for tensor in operand if tensor is not None)) for operand in state]
        master = ops.FlatState(torch.zeros(N, device=device))
        for count, grad in enumerate(grads):
            ops.adamw_step_(
                ops.AdamState(ops.FlatState((grad * 2.0**power).to(device)), *state, master),
                ops.AdamHyper(1e-3, 0.9, 0.95, 0.0, 0.0, decoupled=True),
                grad_factor=torch.ones(1, device=device),
                step=torch.full((1,), count + 1.0, device=device),
            )
        scales = [
            operand.scales / 2.0 ** (power * degree)
            for operand, degree in zip(state, (1, 2), strict=True)
            if operand.scales is not None
        ]
        return [*(operand.payload.float() for operand in state), master.payload], scales

    expected = codes(0)
    for power in range(-36, 61):
        for actual, wanted in zip(codes(power), expected, strict=True):
            assert all(map(torch.equal, actual, wanted)), power
