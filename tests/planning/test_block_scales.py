"""Scales of blocks, under the run's recipe or --fp8-fallback-recipe, are in the predicted memory: as many bytes as the
same calls take on a CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8_megatron.activation_functions import Activation
from fp8_megatron.config.precision import PrecisionConfig
from fp8_megatron.config.schema import Config, ModelConfig, TrainingConfig
from fp8_megatron.models.decoder.costs import fp8_bytes
from fp8_megatron.models.registry import architecture_of
from fp8_megatron.moe.layers.experts import fp8_experts, grouped_by_expert
from fp8_megatron.nn.gemms import LinearParams
from fp8_megatron.planning.activations import predict_peak
from fp8_megatron.quantization.recipe import Recipe
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.sources import TensorSource
from fp8_megatron.storage import RecipeName
from tests.harness.main_grad import KeptGrads
from tests.harness.tiny_gpt import GPT3_STYLE, LLAMA_STYLE, VOCAB_SIZE

TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 512, 256, 128, 6, 2
MIXTURE = replace(
    LLAMA_STYLE,
    hidden_size=HIDDEN,
    num_experts=EXPERTS,
    moe_ffn_hidden_size=FFN,
    moe_router_topk=TOP_K,
    seq_length=TOKENS,
)
COSTS = ("kept_bytes", "forward_bytes", "backward_bytes")


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that calls return and that live. What an operator uses inside is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for storage in (value.untyped_storage() for value in tree_leaves(result) if isinstance(value, Tensor)):
            if storage._cdata not in self._live:
                self._live[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._end, storage._cdata)
        self.peak = max(self.peak, self.now)
        return result

    def _end(self, place: int) -> None:
        self.now -= self._live.pop(place)


class _NoGrads(KeptGrads):
    def accumulate_(self, grad: Tensor) -> None:
        """It is gone."""


def measured(recipe: RecipeName) -> dict[str, int]:
    """Bytes of a call of experts by the cost that predicts them."""
    torch.manual_seed(0)
    x, probs = torch.randn(TOKENS, HIDDEN).bfloat16().requires_grad_(), torch.rand(TOKENS, EXPERTS)
    chosen = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, probs.topk(TOP_K).indices, True)
    layers = []
    for shape in ((EXPERTS, 2 * FFN, HIDDEN), (EXPERTS, HIDDEN, FFN)):
        weight = ScaledTensor(torch.randn(shape).to(torch.float8_e4m3fn), torch.ones(EXPERTS)).requires_grad_()
        weight.main_grad = _NoGrads()  # type: ignore[attr-defined]
        layers.append(LinearParams(weight, None, Recipe(recipe, power_of_two=False).grouped_quantizers()))
    groups, grad = grouped_by_expert(chosen, TOP_K), torch.randn(TOKENS, HIDDEN).bfloat16()
    with LiveBytes() as live:
        output = fp8_experts(x, probs, groups, *layers, Activation("swiglu"))
        forward, kept, live.peak = live.peak, live.now, live.now
        output.backward(grad)
    return {"forward_bytes": forward, "kept_bytes": kept, "backward_bytes": live.peak - kept}


def predicted(model: ModelConfig, recipe: RecipeName, fallback: RecipeName | None = None) -> dict[str, float]:
    precision = PrecisionConfig(fp8_recipe=recipe, fp8_fallback_recipe=fallback)  # type: ignore[arg-type]
    config = Config(model=model, precision=precision, training=TrainingConfig(micro_batch_size=1))
    found = {cost: getattr(architecture_of(model), cost)(config, 0) for cost in COSTS}
    return {**found, "kept_bytes": found["kept_bytes"] * config.tokens_per_micro_batch}


def test_scales_of_experts_rows() -> None:
    """Beside them there are scales of tiles of weights, 4 bytes of 128² elements. A prediction is of the most rows,
    and of both layouts of a token's gradient."""
    plain, blocks = measured("tensorwise"), measured("blockwise")
    expected, expected_blocks = predicted(MIXTURE, "tensorwise"), predicted(MIXTURE, "blockwise")
    for cost, most in zip(COSTS, (1.0, 1.1, 1.25), strict=True):
        of_scales, found = expected_blocks[cost] - expected[cost], blocks[cost] - plain[cost]
        assert found > 4000 and found - 64 <= of_scales <= most * found, cost


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_an_element_of_a_cast(recipe: RecipeName) -> None:
    """In both layouts, beside a scale of a tensor."""
    quantizer = Recipe(recipe, power_of_two=False).linear_quantizers().input
    cast = quantizer.quantize(TensorSource(torch.randn(256, 512).bfloat16(), transposed=True))
    tensors = {id(each): each for each in (cast.payload, cast.payload_t, cast.scale, cast.scale_t) if each is not None}
    config = Config(model=GPT3_STYLE, precision=PrecisionConfig(fp8_recipe=recipe))
    assert sum(each.nbytes for each in tensors.values()) == pytest.approx(2 * 256 * 512 * fp8_bytes(config), abs=8)


@pytest.mark.parametrize("model", [GPT3_STYLE, LLAMA_STYLE, MIXTURE])
def test_a_fallback_counts_as_its_recipe(model: ModelConfig) -> None:
    blocks = predicted(model, "blockwise")
    assert predicted(model, "delayed", "blockwise") == predicted(model, "delayed", "mxfp8") == blocks
    plain = predicted(model, "delayed")
    assert predicted(model, "delayed", "tensorwise") == plain and plain["backward_bytes"] < blocks["backward_bytes"]
    peaks = [
        predict_peak(
            Config(model=model, precision=PrecisionConfig(fp8_recipe="delayed", fp8_fallback_recipe=fallback)),
            VOCAB_SIZE,
            world_size=1,
        )
        for fallback in (None, "blockwise")
    ]
    assert peaks[0].activations + peaks[0].backward <= peaks[1].activations + peaks[1].backward
