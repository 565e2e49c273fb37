"""compare_reductions: the table's file, and the order of the ways in it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import get_args

import pytest

from fp8_megatron.quantization.stats import snr_db
from tools import compare_reductions


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "snr.json"
    small = ["--num-ranks", "2", "8", "--micro-batches", "3", "--blocks-per-tensor", "16"]
    small += ["--local-micro-batches", "2", "40"]
    assert compare_reductions.main(["--output", str(output), *small]) == 0
    report = json.loads(output.read_text())
    assert report["command"].startswith("python tools/compare_reductions.py --output")
    assert report["versions"]["torch"] and report["micro_batches"] == 3
    for kind in get_args(compare_reductions.Kind):
        table = report["snr_db_by_ranks"][kind]
        assert set(table) == set(compare_reductions.REDUCTIONS)
        assert all(set(row) == {"2", "8"} for row in table.values())
    for kind in ("uncorrelated", "correlated"):
        table = report["snr_db_by_ranks"][kind]
        assert table["all_to_all"]["8"] > 30.0 > table["nccl (emulated), settled"]["8"]
        assert table["nccl (emulated), settled"]["8"] > table["nccl (emulated), first step"]["8"]
        assert report["snr_db_of_accumulation"][kind][compare_reductions.ACCUMULATION_OF_OURS] > 30.0
        sums = report["snr_db_of_local_sums"][kind]
        assert sums["default"] == {"2": sums["bf16"]["2"], "40": sums["fp32"]["40"]}
    printed = capsys.readouterr().out
    assert "hierarchical, intra fp8" in printed and "added in E4M3" in printed


@pytest.mark.parametrize("number", ["1", "0", "3", "32"])
def test_a_number_of_ranks_that_cannot_be_is_refused(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        compare_reductions.main(["--num-ranks", "2", number, "--blocks-per-tensor", "2", "--micro-batches", "1"])
    message = f"--num-ranks {number}: give one of 2, 4, 8, 16 (with --blocks-per-tensor 2)"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("mean", [0.1, 0.001])
def test_anti_correlated_ranks_cancel(mean: float) -> None:
    """E4M3 leaves 31.5 dB beside a rank's gradient. The mean over d ranks is `mean` times as large, and d roundings
    average: 31.5 + 10 log10(d) + 20 log10(mean). One tensor of 16 blocks over two decades is uncertain by 2 dB."""
    source = compare_reductions.GradientSource(f"anti-correlated {mean}")  # type: ignore[arg-type]
    values = source.draw(8)
    ratio = (values.mean(dim=0).double().square().mean() / values.double().square().mean()).sqrt().item()
    assert ratio == pytest.approx(mean, rel=0.05)
    measured = snr_db(compare_reductions.reduce_all_to_all(values), values.double().mean(dim=0))
    assert measured == pytest.approx(31.5 + 10 * math.log10(8) + 20 * math.log10(mean), abs=2.0)
