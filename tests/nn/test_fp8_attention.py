"""FP8 attention with its norm and both projections against float64, and over the first steps of delayed scaling.

tests/kernels/test_fp8_attention.py has the noise of the kernels. Here the casts of the norm's output, of query, key and
value, and of three output gradients add theirs.
"""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch import Tensor

from fp8_megatron.data.document_bounds import SequencePart
from fp8_megatron.device.group import Group, max_over_group_
from fp8_megatron.dtypes import E4M3
from fp8_megatron.kernels import ops
from fp8_megatron.nn.attention import AttentionParams, fp8_norm_attention
from fp8_megatron.nn.gemms import LinearParams
from fp8_megatron.nn.normed import NormParams
from fp8_megatron.nn.rope import cos_sin_table, rope_frequencies
from fp8_megatron.quantization import cast_health
from fp8_megatron.quantization.amax_history import AmaxHistory
from fp8_megatron.quantization.attention import AttentionQuantizers
from fp8_megatron.quantization.recipe import Recipe
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db
from tests.harness.ranks import RankPool, on_default_group
from tests.harness.sequence_parts import whole_of

SEQ, BATCH, HEADS, GROUPS, WIDTH, HIDDEN = 96, 2, 4, 2, 32, 64
SCALE = 1 / math.sqrt(WIDTH)
WIDTHS = (HEADS // GROUPS * WIDTH, WIDTH, WIDTH)
#: What happens to query and key.
KINDS = ("plain", "rope", "qk_norm")


def trained_weight(value: Tensor) -> ScaledTensor:
    """With a scale as masters give it, which is no power of two."""
    payload, _, scale = ops.quantize_current(value, E4M3)
    return ScaledTensor(payload, scale)


class Layer:
    """Its casts, weights and random operands. The ranks of `group` share its sequences."""

    def __init__(
        self, kind: str = "rope", *, gradient: float = 1e-5, has_probes: bool = False, group: Group | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.history = AmaxHistory(4, "max", power_of_two=False)
        recipe = Recipe("delayed", False, self.history, has_probes=has_probes)
        self.group = group
        self.quantizers = AttentionQuantizers.of(
            recipe, None if group is None else partial(max_over_group_, group=group)
        )
        self.linear_quantizers = recipe.linear_quantizers(), recipe.linear_quantizers()
        self.history.allocate(torch.device("cpu"))
        self.qkv = trained_weight(random(GROUPS * sum(WIDTHS), HIDDEN) / math.sqrt(HIDDEN))
        self.proj = trained_weight(random(HIDDEN, HEADS * WIDTH) / math.sqrt(HEADS * WIDTH))
        self.norm_weight = (1 + 0.2 * random(HIDDEN)).bfloat16()
        self.qkv_bias = (0.2 * random(GROUPS * sum(WIDTHS))).bfloat16()
        table = cos_sin_table(rope_frequencies(WIDTH, 100), SEQ)
        self.rotation = ops.Rotation(table[:, :, :0].contiguous() if kind == "plain" else table, WIDTH, False)
        self.head_weights = [(1 + 0.2 * random(WIDTH)).bfloat16() for _ in range(2)] if kind == "qk_norm" else []
        self.x = random(SEQ, BATCH, HIDDEN).bfloat16()
        self.cotangent = (gradient * random(SEQ, BATCH, HIDDEN)).bfloat16()
        self.cotangent[: SEQ // 4] *= 2  # ranks that share sequences have different amaxes
        if group is not None:
            part = SequencePart(group.rank(), group.size())
            self.rotation = self.rotation._replace(cos_sin=part.of(self.rotation.cos_sin, dim=0))
            self.x, self.cotangent = part.of(self.x, dim=0), part.of(self.cotangent, dim=0)

    def forward(self, *leaves: Tensor, adds_input: bool = True) -> tuple[Tensor, Tensor | None]:
        """Of x, the norm's weight, both weights, the bias and the weights of norms of query and key."""
        x, norm_weight, qkv, proj, bias, *of_heads = leaves
        assert isinstance(qkv, ScaledTensor) and isinstance(proj, ScaledTensor)
        qk_norm = ops.QKNorm(of_heads[0], of_heads[1], None, None, 1e-5, True) if of_heads else None
        return fp8_norm_attention(
            x,
            NormParams(norm_weight, None, 1e-5, True),
            LinearParams(qkv, bias, self.linear_quantizers[0]),
            LinearParams(proj, None, self.linear_quantizers[1]),
            AttentionParams(self.quantizers, SCALE, WIDTHS, self.rotation, qk_norm, self.group),
            adds_input=adds_input,
        )

    def operands(self) -> list[Tensor]:
        """What `forward` takes, as new leaves."""
        own = [self.x, self.norm_weight, self.qkv, self.proj, self.qkv_bias, *self.head_weights]
        return [copy.deepcopy(value.detach()).requires_grad_() for value in own]

    def step(self) -> list[Tensor]:
        """The output, and the gradient of every operand."""
        leaves = self.operands()
        y, residual = self.forward(*leaves)
        assert residual is None
        return [y.detach(), *torch.autograd.grad(y, leaves, self.cotangent)]

    def exact(self) -> list[Tensor]:
        """The same in float64, without a cast."""
        own = [self.x, self.norm_weight, self.qkv.dequantize(), self.proj.dequantize(), self.qkv_bias]
        leaves = [value.detach().double().requires_grad_() for value in (*own, *self.head_weights)]
        x, norm_weight, qkv, proj, bias, *of_heads = leaves
        normed = torch.nn.functional.rms_norm(x, (HIDDEN,), norm_weight, 1e-5)
        grouped = (normed @ qkv.t() + bias).view(SEQ, BATCH, GROUPS, -1, WIDTH)
        heads = [grouped[..., :-2, :], grouped[..., -2:-1, :]]
        if of_heads:
            heads = [
                torch.nn.functional.rms_norm(x, (WIDTH,), weight, 1e-5)
                for x, weight in zip(heads, of_heads, strict=True)
            ]
        if self.rotation.cos_sin.numel():
            heads = [self._rotated(x) for x in heads]
        q, k, v = (x.flatten(2, 3).permute(1, 2, 0, 3) for x in (*heads, grouped[..., -1:, :]))
        k, v = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
        context = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = context.permute(2, 0, 1, 3).reshape(SEQ, BATCH, -1) @ proj.t() + x
        return [y.detach(), *torch.autograd.grad(y, leaves, self.cotangent.double())]

    def _rotated(self, heads: Tensor) -> Tensor:
        """By the textbook's rotation of pairs (i, i + d/2)."""
        cos, sin = self.rotation.cos_sin.double()[:, None, None, None].unbind(-2)
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def assert_near_exact(
    layer: Layer, y: Tensor, grad_x: Tensor, grads: list[Tensor], *, head_norms: float = 16.9
) -> None:
    """The output and the gradients have the noise of their casts, in dB.

    Noise powers of E4M3 (31.5 dB) and E5M2 (25.5 dB) casts; the weights are exact. y without its addend: the norm's
    output, V, P and O, and Q and K as a change of P, about as large as two of them: 23.7 dB. Gradients pass five E5M2
    casts (the output's, dO, dS, of dQ, dK or dV, the projection's) and three E4M3 ones: 17.9 dB. The output
    projection's weight: one, and y's: 21.5 dB. Less 1 dB for the sample.
    """
    true_y, true_grad_x, *true = layer.exact()
    assert snr_db(y.double() - layer.x.double(), true_y - layer.x.double()) > 22.7
    assert snr_db(grad_x.double() - layer.cotangent.double(), true_grad_x - layer.cotangent.double()) > 16.9
    bounds = [16.9, 16.9, 20.5, 16.9, *2 * [head_norms]]
    for value, expected, bound in zip(grads, true, bounds[: len(true)], strict=True):
        assert snr_db(value.double(), expected) > bound


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind: str, steps: int) -> None:
    """In the first step, whose scales come from the values, and later."""
    layer = Layer(kind)
    for _ in range(steps):
        y, grad_x, *grads = layer.step()
        layer.history.update(None)
    assert_near_exact(layer, y, grad_x, grads)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_come_later_have_scales_at_once(kind: str) -> None:
    """As behind a layer that begins with zeros: the first step's gradients are all 0."""
    layer = Layer(kind)
    cotangent, layer.cotangent = layer.cotangent, torch.zeros_like(layer.cotangent)
    layer.step()
    layer.history.update(None)
    layer.cotangent = cotangent
    for _ in range(3):
        y, grad_x, *grads = layer.step()
        layer.history.update(None)
        assert_near_exact(layer, y, grad_x, grads)
    assert not layer.history.has_cold_casts


def steps_of_a_rank(group: Group, kind: str, steps: int) -> tuple[list[Tensor], list[float]]:
    """The last step, with gradients of parameters summed over the ranks, and the first amaxes of attention's casts."""
    layer = Layer(kind, group=group)
    quantizers = layer.quantizers
    first = []
    for _ in range(steps):
        results = layer.step()
        casts = (quantizers.query, quantizers.key, quantizers.value, quantizers.grad_output)
        first = first or [layer.history.amax[cast.slot].item() for cast in casts]
        layer.history.update(group)
    for grad in results[2:]:
        torch.distributed.all_reduce(grad, group=group)
    return results, first


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_exchange_heads(ranks: RankPool, kind: str, steps: int) -> None:
    """They compute one rank's output and gradients. A rank casts the norm's output and the gradients around attention
    with scales of its tokens in the first step: it has the noise of one rank's casts, but not the same."""
    everyones = ranks.run(on_default_group, steps_of_a_rank, kind, steps, num_ranks=2)
    assert everyones[0][1] == everyones[1][1], "the first scales differ"
    shared = [*zip(*(results[:2] for results, _ in everyones), strict=True)]
    (y, grad_x), grads = (whole_of(parts) for parts in shared), everyones[0][0][2:]
    # 3 dB less for the 32 elements of a head's norm, whose summands cancel over ranks.
    assert_near_exact(Layer(kind), y, grad_x, grads, head_norms=13.9)


@pytest.mark.parametrize("kind", KINDS)
def test_later_steps_have_the_first_ones_scales(kind: str) -> None:
    """The same values give the same output but for the amax, which the first step takes of values in 16 bits, and the
    same gradients but for the headroom of casts in the kernel."""
    layer = Layer(kind)
    first = layer.step()
    layer.history.update(None)
    second = layer.step()
    assert snr_db(second[0].double() - layer.x.double(), first[0].double() - layer.x.double()) > 40
    for one, other in zip(first[1:], second[1:], strict=True):
        assert snr_db(other.double(), one.double()) > 20


def test_the_residual_branch_may_be_added_outside() -> None:
    layer, other = Layer(), Layer()
    inside = layer.step()
    leaves = other.operands()
    y, residual = other.forward(*leaves, adds_input=False)
    assert residual is not None and torch.equal(residual, leaves[0])
    torch.testing.assert_close(y + residual, inside[0], rtol=2.0**-7, atol=1e-2)  # one rounding to BF16 more
    grads = torch.autograd.grad([y, residual], leaves, [layer.cotangent, layer.cotangent])
    for one, same in zip(grads, inside[1:], strict=True):
        assert torch.equal(one, same)


@pytest.mark.parametrize("kind", KINDS)
def test_backward_keeps_a_byte_a_value(kind: str) -> None:
    """Of query, key, value and output; beside them the input, a number a head and one a token, and four scales. Norms
    of query and key keep the projection's output in 16 bits."""
    layer = Layer(kind)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        layer.forward(*layer.operands())
    tokens = SEQ * BATCH
    values = tokens * WIDTH * (2 * HEADS + 2 * GROUPS)
    normed = 2 * tokens * GROUPS * sum(WIDTHS) if kind == "qk_norm" else 0
    assert sum(x.nbytes for x in kept) == values + normed + 2 * tokens * HIDDEN + 4 * tokens * (HEADS + 1) + 4 * 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_non_finite_input_marks_the_step(kind: str) -> None:
    layer = Layer(kind)
    layer.step()
    layer.history.update(None)
    layer.x[3, 1, 5] = math.inf
    layer.step()
    squares = torch.zeros(1)
    layer.history.examine(squares)
    assert not torch.isfinite(squares).item()


@pytest.mark.parametrize("sampled_elements", [1 << 21, 1 << 12])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", ["plain", "rope"])
def test_probes_measure_the_casts(
    kind: str, steps: int, sampled_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every role's noise is that of its format. Query, key and value are measured as the kernel reads them. The
    projection's gradient was cast before: an element that keeps its mantissa adds no noise."""
    monkeypatch.setattr(cast_health, "SAMPLED_ELEMENTS", sampled_elements)
    layer = Layer(kind, has_probes=True)
    for _ in range(steps):
        layer.step()
        layer.history.update(None)
    measured = [layer.quantizers.query, layer.quantizers.key, layer.quantizers.value, layer.quantizers.grad_output]
    measured += [layer.linear_quantizers[0].grad_output]
    for quantizer in measured:
        assert quantizer.probe is not None
        quantizer.probe.statistics = torch.zeros(ops.NUM_STATISTICS, dtype=torch.float64)
        quantizer.probe.is_due = True
    layer.step()
    for quantizer, expected in zip(measured, [31.5, 31.5, 31.5, 25.5, 25.5], strict=True):
        assert quantizer.probe is not None and not quantizer.probe.is_due
        power, error = (
            quantizer.probe.statistics[index].item() for index in (ops.Statistic.SQUARES, ops.Statistic.ERRORS)
        )
        measured_db = 10 * math.log10(power / error)
        assert measured_db > expected - 1
        assert measured_db < expected + 1 or quantizer is measured[-1]


def test_current_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs delayed scaling; recipe tensorwise"):
        AttentionQuantizers.of(Recipe("tensorwise", False))
