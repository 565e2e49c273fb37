"""A forward beside the backward of the micro-batch before it, on one GPU, has the bits of one that follows it.

Its experts are shared by a group of one rank: exchanges are NCCL's, turns are a run's own, and nothing leaves the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from fp8_megatron.collectives.turns import _Pair
from fp8_megatron.config.io import parse_config
from fp8_megatron.moe.layers.token_exchange import AllGather
from fp8_megatron.moe.megatron.layer import Experts
from fp8_megatron.reporting.metrics_file import METRICS_FILE, read_rows
from fp8_megatron.training.trainer import Trainer
from tests.harness.runs import EXPERT_FLAGS, GPU_RUN, tiny_flags

pytestmark = pytest.mark.gpu

MODEL = {
    **GPU_RUN,
    **EXPERT_FLAGS,
    "train_iters": 10,
    "global_batch_size": 12,
    "log_interval": 4,
    "eval_interval": 5,
    "eval_iters": 2,
    "deterministic_mode": True,
}


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Experts exchange tokens with a group of this rank alone; by routine, the turns that it gave to the other."""
    given, make, give = [0, 0], Experts.__init__, _Pair.give

    def make_sharing(experts: Experts, config: Any, groups: Any, *others: Any) -> None:
        make(experts, config, groups, *others)
        experts.ranks = groups.tp_ep

    def count(pair: _Pair) -> None:
        given[pair._own()] += 1
        give(pair)

    monkeypatch.setattr(Experts, "__init__", make_sharing)
    monkeypatch.setattr(_Pair, "give", count)
    yield given


def fit(output_dir: Path, *, overlaps: bool, **overrides: object) -> list[dict]:
    """The metrics of a run on random tokens, without times."""
    config = parse_config(tiny_flags(output_dir, **{**MODEL, **overrides}))
    # As flags it would have no effect with one rank.
    config = replace(config, parallel=replace(config.parallel, overlap_moe_expert_parallel_comm=overlaps))
    Trainer(config).fit()
    kept = ("kind", "iteration", "loss", "grad_norm")
    return [{name: record.get(name) for name in kept} for record in read_rows(output_dir / METRICS_FILE)]


SETTINGS: dict[str, dict[str, object]] = {
    "delayed": {},
    "bf16": {"precision": "bf16", "fp8_recipe": None},
    "blockwise": {"fp8_recipe": "blockwise", "ffn_hidden_size": 1408},
    "shared": {"moe_shared_expert_intermediate_size": 256},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "recomputed": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


@pytest.mark.parametrize("impl", ["none", "local"])
@pytest.mark.parametrize("name", SETTINGS)
def test_overlapped_micro_batches_train_bit_for_bit(tmp_path: Path, turns: list[int], name: str, impl: str) -> None:
    """Under `local` the turns are taken while a step is recorded, and in the steps before."""
    settings = {**SETTINGS[name], "cuda_graph_impl": impl}
    expected = fit(tmp_path / "plain", overlaps=False, **settings)
    assert turns == [0, 0]
    assert fit(tmp_path / "overlapped", overlaps=True, **settings) == expected
    assert min(turns) > 0 and expected[-1]["loss"] is not None


@pytest.mark.parametrize("name", ["delayed", "bf16"])
def test_tokens_sent_to_their_experts_alone_train_bit_for_bit(
    tmp_path: Path, turns: list[int], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As alltoall does: the host waits for numbers of tokens between its turns."""
    make = Experts.__init__

    def make_sending(experts: Experts, *args: Any) -> None:
        make(experts, *args)
        experts.gathers = False

    monkeypatch.setattr(Experts, "__init__", make_sending)
    settings = {**SETTINGS[name], "cuda_graph_impl": "none"}
    expected = fit(tmp_path / "plain", overlaps=False, **settings)
    assert fit(tmp_path / "overlapped", overlaps=True, **settings) == expected
    assert min(turns) > 0


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_of_either_ends_the_run(
    tmp_path: Path, turns: list[int], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Autograd calls the backward on a thread of its own."""
    name = {"forward": "send_choices", "backward": "sum_choices"}[where]
    method = getattr(AllGather, name)

    def fail(exchange: AllGather, x: Tensor) -> Tensor:
        if min(turns) > 10:
            raise ValueError(f"this {where} cannot")
        return method(exchange, x)

    monkeypatch.setattr(AllGather, name, fail)
    with pytest.raises(ValueError, match=f"this {where} cannot"):
        fit(tmp_path, overlaps=True, cuda_graph_impl="none")
