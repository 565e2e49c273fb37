"""Disturbed runs: which batches a burst replaces, and what is printed at the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import cast_health, loss_spikes
from fp8_megatron.training.run_data import RunData
from tests.harness.runs import tiny_flags
from tools import stress


def test_a_burst_replaces_the_micro_batches_of_its_steps() -> None:
    plain = [
        {"tokens": torch.arange(4) + 4 * n, "labels": torch.arange(4), "loss_mask": torch.ones(4)} for n in range(8)
    ]
    batches = list(stress.with_burst(iter(plain), first=2, count=2, per_step=2))
    replaced = [
        not torch.equal(batch["tokens"], before["tokens"]) for batch, before in zip(batches, plain, strict=True)
    ]
    assert replaced == [False, False, True, True, True, True, False, False]
    assert batches[2]["tokens"].tolist() == batches[2]["labels"].tolist() == [8, 8, 8, 8]
    assert torch.equal(batches[2]["loss_mask"], torch.ones(4))


def test_a_disturbed_run_says_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A learning rate of 2 from step 20 on breaks the model: its loss is a spike. Everything is put back afterwards."""
    loader = RunData.train_loader
    flags = tiny_flags(tmp_path, train_iters=26, fp8_health_interval=1, lr=1e-3)[2:]
    words = [str(tmp_path), "--lr-factor", "2000", "--from", "20", "--", *flags, "--loss-spike-threshold", "5"]
    assert stress.main(words) == 0
    text = capsys.readouterr().out
    changed, spikes = text[text.index("casts that changed, by sample:") :].split("loss spikes:")
    assert "  iteration 2" in changed and "decoder.layers." in changed
    assert "is a spike" in spikes
    assert RunData.train_loader is loader
    assert cast_health.main([str(tmp_path), "--output", str(tmp_path / "summary.json")]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["samples"] == 26 and set(summary["roles"]) == {"input", "weight", "grad_output", "weight_grad"}
    snr = summary["roles"]["input"]["snr_db"]
    assert snr["least"] <= snr["median"] <= snr["largest"]


def test_distances_of_losses_are_those_of_the_guard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Noise of 0.1 and one loss 3 above it: 30 deviations, estimated from 64 steps to 40%. One loss is not finite."""
    generator = torch.Generator().manual_seed(0)
    losses: list[float | None] = (5.0 + 0.1 * torch.randn(200, generator=generator)).tolist()
    losses[150], losses[160] = 8.0, None
    (tmp_path / "run").mkdir()
    records = [
        {"kind": "train", "iteration": step + 1, "loss": loss, "grad_norm": 1.0 + (step == 170)}
        for step, loss in enumerate(losses)
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert loss_spikes.main([str(tmp_path / "run"), "--output", str(tmp_path / "out.json")]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    (row,) = report["runs"]
    assert row["at"][0][1] == 151 and row["largest"] == report["largest"] == pytest.approx(30, rel=0.4)
    assert row["steps"] == report["steps"] == 200 and row["at"][1][0] < 5.0
    assert row["norm_at"][0][1] == 171 and row["norm_at"][1][0] == 0.0
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    assert loss_spikes.main([str(tmp_path / "empty"), "--output", str(tmp_path / "out.json")]) == 2
    assert "has no steps" in capsys.readouterr().err
