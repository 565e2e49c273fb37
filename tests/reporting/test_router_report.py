"""Reports of routers in each output of a run."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8_megatron.moe.router_report import TOKENS_FILE, RouterReport, RouterTable
from fp8_megatron.reporting.metrics import StepMetrics
from tests.reporting.test_metrics import QUIET, open_logger, step

TABLE = RouterTable(layers=(1, 2), num_experts=4, means={"load_balancing_loss": 2, "z_loss": 4})
REPORT = TABLE.unpack([8.0, 4.0, 4.0, 0.0, 6.0, 24.0, 4.0, 4.0, 4.0, 4.0, 12.0, 36.0], num_micro_batches=3)


class Sink:
    """Takes scalars as TensorBoard does."""

    destination = None

    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}

    def log(self, scalars: Any, iteration: int) -> None:
        self.scalars = dict(scalars)

    def close(self) -> None:
        pass


def logged(folder: Path, metrics: StepMetrics, report: RouterReport | None) -> Sink:
    sink = Sink()
    with open_logger(folder, replace(QUIET, log_interval=1), layer_files=[TOKENS_FILE]) as logger:
        logger._sinks.append(sink)
        logger.log_step(metrics, report)
    return sink


def test_a_step_has_the_worst_layer_and_the_mean_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    figures = REPORT.figures()
    assert figures == {
        "load_imbalance": 2.0,
        "min_load": 0.0,
        "idle_experts": 1.0,
        "load_balancing_loss": 1.5,
        "z_loss": 2.5,
    }
    with caplog.at_level(logging.INFO):
        sink = logged(tmp_path, step(1), REPORT)
    assert (
        "| experts' load 0.00 to 2.00 of the mean, 1 idle | load balancing loss 1.5000 | z loss 2.5000 |" in caplog.text
    )
    assert {"moe/load_imbalance": 2.0, "load_balancing_loss": 1.5, "z_loss": 2.5}.items() <= sink.scalars.items()
    assert not any("layer" in tag for tag in sink.scalars)
    assert not (tmp_path / "tokens_per_expert.jsonl").exists()
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert figures.items() <= row.items()
    no_flag = ("seq_load_balancing_loss", "global_load_balancing_loss", "dropped_fraction")
    assert [row[name] for name in no_flag] == [None] * 3


def test_single_layers_have_megatrons_tags(tmp_path: Path) -> None:
    table = replace(TABLE, reports_layers=True, tokens_interval=2)
    bad = replace(REPORT, table=table, means={**REPORT.means, "z_loss": [2.0, math.nan]})
    sink = logged(tmp_path, step(4), bad)
    assert sink.scalars["moe/load_balancing_loss_layer_1"] == 1.0 and sink.scalars["moe/load_imbalance_layer_2"] == 1.0
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row["expert_layers"] == [1, 2] and row["load_balancing_loss_by_layer"] == [1.0, 2.0]
    assert row["z_loss_by_layer"] == [2.0, None]
    assert json.loads((tmp_path / "tokens_per_expert.jsonl").read_text()) == {
        "kind": "tokens_per_expert",
        "iteration": 4,
        "layers": [1, 2],
        "tokens": [[8, 4, 4, 0], [4, 4, 4, 4]],
    }


def test_without_experts_no_output_names_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        sink = logged(tmp_path, step(1), None)
    assert "expert" not in caplog.text and not any("moe" in tag for tag in sink.scalars)
