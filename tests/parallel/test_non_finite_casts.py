"""One inf or NaN that one cast of one rank sees skips the step on every rank, and the report names the tensor.

The value is put into what the cast reads and nowhere else. Under delayed scaling the cast clamps an inf, and everything
behind it is finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_megatron.config.schema import ParallelConfig, PrecisionConfig
from fp8_megatron.device.memory import Mark
from fp8_megatron.kernels import ops
from fp8_megatron.mcore.initialization import named_quantizers_of_model
from fp8_megatron.mcore.runtime import runtime, seed_everything
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.quantization.amax_history import MOST_SATURATED
from fp8_megatron.quantization.recipe import Quantizer
from fp8_megatron.quantization.sources import QKVGradSource
from fp8_megatron.training.batches import Batch
from fp8_megatron.training.build import TrainingState, build_training_state, slot_names_of_ranks
from fp8_megatron.training.step_results import PendingStep, StepResult
from fp8_megatron.training.train_step import train_step
from tests.harness.ranks import RankPool
from tests.harness.tiny_gpt import VOCAB_SIZE, random_batches, tiny_config, tiny_optimizer

CPU = torch.device("cpu")
DELAYED = PrecisionConfig(fp8_recipe="delayed")
FAST = replace(DELAYED, fp8_weight_grad_scaling="delayed", fp8_lm_head=True)
LAYOUTS = {
    "one": (1, ParallelConfig()),
    "dp2": (2, ParallelConfig()),
    "tp2": (2, ParallelConfig(tensor_model_parallel_size=2)),
    "tp2 sp": (2, ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)),
    "pp2": (2, ParallelConfig(pipeline_model_parallel_size=2)),
}
#: The step that goes wrong. The first takes current scaling.
BAD_STEP, NUM_STEPS = 2, 4
LAYER = "decoder.layers.1."
#: The field of a source that its cast reads.
READ = {
    "TensorSource": "x",
    "GradSource": "g",
    "NormSource": "x",
    "ActivationSource": "z",
    "ActivationGradSource": "grad",
}


@dataclass(frozen=True)
class Place:
    """A cast of the last layer, on the last rank."""

    layer: str
    role: str
    value: float = math.inf


PLACES = [
    Place("self_attention.linear_proj", "input"),
    Place("self_attention.linear_qkv", "input"),
    Place("mlp.linear_fc1", "input", math.nan),
    Place("mlp.linear_fc2", "input", -math.inf),
    Place("mlp.linear_fc2", "output gradient"),
    Place("mlp.linear_fc1", "output gradient", math.nan),
    Place("self_attention.linear_proj", "output gradient"),
    Place("self_attention.linear_qkv", "output gradient", -math.inf),
]


@dataclass
class Step:
    """What one rank saw of one step."""

    loss: float
    norm: float
    moved: int
    pushed: bool
    blamed: str | None


def spoiled(source: Any, value: float) -> Any:
    """`source`, with one element of what its cast reads replaced."""
    if isinstance(source, QKVGradSource):
        key = source.grads[1].clone()
        key[0, 0, 0, 3] = value
        return replace(source, grads=[source.grads[0], key, source.grads[2]])
    name = READ[type(source).__name__]
    read = getattr(source, name).clone()
    read.view(-1)[3] = value
    if isinstance(source, tuple):
        return source._replace(**{name: read})  # type: ignore[attr-defined]
    return replace(source, **{name: read})


class Spoiler:
    """Spoils the first cast of one quantiser in a step, or the gradient that a norm's backward casts early."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.quantizer: Quantizer | None = None
        self.value, self.is_armed = math.inf, False
        quantize, early = Quantizer.quantize, ops.norm_backward_quantize

        def quantize_spoiled(quantizer: Quantizer, source: Any, **kwargs: Any) -> Any:
            if quantizer is self.quantizer and self.is_armed:
                self.is_armed = False
                source = spoiled(source, self.value)
            return quantize(quantizer, source, **kwargs)

        def early_spoiled(grad: Tensor, residual: Tensor | None, *args: Any, **kwargs: Any) -> Any:
            known = None if self.quantizer is None else self.quantizer.known_scale()
            if self.is_armed and known is not None and kwargs["amax_out"].data_ptr() == known[1].data_ptr():
                self.is_armed = False
                grad = grad.clone()
                grad.view(-1)[3] = self.value
            return early(grad, residual, *args, **kwargs)

        patch.setattr(Quantizer, "quantize", quantize_spoiled)
        patch.setattr(ops, "norm_backward_quantize", early_spoiled)


def batches_of(tokens: Tensor) -> Iterator[Batch]:
    """Micro-batches of token ids [..., seq + 1]."""
    for micro_batch in tokens:
        inputs, labels = micro_batch[:, :-1].contiguous(), micro_batch[:, 1:].contiguous()
        positions = torch.arange(inputs.shape[1]).expand_as(inputs)
        yield {"tokens": inputs, "labels": labels, "position_ids": positions, "loss_mask": torch.ones_like(inputs)}


def snapshot(state: TrainingState) -> list[Tensor]:
    """Masters and histories."""
    masters = [space.master.load().clone() for space in state.optimizer.states]
    return masters + [h.history.clone() for h in state.histories if h is not None and h.history is not None]


def train(parallel: ParallelConfig, precision: PrecisionConfig, place: Place, spoils_last: bool) -> list[Step]:
    """`NUM_STEPS` steps of one rank; the last rank spoils the second, and the last one too if `spoils_last`."""
    optimizer = tiny_optimizer(lr=1e-3, clip_grad=0.0 if precision.release_gradients else 1.0)
    config = tiny_config(parallel=parallel, precision=precision, optimizer=optimizer)
    config = replace(config, training=replace(config.training, micro_batch_size=4))
    with (
        runtime(CPU),
        initialized(config.parallel, config.model.num_layers, CPU) as topology,
        pytest.MonkeyPatch.context() as patch,
    ):
        seed_everything(1, CPU, tensor_parallel_rank=topology.tp.rank(), pipeline_rank=topology.pp.rank())
        state = build_training_state(config, VOCAB_SIZE, topology, CPU)
        names = slot_names_of_ranks(state)
        spoiler = Spoiler(patch)
        if topology.rank == topology.world_size - 1:
            (chunk,) = state.model
            quantizers = named_quantizers_of_model(chunk.module)[LAYER + place.layer]
            spoiler.quantizer = quantizers.input if place.role == "input" else quantizers.grad_output
            spoiler.value = place.value
        tokens = random_batches(NUM_STEPS, topology.dp.size(), micro_batch_size=4)[:, topology.dp.rank()]
        loader, steps = batches_of(tokens), []
        for iteration in range(1, NUM_STEPS + 1):
            before = snapshot(state)
            spoiler.is_armed = iteration == BAD_STEP or (spoils_last and iteration == NUM_STEPS)
            values = train_step(state, loader)
            assert not spoiler.is_armed or topology.rank < topology.world_size - 1, "nothing was cast"
            result = PendingStep(iteration, 1e-3, values, Mark(CPU), batch_size=4).result()
            steps.append(_step(result, before, snapshot(state), len(state.optimizer.states), names))
        return steps


def _step(result: StepResult, before: list[Tensor], after: list[Tensor], num_masters: int, names: Any) -> Step:
    same = [torch.equal(old, new) for old, new in zip(before, after, strict=True)]
    report = result.cast_report
    suspect = None if report is None else report.suspect(names, most_saturated=MOST_SATURATED)
    blamed = None if suspect is None else f"{suspect.reason}: {suspect.tensor}, on rank {suspect.rank}"
    figures = result.figures
    return Step(figures.loss, figures.grad_norm, same[:num_masters].count(False), not all(same[num_masters:]), blamed)


def check(every_rank: list[list[Step]], place: Place, *, is_delayed: bool) -> None:
    name = f"not finite: {place.role} of {LAYER}{place.layer}, on rank {len(every_rank) - 1}"
    for steps in every_rank:
        for iteration, step in enumerate(steps, start=1):
            if iteration in (BAD_STEP, NUM_STEPS):
                assert math.isnan(step.norm) and step.moved == 0 and not step.pushed, (iteration, step)
                assert step.blamed == (name if is_delayed else None)
            else:
                assert math.isfinite(step.norm) and math.isfinite(step.loss) and step.moved > 0, (iteration, step)
                assert step.pushed == is_delayed and step.blamed is None


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place.layer}-{place.role}-{place.value}")
def test_one_value_of_any_cast_skips_the_step(ranks: RankPool, place: Place) -> None:
    every_rank = ranks.run(train, LAYOUTS["one"][1], DELAYED, place, True, num_ranks=1)
    check(every_rank, place, is_delayed=True)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
@pytest.mark.parametrize("place", [PLACES[0], PLACES[6]], ids=["forward", "backward"])
def test_every_rank_skips_it(ranks: RankPool, layout: str, place: Place) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    every_rank = ranks.run(train, parallel, FAST, place, True, num_ranks=num_ranks)
    check(every_rank, place, is_delayed=True)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("place", [PLACES[0], PLACES[4]], ids=["forward", "backward"])
def test_scales_from_the_values_pass_it_on_to_the_gradients(ranks: RankPool, recipe: Any, place: Place) -> None:
    every_rank = ranks.run(train, ParallelConfig(), PrecisionConfig(fp8_recipe=recipe), place, True, num_ranks=1)
    check(every_rank, place, is_delayed=False)


def test_released_gradients_are_not_taken_after_it(ranks: RankPool) -> None:
    """Forward saw it, so no parameter moves, though each one's own gradient is finite."""
    precision = replace(DELAYED, release_gradients=True)
    every_rank = ranks.run(train, ParallelConfig(), precision, PLACES[0], True, num_ranks=1)
    check(every_rank, PLACES[0], is_delayed=True)
