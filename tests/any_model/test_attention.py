"""`torch.nn.MultiheadAttention` with FP8 projections beside torch's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8_megatron
from fp8_megatron.any_model import plain_model, replace_linears, report
from fp8_megatron.any_model.attention import FP8MultiheadAttention
from fp8_megatron.quantization.stats import snr_db

#: Two GEMMs on a path, 28.5 dB each, and softmax, whose logits are products of two of the first GEMM's outputs.
FORWARD_DB = 22.0
WIDTH, HEADS = 64, 4


def build(**settings: Any) -> tuple[FP8MultiheadAttention, torch.nn.MultiheadAttention]:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"attention": torch.nn.MultiheadAttention(WIDTH, HEADS, **settings)})
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.05 * torch.randn_like(param))
    exact = copy.deepcopy(model["attention"])
    replace_linears(model)
    assert isinstance(model["attention"], FP8MultiheadAttention)
    return model["attention"], exact


def masks(name: str) -> dict[str, Any]:
    causal = torch.ones(16, 16, dtype=torch.bool).triu(1)
    padding = torch.zeros(3, 16, dtype=torch.bool)
    padding[0, 10:] = padding[2, 13:] = True
    return {
        "none": {},
        "causal": {"attn_mask": causal},
        "causal hint": {"attn_mask": causal, "is_causal": True},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": causal, "key_padding_mask": padding, "is_causal": True},
        "added": {
            "attn_mask": torch.randn(3 * HEADS, 16, 16, generator=torch.Generator().manual_seed(5)),
            "key_padding_mask": torch.zeros(3, 16).masked_fill(padding, float("-inf")),
        },
    }[name]


@pytest.mark.parametrize("mask", ["none", "causal", "causal hint", "padding", "both", "added"])
@pytest.mark.parametrize("need_weights", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["", "batch_first"])
def test_values_weights_and_gradients(mask: str, need_weights: bool, batch_first: bool) -> None:
    module, exact = build(batch_first=batch_first)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*((3, 16) if batch_first else (16, 3)), WIDTH, generator=generator).requires_grad_()
    x_exact = x.detach().clone().requires_grad_()
    arguments: dict[str, Any] = {"need_weights": need_weights, "average_attn_weights": mask != "both", **masks(mask)}
    y, weights = module(x, x, x, **arguments)
    expected, expected_weights = exact(x_exact, x_exact, x_exact, **arguments)
    assert y.shape == expected.shape and snr_db(y, expected.detach()) > FORWARD_DB
    if need_weights:
        assert weights.shape == expected_weights.shape and snr_db(weights, expected_weights.detach()) > FORWARD_DB
    else:
        assert weights is None and expected_weights is None
    cotangent = torch.randn(y.shape, generator=generator)
    y.backward(cotangent)
    expected.backward(cotangent)
    # dgrad and wgrad have an E5M2 operand, 24.5 dB; two of them and the softmax on the way.
    assert snr_db(x.grad, x_exact.grad) > 17.0  # type: ignore[arg-type]
    assert snr_db(module.in_proj.weight.grad, exact.in_proj_weight.grad) > 17.0  # type: ignore[arg-type]
    assert snr_db(module.out_proj.weight.grad, exact.out_proj.weight.grad) > 20.0  # type: ignore[arg-type]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shared", ["all", "key and value", "nothing"])
def test_other_queries_keys_and_values(shared: str, bias: bool) -> None:
    module, exact = build(bias=bias, batch_first=True)
    torch.manual_seed(1)
    query, key, value = torch.randn(3, 8, WIDTH), torch.randn(3, 16, WIDTH), torch.randn(3, 16, WIDTH)
    if shared != "nothing":
        value = key
    if shared == "all":
        query = key
    assert snr_db(module(query, key, value)[0], exact(query, key, value)[0].detach()) > FORWARD_DB
    one, weights = module(query[0], key[0], value[0])  # without a batch
    assert snr_db(one, exact(query[0], key[0], value[0])[0].detach()) > FORWARD_DB
    assert weights.shape == (query.shape[1], 16)


def test_a_causal_hint_without_a_mask_is_an_error() -> None:
    module, _ = build()
    with pytest.raises(RuntimeError, match="give attn_mask"):
        module(*[torch.randn(16, 3, WIDTH)] * 3, is_causal=True)


def encoder() -> torch.nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 128, batch_first=True, dropout=0.0)
    return torch.nn.TransformerEncoder(layer, 2)


@pytest.mark.parametrize("filters", ["nothing", "attention", "mlp"])
def test_an_encoder_in_training_and_evaluation(filters: str) -> None:
    """Evaluation without gradients has fast paths in torch, which read weights and make nested tensors."""
    model = encoder().eval()
    x, padding = torch.randn(3, 16, WIDTH), torch.zeros(3, 16, dtype=torch.bool)
    padding[0, 10:] = True
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
    kept = {"nothing": "none", "attention": "self_attn", "mlp": "linear"}[filters]
    replace_linears(model, filter=lambda name, layer: kept not in name)
    assert len(report(model).fp8) == {"nothing": 8, "attention": 4, "mlp": 4}[filters]
    results: list[Tensor] = []
    for training in (True, False):
        model.train(training)
        for needs_grad in (True, False):
            with torch.set_grad_enabled(needs_grad):
                results.append(model(x, src_key_padding_mask=padding)[:, :10])
    assert all(torch.equal(result, results[0]) for result in results)
    assert snr_db(results[0], expected[:, :10]) > FORWARD_DB


def test_state_dicts_and_copies() -> None:
    original, model = encoder(), encoder()
    with torch.no_grad():
        for one, other in zip(original.parameters(), model.parameters(), strict=True):
            other.copy_(one)
    model, _ = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), "O3")
    state = model.state_dict()
    assert set(state) == set(original.state_dict())
    assert all(snr_db(state[key], value) > 70.0 for key, value in original.state_dict().items() if value.any())
    encoder().load_state_dict(state)
    model.load_state_dict(original.state_dict())
    x = torch.randn(3, 16, WIDTH)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    plain = plain_model(model)
    assert not report(plain).fp8 and snr_db(plain(x), original(x).detach()) > 60.0  # the FP16 masters
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))


def test_what_stays() -> None:
    class Derived(torch.nn.MultiheadAttention):
        pass

    model = torch.nn.ModuleDict(
        {
            "derived": Derived(64, 4),
            "odd": torch.nn.MultiheadAttention(40, 4),
            "sizes": torch.nn.MultiheadAttention(64, 4, kdim=32),
            "adds": torch.nn.MultiheadAttention(64, 4, add_bias_kv=True),
        }
    )
    replace_linears(model)
    stays = {name: reason for name, reason in report(model).stays.items() if "out_proj" not in name}
    assert stays == {
        "derived": "Derived is a class of its own",
        "odd": "its size 40 is not a multiple of 16",
        "sizes": "its projections have different sizes",
        "adds": "it adds keys",
    }
