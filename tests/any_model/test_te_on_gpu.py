"""Transformer Engine's own modules as FP8 layers, on a GPU: values, gradients, state dicts, training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8_megatron
from fp8_megatron.any_model import replace_linears, report
from fp8_megatron.any_model.meter import Bytes
from fp8_megatron.any_model.te_layers import FP8LayerNormMLP, FP8TELinear
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db

te: Any = pytest.importorskip("transformer_engine.pytorch", exc_type=ImportError)
pytestmark = pytest.mark.gpu
#: As in test_te_modules.py; BF16's own noise in the original is far below.
ONE_GEMM_DB, ONE_GRAD_DB = 27.5, 22.0
MLP_DB, MLP_GRAD_DB, STEP_GRAD_DB = 22.7, 18.5, 12.7

Build = Callable[[], torch.nn.Module]


def twice(build: Build) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Two models with the same values."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        torch.cuda.manual_seed(0)
        models.append(build())
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        with torch.no_grad():
            if one.ndim == 1:
                one.add_(torch.randn_like(one) * 0.1)
            other.copy_(one)
    return models[0], models[1]


def first(outputs: Any) -> Tensor:
    return outputs[0] if isinstance(outputs, tuple) else outputs


def run(module: torch.nn.Module, x: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    x = x.clone().requires_grad_()
    y = first(module(x))
    y.backward(cotangent)
    assert x.grad is not None
    return y.detach(), x.grad, {name: param.grad for name, param in module.named_parameters() if param.grad is not None}


MODULES: dict[str, tuple[Build, float, float]] = {
    "linear": (lambda: te.Linear(256, 512, params_dtype=torch.bfloat16), ONE_GEMM_DB, ONE_GRAD_DB),
    "linear-bias-returned": (
        lambda: te.Linear(256, 512, return_bias=True, params_dtype=torch.bfloat16),
        ONE_GEMM_DB,
        ONE_GRAD_DB,
    ),
    "layernorm-linear-split": (
        lambda: te.LayerNormLinear(256, 768, parameters_split=("q", "k", "v"), params_dtype=torch.bfloat16),
        ONE_GEMM_DB,
        ONE_GRAD_DB,
    ),
    "rmsnorm-linear-zero-centered": (
        lambda: te.LayerNormLinear(
            256, 512, normalization="RMSNorm", zero_centered_gamma=True, bias=False, params_dtype=torch.bfloat16
        ),
        ONE_GEMM_DB,
        ONE_GRAD_DB,
    ),
    **{
        f"mlp-{activation}": (
            lambda activation=activation: te.LayerNormMLP(256, 512, activation=activation, params_dtype=torch.bfloat16),
            MLP_DB,
            STEP_GRAD_DB if activation in ("relu", "reglu") else MLP_GRAD_DB,
        )
        for activation in ("gelu", "swiglu", "srelu", "qgeglu", "relu", "geglu", "qgelu", "reglu", "sreglu", "silu")
    },
    # The limit is within the values, and gradients end there.
    "mlp-clamped_swiglu": (
        lambda: te.LayerNormMLP(
            256,
            512,
            activation="clamped_swiglu",
            activation_params={"limit": 2.0, "alpha": 1.702},
            params_dtype=torch.bfloat16,
        ),
        MLP_DB,
        STEP_GRAD_DB,
    ),
    "mlp-checkpoint": (
        lambda: te.LayerNormMLP(256, 512, activation="swiglu", checkpoint=True, params_dtype=torch.bfloat16),
        MLP_DB,
        MLP_GRAD_DB,
    ),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("rows", [256, 77])
def test_values_and_gradients(name: str, rows: int) -> None:
    build, forward_db, backward_db = MODULES[name]
    original, ours = twice(build)
    model = torch.nn.Sequential(ours)
    replace_linears(model)
    x = (torch.randn(rows, 256, device="cuda") * 2 + 0.3).bfloat16()
    cotangent = torch.randn_like(first(original(x)))
    expected, measured = run(original, x, cotangent), run(model[0], x, cotangent)
    assert snr_db(measured[0], expected[0]) > forward_db
    assert snr_db(measured[1], expected[1]) > backward_db
    for key, grad in expected[2].items():
        own = measured[2].get(key.replace("fc1_", "fc1.").replace("fc2_", "fc2."))
        if own is not None:  # parts of a split weight have no gradient of their own
            assert snr_db(own, grad) > backward_db, key


def layers() -> torch.nn.Module:
    return torch.nn.Sequential(
        *(
            te.TransformerLayer(
                256,
                1024,
                4,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                self_attn_mask_type="causal",
                attn_input_format="bshd",
                params_dtype=torch.float32,
            )
            for _ in range(2)
        )
    )


def test_the_linear_layers_of_a_transformer_layer_become_fp8() -> None:
    original, ours = twice(layers)
    replace_linears(ours)
    assert len(report(ours).fp8) == 8 and not report(ours).stays
    assert sum(isinstance(module, FP8TELinear) for module in ours.modules()) == 8
    assert sum(isinstance(module, FP8LayerNormMLP) for module in ours.modules()) == 2
    x = torch.randn(4, 64, 256, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        y, expected = ours(x), original(x)
    assert y.dtype == expected.dtype
    # What the layers add to the residual stream has MLP_DB or better; attention keeps it.
    assert snr_db(y - x, (expected - x).detach()) > MLP_DB - 3.0


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, context: Any) -> tuple[list[float], Bytes]:
    """40 steps on noisy targets, so that the loss has a floor."""
    generator = torch.Generator("cuda").manual_seed(1)
    matrix, losses = torch.randn(256, 256, generator=generator, device="cuda") / 16, []
    for _ in range(40):
        x = torch.randn(8, 64, 256, generator=generator, device="cuda")
        target = (x @ matrix).tanh() + 0.5 * torch.randn(x.shape, generator=generator, device="cuda")
        with torch.autocast("cuda", torch.bfloat16), context():
            loss = (model(x) - x - target).float().square().mean()
        loss.backward()
        held = Bytes.of(model, optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, held


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_transformer_layer_trains_as_in_their_own_precisions(level: str) -> None:
    recipe = pytest.importorskip("transformer_engine.common.recipe")
    ends = {}
    for name in ("bf16", "te"):
        model, _ = twice(layers)
        context = lambda name=name: te.fp8_autocast(enabled=name == "te", fp8_recipe=recipe.DelayedScaling())  # noqa: E731
        losses, plain = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), context)
        ends[name] = sum(losses[-5:])
        assert ends[name] < 5 * 0.8 * losses[0]
    model, _ = twice(layers)
    model, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), level)
    losses, held = train(model, optimizer, lambda: te.fp8_autocast(enabled=False))
    assert sum(losses[-5:]) < 1.02 * ends["bf16"], (losses[-5:], ends)
    assert held.total < {"O1": 0.72, "O2": 0.42, "O3": 0.48}[level] * plain.total, (held, plain)
    assert all(isinstance(layer.weight, ScaledTensor) for layer in model.modules() if isinstance(layer, FP8TELinear))


def test_state_dicts_go_both_ways() -> None:
    original, ours = twice(layers)
    expected = original.state_dict()
    ours, _ = fp8_megatron.initialize(ours, torch.optim.AdamW(ours.parameters()), "O3")
    state = ours.state_dict()
    assert set(state) == set(expected)
    other = layers()
    other.load_state_dict(state)
    for key, value in other.state_dict().items():
        if isinstance(value, Tensor) and value.numel() and value.is_floating_point():
            assert snr_db(value, expected[key]) > 70.0, key  # FP16 masters
    another = layers()
    ours.load_state_dict(another.state_dict())
    for key, value in ours.state_dict().items():
        if value.numel():
            assert snr_db(value, another.state_dict()[key]) > 70.0, key


def test_weights_that_transformer_engine_made_in_fp8() -> None:
    torch.manual_seed(0)
    with te.fp8_model_init(enabled=True):
        module = te.Linear(256, 512, params_dtype=torch.bfloat16)
    expected = module.weight.dequantize().float()
    model = torch.nn.Sequential(module)
    model, _ = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), "O3")
    assert snr_db(model.state_dict()["0.weight"].float(), expected) > 50.0  # BF16
    assert model(torch.randn(32, 256, device="cuda", dtype=torch.bfloat16)).isfinite().all()
