"""`torch.nn.MultiheadAttention` with FP8 projections beside torch's own."""

from __future__ import annotations

import copy
import warnings
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
#: dgrad and wgrad have an E5M2 operand, 24.5 dB; two of them and the softmax on the way.
BACKWARD_DB = 17.0
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


#: Settings of the module, sizes of key and value, and a call: (shared inputs, mask, need_weights).
FORMS: dict[str, tuple[dict[str, Any], tuple[str, str, bool]]] = {
    "self": ({}, ("all", "causal", False)),
    "self, no bias": ({"bias": False}, ("all", "both", True)),
    "cross": ({}, ("key and value", "none", False)),
    "cross, no bias": ({"bias": False}, ("key and value", "cross", True)),
    "query is key": ({}, ("query and key", "padding", False)),
    "query is value": ({}, ("query and value", "none", True)),
    "apart": ({}, ("nothing", "cross", False)),
    "kdim": ({"kdim": 32}, ("nothing", "padding", True)),
    "vdim": ({"vdim": 48, "bias": False}, ("nothing", "cross", False)),
    "kdim is vdim": ({"kdim": 32, "vdim": 32}, ("key and value", "causal hint", False)),
    "added keys": ({"add_bias_kv": True}, ("all", "both", True)),
    "added keys, causal": ({"add_bias_kv": True, "add_zero_attn": True}, ("all", "causal", False)),
    "added zeros": ({"add_zero_attn": True}, ("key and value", "none", False)),
    "added to sizes": ({"kdim": 32, "add_bias_kv": True, "add_zero_attn": True}, ("nothing", "added", True)),
}


def inputs_of(form: str, layout: str) -> tuple[list[Tensor], dict[str, Any]]:
    """Query, key and value of a form, and its other arguments. Lengths 16 and 16, batch 3; "cross" has 8 queries."""
    settings, (shared, mask, need_weights) = FORMS[form]
    generator = torch.Generator().manual_seed(7)
    length = 8 if mask == "cross" or (shared == "key and value" and mask == "none") else 16
    arguments = masks(mask) if mask != "cross" else {"attn_mask": torch.randn(length, 16, generator=generator)}
    sizes = (WIDTH, settings.get("kdim", WIDTH), settings.get("vdim", WIDTH))
    query, key, value = (
        torch.randn(3, rows, size, generator=generator) for rows, size in zip((length, 16, 16), sizes, strict=True)
    )
    if shared in ("all", "query and key"):
        key = query
    if shared in ("all", "query and value"):
        value = query
    if shared == "key and value":
        value = key
    if layout == "unbatched":
        if "key_padding_mask" in arguments:
            arguments["key_padding_mask"] = arguments["key_padding_mask"][0]
        if arguments.get("attn_mask", torch.empty(0)).dim() == 3:
            arguments["attn_mask"] = arguments["attn_mask"][:HEADS]
    shape = {"unbatched": lambda x: x[0], "batch_first": lambda x: x, "": lambda x: x.transpose(0, 1).contiguous()}
    made = {x: shape[layout](x).requires_grad_() for x in {query: 0, key: 0, value: 0}}
    averages = mask != "both"
    return [made[x] for x in (query, key, value)], {
        "need_weights": need_weights,
        "average_attn_weights": averages,
        **arguments,
    }


@pytest.mark.parametrize("layout", ["", "batch_first", "unbatched"])
@pytest.mark.parametrize("form", FORMS)
def test_it_is_torchs_function(form: str, layout: str) -> None:
    """With plain weights nothing is in FP8, and the values, the weights and all gradients are torch's."""
    module, exact = build(batch_first=layout == "batch_first", dropout=0.2, **FORMS[form][0])
    names = {"in_proj_weight": "in_proj.weight", "in_proj_bias": "in_proj.bias"}
    names |= {f"{key}_proj_weight": f"{key}_proj.weight" for key in "qkv"}
    if hasattr(module, "q_proj"):
        del names["in_proj_bias"]
    plain = {names.get(key, key): param for key, param in copy.deepcopy(exact).named_parameters()}
    (inputs, arguments), (expected_inputs, _) = inputs_of(form, layout), inputs_of(form, layout)
    torch.manual_seed(3)
    y, weights = torch.func.functional_call(module, plain, tuple(inputs), arguments)
    torch.manual_seed(3)
    expected, expected_weights = exact(*expected_inputs, **arguments)
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(y, expected, **close)
    torch.testing.assert_close(weights, expected_weights, **close)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(4))
    y.backward(cotangent)
    expected.backward(cotangent)
    for one, other in zip(inputs, expected_inputs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, **close)
    for key, param in exact.named_parameters():
        torch.testing.assert_close(plain[names.get(key, key)].grad, param.grad, **close)


@pytest.mark.parametrize("form", FORMS)
def test_noise_of_every_form(form: str) -> None:
    module, exact = build(batch_first=True, **FORMS[form][0])
    (inputs, arguments), (exact_inputs, _) = inputs_of(form, "batch_first"), inputs_of(form, "batch_first")
    y, weights = module(*inputs, **arguments)
    expected, expected_weights = exact(*exact_inputs, **arguments)
    assert snr_db(y, expected.detach()) > FORWARD_DB
    if weights is not None:
        assert snr_db(weights, expected_weights.detach()) > FORWARD_DB
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(4))
    y.backward(cotangent)
    expected.backward(cotangent)
    for one, other in zip(inputs, exact_inputs, strict=True):
        assert snr_db(one.grad, other.grad) > BACKWARD_DB  # type: ignore[arg-type]
    of_torch = dict(exact.named_parameters())
    for key, param in module.named_parameters():
        other = of_torch[key if key in of_torch else key.replace("_proj.", "_proj_")]
        assert snr_db(param.grad, other.grad) > BACKWARD_DB, key  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["self", "cross", "kdim", "added keys, causal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_of_torch_under_autocast(form: str, dtype: torch.dtype) -> None:
    module, exact = build(batch_first=True, **FORMS[form][0])
    inputs, arguments = inputs_of(form, "batch_first")
    with torch.autocast("cpu", dtype):
        (y, weights), (expected, expected_weights) = (one(*inputs, **arguments) for one in (module, exact))
    assert y.dtype is expected.dtype is dtype and snr_db(y.float(), expected.detach().float()) > FORWARD_DB
    assert (weights is None) == (expected_weights is None)
    assert weights is None or weights.dtype is expected_weights.dtype


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_mask": torch.zeros(8, 16)}, r"attn_mask has the shape \(8, 16\), not \(16, 8\) or \(12, 16, 8\)"),
        ({"attn_mask": torch.zeros(3, 4, 16, 8)}, "attn_mask has the shape"),
        ({"attn_mask": torch.ones(16, 8, dtype=torch.int64)}, "attn_mask is torch.int64: give a bool mask"),
        ({"key_padding_mask": torch.zeros(8, 3)}, r"key_padding_mask has the shape \(8, 3\), not \(3, 8\)"),
        ({"key": torch.zeros(1, 8, WIDTH)}, "key and value have different"),
        ({"key": torch.zeros(1, 8, WIDTH), "value": torch.zeros(1, 8, WIDTH)}, "different batches, their sizes 0"),
        ({"value": torch.zeros(3, 8, 32)}, "the last sizes are not 64, 64 and 64"),
        ({"query": torch.zeros(16, WIDTH)}, "three matrices"),
    ],
    ids=str,
)
def test_errors_where_torch_has_them(changes: dict[str, Tensor], message: str) -> None:
    """Masks and inputs of wrong shapes might broadcast, or be reshaped, to something else."""
    module, exact = build(batch_first=True)
    arguments = {"query": torch.randn(3, 16, WIDTH), "key": torch.randn(3, 8, WIDTH), "value": torch.randn(3, 8, WIDTH)}
    with pytest.raises((AssertionError, RuntimeError)):
        exact(**(arguments | changes))
    with pytest.raises(ValueError, match=message):
        module(**(arguments | changes))


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
    # An optimizer's state has numbers, so parameters have torch's order.
    assert [param.shape for param in model.parameters()] == [param.shape for param in original.parameters()]
    assert all(snr_db(state[key], value) > 70.0 for key, value in original.state_dict().items() if value.any())
    encoder().load_state_dict(state)
    model.load_state_dict(original.state_dict())
    x = torch.randn(3, 16, WIDTH)
    copied = copy.deepcopy(model)
    for plain in (copied, plain_model(model)):
        assert not report(plain).fp8 and snr_db(plain(x), original(x).detach()) > 60.0  # the FP16 masters
        assert [*map(type, plain.modules())] == [*map(type, original.modules())]
        assert list(plain.state_dict()) == list(original.state_dict())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("form", ["cross", "kdim", "added to sizes"])
def test_it_compiles_to_one_graph(form: str) -> None:
    torch._dynamo.reset()
    module, _ = build(batch_first=True, **FORMS[form][0])
    inputs, arguments = inputs_of(form, "batch_first")
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    results = []
    for call in (module, compiled):
        y, weights = call(*inputs, **arguments)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(4)))
        used = list(dict.fromkeys(inputs))
        results.append([y.detach(), *([] if weights is None else [weights.detach()]), *(x.grad for x in used)])
        module.zero_grad()
        for x in used:
            x.grad = None
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_what_stays() -> None:
    class Derived(torch.nn.MultiheadAttention):
        pass

    model = torch.nn.ModuleDict(
        {
            "derived": Derived(64, 4),
            "odd": torch.nn.MultiheadAttention(40, 4),
            "sizes": torch.nn.MultiheadAttention(64, 4, vdim=24),
            "normed": torch.nn.MultiheadAttention(64, 4),
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.weight_norm(model["normed"].out_proj)
    replace_linears(model)
    reasons = {
        "derived": "Derived is a class of its own",
        "odd": "its size 40 is not a multiple of 16",
        "sizes": "its size 24 is not a multiple of 16",
        "normed": "the weight of its out_proj is computed by a hook",
    }
    assert report(model).stays == {**reasons, **{f"{name}.out_proj": reason for name, reason in reasons.items()}}


@pytest.mark.parametrize("settings", [{}, {"bias": False}, {"kdim": 32}, {"add_bias_kv": True}], ids=str)
def test_a_plain_copy_is_torchs_module(settings: dict[str, Any]) -> None:
    model, original = (torch.nn.ModuleDict({"a": torch.nn.MultiheadAttention(WIDTH, HEADS, **settings)}) for _ in "ab")
    model, _ = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), "O3")
    plain = plain_model(model)
    assert type(plain["a"]) is torch.nn.MultiheadAttention and type(plain["a"].out_proj) is type(original["a"].out_proj)
    expected = [(key, value.shape) for key, value in original.state_dict().items()]
    for one in (model, plain):  # in torch's order, so that values can be zipped
        assert [(key, value.shape) for key, value in one.state_dict().items()] == expected
    assert all(
        torch.equal(*both) for both in zip(plain.state_dict().values(), model.state_dict().values(), strict=True)
    )
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in original.named_parameters()]
