"""Who is asked for what when steps are recorded; a recorder plays CUDA and calls Python again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_megatron.config.io import parse_config
from fp8_megatron.device import memory as device_memory
from fp8_megatron.graphs import exchanges
from fp8_megatron.mcore.runtime import runtime, seed_everything
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.reporting.step_figures import StepFigures
from fp8_megatron.training import train_step
from fp8_megatron.training.batches import Batch
from fp8_megatron.training.build import build_training_state
from fp8_megatron.training.fallback import RecipeFallback
from fp8_megatron.training.graph_choice import GraphChoice
from fp8_megatron.training.run_data import open_run_data
from fp8_megatron.training.step_graph import StepGraph
from tests.harness.played_recordings import PlayedRecorder
from tests.harness.runs import LLAMA_STYLE_FLAGS, tiny_flags

CPU = torch.device("cpu")


class Model:
    """Gives the sum of a step's tokens, at one address for each recording."""

    def __init__(self, recorder: PlayedRecorder) -> None:
        self._recorder = recorder
        self.calls: list[tuple[str, bool]] = []
        self.addresses: set[tuple[int, ...]] = set()

    def __call__(self, batches: list[Batch], *, measures_underflow: bool, samples_casts: bool = False) -> Tensor:
        recorder = self._recorder
        assert exchanges.is_recording() == (recorder.is_recording or recorder.is_launching)
        if recorder.is_recording:
            self.addresses.add(tuple(batch["tokens"].data_ptr() for batch in batches))
        if not recorder.is_launching:
            self.calls.append(("recorded" if recorder.is_recording else "computed", measures_underflow))
        return torch.tensor([float(sum(batch["tokens"].sum() for batch in batches))])


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> PlayedRecorder:
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(device_memory, "_bytes_beside_allocator", 0)
    monkeypatch.setattr(device_memory, "_earlier_peak_gib", 0.0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(exchanges, "_recordables", {})
    return PlayedRecorder()


def loader() -> Iterator[Batch]:
    """Micro-batches whose tokens sum up to 1, 2, 4, 8, …"""
    value = 1
    while True:
        yield {"tokens": torch.tensor([value, 0]), "labels": torch.zeros(2)}
        value *= 2


def make(recorder: PlayedRecorder, prepared: list[None] | None = None, **settings: Any) -> tuple[StepGraph, Model]:
    """A step of two micro-batches, recorded after two."""
    model = Model(recorder)
    prepared = [] if prepared is None else prepared
    settings = {"can_measure": lambda: True, "has_memory": lambda: True, "num_micro_batches": 2, **settings}
    return StepGraph(model, recorder, lambda: prepared.append(None), device=CPU, warmup_steps=2, **settings), model


def test_after_warm_up_each_kind_of_step_is_recorded_and_launched(recorder: PlayedRecorder) -> None:
    prepared: list[None] = []
    graph, model = make(recorder, prepared)
    batches = loader()
    asked = [False, False, False, True, False, True, True]
    figures = [float(graph(batches, measures_underflow=measures)) for measures in asked]
    assert figures == [3.0 * 4**step for step in range(len(asked))]
    # The last step before the first recording has compiled what measuring takes too.
    assert model.calls == [("computed", False), ("computed", True), ("recorded", False), ("recorded", True)]
    assert recorder.num_recordings == len(prepared) == 2 and len(model.addresses) == 1


def test_steps_with_fewer_micro_batches_run_before_the_warm_up(recorder: PlayedRecorder) -> None:
    """While the batch grows nothing is recorded: neither such a step, nor a warm-up that it would be part of."""
    graph, model = make(recorder)
    batches = loader()
    growing = [float(graph(batches, 1, measures_underflow=False)) for _ in range(3)]
    full = [float(graph(batches, 2, measures_underflow=False)) for _ in range(4)]
    assert growing == [1.0, 2.0, 4.0] and full == [8.0 * 3 * 4**step for step in range(4)]
    assert [kind for kind, _ in model.calls] == ["computed"] * 5 + ["recorded"] * 2
    with pytest.raises(AssertionError, match="1 micro-batches after 2"):
        graph(batches, 1, measures_underflow=False)


def test_the_warm_up_goes_on_until_a_step_is_ready(recorder: PlayedRecorder) -> None:
    """The first step after which it is, is the last one of the warm-up, and measures."""
    ready = iter([False, False, True])
    graph, model = make(recorder, is_ready=lambda: next(ready))
    batches = loader()
    for _ in range(6):
        graph(batches, measures_underflow=False)
    computed, recorded = ("computed", False), ("recorded", False)
    assert model.calls == [computed] * 3 + [("computed", True), recorded, ("recorded", True)]


def test_steps_are_recorded_anew_when_their_casts_change(recorder: PlayedRecorder) -> None:
    """Another warm-up step runs first, when the casts are ready."""
    casts, ready = [3], [True]
    graph, model = make(recorder, can_measure=lambda: False, is_ready=lambda: ready[0], casts=lambda: [*casts])
    batches, figures = loader(), []
    for step in range(10):
        if step == 5:
            casts[0], ready[0] = 4, False
        if step == 6:
            ready[0] = True
        figures.append(float(graph(batches, measures_underflow=False)))
    assert figures == [3.0 * 4**step for step in range(10)]
    kinds = [kind for kind, _ in model.calls]
    assert kinds == ["computed"] * 2 + ["recorded"] + ["computed"] * 2 + ["recorded"]


@pytest.mark.parametrize("may_go_on", [True, False])
def test_where_recording_fails_steps_go_on_or_the_run_ends(
    recorder: PlayedRecorder, may_go_on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    graph, model = make(recorder, may_go_on=may_go_on)
    recorder.fails = torch.OutOfMemoryError("no room for the graph")
    batches = loader()
    for _ in range(2):
        graph(batches, measures_underflow=False)
    if not may_go_on:
        with pytest.raises(torch.OutOfMemoryError, match="no room for the graph"):
            graph(batches, measures_underflow=False)
        assert "give --cuda-graph-impl none" in caplog.text
        return
    figures = [float(graph(batches, measures_underflow=measures)) for measures in (True, False)]
    assert figures == [3.0 * 4**step for step in (2, 3)], "the batches of the broken recording are not lost"
    assert model.calls[2:] == [("recorded", False), ("computed", True), ("computed", False)]
    assert recorder.num_releases == 1
    assert "steps go on as Python launches them: recording one failed (no room for the graph)" in caplog.text
    assert "give --cuda-graph-impl none" not in caplog.text


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_step_is_the_same_through_a_recording(recorder: PlayedRecorder, recipe: str) -> None:
    """Loss, norm, underflow and sampled casts of eight steps, some of which measure them; the replay computes in Python
    again."""
    runs, sampled = [], []
    for graphed in (False, True):
        flags = tiny_flags(Path("unused"), fp8_recipe=recipe, fp8_lm_head=recipe == "delayed", train_iters=20)
        config = parse_config(flags)
        with runtime(CPU), initialized(config.parallel, config.model.num_layers, CPU) as topology:
            seed_everything(1, CPU, tensor_parallel_rank=0, pipeline_rank=0)
            data = open_run_data(config, topology)
            state = build_training_state(config, data.padded_vocab_size, topology, CPU)
            graph = train_step.step_graph(state, GraphChoice(True, ""), recorder) if graphed else None
            batches, values, addresses = data.train_loader(0), [], set()
            for step in range(8):
                if step > 3 and (history := state.histories[0]) is not None:
                    addresses.add(history.scale_of(0).data_ptr())
                values.append(
                    train_step.train_step(
                        state,
                        batches,
                        measures_underflow=step % 3 == 0,
                        samples_casts=step == 6,
                        graph=graph,
                    )
                )
                if step == 6:
                    assert state.sampler is not None
                    sampled.append(state.sampler.collect(step).result())
        runs.append(torch.stack(values))
        if recipe == "delayed":
            assert len(addresses) == 1 or not graphed, "a graph reads scales where they were"
    python, recorded = runs
    assert torch.equal(python[:, :3], recorded[:, :3])
    assert len(python[:, 0].unique()) == 8 and recorder.num_recordings == 3
    assert sampled[0] == sampled[1] and len(sampled[0].casts) == (35 if recipe == "delayed" else 32)  # the head's three
    place = [figure.name for figure in fields(StepFigures)].index("grad_underflow_fraction")
    measured = ~torch.isnan(python[:, place])
    assert measured.tolist() == [step % 3 == 0 for step in range(8)]
    assert torch.equal(python[measured, place], recorded[measured, place])


def test_a_step_is_the_same_through_a_recording_when_layers_fall_back(recorder: PlayedRecorder) -> None:
    """Behind the fifth step; steps are recorded anew."""
    runs = []
    settings = {"hidden_size": 128, "seq_length": 128, "fp8_fallback_recipe": "blockwise", "fp8_fallback_iter": 6}
    config = parse_config(tiny_flags(Path("unused"), fp8_recipe="delayed", train_iters=20, **settings))
    for graphed in (False, True):
        with runtime(CPU), initialized(config.parallel, config.model.num_layers, CPU) as topology:
            seed_everything(1, CPU, tensor_parallel_rank=0, pipeline_rank=0)
            data = open_run_data(config, topology)
            state = build_training_state(config, data.padded_vocab_size, topology, CPU)
            graph = train_step.step_graph(state, GraphChoice(True, ""), recorder) if graphed else None
            batches, values, fallback = data.train_loader(0), [], RecipeFallback(state, iteration=0)
            for iteration in range(1, 11):
                fallback.before(iteration)
                values.append(train_step.train_step(state, batches, graph=graph)[:3])
        runs.append(torch.stack(values))
    assert torch.equal(*runs) and len(runs[0][:, 0].unique()) == 10
    assert recorder.num_recordings == 6  # twice three kinds of steps


def test_routers_report_the_same_through_a_recording(recorder: PlayedRecorder) -> None:
    """A recording reads and writes a router's numbers where the first step found them."""
    experts = {"num_experts": 4, "hidden_size": 64, "moe_aux_loss_coeff": 1e-2, "moe_z_loss_coeff": 1e-3}
    config = parse_config(tiny_flags(Path("unused"), **LLAMA_STYLE_FLAGS, **experts, precision="bf16"))
    runs = []
    for graphed in (False, True):
        with runtime(CPU), initialized(config.parallel, config.model.num_layers, CPU) as topology:
            seed_everything(1, CPU, tensor_parallel_rank=0, pipeline_rank=0)
            data = open_run_data(config, topology)
            state = build_training_state(config, data.padded_vocab_size, topology, CPU)
            assert state.layer_table is not None
            graph = train_step.step_graph(state, GraphChoice(True, ""), recorder) if graphed else None
            batches, reports, addresses = data.train_loader(0), [], set()
            for _ in range(6):
                addresses.update(part.numbers()[1].data_ptr() for chunk in state.model for part in chunk.reporting)
                reports.append(train_step.train_step(state, batches, graph=graph)[-state.layer_table.numel :])
            assert len(addresses) == config.model.num_layers
            runs.append(torch.stack(reports))
    assert torch.equal(*runs) and recorder.num_recordings > 0
    assert (runs[0][:, :4].sum(dim=1) == 2 * 2 * 16).all()
