"""Muon: the polar factor against float64, one update against float64, and sharded updates against one rank's."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fp8_megatron.config.schema import PrecisionConfig
from fp8_megatron.device.group import Group
from fp8_megatron.optimizer import matrix_state
from fp8_megatron.optimizer.distributed_optimizer import FP8DistributedOptimizer
from fp8_megatron.optimizer.hyperparameters import OptimizerSettings
from fp8_megatron.optimizer.newton_schulz import COEFFICIENTS, polar_factor, steps_of
from fp8_megatron.optimizer.rules.muon import SCALES, TP_MODES
from fp8_megatron.planning.memory import model_storage
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db
from fp8_megatron.sharding.data_parallel import DataParallelModule, Exchange, finish_gradients
from fp8_megatron.sharding.partition import ParamSpace, RowSplit
from fp8_megatron.sharding.region import Region
from fp8_megatron.sharding.replicas import Replicas, Sharing
from fp8_megatron.sharding.whole_matrices import Turn, turns
from fp8_megatron.storage import StorageDtype
from tests.harness.ranks import RankPool, on_default_group

CPU = torch.device("cpu")
F = StorageDtype
#: qkv has two groups of 2, 1 and 1 heads of 16 rows. The experts are three matrices. The bias ends inside a block.
SHAPES = {
    "qkv": (128, 64),
    "proj": (64, 192),
    "tall": (320, 64),
    "experts": (3, 64, 128),
    "embedding": (90, 64),
    "bias": (90,),
}
ROW_SPLITS = {"qkv": RowSplit(2, (32, 16, 16)), "experts": RowSplit(1, (32, 32))}
MATRICES = ("qkv", "proj", "tall", "experts")
GROUP = {"lr": 0.02, "weight_decay": 0.1}


def values_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def exact(matrix: Tensor, kind: str = "quintic", num_steps: int = 5) -> Tensor:
    """The iteration in float64, by the singular values alone."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for a, b, c in steps_of(kind, num_steps):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


def test_singular_values_come_close_to_one() -> None:
    """Between 0.68 and 1.14 from 1% of the largest on, as published for the quintic coefficients."""
    s = torch.linspace(0.01, 1.0, 1000, dtype=torch.float64)
    for a, b, c in steps_of("quintic", 5):
        s = a * s + b * s**3 + c * s**5
    assert s.min() > 0.65 and s.max() < 1.2


@pytest.mark.parametrize("kind", sorted(COEFFICIENTS.keys() - {"cans"}))
@pytest.mark.parametrize("shape", [(2, 64, 192), (1, 192, 64), (3, 80, 80)])
def test_the_polar_factor_is_that_of_float64(kind: str, shape: tuple[int, ...]) -> None:
    """BF16 rounds X, A and B to 2⁻⁹ of a number at each of four to ten steps. A step multiplies the error of small
    singular values by a ≤ 8.3 and their size likewise, so the relative error stays near 2⁻⁹·√15: 40 dB. Half of it is
    left for the singular values whose slope is larger than their growth. Rounding grows most under cans, whose
    largest term is twelve times the sum: 8 to 31 dB are left."""
    num_steps = len(COEFFICIENTS[kind]) if kind != "simple" else 5
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    got = polar_factor(matrices, steps_of(kind, num_steps))
    assert got.dtype is torch.bfloat16
    for one, matrix in zip(got, matrices, strict=True):
        assert snr_db(one.float(), exact(matrix, kind, num_steps).float()) > 30.0


@pytest.mark.parametrize("num_steps", [2, 5])
@pytest.mark.parametrize("shape", [(2, 64, 192), (3, 192, 64)])
def test_the_error_is_that_of_the_result(shape: tuple[int, ...], num_steps: int) -> None:
    """BF16 rounds both vectors to 2⁻⁹ of an element, which X·Xᵀ multiplies by 1.14² at most. Two steps leave singular
    values far from 1."""
    errors: list[Tensor] = []
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x = polar_factor(matrices, steps_of("quintic", num_steps), errors=errors).double()
    x = x if shape[1] < shape[2] else x.mT
    v = x @ torch.arange(x.shape[2]).double().square().cos()
    exact = ((x @ (x.mT @ v[..., None]))[..., 0] - v).norm(dim=1) / v.norm(dim=1)
    assert torch.cat(errors).tolist() == pytest.approx(exact.tolist(), abs=2 * 2.0**-8)
    assert (exact > 0.4).all() if num_steps == 2 else (exact < 0.1).all()


@pytest.mark.parametrize(
    ("kind", "num_steps", "numbers"),
    [
        ("polar_express", 5, [0, 1, 2, 3, 4]),
        ("polar_express", 10, [0, 1, 2, 3, 4, 5, 6, 7, 7, 7]),
        ("cans", 6, [0, 1, 2, 3, 4, 4]),
        ("quintic", 7, [0, 1, 2, 3, 4, 0, 1]),
        ("aol", 5, [0, 1, 2, 3, 0]),
    ],
)
def test_other_numbers_of_steps_are_megatrons(kind: str, num_steps: int, numbers: list[int]) -> None:
    """Those of emerging_optimizers 0.3: ``get_coefficient_iterator`` repeats the last one or starts over, by type."""
    assert steps_of(kind, num_steps) == [COEFFICIENTS[kind][number] for number in numbers]


def test_a_matrix_of_zeros_stays_one() -> None:
    assert not polar_factor(torch.zeros(2, 8, 16), steps_of("quintic", 5)).any()


class Outcome(NamedTuple):
    """State of one rank after the last step, by parameter."""

    masters: dict[str, Tensor]
    momentum: dict[str, Tensor]
    weights: dict[str, Tensor]


def train(
    group: Group,
    precision: PrecisionConfig,
    options: dict[str, Any],
    bucket_numel: int = 1 << 30,
    num_steps: int = 3,
    bad_step: int | None = None,
) -> Outcome:
    """Every rank is given the same gradients, so that their mean is what one rank has."""
    module = torch.nn.Module()
    for name, value in values_of(1).items():
        is_fp8 = name in MATRICES and precision.precision == "fp8"
        empty = ScaledTensor.quantize(torch.ones_like(value)) if is_fp8 else value.bfloat16().zero_()
        if is_fp8 and value.ndim == 3:
            empty = ScaledTensor(torch.zeros(value.shape, dtype=torch.float8_e4m3fn), torch.ones(len(value)))
        module.register_parameter(name, torch.nn.Parameter(empty))
    params = dict(module.named_parameters())
    names = {param: name for name, param in params.items()}
    sharing, storage = Sharing(Replicas.of(group, CPU)), model_storage(precision, num_micro_batches=1)
    model = DataParallelModule(
        module,
        sharing_of=lambda _: sharing,
        is_matrix=lambda name, _: name in MATRICES,
        row_split_of=lambda param: ROW_SPLITS.get(names[param]),
        storage=storage,
        exchange=Exchange(bucket_numel=bucket_numel),
    )
    settings = OptimizerSettings("muon", options, **GROUP, clip_grad=0.0)
    optimizer = FP8DistributedOptimizer([model], settings, storage, world=group, device=CPU)
    optimizer.load_weights(values_of(1).items())
    for step in range(num_steps):
        model.reset()
        for name, grad in reversed(values_of(100 + step).items()):
            if step == bad_step and group.rank() == group.size() - 1:
                grad[-1] = torch.nan
            params[name].main_grad.accumulate_(grad.bfloat16())  # type: ignore[attr-defined]
        finish_gradients([model])
        optimizer.step()
    model.wait_for_weights()
    matrices = [(state, slot) for state, slot in optimizer.slots() if slot.name in MATRICES]
    return Outcome(
        {slot.name: state.get_master(slot) for state, slot in optimizer.slots()},
        {
            slot.name: state.space.assemble(
                slot, lambda part, state=state: state.states["momentum_buffer"].part(part).load()
            )
            for state, slot in matrices
        },
        {
            name: param.dequantize() if isinstance(param, ScaledTensor) else param.detach().float()
            for name, param in params.items()
        },
    )


def reference(options: dict[str, Any], num_steps: int) -> dict[str, Tensor]:
    """The masters of the matrices in float64."""
    momentum, nesterov = options.get("momentum", 0.95), options.get("nesterov", True)
    scale = SCALES[options.get("scale_mode", "spectral")]
    found = {}
    for name in MATRICES:
        value = values_of(1)[name].double()
        average = torch.zeros_like(value)
        for step in range(num_steps):
            grad = values_of(100 + step)[name].bfloat16().double()
            average = momentum * average + (1 - momentum) * grad
            direction = momentum * average + (1 - momentum) * grad if nesterov else average
            split, stored = ROW_SPLITS.get(name), direction.clone().view(-1, *direction.shape[-2:])
            for part in (stored,) if split is None else split.split(stored):
                for one, rows in zip(part, part.reshape(len(part), -1, part.shape[-1]), strict=True):
                    one.copy_((exact(rows) * scale(*rows.shape)).view_as(one))
            value = value - GROUP["lr"] * (stored.view_as(value) + GROUP["weight_decay"] * value)
        found[name] = value
    return found


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False, "momentum": 0.9}, *({"scale_mode": mode} for mode in SCALES)]
)
def test_updates_are_those_of_float64(ranks: RankPool, options: dict[str, Any]) -> None:
    """In FP32 storage the polar factor alone is rounded: 30 dB of what three steps have changed."""
    (outcome,) = ranks.run(on_default_group, train, PrecisionConfig(precision="bf16"), options, num_ranks=1)
    for name, expected in reference(options, 3).items():
        start = values_of(1)[name]
        assert snr_db(outcome.masters[name] - start, expected.float() - start) > 30.0, name


PRECISIONS = {
    "O3": PrecisionConfig(),
    "O2": PrecisionConfig(opt_level="O2"),
    "O1": PrecisionConfig(opt_level="O1"),
    "int8": PrecisionConfig(exp_avg_dtype=F.INT8),
    "split": PrecisionConfig(main_params_dtype=F.SPLIT, exp_avg_dtype=F.INT8, exp_avg_sq_dtype=F.UINT8),
    "bf16": PrecisionConfig(precision="bf16"),
}


@pytest.mark.parametrize("level", list(PRECISIONS))
@pytest.mark.parametrize(("num_ranks", "bucket_numel"), [(2, 1 << 30), (4, 1 << 14)])
def test_sharded_is_unsharded(ranks: RankPool, level: str, num_ranks: int, bucket_numel: int) -> None:
    """Bit for bit: matrices are whole on their owners, and what is rounded is rounded by place."""
    (single,) = ranks.run(on_default_group, train, PRECISIONS[level], {}, num_ranks=1)
    for outcome in ranks.run(on_default_group, train, PRECISIONS[level], {}, bucket_numel, num_ranks=num_ranks):
        for kind in Outcome._fields:
            for name, value in getattr(single, kind).items():
                assert torch.equal(getattr(outcome, kind)[name], value), f"{kind} of {name}"


def train_in_turns(group: Group, level: str) -> Outcome:
    """A turn for each matrix, and so several under way."""

    def alone(space: ParamSpace, cost: Any) -> list[Turn]:
        return [Turn(space, (matrix,)) for turn in turns(space, cost) for matrix in turn.matrices]

    with patch.object(matrix_state, "turns", alone):
        return train(group, PRECISIONS[level], {})


@pytest.mark.parametrize("level", ["O3", "split"])
def test_turns_under_way_together_change_no_bit(ranks: RankPool, level: str) -> None:
    (single,) = ranks.run(on_default_group, train, PRECISIONS[level], {}, num_ranks=1)
    for num_ranks in (1, 2):
        for outcome in ranks.run(on_default_group, train_in_turns, level, num_ranks=num_ranks):
            for kind in Outcome._fields:
                for name, value in getattr(single, kind).items():
                    assert torch.equal(getattr(outcome, kind)[name], value), f"{kind} of {name}"


@pytest.mark.parametrize("level", ["O3", "O2", "split"])
def test_low_precision_state_moves_weights_alike(ranks: RankPool, level: str) -> None:
    """FP8 gradients and momentum keep some 28 dB of the direction, and so do the singular vectors of the update."""
    (fp8,) = ranks.run(on_default_group, train, PRECISIONS[level], {}, num_ranks=1)
    for name, expected in reference({}, 3).items():
        start = values_of(1)[name]
        assert snr_db(fp8.masters[name] - start, expected.float() - start) > 18.0, name


@pytest.mark.parametrize("level", ["O3", "split"])
def test_a_bad_gradient_skips_the_step(ranks: RankPool, level: str) -> None:
    arguments = (PRECISIONS[level], {}, 1 << 14)
    (before,) = ranks.run(on_default_group, train, *arguments, 1, num_ranks=1)
    for outcome in ranks.run(on_default_group, train, *arguments, 2, 1, num_ranks=2):
        for kind in Outcome._fields:
            for name, value in getattr(before, kind).items():
                assert torch.equal(getattr(outcome, kind)[name], value), f"{kind} of {name}"


#: Matrices that are also cut as fully_shard does.
CUT = {"qkv", "proj", "tall"}
#: Along which axis ranks have parts of each matrix.
AXES = {"qkv": 0, "proj": 1, "tall": 0, "experts": 1}


def error_of_parts(group: Group) -> list[float]:
    """Of a matrix whose columns lie on ranks."""
    errors: list[Tensor] = []
    whole = torch.randn(1, 64, 192, generator=torch.Generator().manual_seed(1))
    part = whole.chunk(group.size(), 2)[group.rank()]
    polar_factor(part, steps_of("quintic", 5), group=group, axis=2, errors=errors)
    return torch.cat(errors).tolist()


def test_the_error_of_parts_is_that_of_the_whole(ranks: RankPool) -> None:
    (whole,), *others = (ranks.run(on_default_group, error_of_parts, num_ranks=size) for size in (1, 2))
    assert all(part == pytest.approx(whole, abs=2 * 2.0**-8) for part in others[0])


def train_parts(group: Group, mode: str) -> dict[str, Tensor]:
    """Three updates of ranks that have parts of each matrix, under tensor parallelism or fully_shard; whole masters."""
    rank, size = group.rank(), group.size()
    is_cut, matrices = mode == "fully_shard", [name for name in MATRICES if mode != "fully_shard" or name in CUT]
    regions: dict[torch.nn.Parameter, Region] = {}
    module = torch.nn.Module()
    for name in matrices:
        shape, pieces = list(SHAPES[name]), 2 if name == "experts" and size > 1 else 1
        shape[AXES[name]] //= size
        param = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
        module.register_parameter(name, param)
        regions[param] = Region(tuple(shape), AXES[name], pieces, rank, size) if size > 1 else Region(tuple(shape))
    params = dict(module.named_parameters())
    names = {param: name for name, param in params.items()}
    splits = {"qkv": RowSplit(2 // size, (32, 16, 16)), "experts": RowSplit(1, (32 // size, 32 // size))}
    splits = ROW_SPLITS if is_cut else splits
    others = group if size > 1 else None
    sharing = Sharing(Replicas.of(None, CPU), **{"scaled_with" if is_cut else "parts_with": others})
    storage = model_storage(PrecisionConfig(precision="bf16"), num_micro_batches=1)
    model = DataParallelModule(
        module,
        sharing_of=lambda _: sharing,
        region_of=regions.__getitem__,
        is_matrix=lambda *_: True,
        row_split_of=lambda param: splits.get(names[param]),
        storage=storage,
    )
    settings = OptimizerSettings("muon", {} if is_cut else {"tp_mode": mode}, **GROUP, clip_grad=0.0)
    optimizer = FP8DistributedOptimizer([model], settings, storage, world=None, device=CPU)
    optimizer.load_weights((name, regions[param].part_of(values_of(1)[name])) for name, param in params.items())
    for step in range(3):
        model.reset()
        for name, param in params.items():
            grad = regions[param].part_of(values_of(100 + step)[name])
            param.main_grad.accumulate_(grad.bfloat16())  # type: ignore[attr-defined]
        finish_gradients([model])
        optimizer.step()
    found = {}
    for state, slot in optimizer.slots():
        parts = [torch.empty_like(state.get_master(slot)) for _ in range(size)]
        torch.distributed.all_gather(parts, state.get_master(slot), group=group)
        found[slot.name] = joined(parts, AXES[slot.name], regions[slot.param].pieces)
    return found


def joined(parts: list[Tensor], axis: int, pieces: int) -> Tensor:
    """The whole parameter, each piece of which the ranks share."""
    return torch.cat(
        [part for piece in zip(*(part.chunk(pieces, axis) for part in parts), strict=True) for part in piece], axis
    )


def test_tensor_parallel_ranks_make_whole_matrices(ranks: RankPool) -> None:
    """duplicated: the bits of one rank. distributed: sums of XᵀX over ranks are rounded once more, and tall matrices
    stay tall; the polar factor keeps 30 dB (`test_the_polar_factor_is_that_of_float64`)."""
    (single,) = ranks.run(on_default_group, train_parts, "duplicated", num_ranks=1)
    duplicated, distributed, blockwise = (
        ranks.run(on_default_group, train_parts, mode, num_ranks=2)[0] for mode in TP_MODES
    )
    for name, whole in single.items():
        moved = whole - values_of(1)[name]
        assert torch.equal(duplicated[name], whole), name
        assert snr_db(distributed[name] - values_of(1)[name], moved) > 28.0, name
        assert snr_db(blockwise[name] - values_of(1)[name], moved) < 20.0, name


def test_matrices_that_fully_shard_cuts_are_whole_on_their_owners(ranks: RankPool) -> None:
    """By rows and by columns, on one to four ranks, with the bits of one."""
    (single,) = ranks.run(on_default_group, train_parts, "duplicated", num_ranks=1)
    for num_ranks in (1, 2, 4):
        cut = ranks.run(on_default_group, train_parts, "fully_shard", num_ranks=num_ranks)[0]
        assert set(cut) == CUT and all(torch.equal(value, single[name]) for name, value in cut.items())


def test_ranks_that_take_parts_for_matrices(ranks: RankPool) -> None:
    """blockwise is an update of each part: of half a matrix."""
    outcome = ranks.run(on_default_group, train_parts, "blockwise", num_ranks=2)[0]
    value, average = values_of(1)["tall"][:160].double(), torch.zeros(160, 64, dtype=torch.float64)
    for step in range(3):
        grad = values_of(100 + step)["tall"][:160].bfloat16().double()
        average = 0.95 * average + 0.05 * grad
        made = exact(0.95 * average + 0.05 * grad) * SCALES["spectral"](160, 64)
        value = value - GROUP["lr"] * (made + GROUP["weight_decay"] * value)
    start = values_of(1)["tall"][:160]
    assert snr_db(outcome["tall"][:160] - start, value.float() - start) > 30.0
