"""A weight's transpose is made once a step."""

from __future__ import annotations

import pytest
import torch

from fp8_megatron.dtypes import E4M3
from fp8_megatron.kernels import ops
from fp8_megatron.nn.links import KeptTranspose
from fp8_megatron.quantization.operand import Format
from fp8_megatron.quantization.scaled_tensor import ScaledTensor


def test_made_once_until_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    transpose = ops.transpose
    monkeypatch.setattr(ops, "transpose", lambda payload: calls.append(1) or transpose(payload))
    kept, weight, format = KeptTranspose(), ScaledTensor.quantize(torch.randn(16, 32)), Format(E4M3)
    first = kept.of(weight, format)
    assert first.payload.shape == (32, 16) and kept.of(weight, format) is first and len(calls) == 1
    weight.payload.view(torch.uint8).zero_()
    kept.forget()
    assert not kept.of(weight, format).payload.float().any() and len(calls) == 2
