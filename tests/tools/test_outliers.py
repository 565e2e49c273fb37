"""Outliers that `benchmarks/outliers.py` gives a model: as large as asked for, and little else changes."""

from __future__ import annotations

import pytest
import torch

from benchmarks.outliers import align_
from fp8_megatron.quantization.stats import snr_db


@pytest.mark.parametrize("factor", [1e2, 1e4])
def test_one_channel_has_the_outlier_and_the_rest_of_the_mlp_stays(factor: float) -> None:
    generator = torch.Generator().manual_seed(0)
    names = {"gate": (384, 128), "up": (384, 128), "down": (128, 384)}
    weights = {
        f"mlp.{name}_proj.weight": 0.1 * torch.randn(shape, generator=generator) for name, shape in names.items()
    }
    weights["post_attention_layernorm.weight"] = torch.ones(128)
    before = {name: value.clone() for name, value in weights.items()}
    assert align_(weights, "", factor, channel=7) == pytest.approx(factor, rel=0.02)
    for name, value in weights.items():
        same = torch.ones_like(value, dtype=torch.bool)
        if "mlp" in name:
            (same[:, 7] if "down" in name else same[7]).fill_(False)
        assert torch.equal(value[same], before[name][same])
    x = torch.randn(1000, 128, generator=generator)

    def outputs(w: dict[str, torch.Tensor]) -> torch.Tensor:
        gate, up, down = (w[f"mlp.{name}_proj.weight"] for name in names)
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    # One channel of 384 has other values, as large as before: twice a 384th of the power is new.
    assert snr_db(outputs(weights), outputs(before)) > 20.0
