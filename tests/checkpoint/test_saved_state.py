"""Checkpoints of sharded state: bitwise the same run on as many replicas, the same state on any other number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp8_megatron.checkpoint.checkpoint import Progress, Resumable, load_checkpoint, read_weights, save_checkpoint
from fp8_megatron.checkpoint.files import CheckpointError
from fp8_megatron.config import ParallelConfig, PrecisionConfig
from fp8_megatron.device import runtime
from fp8_megatron.distributed.topology import initialized
from fp8_megatron.formats import StorageDtype
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.testing.ranks import RankError, RankPool
from fp8_megatron.testing.tiny_gpt import (
    GPT3_STYLE,
    VOCAB_SIZE,
    TinyGPT,
    build_tiny_gpt,
    forward_backward,
    random_batches,
    tiny_config,
)

CPU = torch.device("cpu")
#: Buckets smaller than the space, so that every parameter is in several ranks' shards.
SMALL_BUCKETS = ParallelConfig(ddp_bucket_size=1 << 15)


SPLIT = PrecisionConfig(
    main_params_dtype=StorageDtype.SPLIT, exp_avg_dtype=StorageDtype.INT8, exp_avg_sq_dtype=StorageDtype.UINT8
)


def whole_state(gpt: TinyGPT) -> dict[str, Tensor]:
    """Masters and moments in FP32, and weights; called by every rank."""
    state = {}
    for space, slot in gpt.optimizer.slots():
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            state[f"{slot.name}/{kind}"] = space.space.assemble(
                slot,
                lambda fragment, space=space, kind=kind, slot=slot: space.part(kind, slot, fragment).load(),
                gpt.topology.dp,
            )
    for chunk in gpt.model:
        chunk.wait_for_weights()
    for _, slot in gpt.optimizer.slots():
        is_scaled = isinstance(slot.param, ScaledTensor)
        state[slot.name] = slot.param.dequantize() if is_scaled else slot.param.detach().float().clone()
    return state


def _run(
    folder: Path, precision: PrecisionConfig, num_steps: int, save: bool, load: bool, parallel: ParallelConfig
) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    """Load if told to, train, save if told to: the state at the start, the losses, the state at the end."""
    config = tiny_config(replace(GPT3_STYLE, num_layers=1), precision=precision, parallel=parallel)
    with runtime(CPU), initialized(parallel, 1, CPU) as topology:
        gpt = build_tiny_gpt(config, topology, CPU, num_micro_batches=1)
        resumable = Resumable(gpt.optimizer, [chunk.recipe.history for chunk in gpt.chunks], topology, CPU)
        progress = Progress()
        if load:
            loaded = load_checkpoint(folder, resumable, weights_only=False)
            assert loaded is not None
            progress = loaded
        start = whole_state(gpt)
        losses = []
        for step in range(num_steps):
            batches = random_batches(1, topology.dp.size(), seed=progress.iteration + step)
            losses.append(forward_backward(gpt, config, batches[0, topology.dp.rank() :: topology.dp.size()]))
            gpt.optimizer.step()
        end = whole_state(gpt)
        if save:
            save_checkpoint(
                folder, resumable, Progress(iteration=num_steps), config=config, vocab_size=VOCAB_SIZE, keep_last=None
            )
        return start, losses, end


def assert_equal(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize(
    "precision",
    [
        PrecisionConfig(),
        PrecisionConfig(opt_level="O1"),
        PrecisionConfig(exp_avg_dtype=StorageDtype.INT8, exp_avg_sq_dtype=StorageDtype.UINT8),
        SPLIT,
    ],
    ids=["O3", "O1", "companded", "split"],
)
def test_any_number_of_replicas_takes_over(ranks: RankPool, tmp_path: Path, precision: PrecisionConfig) -> None:
    saved = ranks.run(_run, tmp_path, precision, 2, True, False, SMALL_BUCKETS, num_ranks=2)
    _, _, expected = saved[0]
    for num_ranks, parallel in ((2, SMALL_BUCKETS), (1, ParallelConfig()), (4, ParallelConfig())):
        for start, _, _ in ranks.run(_run, tmp_path, precision, 0, False, True, parallel, num_ranks=num_ranks):
            assert_equal(start, expected)
    # What a reader without an optimizer sees.
    for name, value in read_weights(tmp_path / "iter_0000002", 0, 0):
        assert torch.equal(value, expected[f"{name}/master"])


@pytest.mark.parametrize("precision", [PrecisionConfig(), SPLIT], ids=["O3", "split"])
def test_resuming_is_not_noticed(ranks: RankPool, tmp_path: Path, precision: PrecisionConfig) -> None:
    """Two steps, saved, and two more are four steps: every loss and every bit of state."""
    arguments = (precision, SMALL_BUCKETS)
    whole = ranks.run(_run, tmp_path / "whole", arguments[0], 4, False, False, arguments[1], num_ranks=2)
    ranks.run(_run, tmp_path / "half", arguments[0], 2, True, False, arguments[1], num_ranks=2)
    rest = ranks.run(_run, tmp_path / "half", arguments[0], 2, False, True, arguments[1], num_ranks=2)
    for (_, losses, state), (_, all_losses, expected) in zip(rest, whole, strict=True):
        assert losses == all_losses[2:]
        assert_equal(state, expected)


def test_a_missing_replica_is_named(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_run, tmp_path, PrecisionConfig(), 1, True, False, SMALL_BUCKETS, num_ranks=2)
    next(tmp_path.glob("iter_*/*dp0001*")).unlink()
    with pytest.raises(RankError, match=rf"{CheckpointError.__name__}: .*dp0001.* is missing; use another iteration"):
        ranks.run(_run, tmp_path, PrecisionConfig(), 0, False, True, ParallelConfig(), num_ranks=1)
