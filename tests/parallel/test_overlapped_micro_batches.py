"""A forward that runs beside the backward of the micro-batch before it has the bits of one that follows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_megatron.collectives.turns import Turn, Turns, _Pair
from fp8_megatron.config.schema import Config, ParallelConfig
from fp8_megatron.moe.layers.token_exchange import AllGather, AllToAll
from tests.harness.ranks import RankError, RankPool
from tests.harness.tiny_checkpoint import run_tiny_on_a_rank
from tests.harness.tiny_gpt import TinyGPT, TinyRun, random_batches, tiny_optimizer, train_tiny_gpt
from tests.parallel.layouts import assert_same_bits, everyones_runs
from tests.parallel.test_context_parallel import config_of, gradients
from tests.parallel.test_experts import LAYOUTS, MODELS, PRECISIONS

WORLDS = {2: "dp2", 4: "tp2_sp_pp2"}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "moe_input_jitter_eps": 0.1}
MODELS = {
    **MODELS,
    "alone": replace(MODELS["softmax"], moe_shared_expert_intermediate_size=None, moe_shared_expert_gate=False),
    "random": replace(MODELS["softmax"], **DROPOUT),  # type: ignore[arg-type]
}


def with_overlap(parallel: ParallelConfig) -> ParallelConfig:
    return replace(parallel, overlap_moe_expert_parallel_comm=True)


def counted(config: Config, batches: Tensor) -> tuple[TinyRun, int]:
    """The run, and how many turns one routine gave to another one."""
    count, give = [0], _Pair.give

    def counting(pair: _Pair) -> None:
        count[0] += 1
        give(pair)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Pair, "give", counting)
        return train_tiny_gpt(config, batches), count[0]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "precision", "layout", "training"),
    [
        ("softmax", "delayed", "ep2", {}),
        ("random", "bf16", "ep2_alltoall", {}),
        pytest.param("alone", "O3", "ep4_alltoall", {}, marks=SLOW),
        pytest.param("sigmoid", "delayed", "ep2_dp2", {}, marks=SLOW),
        pytest.param("gpt_oss", "bf16", "ep2", {}, marks=SLOW),
        pytest.param("softmax", "O2", "ep2_dp2_alltoall", {}, marks=SLOW),
        pytest.param("sigmoid", "delayed", "tp2_experts_of_ranks_alltoall", {}, marks=SLOW),
        pytest.param("softmax", "O3", "cp2_ep2", {}, marks=SLOW),
        pytest.param("softmax", "delayed", "ep2", {"recompute_modules": ("moe", "core_attn")}, marks=SLOW),
        pytest.param("softmax", "delayed", "ep2", {"loss_chunk_size": 16}, marks=SLOW),
    ],
)
def test_overlap_has_the_bits_of_micro_batches_in_turn(
    ranks: RankPool, model: str, precision: str, layout: str, training: dict[str, Any]
) -> None:
    """Three micro-batches on each of two replicas: two pairs a step."""
    num_ranks, parallel = LAYOUTS[layout]
    if "recompute_modules" in training:
        training = {"recompute_granularity": "selective", **training}
    replicas = num_ranks // parallel.ranks_per_sample
    batches = random_batches(1, 3 * replicas).expand(3, -1, -1, -1)
    settings = {"train": counted, "optimizer": tiny_optimizer(lr=5e-4), **training}
    plain, overlapped = (
        everyones_runs(
            ranks, MODELS[model], PRECISIONS[precision], WORLDS[num_ranks], batches, parallel=one, **settings
        )
        for one in (parallel, with_overlap(parallel))
    )
    assert {count for _, count in plain} == {0}
    counts = {count for _, count in overlapped}
    num_layers, again = len(MODELS[model].expert_layers), "moe" in training.get("recompute_modules", ())
    assert counts == {3 * 2 * num_layers * (2 + 2 + again)}  # steps, pairs, layers, forward and backward
    for (run, _), (expected, _) in zip(overlapped, plain, strict=True):
        assert_same_bits(run, expected)


@pytest.mark.parametrize("layout", ["ep2", "ep2_alltoall"])
def test_gradients_of_all_parameters_have_the_same_bits(ranks: RankPool, layout: str) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    expected, found = (
        ranks.run(gradients, config_of(MODELS["softmax"], one, "O3"), num_ranks=num_ranks)[0]
        for one in (parallel, with_overlap(parallel))
    )
    assert found[:2] == expected[:2] and found[2].keys() == expected[2].keys()
    assert all(torch.equal(found[2][name], value) for name, value in expected[2].items())


def test_checkpoints_have_the_same_bytes(ranks: RankPool, tmp_path: Path) -> None:
    """Masters, moments, biases of experts, amax histories and random states."""
    num_ranks, parallel = LAYOUTS["ep2"]
    model, folders = replace(MODELS["sigmoid"], hidden_dropout=0.1), (tmp_path / "plain", tmp_path / "overlapped")
    for folder, one in zip(folders, (parallel, with_overlap(parallel)), strict=True):
        config = replace(config_of(model, one, "O3"), precision=PRECISIONS["delayed"])
        ranks.run(run_tiny_on_a_rank, config, 2, None, folder, None, 4, num_ranks=num_ranks)
    files = [{path.relative_to(folder): path for path in folder.rglob("*.distcp")} for folder in folders]
    assert files[0].keys() == files[1].keys() and len(files[0]) >= num_ranks
    assert all(path.read_bytes() == files[1][name].read_bytes() for name, path in files[0].items())


def order_of_a_pair(config: Config, tokens: Tensor) -> list[tuple[str, str]]:
    """What the forward and the backward of two micro-batches do together: by whom, and what. Exchanges start and have
    arrived, and products are computed."""
    pair: list[tuple[str, str]] = []

    def note(what: str) -> None:
        pair.append(("forward" if current_thread() is main_thread() else "backward", what))

    def noting(function: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = function(*args)
            note(what)
            return result

        return call

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func._schema.name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm"):
                note("compute")
            return func(*args, **(kwargs or {}))

    def alternate(turns: Turns, *routines: Any, original: Callable[..., Any] = Turns.alternate) -> Any:
        pair.clear()
        result = original(turns, *routines)
        note("over")
        return result

    with pytest.MonkeyPatch.context() as patch:
        for cls in (AllGather, AllToAll):
            for method in ("send", "sum"):
                patch.setattr(cls, method, noting(getattr(cls, method), "start"))
        patch.setattr(Turn, "wait", noting(Turn.wait, "arrived"))
        patch.setattr(Turns, "alternate", alternate)
        with Products():
            train_tiny_gpt(config, tokens)
    return pair[: pair.index(("forward", "over"))]


@pytest.mark.parametrize("model", ["softmax", "alone"])
@pytest.mark.parametrize("layout", ["ep2", "ep2_alltoall"])
def test_one_computes_while_the_exchange_of_the_other_is_under_way(ranks: RankPool, model: str, layout: str) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    config = config_of(MODELS[model], with_overlap(parallel), "bf16")
    first, *others = ranks.run(order_of_a_pair, config, random_batches(1, 4), num_ranks=num_ranks)
    assert all(other == first for other in others)
    hidden = {"forward": 0, "backward": 0}
    for place, (routine, what) in enumerate(first):
        if what != "start":
            continue
        end = first.index((routine, "arrived"), place)
        hidden[routine] += any(other != routine and did == "compute" for other, did in first[place:end])
    assert hidden == {"forward": 4, "backward": 4}, first  # of each of two layers tokens and sums


def failing(config: Config, tokens: Tensor, where: str) -> list[float]:
    """Train, with an error of the first rank in a forward or a backward beside another routine."""

    def fail(gpt: TinyGPT) -> None:
        (chunk,) = gpt.model
        if gpt.topology.rank:
            return
        exchanges = (AllGather, AllToAll)
        name = {"forward": "send_choices", "backward": "sum_choices"}[where]
        for cls in exchanges:
            method = getattr(cls, name)

            def call(exchange: Any, x: Tensor, method: Callable[..., Tensor] = method) -> Tensor:
                if chunk.turns._pair is not None:
                    raise ValueError(f"the {where} of rank 0 cannot")
                return method(exchange, x)

            patch.setattr(cls, name, call)

    with pytest.MonkeyPatch.context() as patch:
        return train_tiny_gpt(config, tokens, before_training=fail).losses


@pytest.mark.parametrize("layout", ["ep2", "ep2_alltoall"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_of_either_is_the_step_s(ranks: RankPool, where: str, layout: str) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    config = config_of(MODELS["softmax"], with_overlap(parallel), "bf16")
    with pytest.raises(RankError, match=f"rank 0.*\n(.*\n)*ValueError: the {where} of rank 0 cannot"):
        ranks.run(failing, config, random_batches(1, 4), where, num_ranks=num_ranks, timeout_seconds=60.0)


def test_single_micro_batches_take_no_turns(ranks: RankPool) -> None:
    num_ranks, parallel = LAYOUTS["ep2"]
    config = config_of(MODELS["softmax"], with_overlap(parallel), "bf16")
    runs = ranks.run(counted, config, random_batches(2, 2), num_ranks=num_ranks)
    expected = ranks.run(counted, replace(config, parallel=parallel), random_batches(2, 2), num_ranks=num_ranks)
    assert {count for _, count in runs} == {0}
    assert_same_bits(runs[0][0], expected[0][0])
