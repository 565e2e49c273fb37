"""Flat spaces: alignment, completeness, and what other groups share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from fp8_megatron.dtypes import CHUNK, GRAD_BLOCK, STATE_BLOCK
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.sharding.partition import StorageClass, partition
from fp8_megatron.sharding.replicas import Replicas, Sharing
from fp8_megatron.sharding.transport import SendMemory

CPU = torch.device("cpu")
SHAPES = [(64, 64), (65, 64), (1, 16), (3, 4096)]


@dataclass(frozen=True)
class OtherGroup:
    """A group of ranks beside the replicas."""

    name: str
    own_rank: int = 0

    def rank(self) -> int:
        return self.own_rank


def replicas(num_shards: int, index: int = 0) -> Replicas:
    return Replicas(num_shards, index, SendMemory(CPU), SendMemory(CPU))


def cut_over(num_shards: int, index: int = 0) -> Callable[[torch.nn.Parameter], Sharing]:
    """All parameters alike, on one of so many replicas."""
    sharing = Sharing(replicas(num_shards, index))
    return lambda _: sharing


def make_params() -> dict[str, torch.nn.Parameter]:
    """Linear weights, matrices and vectors in a mixed order."""
    params = {}
    for index, shape in enumerate(SHAPES):
        linear = torch.nn.Parameter(ScaledTensor.quantize(torch.ones(shape)))
        matrix = torch.nn.Parameter(torch.ones(shape).bfloat16())
        vector = torch.nn.Parameter(torch.ones(shape[0]).bfloat16())
        params |= {f"vector{index}": vector, f"linear{index}": linear, f"matrix{index}": matrix}
    return params


def test_every_parameter_once_and_aligned() -> None:
    params = make_params()
    spaces = partition(params.items())
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
    for storage in (StorageClass.LINEAR, StorageClass.MATRIX):  # vectors' state has no scales
        assert storage.alignment % STATE_BLOCK == 0


def test_spaces_are_by_storage_class_in_the_given_order() -> None:
    spaces = partition(make_params().items())
    by_class = {space.storage: [slot.name for slot in space.slots] for space in spaces}
    assert by_class == {
        StorageClass.LINEAR: [f"linear{index}" for index in range(len(SHAPES))],
        StorageClass.MATRIX: [f"matrix{index}" for index in range(len(SHAPES))],
        StorageClass.VECTOR: [f"vector{index}" for index in range(len(SHAPES))],
    }


def test_chunk_matrices_and_views() -> None:
    (space,) = (space for space in partition(make_params().items()) if space.storage is StorageClass.LINEAR)
    chunk_matrices = space.shard_chunk_matrices()
    assert chunk_matrices.numel() == space.numel // CHUNK
    flat = torch.arange(space.numel, dtype=torch.float32)
    for index, slot in enumerate(space.slots):
        assert (chunk_matrices[slot.offset // CHUNK : (slot.offset + slot.padded) // CHUNK] == index).all()
        assert slot.slice(flat).shape == slot.param.shape
        assert slot.slice(flat).view(-1)[0] == slot.offset
        for block in (1, GRAD_BLOCK, STATE_BLOCK, CHUNK):
            per_block = flat[::block]
            assert slot.padded_slice(per_block, block)[0] == slot.offset
            assert slot.padded_slice(per_block, block).numel() == slot.padded // block
    assert [space.storage for space in partition([])] == []


def test_the_first_of_the_duplicates_counts_in_the_norm() -> None:
    params = make_params()

    def counted(rank: int) -> set[str]:
        """The parameters that a rank counts; vectors have duplicates on other ranks."""
        duplicated, alone = Sharing(replicas(1), OtherGroup("tp", rank)), Sharing(replicas(1))  # type: ignore[arg-type]
        spaces = partition(params.items(), lambda param: duplicated if param.ndim == 1 else alone)
        return {slot.name for space in spaces if space.sharing.counts_in_norm for slot in space.slots}

    assert counted(0) == set(params)
    assert counted(1) == {name for name in params if not name.startswith("vector")}


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("bucket_numel", [1, 3 * CHUNK * 8, 1 << 30])
def test_every_element_has_one_owner_and_all_own_alike(num_shards: int, bucket_numel: int) -> None:
    """Whatever the shapes and the number of ranks: fragments tile each parameter, shards tile the space."""
    params = make_params()
    cuts = [
        partition(params.items(), cut_over(num_shards, index), bucket_numel=bucket_numel) for index in range(num_shards)
    ]
    for spaces in zip(*cuts, strict=True):
        space = spaces[0]
        alignment = space.storage.alignment
        assert space.numel == sum(bucket.numel for bucket in space.buckets)
        assert space.shard_numel * num_shards == space.numel
        for bucket in space.buckets:
            assert bucket.numel % (num_shards * alignment) == 0 and bucket.numel > 0
            # Blocks, not fractions of them; at most what was asked for, or the least that can be cut.
            assert bucket.numel <= max(bucket_numel, num_shards * alignment)
        owners = torch.zeros(space.numel, dtype=torch.int64)
        for rank, own in enumerate(spaces):
            in_shard = torch.zeros(own.shard_numel, dtype=torch.int64)
            for slot in own.slots:
                for part in own.fragments(slot):
                    assert part.shard_start % alignment == part.slot_start % alignment == part.length % alignment == 0
                    start = slot.offset + part.slot_start
                    owners[start : start + part.length] += 1 << rank
                    in_shard[part.shard_start : part.shard_start + part.length] += 1
            assert in_shard.max() <= 1
        padding = space.numel - sum(slot.padded for slot in space.slots)
        assert all(owner.bit_count() <= 1 for owner in owners.unique().tolist())
        assert (owners == 0).sum() == padding


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_bucket_views_and_spans_agree_with_fragments(num_shards: int) -> None:
    """What a reduce-scatter of the buckets leaves in a shard is what fragments say is there."""
    params = make_params()
    for index in range(num_shards):
        for space in partition(params.items(), cut_over(num_shards, index), bucket_numel=4 * CHUNK * num_shards):
            flat = torch.arange(space.numel)
            shard = torch.full((space.shard_numel,), -1)
            for bucket in space.buckets:
                bucket.of_shard(shard).copy_(bucket.of_space(flat).view(num_shards, -1)[index])
            for slot in space.slots:
                for part in space.fragments(slot):
                    expected = slot.offset + part.slot_start + torch.arange(part.length)
                    assert torch.equal(shard[part.shard_start : part.shard_start + part.length], expected)
                spans = space.spans(slot)
                assert [span.slot_start for span in spans] == [
                    sum(span.length for span in spans[:i]) for i in range(len(spans))
                ]
                assert sum(span.length for span in spans) == slot.padded
                for span in spans:
                    assert span.bucket.start + span.bucket_start == slot.offset + span.slot_start
            if space.storage is StorageClass.LINEAR:
                slots = space.shard_chunk_matrices()
                for number, slot in enumerate(space.slots):
                    for part in space.fragments(slot):
                        chunks = slots[part.shard_start // CHUNK : (part.shard_start + part.length) // CHUNK]
                        assert (chunks == number).all()


def test_what_other_groups_share_is_a_space_of_its_own() -> None:
    """The ranks of such a group cut it alike, even if they hold other parameters too."""
    params = make_params()
    summed = Sharing(replicas(4), summed_over=OtherGroup("pipeline ends"))  # type: ignore[arg-type]
    fewer = Sharing(replicas(2), grad_factor=0.5)

    def sharing_of(param: torch.nn.Parameter) -> Sharing:
        if param is params["matrix1"]:
            return summed
        return fewer if param is params["linear0"] or param is params["linear2"] else Sharing(replicas(4))

    spaces = partition(params.items(), sharing_of)
    names = {
        space.sharing: [slot.name for slot in space.slots] for space in spaces if space.sharing != Sharing(replicas(4))
    }
    assert names == {summed: ["matrix1"], fewer: ["linear0", "linear2"]}
    assert [space.num_shards for space in spaces if space.sharing == fewer] == [2]
    (alone,) = partition([("matrix1", params["matrix1"])], sharing_of)
    beside = next(space for space in spaces if space.sharing == summed)
    assert alone.numel == beside.numel and alone.fragments(alone.slots[0]) == beside.fragments(beside.slots[0])


@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("bucket_numel", [1, 3 * CHUNK, 8 * CHUNK, 1 << 30])
def test_whole_linears_lie_in_one_bucket_each(num_shards: int, bucket_numel: int) -> None:
    shapes = [(4 * CHUNK, 1), (8 * CHUNK, 1), (4 * CHUNK, 3), (4 * CHUNK, 1), (4 * CHUNK, 1)]
    params = {str(i): torch.nn.Parameter(ScaledTensor.quantize(torch.ones(shape))) for i, shape in enumerate(shapes)}
    (space,) = partition(params.items(), cut_over(num_shards), bucket_numel=bucket_numel, whole_linears=True)
    held = [len(space.spans(slot)) for slot in space.slots]
    assert held == [1] * len(shapes)
    assert [bucket.start for bucket in space.buckets] == [0, *(bucket.stop for bucket in space.buckets[:-1])]
    assert space.buckets[-1].stop == space.numel
    for bucket in space.buckets:
        inside = [slot for slot in space.slots if bucket.start <= slot.offset < bucket.stop]
        assert bucket.numel <= bucket_numel or len(inside) == 1
        assert bucket.numel % (num_shards * CHUNK) == 0


def test_a_linear_that_no_even_cut_ends_shares_its_bucket() -> None:
    """Three chunks cannot be cut over two ranks alone; with the next three they can."""
    params = {str(i): torch.nn.Parameter(ScaledTensor.quantize(torch.ones(3 * CHUNK, 1))) for i in range(4)}
    (space,) = partition(params.items(), cut_over(2), bucket_numel=CHUNK, whole_linears=True)
    assert [bucket.numel for bucket in space.buckets] == [6 * CHUNK, 6 * CHUNK]
