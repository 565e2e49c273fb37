"""The ablations: each way's figures where they can be derived, and the orderings that docs/ablations.md states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import ablations
from tools.compare_reductions import GradientSource, reduce_nccl


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "ablations.json"
    assert ablations.main(["--output", str(output), "--num-ranks", "4", "--blocks-per-tensor", "8"]) == 0
    report = json.loads(output.read_text())
    for kind in ("uncorrelated", "correlated"):
        ways = report["wire"][kind]["4"]
        assert ways["post"]["overflow"] > 10 * ways["auto"]["overflow"]
        assert ways["auto"]["underflow"] <= ways["pre"]["underflow"] and ways["pre"]["overflow"] == 0
        assert ways["ours"]["snr_db"] > ways["auto"]["snr_db"] + 3 > ways["post"]["snr_db"] + 6
        assert ways["ours"]["underflow"] < ways["auto"]["underflow"] / 10
    assert "heavy tails" in capsys.readouterr().out


def test_pre_and_post_are_the_collectives_first_reductions() -> None:
    """The same scales as mode nccl takes from μ = 1/N and from 1. Its payloads are rounded to blocks before: one more
    rounding, of the same size as the ring's."""
    values = GradientSource("uncorrelated", blocks_per_tensor=8).draw(4)
    exact = values.double().mean(dim=0)
    ones = torch.ones(values.shape[1])
    for mu in (0.25, 1.0):
        theirs, _ = reduce_nccl(values, initial_mu=mu)
        found = ablations.native_sum(values, exact, mu * ones)
        assert found.snr_db == pytest.approx(ablations.worst_snr_db(theirs, exact), abs=1.5)


def test_casts() -> None:
    """One rounding of E4M3 leaves 31.5 dB. A scale that is a hundred times too large moves channels of size 1 from
    30 · 5 / 448 · 2⁶ = 21 units of the smallest normal number below its subnormals."""
    steady, grown, shrunk = (ablations.measure_casts(growth) for growth in (1.0, 3.0, 0.01))
    assert steady["current"] == steady["delayed"] and steady["current"].snr_db == pytest.approx(31.5, abs=0.7)
    assert grown["delayed"].saturated > 0.001 and grown["delayed"].snr_db < 20 < grown["current"].snr_db
    assert grown["current"].saturated == 0 and grown["blockwise"].saturated == 0
    assert shrunk["delayed"].underflow > 20 * shrunk["current"].underflow
    for found in (steady, grown, shrunk):
        assert found["blockwise"].snr_db > 31.0 and found["blockwise"].underflow <= found["current"].underflow
