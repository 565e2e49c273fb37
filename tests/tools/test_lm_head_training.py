"""Training with forms of the LM head: the bias of one scale, the report, refused files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import lm_head_training


@pytest.mark.parametrize(("form", "is_biased"), [("16 bits", False), ("one scale", True), ("a scale a token", False)])
def test_what_rows_have_in_common_reaches_the_input_by_one_scale_alone(form: str, is_biased: bool) -> None:
    """A token's gradient of the logits sums to 0, so a row that all rows contain adds nothing to dgrad. Rounding errors
    of 2,048 tokens average to 4.1% / √2048 = 0.1% of the label's element; one scale leaves about 1% of it."""
    generator = torch.Generator().manual_seed(0)
    h, own = torch.randn(2048, 64, generator=generator), 0.3 * torch.randn(512, 64, generator=generator)
    common = 2.0
    labels = torch.multinomial(torch.softmax(h @ own.t(), dim=1), 1, generator=generator).squeeze(1)
    h.requires_grad_()
    lm_head_training.Head.apply(h, own + common, labels, form).backward()
    assert h.grad is not None
    share = h.grad.sum().item() / (common * h.shape[1])  # of one token's label, in the mean over tokens
    assert share < -0.006 if is_biased else abs(share) < 0.003


def test_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_head_training, "_BATCH", 64)
    monkeypatch.setattr(lm_head_training, "_HELD_OUT", 200)
    tokens, output = tmp_path / "tokens.npy", tmp_path / "report.json"
    np.save(tokens, np.random.default_rng(0).integers(0, 128, 1000))
    words = ["--token-file", str(tokens), "--steps", "4", "--interval", "2", "--output", str(output)]
    assert lm_head_training.main(words) == 0
    steps = json.loads(output.read_text())["steps"]
    assert list(steps) == ["2", "4"]
    for forms in steps.values():
        assert list(forms) == list(lm_head_training.FORMS)
        assert forms["16 bits"]["training"] == forms["16 bits"]["validation"] == 0.0
        assert all(abs(figures["validation"]) < 1 for figures in forms.values())
        assert forms["one scale"]["validation"] != 0.0


def test_a_file_that_is_no_tokens_is_an_error(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.npy"
    np.save(wrong, np.zeros(10))
    with pytest.raises(lm_head_training.UserError, match=r"float64 \[10\] is not int64 \[n\] with n above 204096"):
        lm_head_training.main(["--token-file", str(wrong)])
    with pytest.raises(lm_head_training.UserError, match="give a numpy file"):
        lm_head_training.main(["--token-file", str(tmp_path / "none.npy")])
