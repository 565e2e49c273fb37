"""Gradients released during backward, and the 4-byte form, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8_megatron.quantization.stats import snr_db
from fp8_megatron.sharding.partition import StorageClass
from fp8_megatron.training.train_step import train_step
from tests.harness.runs import GPU_RUN
from tests.harness.training_states import losses, step_without_waiting, training_states

pytestmark = pytest.mark.gpu

MODEL = {**GPU_RUN, "clip_grad": 0}
STRETCH = {"main_params_dtype": "split", "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "uint8"}
RELEASE = {"release_gradients": True}


@pytest.fixture
def build_state() -> Iterator[Callable[..., Any]]:
    """A training state of given flags, its loader and the bytes held before, on the GPU, until the test ends."""
    with training_states(MODEL) as build:
        yield build


@pytest.mark.parametrize("form", [{}, STRETCH, {**STRETCH, **RELEASE}], ids=["O3-released", "split", "released"])
def test_follows_bf16(tmp_path: Path, form: dict) -> None:
    """As `test_training.test_every_level_follows_bf16`: 1% over the last five of 30 steps."""
    expected = losses(tmp_path / "bf16", **MODEL, precision="bf16", train_iters=30)
    measured = losses(tmp_path / "fp8", **MODEL, train_iters=30, **(form or RELEASE))
    assert sum(measured[-5:]) == pytest.approx(sum(expected[-5:]), rel=1e-2)


def test_released_is_stored_bit_for_bit(tmp_path: Path) -> None:
    """O3 rounds to nearest, so its losses do not depend on the part of the state that a launch is given."""
    settings = {**MODEL, "train_iters": 8, "deterministic_mode": True}
    assert losses(tmp_path / "released", **RELEASE, **settings) == losses(tmp_path / "stored", **settings)


def test_nothing_waits_for_the_device(build_state: Callable[..., Any]) -> None:
    state, loader, _ = build_state(**STRETCH, **RELEASE)
    values = step_without_waiting(state, loader)
    assert torch.isfinite(values[:3]).all()


def test_persistent_bytes_per_parameter(build_state: Callable[..., Any]) -> None:
    """What the allocator holds after a step, beside the 16-bit rest: 4.05 bytes a linear weight are stored."""
    state, loader, before = build_state(num_layers=8, hidden_size=1024, num_attention_heads=8, **STRETCH, **RELEASE)
    train_step(state, loader)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    rest = linear = 0
    for buffer, space in zip(state.optimizer.buffers, state.optimizer.states, strict=True):
        if buffer.space.storage is StorageClass.LINEAR:
            linear += buffer.space.num_params
        else:
            rest += sum(space.byte_counts().values()) + buffer.payload.nbytes
    assert linear > 90e6
    assert (held - rest) / linear <= 4.15


@pytest.mark.parametrize("release", [{}, RELEASE], ids=["stored", "released"])
def test_weights_are_their_split_masters(build_state: Callable[..., Any], release: dict) -> None:
    """Every tensor's weight and master are read with one scale, the one that the kernel wrote them with."""
    state, loader, _ = build_state(**STRETCH, **release)
    before = {slot.name: space.get_master(slot).clone() for space, slot in state.optimizer.slots()}
    for _ in range(5):
        train_step(state, loader)
    for space, slot in state.optimizer.slots():
        if space.space.storage is StorageClass.LINEAR:
            master = space.get_master(slot)
            assert snr_db(slot.param.dequantize(), master) > 30.0, slot.name
            # Five Adam steps of at most about 1e-3 each.
            assert 0.0 < (master - before[slot.name]).abs().max().item() < 1.5e-2, slot.name
