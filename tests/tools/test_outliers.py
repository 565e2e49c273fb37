"""Outliers that `benchmarks/outliers.py` gives a model: as large as asked for, and little else changes."""

from __future__ import annotations

import pytest
import torch

from benchmarks.outlier_casts import LEAST, Case, products, smooth_scales
from benchmarks.outliers import NUM_TOKENS, align_attention_, align_mlp_
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
    assert align_mlp_(weights, "", factor, channel=7) == pytest.approx(factor, rel=0.02)
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


def test_one_channel_of_attentions_input_has_the_outlier_and_the_layer_stays() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = {"q": 128, "k": 64, "v": 64}
    names = {name: f"self_attn.{name}_proj.weight" for name in sizes}
    weights = {names[name]: 0.1 * torch.randn(size, 128, generator=generator) for name, size in sizes.items()}
    weights["input_layernorm.weight"] = 1.0 + 0.1 * torch.randn(128, generator=generator)
    before = {name: value.clone() for name, value in weights.items()}
    align_attention_(weights, "", 1e4, channel=7)
    x = torch.randn(NUM_TOKENS, 128, generator=generator)
    inputs, inputs_before = (x * w["input_layernorm.weight"] for w in (weights, before))
    assert [*(inputs != inputs_before).any(0).nonzero()] == [7]
    # The largest of 4,096 normal values is 3.8 ± 0.4; these are others than the ones that it was measured with.
    assert float(inputs[:, 7].abs().amax() / inputs.abs().median()) == pytest.approx(1e4, rel=0.4)
    for name in names.values():  # one factor is rounded twice: 2⁻²³ of 1/128 of the power
        assert snr_db(inputs @ weights[name].T, inputs_before @ before[name].T) > 110.0


def test_scales_of_channels_move_exponents_of_a_weight_and_gain_range() -> None:
    case = Case.of(1e6, "divided")
    columns = smooth_scales(case.h)
    assert (columns.log2() % 1 == 0).all() and columns.amax() == 1 and columns.amin() == LEAST
    moved = (case.weight.float() * columns).to(case.weight.dtype).float()
    normal = moved.abs() > 2.0**-6  # the payload was above 16, and its standard deviation is about 100
    assert normal.double().mean() > 0.85 and torch.equal((moved / columns)[normal], case.weight.float()[normal])
    exact = case.h.double() @ (case.weight.double() * case.scale.double()).T
    plain, smooth = (snr_db(products(case, name)[1], exact) for name in ("tensorwise", "smooth"))
    # One rounding of normal numbers has 31.5 dB; two thirds of h are 0 with one scale.
    assert smooth > 31.0 and plain < 20.0
