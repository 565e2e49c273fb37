"""Activations that grow far beyond their delayed scales: they are counted, and the step is skipped.

Attention's output is multiplied by a factor, which the projection's cast sees. Its values are near normal, so with the
scale of the largest of n values (about 4 σ) the fraction within the range is that within 4 σ / factor: 3% at 100 and
0.03% at 10⁴.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_megatron.config.schema import PrecisionConfig
from fp8_megatron.device.memory import Mark
from fp8_megatron.mcore.runtime import runtime, seed_everything
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.quantization.amax_history import MOST_SATURATED
from fp8_megatron.quantization.weight_grad import WeightGrad
from fp8_megatron.training.build import TrainingState, build_training_state, slot_names_of_ranks
from fp8_megatron.training.step_results import PendingStep, StepResult
from fp8_megatron.training.train_step import train_step
from tests.harness.tiny_gpt import VOCAB_SIZE, random_batches, tiny_config

CPU = torch.device("cpu")
PROJECTION = "input of decoder.layers.1.self_attention.linear_proj"


class Run:
    """A tiny model whose last layer's attention output can be scaled."""

    def __init__(self, state: TrainingState) -> None:
        self.state, self.factor, self.iteration = state, 1.0, 0
        attention = state.model[0].module.decoder.layers[1].self_attention.core_attention
        attention.register_forward_hook(lambda module, args, output: output * self.factor)
        self.names = slot_names_of_ranks(state)
        tokens = random_batches(20, 1, micro_batch_size=4)[:, 0]
        self.loader = iter(
            {
                "tokens": batch[:, :-1].contiguous(),
                "labels": batch[:, 1:].contiguous(),
                "position_ids": torch.arange(batch.shape[1] - 1).expand_as(batch[:, 1:]),
                "loss_mask": torch.ones(batch[:, 1:].shape),
            }
            for batch in tokens
        )

    def step(self, factor: float = 1.0, *, loss_factor: float = 1.0) -> StepResult:
        self.factor = factor
        self.iteration += 1
        hook = self.state.model[0].module.register_forward_hook(lambda module, args, output: output * loss_factor)
        values = train_step(self.state, self.loader, measures_underflow=loss_factor != 1.0)
        hook.remove()
        return PendingStep(self.iteration, 1e-3, values, Mark(CPU), batch_size=4).result()

    def blamed(self, result: StepResult) -> str | None:
        assert result.cast_report is not None
        suspect = result.cast_report.suspect(self.names, most_saturated=MOST_SATURATED)
        return None if suspect is None else f"{suspect.reason}: {suspect.tensor}"

    def masters(self) -> list[Tensor]:
        return [space.master.load().clone() for space in self.state.optimizer.states]

    def scales(self) -> Tensor:
        (history,) = self.state.histories
        assert history is not None and history.scale is not None
        return history.scale.clone()


@contextmanager
def running(precision: PrecisionConfig) -> Iterator[Run]:
    config = tiny_config(precision=precision)
    config = replace(config, training=replace(config.training, micro_batch_size=4))
    with runtime(CPU), initialized(config.parallel, config.model.num_layers, CPU) as topology:
        seed_everything(1, CPU, tensor_parallel_rank=0, pipeline_rank=0)
        yield Run(build_training_state(config, VOCAB_SIZE, topology, CPU))


@pytest.mark.parametrize("factor", [100.0, 1e4])
@pytest.mark.parametrize("fp8_weight_grad_scaling", ["block", "delayed"])
def test_one_step_far_out_of_range_is_counted_and_skipped(factor: float, fp8_weight_grad_scaling: str) -> None:
    with running(PrecisionConfig(fp8_recipe="delayed", fp8_weight_grad_scaling=fp8_weight_grad_scaling)) as run:  # type: ignore[arg-type]
        for step in range(3):
            healthy = run.step()
            fraction = healthy.figures.input_saturation_fraction
            assert not healthy.skipped and run.blamed(healthy) is None
            assert (
                fraction is None if step == 0 else fraction is not None and fraction < 1e-3
            )  # first: no delayed scale
        before, scales = run.masters(), run.scales()
        bad = run.step(factor)
        assert bad.skipped and math.isfinite(bad.figures.loss)
        assert all(map(torch.equal, run.masters(), before)) and torch.equal(run.scales(), scales)
        # One of 8 inputs is the projection's, of 1/11 of their elements; the layers behind it see other values too.
        assert bad.figures.input_saturation_fraction is not None and bad.figures.input_saturation_fraction > 0.9 / 14
        assert bad.figures.saturated_tensors is not None and bad.figures.saturated_tensors >= 1
        blamed = run.blamed(bad)
        assert blamed is not None and blamed.endswith(f"clamped: {PROJECTION}"), blamed
        after = run.step()
        assert not after.skipped and not all(map(torch.equal, run.masters(), before))


def test_values_that_stay_large_are_followed() -> None:
    """The second step in a row takes the new amaxes, so the third one fits."""
    with running(PrecisionConfig(fp8_recipe="delayed")) as run:
        for _ in range(3):
            run.step()
        skipped = [run.step(100.0).skipped for _ in range(6)]
        assert skipped[:2] == [True, True] and not any(skipped[4:]), skipped


def test_a_little_saturation_is_counted_and_taken() -> None:
    """At 1.3 times the values, only those beyond 3.2 σ are clamped: about a thousandth."""
    with running(PrecisionConfig(fp8_recipe="delayed")) as run:
        for _ in range(3):
            run.step()
        result = run.step(1.3)
        assert not result.skipped and run.blamed(result) is None
        assert result.figures.saturated_tensors is not None and result.figures.saturated_tensors > 0
        assert result.figures.input_saturation_fraction is not None
        assert 0 < result.figures.input_saturation_fraction < MOST_SATURATED


def test_weight_gradients_that_gemms_write_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss 8 times as large makes gradients twice as large as their scales' headroom of 4 allows."""
    monkeypatch.setattr("fp8_megatron.quantization.amax_history.MOST_SATURATED", math.inf)
    with running(PrecisionConfig(fp8_recipe="delayed", fp8_weight_grad_scaling="delayed")) as run:
        for _ in range(3):
            healthy = run.step()
            assert healthy.figures.weight_grad_saturation_fraction is None  # not measured
        (history,) = run.state.histories
        assert history is not None and history.scale is not None
        limits = 464.0 * history.scale
        grads: list[tuple[int, Tensor]] = []
        sample = WeightGrad.sample

        def seen(self: WeightGrad, *args: Any) -> tuple[Tensor, Tensor]:
            assert self.scale is not None
            rows, written = sample(self, *args)
            grads.append((self.scale.slot, rows))
            return rows, written

        monkeypatch.setattr(WeightGrad, "sample", seen)
        bad = run.step(loss_factor=8.0)
        counts = [int((grad.double().abs() > limits[slot].double()).sum()) for slot, grad in grads]
        numel = sum(grad.numel() for _, grad in grads)
        assert len(grads) == 8 and sum(counts) > 0
        # The amax is of the FP32 product: rounded to BF16, a largest element may be at the limit.
        tensors = bad.figures.weight_grad_saturated_tensors
        assert tensors is not None and sum(count > 0 for count in counts) <= tensors <= 8
        assert bad.figures.weight_grad_saturation_fraction == pytest.approx(sum(counts) / numel, rel=1e-6)
        assert bad.figures.saturated_tensors is not None
        assert bad.figures.saturated_tensors > tensors  # inputs and output gradients too
