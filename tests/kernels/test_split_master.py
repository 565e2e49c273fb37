"""The split master against float64, its foretold scales, and AdamW over it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import E4M3, STATE_BLOCK
from fp8_megatron.kernels import ops, reference
from fp8_megatron.kernels.adamw.split_master import adamw_split_step_, join_master, next_weight_scales, split_master
from fp8_megatron.kernels.quantize import blockwise
from fp8_megatron.quantization.stats import snr_db
from tests.kernels.cases import adam, claiming_a_gpu, split_adam

CHUNK = 4096
SCALE = torch.tensor([2.0**-5])
HYPER = dict(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, decoupled=True)


def bits(payload: Tensor) -> Tensor:
    return payload.view(torch.uint8)


def awkward_values() -> Tensor:
    """In units of the scale: every E4M3 number, the ties between them and their neighbours, zeros, 10⁵ at random."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).double()
    ties = (codes[1:] + codes[:-1]) / 2
    near = [ties * (1 + sign * 2.0**-k) for k in (8, 12, 16, 20, 23) for sign in (1, -1)]
    generator = torch.Generator().manual_seed(0)
    random = 448 * 2.0 ** (-30 * torch.rand(10**5, generator=generator).double())
    x = torch.cat([codes, ties, *near, random, torch.tensor([0.0, 448.0, 2.0**-40])])
    return torch.cat([x, -x]).float()


def unit(x: Tensor) -> Tensor:
    """Distance between E4M11 numbers at `x` (in units of the scale), float64: 2⁻¹¹ of the power of two, from 2⁻⁶ on."""
    return torch.exp2(x.double().abs().clamp_min(2.0**-6).log2().floor() - 11)


def test_joins_to_the_nearest_number_of_eleven_bits() -> None:
    """Within half a unit, 2⁻¹² of the power of two; FP16 has one bit less. Below 2⁻⁶ the unit stays 2⁻¹⁷."""
    x = awkward_values().clamp(-448, 448)
    joined = (join_master(*split_master(x * SCALE, SCALE), SCALE) / SCALE).double()
    error = (joined - x.double()).abs()
    assert (error <= unit(x) / 2).all()
    assert torch.equal(joined, (x.double() / unit(x)).round() * unit(x))  # to nearest even, exactly
    assert error[x == 0].max() == error[x.abs() == 448].max() == 0


def test_the_payload_is_the_weight_that_any_master_gives() -> None:
    """The E4M3 number nearest to the joined master; on a tie, which is one correction in 256, the larger one."""
    payload, correction = split_master(awkward_values() * SCALE, SCALE)
    joined = join_master(payload, correction, SCALE)
    derived = reference.encode(joined, SCALE, E4M3)
    tie = correction == -128
    assert torch.equal(reference.decode(derived)[~tie], reference.decode(payload)[~tie])
    error = (reference.decode(payload, SCALE) - joined).abs()
    assert torch.equal(error, (reference.decode(derived, SCALE) - joined).abs())
    assert correction.min() == -128 and correction.max() == 127


def test_splitting_what_was_joined_changes_no_bit() -> None:
    """For all 2 · 0x7E80 masters."""
    bits_of_all = torch.arange(0x7E01)
    code, correction = (bits_of_all + 128) >> 8, ((bits_of_all + 128) & 0xFF) - 128
    for sign in (0, 0x80):
        payload, rest = (code | sign).to(torch.uint8).view(E4M3), correction.to(torch.int8)
        joined = join_master(payload, rest, SCALE)
        assert (joined.abs().diff() > 0).all()  # counted by their bits
        again = split_master(joined, SCALE)
        assert torch.equal(bits(again[0]), bits(payload)) and torch.equal(again[1], rest)


@pytest.mark.parametrize("factor", [0.5, 2.0, 8.0])
def test_a_new_power_of_two_scale_moves_no_value(factor: float) -> None:
    """Where both payloads are normal numbers the bytes are those of a shifted exponent."""
    x = awkward_values()
    x = x[(x.abs() < 220) & (x.abs() > 0.2)] * SCALE
    payload, correction = split_master(x, SCALE)
    joined = join_master(payload, correction, SCALE)
    assert torch.equal(join_master(*split_master(joined, factor * SCALE), factor * SCALE), joined)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_nan(bad: float) -> None:
    value = torch.tensor([1.0, bad, 2.0])
    payload, correction = split_master(value, SCALE)
    assert join_master(payload, correction, SCALE).isnan().tolist() == [False, True, False]
    assert split_master(value, torch.tensor([math.nan]))[0].float().isnan().all()


def test_saturates_at_the_largest_number() -> None:
    payload, correction = split_master(torch.tensor([1e6, -1e6, 448.1]), torch.ones(1))
    assert join_master(payload, correction, torch.ones(1)).tolist() == [448.0, -448.0, 448.0]


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.0, 0.0)])
@pytest.mark.parametrize("amax", [0.0, 1e-3, 1.0, 30.0])
def test_foretold_scales_hold_for_the_worst_gradients(betas: tuple[float, float], amax: float) -> None:
    """Gradients that reach Cauchy-Schwarz's bound (each β₂/β₁ times the last), pushing outwards from the amax."""
    beta1, beta2 = betas
    lr, num_steps = 0.1, 100
    growth = beta2 / beta1 if beta1 else 1.0
    state = SplitState(torch.full((CHUNK,), amax))
    hyper = {**HYPER, "lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": 0.0, "eps": 0.0}
    largest_step, before = 0.0, state.master().abs().max()
    for step in range(1, num_steps + 1):
        state.step(torch.full((CHUNK,), -(growth ** (step - num_steps))), step, hyper=hyper)
        after = state.master().abs().max()
        assert after < 448 * state.weight_scales[0]
        largest_step, before = max(largest_step, (after - before).item()), after
    # The test can fail: the worst gradients move farther than the learning rate (7.3 times in the limit).
    if betas == (0.9, 0.999):
        assert largest_step > 2 * lr


def test_next_weight_scales() -> None:
    amax = torch.tensor([0.0, 1.0, 447.0, math.nan, math.inf])
    scales = next_weight_scales(amax, lr=1e-3, beta1=0.9, beta2=0.95)
    assert (torch.frexp(scales[:3]).mantissa == 0.5).all() and scales[3:].isnan().all()
    assert (448 * scales[:3] > amax[:3] + 4e-3).all() and (448 * scales[1:3] < 2.1 * amax[1:3]).all()
    # The bounds of the docstring, in powers of two: 4 · 1.17 / 448 ≤ 2⁻⁶, 4 · 7.3 / 448 ≤ 2⁻³.
    for beta2, scale in ((0.95, 2.0**-6), (0.999, 2.0**-3)):
        assert next_weight_scales(torch.zeros(1), lr=1.0, beta1=0.9, beta2=beta2) == scale
    kept = next_weight_scales(amax, lr=1e-3, beta1=0.9, beta2=0.95, previous=torch.full((5,), 0.25))
    assert torch.equal(kept[:3], scales[:3]) and (kept[3:] == 0.25).all()
    with pytest.raises(ValueError, match=r"adam_beta1\(0.9\)² ≥ adam_beta2\(0.5\)"):
        next_weight_scales(amax, lr=1e-3, beta1=0.9, beta2=0.5)


class SplitState:
    """Split masters of tensors of whole chunks, with FP32 moments, stepped as an optimizer would."""

    def __init__(self, *values: Tensor) -> None:
        chunks = [value.numel() // CHUNK for value in values]
        self.chunk_tensor = torch.repeat_interleave(torch.arange(len(values)), torch.tensor(chunks)).int()
        flat = torch.cat(values).view(-1, CHUNK)
        self.chunk_amax = flat.abs().amax(dim=1)
        self.weight_scales = reference.scale_from_amax(self.tensor_amax(), E4M3, power_of_two=True)
        weight, correction = split_master(flat, self.per_chunk())
        self.weight, self.correction = weight.view(-1), correction.view(-1)
        self.exp_avg, self.exp_avg_sq = torch.zeros(flat.numel()), torch.zeros(flat.numel())

    def tensor_amax(self) -> Tensor:
        amax = torch.zeros(int(self.chunk_tensor.max()) + 1)
        return amax.scatter_reduce_(0, self.chunk_tensor.long(), self.chunk_amax, "amax")

    def per_chunk(self) -> Tensor:
        return self.weight_scales[self.chunk_tensor.long()][:, None]

    def master(self) -> Tensor:
        shape = (-1, CHUNK)
        return join_master(self.weight.view(shape), self.correction.view(shape), self.per_chunk()).view(-1)

    def tensors(self) -> list[Tensor]:
        moments = [self.exp_avg, self.exp_avg_sq]
        return [*moments, bits(self.weight), self.correction, self.weight_scales, self.chunk_amax]

    def step(self, grad: Tensor, step: int, *, hyper: dict | None = None) -> None:
        hyper = hyper or HYPER
        lr, betas = hyper["lr"], {name: hyper[name] for name in ("beta1", "beta2")}
        ops.adamw_split_step_(
            **split_adam(
                *(grad, None, self.exp_avg, None, self.exp_avg_sq, None, self.weight, self.correction),
                *(self.weight_scales, next_weight_scales(self.tensor_amax(), lr=lr, **betas)),
                *(self.chunk_tensor, self.chunk_amax, torch.ones(1), torch.tensor([float(step)])),
                **hyper,
            )
        )


def gradients(step: int, n: int) -> Tensor:
    fixed = torch.randn(n, generator=torch.Generator().manual_seed(0))
    return fixed + torch.randn(n, generator=torch.Generator().manual_seed(step))


def test_adamw_over_a_split_master_follows_fp32() -> None:
    """300 steps on tensors three decades apart, to the noise that rounding the master at every step leaves.

    A stochastic rounding's variance is p(1-p) units², with p the place between two numbers: predicted from the FP32
    master's update of each step, less whole units. Half a dB: the ratio of 4,096 sums, and p of a master that strays.
    """
    n, num_steps = 2 * CHUNK, 300
    generator = torch.Generator().manual_seed(1)
    values = [0.5 * torch.randn(CHUNK, generator=generator), 5e-4 * torch.randn(CHUNK, generator=generator)]
    split, master = SplitState(*values), torch.cat(values)
    fp16, fp16_scales = torch.empty(n, dtype=torch.float16), torch.empty(n // STATE_BLOCK)
    blockwise.quantize_blockwise_(master, fp16, fp16_scales)
    moments = [[torch.zeros(n), None, torch.zeros(n), None] for _ in range(2)]
    noise = torch.zeros(n, dtype=torch.float64)
    one = torch.ones(1)
    for step in range(1, num_steps + 1):
        grad, count, before = gradients(step, n), torch.tensor([float(step)]), master.clone()
        split.step(grad, step)
        scale = split.per_chunk().expand(-1, CHUNK).reshape(-1)
        ops.adamw_step_(**adam(grad, None, *moments[0], master, None, None, None, one, count, **HYPER))  # type: ignore[arg-type]
        ops.adamw_step_(
            **adam(
                *(grad, None, *moments[1], fp16, fp16_scales, None, None, one, count),  # type: ignore[arg-type]
                **HYPER,
            )
        )
        place = ((master - before).double() / unit(master / scale) / scale) % 1.0
        noise += place * (1 - place) * (unit(master / scale) * scale).square()
    for tensor in (slice(0, CHUNK), slice(CHUNK, n)):
        predicted = 10 * math.log10(master[tensor].double().square().sum() / noise[tensor].sum())
        assert abs(snr_db(split.master()[tensor], master[tensor]) - predicted) < 0.5
        assert predicted > 50.0
    # Not worse than the FP16 master of level O3.
    assert snr_db(split.master(), master) > snr_db(blockwise.load_state(fp16, fp16_scales), master)
    # The test can fail: without the correction the weight alone is a master that most updates never reach.
    assert snr_db(reference.decode(split.weight) * scale, master) < 33.0


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_skips_where_the_factor_is_not_finite(factor: float, on_gpu: bool) -> None:
    """The scales stay too: the weights are still stored with them."""
    state = SplitState(torch.randn(CHUNK))
    state.step(torch.randn(CHUNK), 1)
    before = [tensor.clone() for tensor in state.tensors()]
    scales = 2 * state.weight_scales
    grad_factor = claiming_a_gpu(torch.tensor([factor])) if on_gpu else torch.tensor([factor])
    for skipping in (grad_factor, torch.ones(1)):
        adamw_split_step_(
            **split_adam(
                *(
                    torch.randn(CHUNK),
                    None,
                    state.exp_avg,
                    None,
                    state.exp_avg_sq,
                    None,
                    state.weight,
                    state.correction,
                ),
                *(state.weight_scales, scales, state.chunk_tensor, state.chunk_amax, skipping, torch.tensor([2.0])),
                **{**HYPER, "lr": 0.1},
            )
        )
        unchanged = [torch.equal(old, new) for old, new in zip(before, state.tensors(), strict=True)]
        assert all(unchanged) if skipping is grad_factor else not any(unchanged)


def test_every_chunk_has_its_tensors_scale_and_reports_its_amax() -> None:
    state = SplitState(torch.randn(2 * CHUNK), 1e-3 * torch.randn(CHUNK), 100 * torch.randn(CHUNK))
    state.step(torch.randn(4 * CHUNK), 1)
    assert torch.equal(state.chunk_amax, state.master().abs().view(4, CHUNK).amax(dim=1))
    assert state.weight_scales.unique().numel() == 3
    fraction = state.tensor_amax() / (448 * state.weight_scales)
    assert (fraction <= 1.0).all() and (fraction[[0, 2]] > 0.49).all()  # the small one's has room for its step


def test_moments_may_be_companded_and_gradients_fp8() -> None:
    """The stretch level's operands; gradients and the new scales are only read."""
    n = 2 * CHUNK
    state = SplitState(torch.randn(n))
    operands: list[Tensor] = []
    for dtype, block, value in (
        (E4M3, 128, torch.randn(n)),
        (torch.int8, STATE_BLOCK, torch.randn(n)),
        (torch.uint8, STATE_BLOCK, 1 + torch.rand(n)),
    ):
        payload, scales = torch.empty(n, dtype=dtype), torch.empty(n // block)
        blockwise.quantize_blockwise_(value, payload, scales)
        operands += [payload, scales]
    scales = next_weight_scales(state.tensor_amax(), lr=1e-3, beta1=0.9, beta2=0.95)
    rest = (state.weight_scales, scales, state.chunk_tensor, state.chunk_amax, torch.ones(1), torch.ones(1))
    before = state.master().clone()
    given = [tensor.clone() for tensor in (*operands, scales)]
    ops.adamw_split_step_(**split_adam(*operands, state.weight, state.correction, *rest, **HYPER))
    assert 1e-4 < (state.master() - before).abs().max() < 1e-2
    written = [
        not torch.equal(old.view(torch.uint8), new.view(torch.uint8))
        for old, new in zip(given, [*operands, scales], strict=True)
    ]
    assert written == [False, False, True, True, True, True, False]
