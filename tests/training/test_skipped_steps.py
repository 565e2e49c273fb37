"""Steps that are skipped for a value that is not finite: a loss with finite gradients, and the tensor that is named."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_megatron.config.io import parse_config
from fp8_megatron.mcore.runtime import runtime, seed_everything
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.reporting.metrics_file import HEALTH_FILE
from fp8_megatron.reporting.run_log import EVENTS_FILE, read_events
from fp8_megatron.training import training_run
from fp8_megatron.training.build import build_training_state
from fp8_megatron.training.run_data import open_run_data
from fp8_megatron.training.train_step import train_step
from fp8_megatron.training.trainer import Trainer
from tests.harness.ranks import RankPool
from tests.harness.runs import tiny_flags

#: The step that is disturbed, on the last rank.
BAD = 3


def _fit_with_a_bad_loss(folder: Path, flags: dict[str, Any], bad: float) -> list[tuple[bool, bool]]:
    """Train 4 steps; `bad` is added to the last rank's losses of one, with the gradient that they have without it.

    Returns:
        For each step, whether its norm is finite, and whether any master changed on this rank.
    """
    step, taken, found = training_run.train_step, itertools.count(1), []

    def masters(state: Any) -> list[Tensor]:
        return [space.master.load().clone() for space in state.optimizer.states]

    def disturbed(state: Any, *args: Any, **kwargs: Any) -> Tensor:
        is_bad = next(taken) == BAD and state.topology.rank == state.topology.world_size - 1
        hook = state.model[-1].module.register_forward_hook(lambda module, args, out: out + bad if is_bad else out)
        before = masters(state)
        packed = step(state, *args, **kwargs)
        hook.remove()
        changed = any(not torch.equal(*pair) for pair in zip(before, masters(state), strict=True))
        found.append((math.isfinite(packed[2].item()), changed))
        return packed

    training_run.train_step = disturbed
    try:
        Trainer(parse_config(tiny_flags(folder, train_iters=4, **flags))).fit()
    finally:
        training_run.train_step = step
    return found


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize(
    "flags",
    [
        {"precision": "bf16"},
        {"fp8_recipe": "tensorwise"},
        {"fp8_recipe": "delayed"},
        {"pipeline_model_parallel_size": 2},
    ],
    ids=["bf16", "tensorwise", "delayed", "pipeline"],
)
def test_a_loss_that_is_not_finite_skips_the_step_on_every_rank(
    ranks: RankPool, tmp_path: Path, flags: dict[str, Any], bad: float
) -> None:
    for found in ranks.run(_fit_with_a_bad_loss, tmp_path, flags, bad, num_ranks=2):
        assert found == [(number != BAD, number != BAD) for number in range(1, 5)]


def _train_on_a_batch(
    flags: dict[str, Any], bad_steps: list[int], num_steps: int, bad: float = math.nan
) -> list[tuple[float, Tensor]]:
    """Gradient norm, and μ of every tensor on this rank, after each step; in some, the last rank's loss is multiplied
    by `bad`."""
    constant = {"fp8_recipe": "delayed", "lr_decay_style": "constant", "lr_warmup_iters": 0}
    config = parse_config(tiny_flags(Path("unused"), train_iters=num_steps, **constant, **flags))
    device, found = torch.device("cpu"), []
    with runtime(device), initialized(config.parallel, config.model.num_layers, device) as topology:
        seed_everything(1, device, tensor_parallel_rank=topology.tp.rank(), pipeline_rank=topology.pp.rank())
        data = open_run_data(config, topology)
        state = build_training_state(config, data.padded_vocab_size, topology, device)
        factor = bad if topology.rank == topology.world_size - 1 else 1.0
        batch = list(itertools.islice(data.train_loader(0), state.num_micro_batches))
        for number in range(1, num_steps + 1):
            hook = state.model[-1].module.register_forward_hook(
                lambda module, args, out, is_bad=number in bad_steps: out * factor if is_bad else out
            )
            norm = train_step(state, iter(batch))[2].item()
            hook.remove()
            mus = [autoscale.mu for buffer in state.optimizer.buffers for autoscale in buffer.autoscales]
            found.append((norm, torch.cat([torch.empty(0), *mus])))
    return found


@pytest.mark.parametrize(
    "flags", [{}, {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}], ids=["dp2", "tp2", "pp2"]
)
def test_a_step_behind_skipped_first_ones_casts_as_a_first_step(ranks: RankPool, flags: dict[str, Any]) -> None:
    """To the bit: neither a scale that was never set, nor an amax of a skipped step takes part."""
    healthy = ranks.run(_train_on_a_batch, flags, [], 2, num_ranks=2)
    for found, without in zip(ranks.run(_train_on_a_batch, flags, [1, 2], 4, num_ranks=2), healthy, strict=True):
        norms = [norm for norm, _ in found]
        assert all(map(math.isnan, norms[:2])) and norms[2:] == [norm for norm, _ in without]


def test_a_first_step_whose_norm_overflows_leaves_no_amaxes(ranks: RankPool) -> None:
    """Its gradients are finite, and their squares are not: the step is skipped as one with a NaN is."""
    healthy = ranks.run(_train_on_a_batch, {}, [], 2, num_ranks=1)
    for found, without in zip(ranks.run(_train_on_a_batch, {}, [1], 3, 1e25, num_ranks=1), healthy, strict=True):
        norms = [norm for norm, _ in found]
        assert norms[0] == math.inf and norms[1:] == [norm for norm, _ in without]


def test_mu_does_not_move_in_a_skipped_step(ranks: RankPool) -> None:
    """On any rank. Behind it, μ is what it is without the step."""
    flags = {"fp8_grad_reduce": "nccl"}
    healthy = ranks.run(_train_on_a_batch, flags, [], 4, num_ranks=2)
    for found, without in zip(ranks.run(_train_on_a_batch, flags, [4, 5], 6, num_ranks=2), healthy, strict=True):
        norms, mus = zip(*found, strict=True)
        assert [math.isnan(norm) for norm in norms] == [False] * 3 + [True] * 2 + [False]
        assert len(mus[0]) > 0 and not torch.equal(mus[1], mus[2])
        assert torch.equal(mus[3], mus[2]) and torch.equal(mus[4], mus[2])
        assert torch.equal(mus[2], without[2][1]) and torch.equal(mus[5], without[3][1])


@pytest.mark.parametrize(
    "flags", [{"fp8_recipe": "tensorwise"}, {"fp8_recipe": "blockwise", "hidden_size": 256, "seq_length": 128}]
)
def test_the_third_bad_step_in_a_row_names_the_first_cast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any]
) -> None:
    """A result is read one step late, so the step after the next one is sampled. Healthy steps are not."""
    step, taken = training_run.train_step, itertools.count(1)

    def disturbed(state: Any, *args: Any, **kwargs: Any) -> Tensor:
        is_bad = next(taken) in (3, 4, 5)
        attention = state.model[0].module.decoder.layers[1].self_attention.core_attention
        hook = attention.register_forward_hook(lambda module, args, out: out * math.nan if is_bad else out)
        packed = step(state, *args, **kwargs)
        hook.remove()
        return packed

    monkeypatch.setattr(training_run, "train_step", disturbed)
    Trainer(parse_config(tiny_flags(tmp_path, train_iters=8, **flags))).fit()
    skips = [found for found in read_events(tmp_path / EVENTS_FILE) if found["kind"] == "skip"]
    assert [skip["iteration"] for skip in skips] == [3, 4, 5]
    assert [skip.get("tensor") for skip in skips] == [
        None,
        None,
        "input of decoder.layers.1.self_attention.linear_proj",
    ]
    assert "not finite: input of decoder.layers.1.self_attention.linear_proj" in skips[2]["text"]
    assert len((tmp_path / HEALTH_FILE).read_text().splitlines()) == 3  # steps 5, 6 and 7
