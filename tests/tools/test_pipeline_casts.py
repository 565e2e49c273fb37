"""benchmarks/pipeline_casts.py: what a sample measures, and runs that add up in a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import pipeline_casts
from benchmarks.pipeline_casts import Sample, border_layers
from fp8_megatron.reporting.parity import RunResult


def test_a_sample_of_tokens_of_different_sizes() -> None:
    """E4M3 keeps 31.5 dB, E5M2 6 less. E4M3's values span 2⁻⁹ to 448: with one scale for all, tokens of 10⁻⁷ vanish."""
    x = torch.randn(64, 2, 256) * torch.tensor([1.0, 1e-7])[:, None]
    sample = Sample(every=2)
    sample.look("gradients", 100 * x)  # not its turn
    assert not sample.found
    sample.look("gradients", x.bfloat16())
    found = sample.summary()["gradients"]
    for form, decibels in (("E4M3, row", 31.5), ("E4M3, block", 31.5), ("E4M3, tensor", 31.5), ("E5M2, tensor", 25.5)):
        assert found[form]["snr_db"] == pytest.approx(decibels, abs=0.5)
    assert found["E4M3, tensor"]["zeroed_fraction"] == pytest.approx(0.5, abs=0.01)
    assert found["E4M3, block"]["zeroed_fraction"] < 1e-3
    assert found["rows"]["largest_over_median_amax"] > 1


def test_borders_are_between_equal_stages() -> None:
    assert border_layers(8, 1) == [] and border_layers(8, 4) == [1, 3, 5]
    with pytest.raises(ValueError, match=r"--stages 3 does not divide num_layers\(8\); choose one that does"):
        border_layers(8, 3)


def test_runs_add_up_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[tuple[str, int]] = []

    def train(words: list[str], level: str, seed: int, stages: int, sample: Sample) -> RunResult:
        trained.append((level, seed))
        loss = 3.0 * (1 + 0.001 * (stages - 1)) + seed
        return RunResult(level, seed, 5, loss, loss, 1.0, 1.0, 1.0, 0, 1.0, [(5, loss)], [(5, loss)])

    monkeypatch.setattr(pipeline_casts, "_train", train)
    first, second = tmp_path / "a.json", tmp_path / "b.json"

    def run(*words: str) -> dict[str, object]:
        monkeypatch.setattr(sys, "argv", ["pipeline_casts.py", *words, "--", "--lr", "1e-3"])
        assert pipeline_casts.main() == 0
        known: dict[str, object] = json.loads(Path(words[0]).read_text())
        return known

    run(str(first), "--stages", "1", "2", "--seeds", "0")
    assert trained == [("1 stage", 0), ("2 stages", 0)]
    known = run(str(second), "--stages", "1", "2", "--seeds", "1", "--add", str(first))
    assert trained[2:] == [("1 stage", 1), ("2 stages", 1)]
    assert known["flags"] == "--lr 1e-3"
    _, two = known["gaps"]  # type: ignore[misc]
    assert two["seeds"] == [0, 1] and two["gaps"] == pytest.approx([0.001, 0.00075])
    assert "2 stages: validation +0.087%" in capsys.readouterr().out
    assert [(run["level"], run["seed"]) for run in known["runs"]] == [  # type: ignore[attr-defined]
        ("1 stage", 0),
        ("1 stage", 1),
        ("2 stages", 0),
        ("2 stages", 1),
    ]


def test_a_llama_in_fp32_learns_and_feels_the_casts(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the model is transformers' (pip install -e '.[dev]')")
    rises = (np.arange(4000) % 50).astype(np.uint16)
    rises.tofile(tmp_path / "tokens.bin")
    words = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 16 --position-embedding-type rope "
        "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 50 "
        f"--micro-batch-size 4 --train-iters 12 --lr 1e-2 --eval-iters 2 --data-path {tmp_path / 'tokens'}"
    ).split()
    level, again, cast = (
        pipeline_casts._train_in_fp32(words, "", 1, stages, Sample(every)) for stages, every in ((1, 0), (1, 0), (2, 1))
    )
    assert level.training == again.training and level.final_loss < level.training[0][1] - 1
    assert level.training[0][1] != cast.training[0][1] and cast.final_loss == pytest.approx(level.final_loss, abs=0.1)
