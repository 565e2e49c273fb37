"""Experts in FP8 and in 16 bits against float64: values and every gradient.

Noise adds up along the path as in `test_fused`: fprop has two E4M3 operands a GEMM (28.5 dB each), dgrad and wgrad an
E5M2 and an E4M3 one (24.5 dB). In blocks all are E4M3.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from fp8_megatron.activation_functions import Activation
from fp8_megatron.dtypes import E4M3
from fp8_megatron.moe.layers.exchanged import Exchanged
from fp8_megatron.moe.layers.experts import (
    experts,
    fp8_experts,
    grouped_by_expert,
    send_tokens,
    with_biases,
)
from fp8_megatron.moe.layers.token_exchange import AllGather, AllToAll, TokenExchange
from fp8_megatron.moe.layers.token_flight import Flight, SendTokens, StartSum, exchange_choices
from fp8_megatron.nn.gemms import LinearParams
from fp8_megatron.quantization.recipe import Recipe
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db
from fp8_megatron.storage import RecipeName
from tests.harness.main_grad import KeptGrads
from tests.harness.ranks import RankPool, on_default_group

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 96, 256, 128, 6, 2
RECIPES = ["tensorwise", "blockwise"]
GATED = {"swiglu": 2, "gelu": 1}
_ACTIVATIONS = {
    "swiglu": lambda z: torch.nn.functional.silu(z.chunk(2, dim=-1)[0]) * z.chunk(2, dim=-1)[1],
    "gelu": lambda z: torch.nn.functional.gelu(z, approximate="tanh"),
}


def routing(*, crowded: bool) -> tuple[Tensor, Tensor]:
    """Probabilities FP32 [T, E] and the routing map. `crowded`: one expert has all tokens, three have none."""
    torch.manual_seed(1)
    scores = torch.randn(TOKENS, EXPERTS)
    if crowded:
        scores[:, 0] += 50.0
        scores[:, 3:] -= 50.0
    chosen = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, scores.topk(TOP_K).indices, True)
    chosen[5] = False  # a dropped token
    return torch.where(chosen, torch.rand(TOKENS, EXPERTS) + 0.1, 0.0), chosen


def exact(x: Tensor, probs: Tensor, weight1: Tensor, weight2: Tensor, activation: str) -> Tensor:
    """Each expert over all tokens."""
    of_experts = _ACTIVATIONS[activation](torch.einsum("th,ezh->tez", x, weight1))
    return torch.einsum("tef,ehf,te->th", of_experts, weight2, probs)


def weights(activation: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(EXPERTS, GATED[activation] * FFN, HIDDEN) * 0.1, torch.randn(EXPERTS, HIDDEN, FFN) * 0.1


def fp8_layer(value: Tensor, device: str, recipe: RecipeName = "tensorwise") -> tuple[LinearParams, Tensor]:
    """A layer with FP8 weights, and their values."""
    scale = value.abs().amax(dim=(1, 2)) / 448.0
    payload = (value / scale[:, None, None]).to(E4M3)
    weight = ScaledTensor(payload.to(device), scale.to(device)).requires_grad_()
    weight.main_grad = KeptGrads()  # type: ignore[attr-defined]
    quantizers = Recipe(recipe, power_of_two=False).grouped_quantizers()
    return LinearParams(weight, None, quantizers), payload.double() * scale.double()[:, None, None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("activation", list(GATED))
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_experts(device: str, activation: str, crowded: bool, recipe: RecipeName) -> None:
    probs, chosen = routing(crowded=crowded)
    (fc1, value1), (fc2, value2) = (fp8_layer(value, device, recipe) for value in weights(activation))
    torch.manual_seed(3)
    x, grad = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.randn(TOKENS, HIDDEN).bfloat16()
    wanted = [each.double().requires_grad_() for each in (x, probs, value1, value2)]
    expected = exact(*wanted, activation)
    expected.backward(grad.double())

    own_x, own_probs = (each.to(device).requires_grad_() for each in (x, probs))
    output = fp8_experts(
        own_x, own_probs, grouped_by_expert(chosen.to(device), TOP_K), fc1, fc2, Activation(activation)
    )
    output.backward(grad.to(device))
    assert snr_db(output.cpu(), expected) > 23.5
    assert (output[5] == 0).all() and own_x.grad is not None and (own_x.grad[5] == 0).all()
    of_x, of_probs, of_fc1, of_fc2 = (24.5,) * 4 if recipe == "blockwise" else (19.0, 19.0, 18.0, 20.0)
    assert snr_db(own_x.grad.cpu(), wanted[0].grad) > of_x
    assert own_probs.grad is not None
    assert snr_db(own_probs.grad.cpu()[chosen], wanted[1].grad[chosen]) > of_probs
    assert (own_probs.grad.cpu()[~chosen] == 0).all()
    for layer, gradient, bound in ((fc1, wanted[2].grad, of_fc1), (fc2, wanted[3].grad, of_fc2)):
        (found,) = layer.weight.main_grad.grads  # type: ignore[attr-defined]
        assert snr_db(found.cpu(), gradient) > bound


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("recipe", "crowded"), [("tensorwise", False), ("blockwise", True), (None, False), (None, True)]
)
def test_biases(device: str, recipe: RecipeName | None, crowded: bool) -> None:
    """Their gradients are sums of 32 rows' gradients, of which FP8 rounds fc1's to E5M2. In 16 bits noise is that of
    `test_experts_in_16_bits`."""
    probs, chosen = routing(crowded=crowded)
    torch.manual_seed(4)
    biases = [torch.randn(EXPERTS, size).bfloat16() for size in (2 * FFN, HIDDEN)]
    own = [bias.clone().to(device).requires_grad_() for bias in biases]
    x, grad = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.randn(TOKENS, HIDDEN).bfloat16()
    own_x, own_probs = (each.to(device, copy=True).requires_grad_() for each in (x, probs))
    groups = grouped_by_expert(chosen.to(device), TOP_K)
    if recipe is not None:
        (fc1, value1), (fc2, value2) = (fp8_layer(value, device, recipe) for value in weights("swiglu"))
        fc1 = fc1._replace(bias=own[0])
        output = fp8_experts(own_x, own_probs, groups, fc1, fc2, Activation("swiglu"))
        bounds = (23.5, 19.0, 19.0, 19.0, 40.0)
    else:
        value1, value2 = (value.bfloat16() for value in weights("swiglu"))
        both = (value.to(device) for value in (value1, value2))
        output = experts(own_x, own_probs, groups, *both, Activation("swiglu"), bias1=own[0])
        bounds = (45.0, 43.0, 43.0, 43.0, 43.0)
    output = with_biases(output, own_probs, own[1])
    output.backward(grad.to(device))

    wanted = [each.double().requires_grad_() for each in (x, probs, *biases)]
    z = torch.einsum("th,ezh->tez", wanted[0], value1.double()) + wanted[2]
    y = torch.einsum("tef,ehf->teh", _ACTIVATIONS["swiglu"](z), value2.double()) + wanted[3]
    expected = torch.einsum("teh,te->th", y, wanted[1])
    expected.backward(grad.double())
    assert snr_db(output.cpu(), expected) > bounds[0]
    for found, reference, bound in zip((own_x, own_probs, *own), wanted, bounds[1:], strict=True):
        assert found.grad is not None and reference.grad is not None
        kept = chosen if found is own_probs else slice(None)
        assert snr_db(found.grad.cpu()[kept], reference.grad[kept]) > bound
    unused = ~chosen.any(dim=0)
    assert all((bias.grad[unused.to(device)] == 0).all() for bias in own if bias.grad is not None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", list(GATED))
def test_experts_in_16_bits(device: str, activation: str) -> None:
    probs, chosen = routing(crowded=False)
    torch.manual_seed(3)
    x, grad = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.randn(TOKENS, HIDDEN).bfloat16()
    leaves = [x, probs, *(value.bfloat16() for value in weights(activation))]
    wanted = [each.double().requires_grad_() for each in leaves]
    expected = exact(*wanted, activation)
    expected.backward(grad.double())
    own_x, own_probs, *own = [each.to(device).requires_grad_() for each in leaves]
    output = experts(own_x, own_probs, grouped_by_expert(chosen.to(device), TOP_K), *own, Activation(activation))
    output.backward(grad.to(device))
    assert snr_db(output.cpu(), expected) > 45.0
    for found, reference in zip((own_x, own_probs, *own), wanted, strict=True):
        assert found.grad is not None and reference.grad is not None
        kept = chosen if found is own_probs else slice(None)
        assert snr_db(found.grad.cpu()[kept], reference.grad[kept]) > 43.0


def _on_ranks(
    group: torch.distributed.ProcessGroup, *, crowded: bool, recipe: RecipeName | None, gathers: bool, recomputes: bool
) -> list[Tensor]:
    """Of this rank's part of the tokens the output and gradients, and the gradients of its part of the weights."""
    activation = Activation("swiglu")
    all_probs, all_chosen = routing(crowded=crowded)
    torch.manual_seed(3)
    tensors = (torch.randn(TOKENS, HIDDEN).bfloat16(), torch.randn(TOKENS, HIDDEN).bfloat16(), all_probs, all_chosen)
    num_ranks = group.size()

    def own_part(value: Tensor) -> Tensor:
        return value.chunk(num_ranks)[group.rank()].contiguous()

    x, grad, probs, chosen = map(own_part, tensors)
    x.requires_grad_()
    probs.requires_grad_()
    exchange: TokenExchange = AllGather(group, num_ranks) if gathers else AllToAll(chosen, group, num_ranks, TOP_K)
    flight = Flight(exchange)
    received_probs, received = exchange_choices(probs, chosen, exchange)
    groups = grouped_by_expert(received, TOP_K, None, exchange.num_routed)
    own = [own_part(value) for value in weights("swiglu")]
    if recipe is not None:
        parallelism = Exchanged(exchange)
        fc1, fc2 = (fp8_layer(value, "cpu", recipe)[0]._replace(parallelism=parallelism) for value in own)
        if gathers:
            send_tokens(x, fc1, flight)
        output = fp8_experts(x, received_probs, groups, fc1, fc2, activation, recomputes=recomputes, flight=flight)
        output = flight.arrived(output)
        output.backward(grad)
        of_weights = [layer.weight.main_grad.grads[0] for layer in (fc1, fc2)]  # type: ignore[attr-defined]
    else:
        own = [value.bfloat16().requires_grad_() for value in own]
        if gathers:
            flight.rows = exchange.send(x.detach())
        y = experts(
            SendTokens.apply(x, flight), received_probs, groups, *own, activation, recomputes_activation=recomputes
        )
        output = flight.arrived(StartSum.apply(y, x.shape, flight))
        output.backward(grad)
        of_weights = [value.grad for value in own]  # type: ignore[misc]
    return [output.detach(), x.grad, probs.grad, *of_weights]  # type: ignore[list-item]


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("crowded", [False, True])
def test_two_ranks_with_half_of_the_experts_each(ranks: RankPool, crowded: bool, recipe: RecipeName | None) -> None:
    """`crowded`: all tokens go to the first rank. A sum has two terms, so both exchanges have the same bits. So has
    one rank, but under tensorwise, where each rank's activations have a scale of their own."""
    is_fp8 = recipe is not None
    probs, chosen = routing(crowded=crowded)
    torch.manual_seed(3)
    x, grad = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.randn(TOKENS, HIDDEN).bfloat16()
    values = [fp8_layer(value, "cpu")[1] if is_fp8 else value.bfloat16() for value in weights("swiglu")]
    wanted = [each.double().requires_grad_() for each in (x, probs, *values)]
    expected = exact(*wanted, "swiglu")
    expected.backward(grad.double())

    call = partial(_on_ranks, crowded=crowded, recipe=recipe)
    found, gathered, recomputed = (
        ranks.run(on_default_group, partial(call, gathers=gathers, recomputes=recomputes), num_ranks=2)
        for gathers, recomputes in ((False, False), (True, False), (False, True))
    )
    for own, *others in zip(found, gathered, recomputed, strict=True):
        assert all(torch.equal(*pair) for other in others for pair in zip(own, other, strict=True))
    output, *grads = (torch.cat(parts) for parts in zip(*found, strict=True))
    (alone,) = ranks.run(on_default_group, partial(call, gathers=True, recomputes=False), num_ranks=1)
    assert recipe == "tensorwise" or all(map(torch.equal, (output, *grads), alone))
    bounds = (19.0, 19.0, 18.0, 20.0) if is_fp8 else (43.0,) * 4
    assert snr_db(output, expected) > (23.5 if is_fp8 else 45.0)
    for found_grad, reference, bound in zip(grads, wanted, bounds, strict=True):
        assert reference.grad is not None
        kept = chosen if reference is wanted[1] else slice(None)
        assert snr_db(found_grad[kept], reference.grad[kept]) > bound
        assert found_grad.isfinite().all()


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_recomputed_experts_keep_less_and_have_the_same_gradients(recipe: RecipeName | None) -> None:
    probs, chosen = routing(crowded=False)
    torch.manual_seed(3)
    x, grad = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.randn(TOKENS, HIDDEN).bfloat16()
    groups = grouped_by_expert(chosen, TOP_K)

    def gradients(*, recomputes: bool) -> tuple[list[Tensor], int]:
        own_x, own_probs = (each.clone().requires_grad_() for each in (x, probs))
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            if recipe is not None:
                fc1, fc2 = (fp8_layer(value, "cpu", recipe)[0] for value in weights("swiglu"))
                output = fp8_experts(own_x, own_probs, groups, fc1, fc2, Activation("swiglu"), recomputes=recomputes)
            else:
                own = [value.bfloat16().requires_grad_() for value in weights("swiglu")]
                output = experts(own_x, own_probs, groups, *own, Activation("swiglu"), recomputes_activation=recomputes)
        output.backward(grad)
        if recipe is not None:
            of_weights = [layer.weight.main_grad.grads[0] for layer in (fc1, fc2)]  # type: ignore[attr-defined]
        else:
            of_weights = [weight.grad for weight in own]
        return [output, own_x.grad, own_probs.grad, *of_weights], sum(kept.values())  # type: ignore[list-item]

    (expected, most), (found, fewer) = (gradients(recomputes=again) for again in (False, True))
    assert all(torch.equal(own, other) for own, other in zip(found, expected, strict=True))
    rows = len(groups.source)
    if recipe is not None:  # fc1's output
        assert most - fewer == rows * 2 * 2 * FFN
    else:  # fc2's input
        assert most - fewer >= rows * 2 * FFN
