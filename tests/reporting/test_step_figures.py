"""The figures of a step keep their names and values on their way through one tensor."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from fp8_megatron.reporting.metrics import StepMetrics
from fp8_megatron.reporting.step_figures import StepFigures

ALL = {field.name: float(index + 1) for index, field in enumerate(dataclasses.fields(StepFigures))}
OPTIONAL = [field.name for field in dataclasses.fields(StepFigures) if field.default is None]


def packed(figures: dict[str, float]) -> torch.Tensor:
    return StepFigures.pack(**{name: torch.tensor([value]) for name, value in figures.items()})


def test_every_figure_comes_back_under_its_name() -> None:
    tensor = packed(dict(reversed(ALL.items())))  # the order of the call does not matter
    assert tensor.dtype == torch.float32 and tensor.shape == (len(ALL),)
    assert StepFigures.unpack(tensor.tolist()).as_dict() == ALL


@pytest.mark.parametrize("name", OPTIONAL)
def test_a_figure_that_is_missing_is_none(name: str) -> None:
    given = {other: value for other, value in ALL.items() if other != name}
    for figures in (given, {**given, name: math.nan}):
        assert StepFigures.unpack(packed(figures).tolist()).as_dict() == {**given, name: None}


def test_a_loss_that_is_nan_stays_nan() -> None:
    assert math.isnan(StepFigures.unpack(packed({**ALL, "loss": math.nan}).tolist()).loss)


def test_a_figure_that_nobody_knows_or_that_is_left_out_is_refused() -> None:
    with pytest.raises(AssertionError, match="unknown figures: \\['perplexity'\\]"):
        packed({**ALL, "perplexity": 1.0})
    with pytest.raises(KeyError, match="grad_norm"):
        packed({name: value for name, value in ALL.items() if name != "grad_norm"})


def test_a_new_figure_is_one_line() -> None:
    """A subclass stands for that line: the figure is packed, and a report has it under its tag."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class WithOverflow(StepFigures):
        overflow: float | None = dataclasses.field(default=None, metadata={"tag": "fp8/overflow"})

    tensor = WithOverflow.pack(**{name: torch.tensor([value]) for name, value in {**ALL, "overflow": 0.5}.items()})
    assert WithOverflow.unpack(tensor.tolist()).overflow == 0.5


def test_reports_have_every_figure_but_the_request_to_stop() -> None:
    host = {field.name: 1 for field in dataclasses.fields(StepMetrics) if field.name not in ALL}
    metrics = StepMetrics(**ALL, **host)
    names = {*ALL, *host} - {"stop_request"}
    assert set(metrics.record()) == {"kind", *names}
    assert len(metrics.scalars()) == len(names) - 1  # the iteration is what they are drawn over
    assert metrics.scalars()["fp8/autoscale_mu"] == ALL["autoscale_mu"]
