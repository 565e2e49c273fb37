"""The sample: every 97th gradient, as it was written and in blocks, against the exact product."""

from __future__ import annotations

import pytest
import torch

from fp8_megatron.dtypes import E4M3, E5M2, GRAD_BLOCK
from fp8_megatron.quantization.operand import Format, Quantized
from fp8_megatron.quantization.weight_grad import WeightGrad
from tools.gradient_snr import _EVERY, Sample


@pytest.mark.parametrize(("share_of_amax", "saturates"), [(4.0, False), (0.5, True)])
def test_a_sample(share_of_amax: float, saturates: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    g, x = (torch.randn(64, 128, generator=generator) for _ in range(2))
    g_t, x_t = (
        Quantized(value.to(dtype), None, torch.ones(1), Format(dtype)) for value, dtype in ((g, E5M2), (x, E4M3))
    )
    grad = WeightGrad(g_t, x_t, torch.bfloat16)
    wide = grad.wide().float().view(-1)
    scale = share_of_amax * wide.abs().max() / 448
    payload = (wide / scale).clamp(-448, 448).to(E4M3)
    sample = Sample()
    for _ in range(2 * _EVERY):
        sample.take(grad, payload, scale.expand(wide.numel() // GRAD_BLOCK))
    summary = sample.summary()
    assert summary["gradients"] == 2
    assert 30.5 < summary["block_db"]["min"] < 32.5  # type: ignore[index]
    assert summary["gradients_that_saturate"] == (2 if saturates else 0)
    assert (summary["delayed_db"]["min"] > 30.5) == (not saturates)  # type: ignore[index]
