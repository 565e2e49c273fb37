"""Values that ranks exchange in a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from fp8_megatron.config.io import parse_config
from fp8_megatron.quantization.cast_report import CastReport, Role, SlotName, Suspect
from fp8_megatron.reporting.metrics_file import METRICS_FILE, read_rows
from fp8_megatron.sharding.gradient import GradBuffer
from fp8_megatron.training import training_run
from fp8_megatron.training.stopping import StopReason, request_of
from fp8_megatron.training.train_step import _over_ranks
from fp8_megatron.training.trainer import Trainer
from tests.harness.ranks import RankPool, on_default_group
from tests.harness.runs import tiny_flags

#: Of each rank's two model chunks the head of the report: the first bad slot, the largest fraction and its slot.
HEADS = [
    [[0.0, 0.25, 2.0], [2.0, 0.5, 1.0]],
    [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
    [[3.0, 0.75, 2.0], [1.0, 0.0, 0.0]],
]
#: Of each role the saturated and cast elements and the saturated tensors; rank 1 has no FP8 layer.
SUMS = [[2.0, 100.0, 1.0], [0.0, 50.0, 0.0], [0.0, 0.0, 3.0], *3 * [[0.0, 0.0, 0.0]]]
NAMES = [SlotName("fc1", Role.INPUT), SlotName("qkv", Role.INPUT), SlotName("qkv", Role.GRAD_OUTPUT)]


def _exchanged(group: torch.distributed.ProcessGroup, reports: bool) -> tuple[dict[str, list[float]], Any]:
    rank = group.rank()
    topology = SimpleNamespace(world_size=group.size(), rank=rank)
    histories: list[Any] = [None, None]
    if reports:
        made = [torch.tensor(head + [value for sums in SUMS for value in sums]) for head in HEADS[rank]]
        histories = [SimpleNamespace(report=None if rank == 1 else report) for report in made]
    state: Any = SimpleNamespace(topology=topology, device=torch.device("cpu"), histories=histories)
    peak = [3.0, 7.5, 5.0][rank]
    stop = [StopReason.DURATION, StopReason.SIGNAL, None][rank]
    figures, reports = _over_ranks(torch.tensor([rank + 1.0]), state, stop=stop, peak_memory_gib=peak)
    assert request_of(figures["stop_request"].item()) is (stop if group.size() == 1 else StopReason.SIGNAL)
    return {name: figure.tolist() for name, figure in figures.items()}, reports.tolist()


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [
        (1, {"loss": [1.0], "stop_request": [1.0], "peak_memory_gib": [3.0]}),
        (3, {"loss": [6.0], "stop_request": [2.0], "peak_memory_gib": [7.5]}),
    ],
)
def test_sums_the_largest_peak_and_why_to_stop_are_everywhere(ranks: RankPool, num_ranks: int, expected: Any) -> None:
    found = ranks.run(on_default_group, _exchanged, False, num_ranks=num_ranks)
    assert found == [(expected, [])] * num_ranks


def test_reports_of_casts_are_everywhere(ranks: RankPool) -> None:
    (figures, values), *others = ranks.run(on_default_group, _exchanged, True, num_ranks=3)
    assert others == [(figures, values)] * 2 and figures["loss"] == [6.0]
    report = CastReport.unpack(values, num_chunks=2)
    assert report.heads == HEADS
    found = report.figures()
    assert found["input_saturation_fraction"] == 0.02 and found["grad_output_saturation_fraction"] == 0.0
    # No head: no figure. Four reports have 1 + 3 saturated tensors each.
    assert found["head_input_saturation_fraction"] is None and found["saturated_tensors"] == 16.0


def test_the_tensor_to_blame_is_the_first_bad_one_or_the_most_saturated() -> None:
    """Forward runs the first chunk on all ranks, then the second; backward runs the other way."""
    sums = [value for of_role in SUMS for value in of_role]

    def suspect(heads: list[list[list[float]]]) -> Suspect | None:
        return CastReport(sums, heads).suspect(lambda rank, chunk: NAMES, most_saturated=0.5)

    assert suspect(HEADS) == Suspect(0, NAMES[1], "not finite")
    saturated = [[[0.0, *head[1:]] for head in of_rank] for of_rank in HEADS]
    assert suspect(saturated) == Suspect(2, NAMES[1], "75.00% clamped")
    assert suspect([of_rank[1:] for of_rank in saturated]) is None
    only_backward = [[[3.0, 0.0, 0.0], [0.0, 0.0, 0.0]], [[0.0, 0.0, 0.0], [3.0, 0.0, 0.0]]]
    assert suspect(only_backward) == Suspect(1, NAMES[2], "not finite")
    assert suspect([[[0.0, 0.0, 0.0]]]) is None
    assert str(NAMES[2]) == "output gradient of qkv"


_Watched = TypeVar("_Watched")


def _fit_on_stages(
    folder: Path, layout: str, look: Callable[[list[GradBuffer]], _Watched], words: dict[str, Any]
) -> list[_Watched]:
    """Train 3 steps on two pipeline stages; after each, what `look` finds in this rank's gradients."""
    stages = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": layout}
    step, found = training_run.train_step, []

    def watched(state: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        packed = step(state, *args, **kwargs)
        found.append(look(state.optimizer.buffers))
        return packed

    training_run.train_step = watched
    try:
        settings = {**stages, **words, "fp8_recipe": "delayed", "train_iters": 3, "log_interval": 1}
        Trainer(parse_config(tiny_flags(folder, **settings))).fit()
    finally:
        training_run.train_step = step
    return found


def _auto_scaling(buffers: list[GradBuffer]) -> tuple[float, float]:
    """The largest saturated fraction and least μ, ±inf where there is no tensor."""
    autoscales = [autoscale for buffer in buffers for autoscale in buffer.autoscales]
    saturated = [value for autoscale in autoscales for value in autoscale.saturated_fraction.tolist()]
    mus = [value for autoscale in autoscales for value in autoscale.mu.tolist()]
    return max(saturated, default=-math.inf), min(mus, default=math.inf)


def _counts(buffers: list[GradBuffer]) -> tuple[list[int], ...]:
    """What is counted: underflow, and elements that clamp."""
    counts = [[buffer.underflow, buffer.clamped] for buffer in buffers]
    known = [[count for count in of_kind if count is not None] for of_kind in zip(*counts, strict=True)]
    return tuple(sum(of_kind, torch.zeros(2, dtype=torch.int64)).tolist() for of_kind in known)


@pytest.mark.parametrize("layout", ["Et|tL", "E|ttL"])
def test_auto_scaling_is_reported_of_every_stage(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    """Also where the first stage, which reports, has no FP8 gradient."""
    everyones = ranks.run(_fit_on_stages, tmp_path, layout, _auto_scaling, {"fp8_grad_reduce": "nccl"}, num_ranks=4)
    reported = [record for record in read_rows(tmp_path / METRICS_FILE) if record["kind"] == "train"]
    for record, of_ranks in zip(reported, zip(*everyones, strict=True), strict=True):
        worst = max(saturated for saturated, _ in of_ranks)
        assert record["grad_saturation_fraction"] == (worst if worst >= 0 else None)  # the first step has none
        assert record["autoscale_mu"] == min(mu for _, mu in of_ranks)
    assert reported[-1]["grad_saturation_fraction"] is not None


@pytest.mark.parametrize("layout", ["Et|tL", "E|ttL"])
def test_underflow_and_clamped_gradients_are_those_of_all_ranks(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    """Also where the first stage, which reports, has no FP8 gradient."""
    everyones = ranks.run(_fit_on_stages, tmp_path, layout, _counts, {}, num_ranks=4)
    reported = [record for record in read_rows(tmp_path / METRICS_FILE) if record["kind"] == "train"]
    for record, of_ranks in zip(reported, zip(*everyones, strict=True), strict=True):
        (nonzero, lost), (written, clamped) = torch.tensor(of_ranks, dtype=torch.float64).sum(0).tolist()
        assert record["grad_underflow_fraction"] == pytest.approx(lost / nonzero, rel=1e-6)
        expected = clamped / written if written else None
        assert record["weight_grad_saturation_fraction"] == (expected and pytest.approx(expected, rel=1e-6))
    assert any(record["weight_grad_saturation_fraction"] is not None for record in reported)
