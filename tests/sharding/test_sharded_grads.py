"""ShardedGradBuffer: the mean over replicas and micro-batches reaches its owner, for any order of writes.

Each gradient is rounded to E4M3 once (31.5 dB for Gaussian values) and every sum is FP32. Independent roundings of
independent gradients keep the 31.5 dB; 1.5 dB is the sample's: the smallest parameter has 256 elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fp8_megatron.collectives.gradient_reduction import GradReducer
from fp8_megatron.collectives.hierarchical import new_node_groups
from fp8_megatron.collectives.wire import WireTensor, accumulate_rows_
from fp8_megatron.device.group import Group
from fp8_megatron.dtypes import CHUNK, E4M3, E5M2, GradReduceMode, StorageDtype
from fp8_megatron.formats.format import Quantized
from fp8_megatron.formats.tensorwise import Tensorwise
from fp8_megatron.kernels import ops
from fp8_megatron.nn.gemms import LinearParams, delivered_wgrad
from fp8_megatron.quantization.amax_history import AmaxHistory
from fp8_megatron.quantization.recipe import Recipe
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db
from fp8_megatron.quantization.weight_grad import WeightGrad
from fp8_megatron.sharding.gradient import GradState
from fp8_megatron.sharding.partition import ParamSpace, StorageClass, partition
from fp8_megatron.sharding.replicas import Replicas, Sharing
from fp8_megatron.sharding.sharded_grads import ShardedGradBuffer
from fp8_megatron.sharding.staging import StagingPool
from fp8_megatron.sharding.storage import ModelStorage
from fp8_megatron.sharding.transport import SendMemory
from tests.harness.ranks import RankPool, on_default_group

SHAPES = {"a": (64, 64), "b": (30, 50), "c": (128, 96), "d": (16, 16)}  # b and d are padded
CPU = torch.device("cpu")


def gradient(name: str, rank: int, micro_batch: int) -> Tensor:
    """Of spread size: tensors, ranks and micro-batches differ by powers of ten."""
    seed = 1000 * list(SHAPES).index(name) + 10 * micro_batch + rank
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPES[name], generator=generator) * 10.0 ** (list(SHAPES).index(name) - 2)


def over(group: Group) -> Callable[[torch.nn.Parameter], Sharing]:
    sharing = Sharing(Replicas.of(group, CPU))
    return lambda _: sharing


def make_space(group: Group, bucket_numel: int, *, linear: bool = True) -> tuple[ParamSpace, dict[str, Any]]:
    params = {
        name: torch.nn.Parameter(ScaledTensor.quantize(torch.ones(shape)) if linear else torch.ones(shape).bfloat16())
        for name, shape in SHAPES.items()
    }
    (space,) = partition(params.items(), over(group), bucket_numel=bucket_numel)
    return space, params


def whole(buffer: ShardedGradBuffer) -> dict[str, Tensor]:
    def owned(part: Any) -> Tensor:
        return buffer.payload[part.shard_start : part.shard_start + part.length]

    return {slot.name: buffer.space.assemble(slot, owned).clone() for slot in buffer.space.slots}


def _reduce(
    group: Group, bucket_numel: int, num_micro_batches: int, mode: GradReduceMode, dtype: StorageDtype, local: bool
) -> list[dict[str, Tensor]]:
    """Two steps, the second with other gradients and without "b"; the mean of each."""
    space, params = make_space(group, bucket_numel)
    node_groups = None
    if mode is GradReduceMode.HIERARCHICAL:
        node_groups = new_node_groups([list(range(group.size()))], 2)
    reducer = GradReducer(mode, group, node_groups)
    pool = StagingPool(reducer.wire_dtype if dtype is StorageDtype.FP8 else dtype, SendMemory(CPU))
    accumulator = StorageDtype.BF16 if local else None
    buffer = ShardedGradBuffer(space, reducer, pool, local=accumulator, num_micro_batches=num_micro_batches)
    buffer.become_main_grad()
    means = []
    for step in range(2):
        buffer.reset()
        for micro_batch in range(num_micro_batches):
            for name in ("c", "d", "a", "b"):  # any order
                if not (step == 1 and name == "b"):
                    grad = gradient(name, group.rank(), micro_batch + 100 * step)
                    params[name].main_grad.accumulate_(grad.bfloat16())
        buffer.finish()
        means.append(whole(buffer))
    return means


def expected(world: int, num_micro_batches: int, step: int) -> dict[str, Tensor]:
    return {
        name: sum(
            gradient(name, rank, micro_batch + 100 * step).bfloat16().double()
            for rank in range(world)
            for micro_batch in range(num_micro_batches)
        )
        / world
        for name in SHAPES
    }


@pytest.mark.parametrize("local", [False, True], ids=["sharded", "local"])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize(("world", "bucket_numel"), [(2, 1), (2, 1 << 30), (4, 4 * CHUNK)])
def test_means_reach_their_owners(
    ranks: RankPool, world: int, bucket_numel: int, num_micro_batches: int, local: bool
) -> None:
    arguments = (bucket_numel, num_micro_batches, GradReduceMode.ALL_TO_ALL, StorageDtype.FP8, local)
    for means in ranks.run(on_default_group, _reduce, *arguments, num_ranks=world):
        for step, mean in enumerate(means):
            for name, value in expected(world, num_micro_batches, step).items():
                if step == 1 and name == "b":
                    assert not mean[name].any()
                else:
                    assert snr_db(mean[name], value) > 30.0, (step, name)


@pytest.mark.parametrize(
    ("mode", "dtype", "least_db"),
    [
        (GradReduceMode.ALL_TO_ALL, StorageDtype.BF16, 55.0),  # gradients are BF16: nothing is rounded but FP32 sums
        (GradReduceMode.ALL_TO_ALL, StorageDtype.FP32, 55.0),
        # One rounding of each node's sum; what travels inside is BF16.
        (GradReduceMode.HIERARCHICAL, StorageDtype.FP8, 30.0),
        # One scale a tensor, rounded for the wire again, and at each of three hops: docs/collectives.md has 25.8 dB.
        (GradReduceMode.NCCL, StorageDtype.FP8, 23.0),
    ],
)
def test_other_ways_to_reduce(ranks: RankPool, mode: GradReduceMode, dtype: StorageDtype, least_db: float) -> None:
    for means in ranks.run(on_default_group, _reduce, 1 << 30, 1, mode, dtype, False, num_ranks=4):
        for step, mean in enumerate(means):
            for name, value in expected(4, 1, step).items():
                if not (step == 1 and name == "b"):
                    assert snr_db(mean[name], value) > least_db, (step, name)


def _overlap(group: Group) -> tuple[list[int], list[int], int, int]:
    """(buckets under way after each gradient, and after finish), buffers made in ten steps, of how many buckets."""
    space, params = make_space(group, CHUNK * group.size())
    pool = StagingPool(StorageDtype.FP8, SendMemory(CPU))
    buffer = ShardedGradBuffer(space, GradReducer(GradReduceMode.ALL_TO_ALL, group), pool)
    buffer.become_main_grad()
    started: list[int] = []
    start = buffer._reducer.start

    def count(*args: Any) -> Any:
        started[-1] += 1
        return start(*args)

    buffer._reducer.start = count  # type: ignore[method-assign]
    for _ in range(10):
        buffer.reset()
        started = []
        for name in reversed(SHAPES):
            started.append(0)
            params[name].main_grad.accumulate_(gradient(name, group.rank(), 0))
        started.append(0)
        buffer.finish()
    return started, [len(space.spans(slot)) for slot in space.slots], pool._num_made, len(space.buckets)


def _leaves_during_backward(group: Group) -> list[tuple[int, int]]:
    """(buckets reduced before `finish`, buckets) of steps of one, two and three micro-batches, added locally."""
    space, params = make_space(group, CHUNK * group.size())
    pool = StagingPool(StorageDtype.FP8, SendMemory(CPU))
    reducer = GradReducer(GradReduceMode.ALL_TO_ALL, group)
    buffer = ShardedGradBuffer(space, reducer, pool, local=StorageDtype.BF16, num_micro_batches=3)
    buffer.become_main_grad()
    counts = []
    for num_micro_batches in (1, 2, 3):
        buffer.reset(num_micro_batches=num_micro_batches)
        for micro_batch in range(num_micro_batches):
            for name in reversed(SHAPES):
                params[name].main_grad.accumulate_(gradient(name, group.rank(), micro_batch))
        counts.append((sum(state.reduced for state in buffer._buckets), len(space.buckets)))
        buffer.finish()
    return counts


def test_a_step_of_fewer_micro_batches_reduces_during_backward_too(ranks: RankPool) -> None:
    for counts in ranks.run(on_default_group, _leaves_during_backward, num_ranks=2):
        assert all(reduced == num_buckets >= 3 for reduced, num_buckets in counts)


def test_buckets_leave_during_backward_and_buffers_are_reused(ranks: RankPool) -> None:
    """Nothing waits for `finish` but what was never written; three buffers serve any number of buckets."""
    for started, _, num_buffers, num_buckets in ranks.run(on_default_group, _overlap, num_ranks=2):
        assert sum(started) == num_buckets >= 3 and started[-1] == 0
        assert sum(count > 0 for count in started) >= 2
        assert num_buffers <= 3


def _states(group: Group) -> list[set[GradState]]:
    """Of all gradients: before and after they are written, after `finish`, and after `reset`."""
    space, params = make_space(group, 1 << 30)
    pool = StagingPool(StorageDtype.FP8, SendMemory(CPU))
    buffer = ShardedGradBuffer(space, GradReducer(GradReduceMode.ALL_TO_ALL, group), pool)
    buffer.become_main_grad()
    found = [{own.state for own in buffer.gradients}]
    for name in SHAPES:
        params[name].main_grad.accumulate_(gradient(name, group.rank(), 0))
    found.append({own.state for own in buffer.gradients})
    for end in (buffer.finish, buffer.reset):
        end()
        found.append({own.state for own in buffer.gradients})
    return found


def test_a_gradient_is_in_flight_until_its_mean_is_there(ranks: RankPool) -> None:
    expected = [{GradState.EMPTY}, {GradState.IN_FLIGHT}, {GradState.SUM}, {GradState.EMPTY}]
    assert ranks.run(on_default_group, _states, num_ranks=2) == [expected, expected]


def _bad_block(group: Group) -> tuple[list[str], Tensor]:
    space, params = make_space(group, 1 << 30)
    pool = StagingPool(StorageDtype.FP8, SendMemory(CPU))
    buffer = ShardedGradBuffer(space, GradReducer(GradReduceMode.ALL_TO_ALL, group), pool)
    buffer.become_main_grad()
    for name in SHAPES:
        grad = gradient(name, group.rank(), 0)
        if name == "c" and group.rank() == 1:
            grad[-1, -1] = torch.inf
        params[name].main_grad.accumulate_(grad)
    buffer.finish()
    return buffer.non_finite_slots(), whole(buffer)["c"]


def test_a_bad_block_is_found_and_named(ranks: RankPool) -> None:
    """One rank's inf makes its block of 128 NaN in the mean, on the rank that owns it, and nothing else."""
    results = ranks.run(on_default_group, _bad_block, num_ranks=2)
    assert sorted(name for names, _ in results for name in names) == ["c"]
    for _, mean in results:
        assert mean.view(-1)[-128:].isnan().all() and mean.view(-1)[:-128].isfinite().all()


def _padding(group: Group) -> Tensor:
    """The bucket's padding must be zero also where a buffer held another bucket's NaNs."""
    space, params = make_space(group, 1 << 30)
    pool = StagingPool(StorageDtype.FP8, SendMemory(CPU))
    buffer = ShardedGradBuffer(space, GradReducer(GradReduceMode.ALL_TO_ALL, group), pool)
    buffer.become_main_grad()
    for value in (torch.nan, 1.0):
        buffer.reset()
        for name, shape in SHAPES.items():
            params[name].main_grad.accumulate_(torch.full(shape, value))
        staging = buffer._pool
        buffer.finish()
        for free in staging._free:  # what a larger bucket of another space might have left behind
            free.sent.payload.view(torch.uint8).fill_(0x7F)
            assert free.sent.scales is not None
            free.sent.scales.fill_(torch.nan)
    return buffer.payload.clone()


def test_padding_stays_zero(ranks: RankPool) -> None:
    shards = ranks.run(on_default_group, _padding, num_ranks=4)
    numel = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    flat = torch.cat(shards)
    assert flat.isfinite().all() and flat.count_nonzero() == numel and flat.sum() == numel


def _reduce_what_gemms_write(group: Group) -> list[float]:
    """SNR of each parameter's mean over ranks, of gradients that wrote themselves into the send buffers in FP8."""
    history = AmaxHistory(2, "max", power_of_two=False)
    recipe = Recipe("delayed", False, history, delays_weight_grads=True)
    shapes = {"a": (64, 64), "b": (48, 80), "c": (128, 96), "d": (16, 16)}  # b and d are padded
    params = {name: torch.nn.Parameter(ScaledTensor.quantize(torch.ones(shape))) for name, shape in shapes.items()}
    quantizers = recipe.linear_quantizers()
    scales = {name: recipe.linear_quantizers().weight_grad for name in shapes}
    history.allocate(CPU)
    (space,) = partition(params.items(), over(group), bucket_numel=1, whole_linears=True)
    reducer = GradReducer(GradReduceMode.ALL_TO_ALL, group)
    buffer = ShardedGradBuffer(space, reducer, StagingPool(StorageDtype.FP8, SendMemory(CPU)))
    buffer.become_main_grad()
    exact: dict[str, Tensor] = {}
    for step in range(2):
        buffer.reset()
        for index, (name, (n, k)) in enumerate(shapes.items()):
            exact[name] = torch.zeros(n, k, dtype=torch.float64)
            for rank in range(group.size()):
                generator = torch.Generator().manual_seed(100 * step + 10 * index + rank)
                g_t, x_t = (torch.randn(size, 32, generator=generator) for size in (n, k))
                operands = (
                    Quantized(value.to(dtype), None, torch.ones(1), Tensorwise(dtype))
                    for value, dtype in ((g_t, E5M2), (x_t, E4M3))
                )
                grad = WeightGrad(*operands, torch.bfloat16, scales[name])
                exact[name] += grad.g_t.payload.double() @ grad.x_t.payload.double().t() / group.size()
                if rank == group.rank():
                    assert grad.writes_fp8 == (step == 1)
                    with mock.patch.object(ops, "quantize_blockwise_", _never if step else ops.quantize_blockwise_):
                        delivered_wgrad(grad, LinearParams(params[name], None, quantizers))
        buffer.finish()
        history.update(group)
    return [snr_db(value, exact[name]) for name, value in whole(buffer).items()]


def _never(*unused: object) -> None:
    raise AssertionError("the gradient was cast by a kernel")


def test_gradients_write_themselves_into_the_send_buffer(ranks: RankPool) -> None:
    for snrs in ranks.run(on_default_group, _reduce_what_gemms_write, num_ranks=2):
        assert min(snrs) > 30.0, snrs


@pytest.mark.parametrize(
    ("num_micro_batches", "adds_locally", "accumulator", "expected"),
    [
        (1, False, None, "bf16"),
        (16, False, None, "bf16"),
        (17, False, None, "fp32"),
        (17, False, "bf16", "bf16"),
        (2, False, "fp32", "fp32"),
        (1024, True, None, "bf16"),  # one reduction a step
    ],
)
def test_a_shard_is_fp32_for_many_reductions(
    num_micro_batches: int, adds_locally: bool, accumulator: str | None, expected: str
) -> None:
    storage = ModelStorage(
        num_micro_batches=num_micro_batches,
        adds_locally=adds_locally,
        accumulator=None if accumulator is None else StorageDtype(accumulator),
    )
    assert storage.of_grads(StorageClass.LINEAR).shard is StorageDtype(expected)
    assert storage.of_grads(StorageClass.VECTOR).shard is StorageDtype.FP32
    plain = ModelStorage(has_fp8_layers=False, num_micro_batches=num_micro_batches)
    assert plain.of_grads(StorageClass.LINEAR).shard is StorageDtype.FP32


@pytest.mark.parametrize("num_micro_batches", [1, 16, 17, 64, 256])
def test_the_default_keeps_30_db_of_any_number_of_reductions(num_micro_batches: int) -> None:
    """Of equal gradients, the worst case: each is rounded to E4M3 alike, and a sum in BF16 rounds each addend."""
    dtype = ModelStorage(num_micro_batches=num_micro_batches).of_grads(StorageClass.LINEAR).shard.torch_dtype
    rows = WireTensor.empty(4 * 8192, StorageDtype.FP8, CPU)
    values = torch.randn(4, 8192, generator=torch.Generator().manual_seed(1))
    rows.store_(values.view(-1))
    total = torch.zeros(8192, dtype=dtype)
    for _ in range(num_micro_batches):
        accumulate_rows_(rows, 4, total, factor=0.25, add=True)
    assert snr_db(total, num_micro_batches * values.double().mean(dim=0)) > 30.0


@pytest.mark.parametrize(
    ("storage", "num_micro_batches", "expected"),
    [
        (StorageClass.LINEAR, 4, None),
        (StorageClass.MATRIX, 4, StorageDtype.BF16),
        (StorageClass.VECTOR, 4, StorageDtype.FP32),
        (StorageClass.MATRIX, 1, None),
    ],
)
def test_only_the_rest_is_added_up_before_it_is_reduced(
    storage: StorageClass, num_micro_batches: int, expected: StorageDtype | None
) -> None:
    """Over two replicas; matrices in FP32 if that was asked for, vectors always."""
    formats = ModelStorage(num_micro_batches=num_micro_batches).of_grads(storage)
    assert formats.adds_locally == (expected is not None)
    if expected is not None:
        assert formats.local is expected
        exact = ModelStorage(num_micro_batches=num_micro_batches, accumulator=StorageDtype.FP32)
        assert exact.of_grads(storage).local is StorageDtype.FP32
