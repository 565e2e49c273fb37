"""Flat spaces: alignment, completeness, and who counts in the norm."""

from __future__ import annotations

import pytest
import torch

from fp8_megatron.distributed.partition import CHUNK, ParamSpace, StorageClass, partition
from fp8_megatron.formats import GRAD_BLOCK, STATE_BLOCK
from fp8_megatron.quantization.scaled_tensor import ScaledTensor

SHAPES = [(64, 64), (65, 64), (1, 16), (3, 4096)]


def make_params(sharded: bool = True) -> dict[str, torch.nn.Parameter]:
    """Linear weights, matrices and vectors in a mixed order, tagged as megatron-core tags them."""
    params = {}
    for index, shape in enumerate(SHAPES):
        linear = torch.nn.Parameter(ScaledTensor.quantize(torch.ones(shape)))
        matrix = torch.nn.Parameter(torch.ones(shape).bfloat16())
        vector = torch.nn.Parameter(torch.ones(shape[0]).bfloat16())
        for param in (linear, matrix):
            param.tensor_model_parallel = sharded  # type: ignore[attr-defined]
        params |= {f"vector{index}": vector, f"linear{index}": linear, f"matrix{index}": matrix}
    return params


@pytest.mark.parametrize("tensor_parallel_rank", [0, 1])
def test_every_parameter_once_and_aligned(tensor_parallel_rank: int) -> None:
    params = make_params()
    spaces = partition(params.items(), tensor_parallel_rank)
    placed = {slot.name: slot.param for space in spaces for slot in space.slots}
    assert len(placed) == sum(len(space.slots) for space in spaces) == len(params)
    assert all(placed[name] is param for name, param in params.items())
    for space in spaces:
        end = 0
        for slot in space.slots:
            assert slot.offset == end and slot.offset % space.storage.alignment == 0
            assert 0 <= slot.padded - slot.numel < space.storage.alignment
            end += slot.padded
        assert space.numel == end and space.num_params == sum(slot.numel for slot in space.slots)
        is_scaled = [isinstance(slot.param, ScaledTensor) for slot in space.slots]
        assert all(is_scaled) if space.storage is StorageClass.LINEAR else not any(is_scaled)


def test_no_scale_block_crosses_two_parameters() -> None:
    assert StorageClass.LINEAR.alignment % GRAD_BLOCK == 0
    for storage in (StorageClass.LINEAR, StorageClass.MATRIX):  # vectors have no scales
        assert storage.alignment % STATE_BLOCK == 0


def test_spaces_are_by_storage_class_in_the_given_order() -> None:
    spaces = partition(make_params().items(), 0)
    by_class = {space.storage: [slot.name for slot in space.slots] for space in spaces}
    assert by_class == {
        StorageClass.LINEAR: [f"linear{index}" for index in range(len(SHAPES))],
        StorageClass.MATRIX: [f"matrix{index}" for index in range(len(SHAPES))],
        StorageClass.VECTOR: [f"vector{index}" for index in range(len(SHAPES))],
    }


def test_chunk_slots_and_views() -> None:
    space = partition(make_params().items(), 0)[0]
    chunk_slots = space.chunk_slots()
    assert chunk_slots.numel() == space.numel // CHUNK
    flat = torch.arange(space.numel, dtype=torch.float32)
    for index, slot in enumerate(space.slots):
        assert (chunk_slots[slot.offset // CHUNK : (slot.offset + slot.padded) // CHUNK] == index).all()
        assert slot.slice(flat).shape == slot.param.shape
        assert slot.slice(flat).view(-1)[0] == slot.offset
        for block in (1, GRAD_BLOCK, STATE_BLOCK, CHUNK):
            per_block = flat[::block]
            assert slot.padded_slice(per_block, block)[0] == slot.offset
            assert slot.padded_slice(per_block, block).numel() == slot.padded // block
    assert [space.storage for space in partition([], 0)] == []


def counted(spaces: list[ParamSpace]) -> set[str]:
    return {slot.name for space in spaces if space.counts_in_norm for slot in space.slots}


def test_each_parameter_counts_in_the_norm_on_exactly_one_rank() -> None:
    params = make_params()
    sharded = {name for name in params if not name.startswith("vector")}
    assert counted(partition(params.items(), 0)) == set(params)
    assert counted(partition(params.items(), 1)) == sharded  # each rank has its own part of these
    replicated = make_params(sharded=False)
    assert counted(partition(replicated.items(), 1)) == set()


def test_the_last_stages_copy_of_a_tied_embedding_does_not_count() -> None:
    params = make_params()
    params["matrix1"].shared = True  # type: ignore[attr-defined]
    assert counted(partition(params.items(), 0)) == set(params) - {"matrix1"}
