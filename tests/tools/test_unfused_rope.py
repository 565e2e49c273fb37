"""Tests of `benchmarks/unfused_rope.py`: RoPE by operations in 16 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks import unfused_rope
from fp8_megatron.kernels import ops
from fp8_megatron.kernels.rope.reference import rotated
from fp8_megatron.nn.rope import cos_sin_table, rope_frequencies
from fp8_megatron.quantization.stats import snr_db

SEQUENCE, BATCH, GROUPS, HEADS, WIDTH = 6, 2, 2, 3, 16


@pytest.fixture
def rotation() -> ops.Rotation:
    return ops.Rotation(cos_sin_table(rope_frequencies(WIDTH, 100.0), SEQUENCE), WIDTH, False)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize("inverse", [False, True])
def test_it_rotates_with_the_rounding_of_16_bits(rotation: ops.Rotation, inverse: bool) -> None:
    x = normal(SEQUENCE, BATCH, GROUPS, HEADS * WIDTH)
    found = unfused_rope.elementwise(x, rotation, inverse=inverse)
    assert found.dtype is torch.bfloat16
    assert 44.0 < snr_db(found, rotated(x, rotation, inverse=inverse)) < 56.0  # rounded once: 56


def test_it_takes_the_places_of_the_kernels(rotation: ops.Rotation) -> None:
    y = normal(SEQUENCE * BATCH, GROUPS * (HEADS + 2) * WIDTH)
    expected = ops.split_rotated_qkv(y, rotation, heads_per_group=HEADS)
    found = unfused_rope.split_rotated_qkv(y, rotation, heads_per_group=HEADS)
    assert all(snr_db(mine, theirs) > 44.0 for mine, theirs in zip(found, expected, strict=True))
    grads = [normal(SEQUENCE, BATCH, GROUPS, heads * WIDTH) for heads in (HEADS, 1, 1)]
    assert snr_db(unfused_rope.unrotate_qkv_grad(grads, rotation), ops.unrotate_qkv_grad(grads, rotation)) > 44.0
    settings = {"scale": torch.full((1,), 2.0**-12), "column_sums": True}
    found = unfused_rope.quantize_rotated_qkv_grad(grads, rotation, torch.float8_e5m2, **settings)
    expected = ops.quantize_rotated_qkv_grad(grads, rotation, torch.float8_e5m2, **settings)
    assert snr_db(found[0].float(), expected[0].float()) > 24.0  # few E5M2 numbers are neighbours
