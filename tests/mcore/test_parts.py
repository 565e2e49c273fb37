"""A layer's part in the place of the MLP is built, trained and asked for its numbers as `mcore.parts` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from fp8_megatron.config.schema import PrecisionConfig
from fp8_megatron.mcore.parts import Parts, ReportingPart
from fp8_megatron.nn.links import LayerLinks
from fp8_megatron.quantization.recipe import Recipe
from fp8_megatron.training import build
from tests.harness.tiny_gpt import LLAMA_STYLE, TinyGPT, random_batches, tiny_config, train_tiny_gpt


class Gain(torch.nn.Module):
    """x · (1 + gain), where the MLP would be; counts the calls of a step."""

    def __init__(self, config: Any, pg_collection: Any, layer_number: int) -> None:
        super().__init__()
        self.layer_number, self.calls = layer_number, [0]
        self.gain = torch.nn.Parameter(torch.zeros(config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden_states: Tensor, **unused: Any) -> tuple[Tensor, None]:
        self.calls[-1] += 1
        return hidden_states * (1 + self.gain), None

    def start_step(self) -> None:
        self.calls.append(0)

    def numbers(self) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(self.calls[-1])]), torch.zeros(0)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_another_part_takes_the_place_of_an_mlp(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, finished, found = list[bool](), list[int](), list[Any]()

    def gain(recipe: Recipe | None, links: LayerLinks) -> ModuleSpec:
        asked.append(recipe is not None)
        return ModuleSpec(module=Gain)

    def after_gradients(parts: Sequence[ReportingPart]) -> None:
        finished.append(len(parts))

    def keep(gpt: TinyGPT) -> None:
        found.extend(gpt.model[0].reporting)

    monkeypatch.setattr(build, "parts_of", lambda config: Parts(mlps={1: gain}, after_gradients=after_gradients))
    config = tiny_config(LLAMA_STYLE, precision=PrecisionConfig(precision=precision))  # type: ignore[arg-type]
    config = replace(
        config, training=replace(config.training, recompute_granularity="selective", recompute_modules=("mlp",))
    )
    run = train_tiny_gpt(config, random_batches(1, 2).expand(3, -1, -1, -1), before_training=keep)
    (part,) = found
    assert asked == [precision == "fp8"] and finished == [1] * 3
    assert (part.layer_number, part.calls) == (2, [0, 2, 2, 2])
    assert run.losses[-1] < run.losses[0] - 0.1
    assert run.weights["decoder.layers.1.mlp.gain"].abs().max() > 0
    assert "decoder.layers.0.mlp.linear_fc1.weight" in run.weights
