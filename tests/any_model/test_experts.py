"""Experts that are parameters with three dimensions, in FP8: Qwen3-MoE, Mixtral, DeepSeek-V3 and gpt-oss of
transformers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8_megatron
from fp8_megatron.any_model import plain_model, replace_linears, report
from fp8_megatron.moe.any_model.experts import FP8Experts
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db
from tests.any_model.architectures import VOCABULARY, tokens
from tests.harness.fp8_models import masters

transformers = pytest.importorskip("transformers")

LAYERS, HIDDEN, FFN = 2, 64, 64
_COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
    "head_dim": 32,
}
CONFIGS: dict[str, Callable[..., Any]] = {
    "qwen3": lambda **own: transformers.Qwen3MoeConfig(
        **{**_COMMON, "moe_intermediate_size": FFN, "num_experts": 8, "num_experts_per_tok": 2, **own}
    ),
    "mixtral": lambda **own: transformers.MixtralConfig(**{**_COMMON, "num_local_experts": 4, **own}),
    "gpt_oss": lambda **own: transformers.GptOssConfig(**{**_COMMON, "num_local_experts": 4, **own}),
    "deepseek": lambda **own: transformers.DeepseekV3Config(
        **{
            **_COMMON,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "moe_intermediate_size": FFN,
            "first_k_dense_replace": 1,
        },
        **{"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
        **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32},
        **own,
    ),
}


def build(name: str, **own: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name](**own))


#: Sizes of whole blocks.
_BLOCKS = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}


def sizes(recipe: Any) -> dict[str, int]:
    return _BLOCKS if recipe == "blockwise" else {}


def start(name: str, level: str = "O2", recipe: Any = "tensorwise") -> tuple[Any, Any]:
    model = build(name, **sizes(recipe))
    return fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters(), lr=2e-3), level, recipe=recipe)


def loss_of(model: Any, seed: int) -> Tensor:
    batch = tokens(torch.Generator().manual_seed(seed))
    with torch.autocast("cpu", torch.bfloat16):
        loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def train(model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def experts_of(model: Any) -> list[Any]:
    return [layer.mlp.experts for layer in model.model.layers if hasattr(layer.mlp, "experts")]


@pytest.mark.parametrize(
    ("name", "level", "recipe"),
    [
        ("qwen3", "O2", "tensorwise"),
        ("mixtral", "O3", "delayed"),
        ("deepseek", "O1", "tensorwise"),
        ("gpt_oss", "O2", "tensorwise"),
        ("qwen3", "O3", "blockwise"),
        ("gpt_oss", "O2", "blockwise"),
    ],
)
def test_they_train_as_in_bf16(name: str, level: str, recipe: str) -> None:
    plain = build(name, **sizes(recipe))
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=2e-3), range(10))
    model, optimizer = start(name, level, recipe)
    assert all(isinstance(one, FP8Experts) for one in experts_of(model))
    assert expected[-1] < 0.9 * expected[0]
    assert train(model, optimizer, range(10)) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_gradients(name: str) -> None:
    """Two FP8 operands a GEMM, as in tests/nn/test_experts.py; the model's other layers add as much noise again."""
    plain, (model, _) = build(name), start(name, "O3")
    for one in (plain, model):
        loss_of(one, 0).backward()
    found = dict(model.named_parameters())
    for key, param in plain.named_parameters():
        if ".experts." in key or key.endswith(("mlp.gate.weight", "mlp.router.weight")):
            experts, _, own = key.rpartition(".")
            layout = model.get_submodule(experts).layout(own) if ".experts." in key else None
            grad = found[key].grad.clone()
            assert snr_db(grad if layout is None else layout.to_plain(grad), param.grad) > 12.0, key


def test_bytes_a_parameter() -> None:
    """O2: FP16 weights with their scales, 2 + 1/64, moments in FP8 and FP16, 3 + 1/32, gradients in FP8, 1 + 1/32."""
    model = build("qwen3")
    weights = [param for one in experts_of(model) for param in one.parameters()]
    _, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(weights), filter=lambda name, _: "experts" in name)
    loss_of(model, 0).backward()
    numel = sum(param.numel() for one in experts_of(model) for param in one.parameters())
    assert numel == LAYERS * 8 * 3 * HIDDEN * FFN
    assert sum(optimizer.storage_bytes.values()) / numel == pytest.approx(6.1, abs=0.1)


@pytest.mark.parametrize(("name", "level"), [("qwen3", "O2"), ("qwen3", "O3"), ("gpt_oss", "O1")])
def test_a_run_resumes_bit_for_bit(name: str, level: str) -> None:
    """Model and state have the shapes of the model without FP8."""
    model, optimizer = start(name, level)
    train(model, optimizer, range(2))
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    plain = build(name)
    shapes = {key: value.shape for key, value in plain.state_dict().items()}
    assert {key: value.shape for key, value in state[0].items()} == shapes
    assert [key for key, _ in model.named_parameters()] == [key for key, _ in plain.named_parameters()]
    if level == "O1":
        moments = [entry["exp_avg"].shape for entry in state[1]["state"].values()]
        assert moments == [param.shape for param in plain.parameters()]
    resumed, its_optimizer = start(name, level)
    resumed.load_state_dict(state[0])
    its_optimizer.load_state_dict(state[1])
    assert train(model, optimizer, range(2, 4)) == train(resumed, its_optimizer, range(2, 4))
    assert all(torch.equal(value, masters(resumed)[key]) for key, value in masters(model).items())


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_copies_are_the_models_own_classes(name: str) -> None:
    model, optimizer = start(name)
    train(model, optimizer, range(1))
    for copied in (copy.deepcopy(model), plain_model(model)):
        assert [type(one) for one in experts_of(copied)] == [type(one) for one in experts_of(build(name))]
        for key, value in model.state_dict().items():
            assert torch.equal(copied.state_dict()[key], value)
        batch = {"input_ids": tokens(torch.Generator().manual_seed(0))}
        with torch.no_grad():
            called = torch.func.functional_call(model, dict(copied.named_parameters()), (), batch)
            assert torch.equal(called.logits, copied(**batch).logits)
    frozen = build(name).requires_grad_(False).eval()
    replace_linears(frozen)
    loaded = pickle.loads(pickle.dumps(frozen))
    assert isinstance(experts_of(loaded)[0].down_proj, ScaledTensor)
    frozen.load_state_dict(build(name).state_dict())
    with torch.no_grad():
        assert torch.equal(loss_of(loaded, 0), loss_of(frozen, 0))


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_transformers_saves_them(name: str, tmp_path: Path) -> None:
    """A file has the names and shapes of the Hub's checkpoints, an expert each for Qwen3-MoE."""
    model, optimizer = start(name, "O3")
    train(model, optimizer, range(1))
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path)
    assert {type(one) for one in experts_of(plain)} == {type(one) for one in experts_of(build(name))}
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in plain.state_dict().items())


def test_frozen_experts_and_recomputing() -> None:
    """The same bits where backward computes a block, or the first projection's output, again."""
    found = []
    for recomputes, checkpoints in ((False, False), (False, True), (True, False)):
        model = build("qwen3").train()
        for one in experts_of(model)[:1]:
            one.down_proj.requires_grad_(False)
        model, optimizer = fp8_megatron.initialize(
            model, torch.optim.AdamW(model.parameters(), lr=2e-3), recompute_activations=recomputes
        )
        if checkpoints:
            model.gradient_checkpointing_enable()
        before = experts_of(model)[0].down_proj.clone()
        found.append(train(model, optimizer, range(2)))
        assert torch.equal(experts_of(model)[0].down_proj.clone(), before)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("name", "recipe"), [("qwen3", "delayed"), ("gpt_oss", "tensorwise"), ("gpt_oss", "blockwise")]
)
def test_they_are_part_of_a_compiled_graph(name: str, recipe: str) -> None:
    model, optimizer = start(name, recipe=recipe)
    compiled, its_optimizer = start(name, recipe=recipe)
    for layer in compiled.model.layers:
        layer.mlp = torch.compile(layer.mlp, backend="aot_eager", fullgraph=True)
    assert train(compiled, its_optimizer, range(2)) == train(model, optimizer, range(2))
    with torch.no_grad():
        assert torch.equal(loss_of(compiled.eval(), 0), loss_of(model.eval(), 0))


class Experts(torch.nn.Module):
    """What experts of any library look like; `changed` computes something else."""

    def __init__(self, activation: Any, changed: str = "", sizes: tuple[int, int, int] = (4, 64, 64)) -> None:
        super().__init__()
        count, hidden, width = sizes
        self.hidden, self.activation, self.changed = hidden, activation, changed
        self.w1 = torch.nn.Parameter(torch.randn(count, 2 * width, hidden) * 0.1)
        self.w2 = torch.nn.Parameter(torch.randn(count, hidden, width) * 0.1)

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        tokens = tokens.reshape(-1, self.hidden)
        gate, up = torch.einsum("th,ezh->tez", tokens, self.w1).chunk(2, dim=-1)
        if self.changed == "clamped":
            gate = gate.clamp(max=7.0)
        if self.changed == "swapped":
            gate, up = up, gate
        outputs = torch.einsum("tef,ehf->teh", self.activation(gate) * up, self.w2)
        picked = outputs.gather(1, chosen[:, :, None].expand(-1, -1, outputs.shape[2]))
        return (picked * weights[:, :, None]).sum(dim=1)


class TurnedExperts(torch.nn.Module):
    """Transposed weights, columns of gate and up in turns, and biases, as in gpt-oss; all sizes are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = (torch.nn.Parameter(torch.randn(4, 64, size) * 0.1) for size in (128, 64))
        self.b1, self.b2 = (torch.nn.Parameter(torch.randn(4, size)) for size in (128, 64))

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        z = torch.einsum("th,ehz->tez", tokens, self.w1) + self.b1
        hidden = torch.nn.functional.silu(z[..., ::2]) * z[..., 1::2]
        outputs = torch.einsum("tef,efh->teh", hidden, self.w2) + self.b2
        picked = outputs.gather(1, chosen[:, :, None].expand(-1, -1, outputs.shape[2]))
        return (picked * weights[:, :, None]).sum(dim=1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", [lambda: Experts(torch.nn.SiLU()), TurnedExperts])
def test_any_librarys_experts(kind: Callable[[], torch.nn.Module], device: str) -> None:
    """Any number of tokens, none too, and experts that a token has chosen twice."""
    torch.manual_seed(0)
    plain = kind().to(device)
    model = copy.deepcopy(plain)
    fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), "O3")
    assert isinstance(model, FP8Experts) and report(model).fp8 == ("",)
    for count in (0, 1, 37):
        x, weights = (torch.rand(count, size, device=device, requires_grad=True) for size in (64, 3))
        chosen = torch.randint(4, (count, 3), device=device)
        results = [each(tokens=x, chosen=chosen, weights=weights) for each in (model, plain)]
        assert results[0].dtype is torch.float32 and results[0].shape == results[1].shape
        cotangent = torch.randn(count, 64, device=device)
        grads = [torch.autograd.grad((each * cotangent).sum(), (x, weights)) for each in results]
        if count:
            # As in tests/nn/test_experts.py, and here the weights' own rounding is noise too.
            assert snr_db(*(each.detach() for each in results)) > 21.0
            assert all(snr_db(found, expected) > 17.0 for found, expected in zip(*grads, strict=True))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Experts(torch.nn.GELU()), "known activation"),
        (Experts(torch.nn.SiLU(), "clamped"), "known activation"),
        (Experts(torch.nn.SiLU(), "swapped"), "known activation"),
        (Experts(torch.nn.SiLU(), sizes=(4, 32, 16)), "32 x 32 elements is no multiple of 4,096"),
        (Experts(torch.nn.SiLU(), sizes=(4, 72, 64)), "its size 72 is not a multiple of 16"),
    ],
)
def test_other_experts_stay(module: Experts, reason: str) -> None:
    model = torch.nn.Sequential(module)
    replace_linears(model)
    assert type(model[0]) is Experts and not report(model).stays
    assert "0.w1, 0.w2 (Experts, because " in str(report(model)) and reason in str(report(model))


def test_a_line_says_what_of_transformers_stays() -> None:
    model = build("qwen3", hidden_act="relu")
    replace_linears(model)
    assert "Qwen3MoeExperts, because its forward is not" in str(report(model))
    model = build("qwen3")
    replace_linears(model, recipe="mxfp8", filter=lambda name, _: "layers.0" in name)
    text = str(report(model))
    assert "because recipe 'mxfp8' has no" in text and "because the filter refuses it" in text
