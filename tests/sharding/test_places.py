"""Where a shard's elements lie in the whole model: one element has the same random bits under every layout."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import STATE_BLOCK
from fp8_megatron.kernels import ops
from fp8_megatron.kernels.rounding import rounding_bits
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.sharding.partition import ParamSpace, partition
from fp8_megatron.sharding.region import Region
from fp8_megatron.sharding.replicas import Replicas, Sharing
from fp8_megatron.sharding.transport import SendMemory

CPU = torch.device("cpu")
#: Whole shapes, the axis and the pieces of the tensor-parallel cut. Experts have three dimensions.
WHOLE: dict[str, tuple[tuple[int, ...], int | None, int]] = {
    "fc1": ((256, 96), 0, 2),
    "fc2": ((96, 256), 1, 1),
    "narrow": ((96, 64), 1, 1),
    "wide": ((8, 2048), 1, 1),
    "qkv": ((144, 96), 0, 1),
    "experts_fc1": ((4, 256, 64), 1, 2),
    "experts_fc2": ((4, 64, 256), 2, 1),
    "embedding": ((512, 96), 0, 1),
    "position": ((64, 96), None, 1),
}
MATRICES = ("embedding", "position")


@dataclass
class Layout:
    """Tensor-parallel size, ranks that share matrices, replicas, elements of a bucket, and the parameters of each
    stage."""

    tensor: int = 1
    holders: int = 1
    replicas: int = 1
    bucket: int = 1 << 30
    stages: tuple[tuple[str, ...], ...] = (tuple(WHOLE),)


LAYOUTS = {
    "alone": Layout(),
    "replicas": Layout(replicas=4),
    "small_buckets": Layout(replicas=2, bucket=16384),
    "tensor": Layout(tensor=2),
    "tensor_4_replicas_3": Layout(tensor=4, replicas=3, bucket=20000),
    "holders": Layout(holders=2),
    "tensor_2_holders_4_replicas_2": Layout(tensor=2, holders=4, replicas=2, bucket=20000),
    "stages": Layout(stages=(("embedding", "fc2", "position"), ("wide", "narrow"), ("qkv", "fc1", "embedding"))),
}


def part(whole: Tensor, name: str, layout: Layout, rank: int) -> Tensor:
    """A rank's part of a parameter; tensor-parallel ranks are next to each other."""
    _, axis, pieces = WHOLE[name]
    holder, rank = divmod(rank, layout.tensor)
    size = layout.tensor
    whole = whole.chunk(layout.holders)[holder] if whole.ndim == 3 else whole
    return whole if axis is None else torch.cat(whole.chunk(size * pieces, dim=axis)[rank::size], dim=axis)


def spaces(layout: Layout, stage: tuple[str, ...], rank: int, replica: int) -> list[ParamSpace]:
    params, regions = {}, {}
    for name in stage:
        shape, axis, pieces = WHOLE[name]
        value = part(torch.zeros(shape), name, layout, rank)
        param = torch.nn.Parameter(value.bfloat16() if name in MATRICES else ScaledTensor.quantize(value))
        params[name] = param
        holder, tensor_rank = divmod(rank, layout.tensor)
        matrices = (holder, layout.holders) if value.ndim == 3 else (0, 1)
        regions[param] = Region(tuple(value.shape), axis, pieces, tensor_rank, layout.tensor, matrices=matrices)
    sharing = Sharing(Replicas(layout.replicas, replica, SendMemory(CPU), SendMemory(CPU)))
    return partition(params.items(), lambda _: sharing, region_of=regions.__getitem__, bucket_numel=layout.bucket)


def bits(layout: Layout, rank: int, stage: tuple[str, ...]) -> dict[str, Tensor]:
    """The random bits of a step, put together from the replicas' shards: [local shape] of each parameter."""
    found: dict[str, Tensor] = {}
    for replica in range(layout.replicas):
        for space in spaces(layout, stage, rank, replica):
            drawn = rounding_bits(space.shard_numel, torch.tensor([7.0]), space.shard_places())
            for slot in space.slots:
                flat = found.setdefault(slot.name, torch.zeros(slot.padded, dtype=torch.int32))
                for fragment in space.fragments(slot):
                    start = fragment.slot_start
                    flat[start : start + fragment.length] = drawn[fragment.shard_start :][: fragment.length]
    return {name: flat[: part(torch.empty(WHOLE[name][0]), name, layout, rank).numel()] for name, flat in found.items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    found = bits(Layout(), 0, tuple(WHOLE))
    return {name: drawn.view(WHOLE[name][0]) for name, drawn in found.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_element_has_the_same_bits_under_every_layout(alone: dict[str, Tensor], name: str) -> None:
    layout = LAYOUTS[name]
    for stage in layout.stages:
        for rank in range(layout.tensor * layout.holders):
            for param, drawn in bits(layout, rank, stage).items():
                expected = part(alone[param], param, layout, rank)
                assert torch.equal(drawn.view(expected.shape), expected), (param, rank)


def test_parameters_and_elements_differ(alone: dict[str, Tensor]) -> None:
    drawn = torch.cat([values.reshape(-1) for values in alone.values()])
    # 2³² values and 2¹⁷ draws: two in a pair of equal ones, by chance.
    assert len(drawn) - len(drawn.unique()) < 20


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_gives_the_same_bits_under_every_layout(name: str) -> None:
    """Masters and moments of a parameter whose scale blocks are whole under every cut."""
    layout, shape = LAYOUTS[name], WHOLE["wide"][0]
    generator = torch.Generator().manual_seed(0)
    grad, start = torch.randn(shape, generator=generator), 0.02 * torch.randn(shape, generator=generator)
    hyper = ops.AdamHyper(1e-5, 0.9, 0.95, 1e-8, 0.1, decoupled=True)
    results = []
    for run in (Layout(), layout):
        stage = next(stage for stage in run.stages if "wide" in stage)
        ranks = []
        for rank in range(run.tensor):
            local_grad, local_start = (part(value, "wide", run, rank) for value in (grad, start))
            moved = torch.zeros(3, local_grad.numel())
            for replica in range(run.replicas):
                for space in spaces(run, stage, rank, replica):
                    for slot in (slot for slot in space.slots if slot.name == "wide"):
                        _step_fragments(space, slot, local_grad, local_start, hyper, moved)
            ranks.append(moved.view(3, *local_grad.shape))
        results.append(torch.cat(ranks, dim=2))
    assert torch.equal(results[0], results[1])
    assert (results[0][0] != start).any()


def _step_fragments(
    space: ParamSpace, slot: object, grad: Tensor, start: Tensor, hyper: ops.AdamHyper, moved: Tensor
) -> None:
    """Two steps of a replica's fragments of a slot; master, first and second moment into `moved`."""
    places = space.shard_places()
    for fragment in space.fragments(slot):  # type: ignore[arg-type]
        inside = slice(fragment.slot_start, fragment.slot_start + fragment.length)
        n = fragment.length
        stored = [
            ops.FlatState(torch.zeros(n, dtype=dtype), torch.ones(n // STATE_BLOCK))
            for dtype in (torch.float16, torch.float8_e4m3fn, torch.float16)
        ]
        ops.quantize_blockwise_(start.reshape(-1)[inside], *stored[0])  # type: ignore[arg-type]
        first = fragment.shard_start // space.place_unit
        assert places.table is not None
        table = places.table[first : first + n // space.place_unit]
        state = ops.AdamState(
            ops.FlatState(grad.reshape(-1)[inside]), stored[1], stored[2], stored[0], places._replace(table=table)
        )
        for step in (1.0, 2.0):
            ops.adamw_step_(state, hyper, grad_factor=torch.ones(1), step=torch.tensor([step]))
        for row, operand in enumerate(stored):
            moved[row, inside] = ops.load_state(*operand)
