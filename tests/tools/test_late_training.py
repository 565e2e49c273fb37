"""Late training: levels start from the same weights, and the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import late_training
from benchmarks.late_training import BASE, LEVELS, PHASES, texts, train


def test_levels_start_from_the_weights_and_move_little(tmp_path: Path) -> None:
    data = texts("cosine")
    _, weights = train(LEVELS["bf16"], BASE, data, number=1, num_steps=2)
    settings = {"number": 1, "weights": weights}
    before, kept = train(LEVELS["FP32 masters"], PHASES["fine-tuning"], data, num_steps=0, **settings)  # type: ignore[arg-type]
    assert all(torch.equal(kept[name], value) for name, value in weights.items())
    after, moved = train(LEVELS["FP32 masters"], PHASES["fine-tuning"], data, num_steps=6, **settings)  # type: ignore[arg-type]
    # Adam moves an element by about the learning rate a step. The warm-up of 5 steps adds up to 2 rates; 1 follows.
    largest = max((moved[name] - value).abs().max().item() for name, value in weights.items())
    assert 1e-5 < largest < 6e-5 and abs(after - before) < 0.1
    rounded, _ = train(LEVELS["O3"], PHASES["fine-tuning"], data, num_steps=6, **settings)  # type: ignore[arg-type]
    assert rounded != after and rounded == pytest.approx(after, rel=2e-3)


def test_gaps_are_relative_to_the_first_level_of_the_same_seed() -> None:
    rows = late_training.summary({"cosine": {"FP32 masters": [2.0, 4.0], "O3": [2.02, 3.96]}})
    assert [row["name"] for row in rows] == ["cosine: FP32 masters", "cosine: O3"]
    assert rows[0]["gap_percent"] == 0.0
    assert rows[1]["gap_percent"] == pytest.approx(0.0) and rows[1]["largest_gap_percent"] == pytest.approx(1.0)


def test_a_run_writes_its_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([2.5, 2.4, 2.42, 2.0, 1.9, 1.919])
    taken: list[tuple[int, bool]] = []

    def trained(precision, optimizer, data, *, number, num_steps, weights=None):  # type: ignore[no-untyped-def]
        taken.append((num_steps, weights is not None))
        return (0.0, {"w": torch.ones(1)}) if weights is None else (next(losses), {})

    monkeypatch.setattr(late_training, "train", trained)
    output = tmp_path / "out.json"
    assert late_training.main(["--seeds", "7", "--base-steps", "40", "--steps", "10", "--output", str(output)]) == 0
    assert taken == [(40, False), *[(0, True), (10, True), (10, True)] * 2]
    report = json.loads(output.read_text())
    assert report["loss_before"] == {"cosine": 2.5, "fine-tuning": 2.0}
    assert report["rows"][1]["gap_percent"] == pytest.approx(100 * 0.02 / 2.4)
    assert report["rows"][3]["gap_percent"] == pytest.approx(1.0)
