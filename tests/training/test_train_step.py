"""Values that ranks exchange in a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8_megatron.quantization.cast_report import CastReport, Role, SlotName, Suspect
from fp8_megatron.training.train_step import _over_ranks
from tests.harness.ranks import RankPool, on_default_group

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
    figures, report = _over_ranks(torch.tensor([rank + 1.0]), state, wants_stop=rank != 1, peak_memory_gib=peak)
    return {name: figure.tolist() for name, figure in figures.items()}, None if report is None else report.tolist()


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [
        (1, {"loss": [1.0], "num_stop_requests": [1.0], "peak_memory_gib": [3.0]}),
        (3, {"loss": [6.0], "num_stop_requests": [2.0], "peak_memory_gib": [7.5]}),
    ],
)
def test_sums_and_the_largest_peak_are_everywhere(ranks: RankPool, num_ranks: int, expected: Any) -> None:
    found = ranks.run(on_default_group, _exchanged, False, num_ranks=num_ranks)
    assert found == [(expected, None)] * num_ranks


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
