"""Scale blocks that were saved whole are copied, whatever rectangles they were cut into."""

from __future__ import annotations

import pytest
import torch

from fp8_megatron.checkpoint.encoding import Encoded
from fp8_megatron.checkpoint.saved_blocks import SavedBlocks
from fp8_megatron.dtypes import STATE_BLOCK, StorageDtype
from fp8_megatron.kernels import ops
from fp8_megatron.optimizer.state import StateTensor

NUMEL, LENGTH = 1500, 1536


def stored_run(dtype: StorageDtype) -> StateTensor:
    """State whose blocks have random codes, so that no block's largest value has the largest code."""
    stored = StateTensor(torch.zeros(LENGTH, dtype=dtype.torch_dtype), torch.rand(LENGTH // STATE_BLOCK) + 0.5)
    assert stored.scales is not None
    if dtype in (StorageDtype.INT8, StorageDtype.UINT8):
        stored.payload[:NUMEL] = torch.randint(1, 100, (NUMEL,)).to(dtype.torch_dtype)
    else:
        stored.payload[:NUMEL] = torch.rand(NUMEL).to(dtype.torch_dtype)
    return stored


def reencoded(stored: StateTensor) -> StateTensor:
    again = StateTensor(torch.zeros_like(stored.payload), torch.ones_like(stored.scales))  # type: ignore[arg-type]
    again.store_(stored.load())
    return again


@pytest.mark.parametrize("dtype", [StorageDtype.INT8, StorageDtype.UINT8, StorageDtype.FP16, StorageDtype.FP8])
@pytest.mark.parametrize("cuts", [[], [256], [100, 700], [1, 2, 1499], [255, 257, 1280]], ids=str)
def test_all_rectangles_together_are_the_state(dtype: StorageDtype, cuts: list[int]) -> None:
    stored = stored_run(dtype)
    run = Encoded.of_state(stored.payload, stored.scales)
    blocks = SavedBlocks(LENGTH, NUMEL)
    for start, stop in zip([0, *cuts], [*cuts, NUMEL], strict=True):
        blocks.take(run.rectangle(start, (stop - start,)), 0, stop - start, start)
    own = reencoded(stored)
    assert not torch.equal(own.scales, stored.scales)  # type: ignore[arg-type]
    blocks.put(own, stored.load())
    assert torch.equal(own.payload.view(torch.uint8), stored.payload.view(torch.uint8))
    assert torch.equal(own.scales, stored.scales)  # type: ignore[arg-type]


def test_blocks_that_are_not_whole_or_lie_otherwise_stay() -> None:
    stored = stored_run(StorageDtype.INT8)
    run = Encoded.of_state(stored.payload, stored.scales)
    blocks, own = SavedBlocks(LENGTH, NUMEL), reencoded(stored)
    before = StateTensor(own.payload.clone(), own.scales.clone())  # type: ignore[union-attr]
    blocks.take(run.rectangle(0, (300,)), 0, 300, 0)  # the first block, and a part of the second
    blocks.take(run.rectangle(512, (512,)), 0, 512, 520)  # not at a border of blocks
    blocks.put(own, stored.load())
    assert torch.equal(own.payload[:256], stored.payload[:256])
    assert torch.equal(own.payload[256:], before.payload[256:])
    assert ops.load_state(*own)[:256].equal(ops.load_state(*stored)[:256])


def test_another_dtype_is_not_taken() -> None:
    stored = stored_run(StorageDtype.INT8)
    blocks = SavedBlocks(LENGTH, NUMEL)
    blocks.take(Encoded.of_state(stored.payload, stored.scales), 0, NUMEL, 0)
    other = StateTensor(torch.zeros(LENGTH, dtype=torch.float16), torch.ones(LENGTH // STATE_BLOCK))
    blocks.put(other, stored.load())
    assert not other.payload.any()


@pytest.mark.parametrize("dtype", [StorageDtype.INT8, StorageDtype.UINT8])
def test_values_in_fp32_get_the_scales_that_a_gpus_step_has_stored(dtype: StorageDtype) -> None:
    """It may give a block's largest value the second largest code. Two blocks are not of such a step."""
    second, num_blocks = torch.iinfo(dtype.torch_dtype).max - 1, 500
    codes = torch.randint(-second if dtype is StorageDtype.INT8 else 1, second + 1, (num_blocks, STATE_BLOCK))
    codes[torch.arange(num_blocks), torch.randint(STATE_BLOCK, (num_blocks,))] = second
    codes[::2] *= 1 if dtype is StorageDtype.UINT8 else -1
    scales = torch.exp2(30 * torch.rand(num_blocks) - 40)
    stored = StateTensor(codes.to(dtype.torch_dtype).flatten(), scales)
    value = stored.load()
    value[0], value[511] = value[:STATE_BLOCK].abs().max() * 1.01, torch.nan
    rounded = reencoded(StateTensor(stored.payload, stored.scales))
    rounded.store_(value)
    first = rounded.payload.clone().view_as(codes), rounded.scales.clone()  # type: ignore[union-attr]
    assert not torch.equal(first[1], scales)
    SavedBlocks(value.numel(), value.numel()).put(rounded, value)
    assert torch.equal(rounded.payload.view_as(codes)[2:], stored.payload.view_as(codes)[2:])
    assert torch.equal(rounded.scales[2:], scales[2:])  # type: ignore[index]
    assert torch.equal(rounded.payload.view_as(codes)[:2], first[0][:2]) and rounded.scales[0] == first[1][0]  # type: ignore[index]
