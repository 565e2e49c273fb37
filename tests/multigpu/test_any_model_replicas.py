"""FP8Optimizer over two GPUs and NCCL: one GPU's weights and state, bit for bit but for the last bit of FP32."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from fp8_megatron.any_model.clip_grads import clip_grad_norm_
from fp8_megatron.any_model.recorded_step import record_step
from fp8_megatron.device.group import Group
from tests.any_model.test_data_parallel import Outcome, assert_equal, build, with_equal_gradients
from tests.harness.fp8_models import masters
from tests.harness.ranks import RankPool, on_default_group

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def _equal(group: Group, level: str, dtype: torch.dtype) -> Outcome:
    torch.cuda.set_device(group.rank())
    return with_equal_gradients(group, level, dtype, f"cuda:{group.rank()}")


def _equal_over_nccl(level: str, dtype: torch.dtype) -> Outcome:
    return on_default_group(_equal, level, dtype, backend="nccl")


@pytest.mark.parametrize(("level", "dtype"), [("O1", torch.float32), ("O3", torch.bfloat16), ("O3", torch.float32)])
def test_two_gpus_equal_one(gpus: RankPool, level: str, dtype: torch.dtype) -> None:
    (single,) = gpus.run(_equal_over_nccl, level, dtype, num_ranks=1, timeout_seconds=300.0)
    for outcome in gpus.run(_equal_over_nccl, level, dtype, num_ranks=2, timeout_seconds=300.0):
        assert_equal(outcome, single, last_bit=2.0**-23)


def _trained(group: Group, wraps: bool) -> list[bytes]:
    """The weights after steps on data of each rank's own, as bytes."""
    torch.cuda.set_device(group.rank())
    model, optimizer = build("O3", device=f"cuda:{group.rank()}")
    called = torch.nn.parallel.DistributedDataParallel(model, device_ids=[group.rank()]) if wraps else model
    generator = torch.Generator().manual_seed(group.rank())
    for _ in range(6):
        optimizer.zero_grad()
        for _ in range(2):
            tokens = torch.randint(0, 50, (64,), generator=generator).cuda()
            called(tokens).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    assert optimizer.num_skipped_steps == 0
    return [value.numpy().tobytes() for value in masters(model).values()]


def _trained_over_nccl(wraps: bool) -> list[bytes]:
    return on_default_group(_trained, wraps, backend="nccl")


@pytest.mark.parametrize("wraps", [False, True])
def test_replicas_stay_equal(gpus: RankPool, wraps: bool) -> None:
    """Also under torch's DDP, over two micro-batches, with torch's clipping."""
    first, second = gpus.run(_trained_over_nccl, wraps, num_ranks=2, timeout_seconds=300.0)
    assert first == second


def _in_step(group: Group, level: str, is_recorded: bool) -> tuple[list[bytes], int]:
    """The weights after steps of two micro-batches on data of each rank's own, and the number of recordings."""
    torch.cuda.set_device(group.rank())
    model, optimizer = build(level, device=f"cuda:{group.rank()}", dtype=torch.bfloat16)

    def compute(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens).float().square().mean()
        loss.backward()
        return loss

    step = record_step(compute, model) if is_recorded else compute
    generator = torch.Generator().manual_seed(group.rank())
    losses = []
    for _ in range(8):
        for _ in range(2):
            with nullcontext() if is_recorded else optimizer.no_sync():
                losses.append(step(torch.randint(0, 50, (64,), generator=generator).cuda()).detach())
        clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.num_skipped_steps == 0
    found = [*(value.float() for value in masters(model).values()), torch.stack(losses).cpu()]
    return [value.numpy().tobytes() for value in found], getattr(step, "num_recordings", 0)


def _in_step_over_nccl(level: str, is_recorded: bool) -> tuple[list[bytes], int]:
    return on_default_group(_in_step, level, is_recorded, backend="nccl")


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_recorded_step_has_the_bits_of_no_sync(gpus: RankPool, level: str) -> None:
    expected = gpus.run(_in_step_over_nccl, level, False, num_ranks=2, timeout_seconds=300.0)
    for (found, num_recordings), (plain, _) in zip(
        gpus.run(_in_step_over_nccl, level, True, num_ranks=2, timeout_seconds=300.0), expected, strict=True
    ):
        assert found == plain and num_recordings == 2
