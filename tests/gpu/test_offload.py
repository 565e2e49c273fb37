"""Activations on the host, loss and MLPs over chunks, on a GPU: the same losses, no waiting host, less memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8_megatron.training.train_step import train_step
from tests.harness.runs import GPU_LLAMA_RUN
from tests.harness.training_states import losses, step_without_waiting, training_states
from tests.parallel.layouts import RECOMPUTE

pytestmark = pytest.mark.gpu

MODEL = {**GPU_LLAMA_RUN, "num_layers": 8, "fp8_recipe": "delayed"}
#: Two micro-batches a step.
RUN = {**MODEL, "global_batch_size": 8, "train_iters": 12}
FULL, MLP = RECOMPUTE["full"], RECOMPUTE["mlp"]
MOVED = {"cpu_offloading_num_layers": 7}


@pytest.mark.parametrize(
    "form", [{}, MLP, FULL, {"precision": "bf16", "fp8_recipe": None}], ids=["none", "mlp", "full", "bf16"]
)
def test_the_losses_are_those_without(tmp_path: Path, form: dict) -> None:
    settings = {**RUN, "deterministic_mode": True, **form}
    expected = losses(tmp_path / "plain", **settings)
    assert len(expected) == 12
    assert losses(tmp_path / "moved", **settings, **MOVED) == expected
    assert losses(tmp_path / "all", **settings, cpu_offloading_num_layers=8) == expected


@pytest.mark.parametrize("head", [False, True])
def test_the_loss_over_chunks_follows(tmp_path: Path, head: bool) -> None:
    """As `test_training.test_every_level_follows_bf16`: 1% over the last five steps."""
    expected = losses(tmp_path / "plain", **RUN, fp8_lm_head=head)
    measured = losses(tmp_path / "chunks", **RUN, fp8_lm_head=head, loss_chunk_size=96)
    assert measured[0] == pytest.approx(expected[0], rel=1e-3)
    assert sum(measured[-5:]) == pytest.approx(sum(expected[-5:]), rel=1e-2)


@pytest.fixture
def build_state() -> Iterator[Callable[..., Any]]:
    """A training state of given flags, its loader and the bytes held before, on the GPU, until the test ends."""
    with training_states(MODEL) as build:
        yield build


@pytest.mark.parametrize("form", [{}, {"loss_chunk_size": 96, "fp8_lm_head": True, **FULL}], ids=["none", "full"])
def test_nothing_waits_for_the_device(build_state: Callable[..., Any], form: dict) -> None:
    state, loader, _ = build_state(**MOVED, **form)
    values = step_without_waiting(state, loader)
    assert torch.isfinite(values[:3]).all()


def _peak(build_state: Callable[..., Any], **settings: object) -> int:
    """Bytes that the third step takes beside what it begins with."""
    state, loader, _ = build_state(
        hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=8, num_layers=12, **settings
    )
    for _ in range(2):
        train_step(state, loader)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train_step(state, loader)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(("count", "is_moved"), [(0, False), (11, True)])
def test_the_device_holds_two_layers(build_state: Callable[..., Any], count: int, is_moved: bool) -> None:
    """4,096 tokens keep 105 MB a layer: x, query, output and x in 1,024 columns, key and value in 256, the MLP's input
    in 8,192, all BF16. Twelve layers are 1,258 MB; two, 134 MB of a layer's backward and the logits less than 500."""
    peak = _peak(build_state, micro_batch_size=16, cpu_offloading_num_layers=count)
    assert (peak < 500e6) == is_moved, peak


def test_an_mlp_in_chunks_takes_less() -> None:
    """4,096 tokens. Backward of a whole MLP makes 134 MB, and 67 of its input to SwiGLU; in 16 chunks 33 MB, 63 of the
    weights' gradients and transposes, and a sixteenth of the rest."""

    def peak(chunks: int) -> int:
        with training_states(MODEL) as build:
            return _peak(build, micro_batch_size=16, **FULL, mlp_chunks_for_training=chunks)

    whole, parts = peak(1), peak(16)
    assert parts < whole - 60e6, (whole, parts)
