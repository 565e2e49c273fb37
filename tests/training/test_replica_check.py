"""A run of two ranks compares its replicas, and a flipped bit ends it before what it spoils is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fp8_megatron.checkpoint.files import saved_iterations
from fp8_megatron.config.io import parse_config
from fp8_megatron.reporting.run_log import EVENTS_FILE, read_events
from fp8_megatron.training import training_run
from fp8_megatron.training.trainer import Trainer
from fp8_megatron.watch.replica_hash import ReplicasDiffer
from tests.harness.ranks import RankPool
from tests.harness.runs import tiny_flags


def _fit(folder: Path, flipped_at: int | None, changed: dict[str, Any] | None = None) -> str:
    """Train 6 steps on this rank, with a bit of rank 1's weights flipped in front of a step."""
    settings: dict[str, Any] = {
        "train_iters": 6,
        "save": folder / "saved",
        "save_interval": 2,
        "check_weight_hash_across_dp_replicas_interval": 3,
    }
    flags = tiny_flags(folder, **{**settings, **(changed or {})})
    step, taken = training_run.train_step, 0

    def flipping(state: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal taken
        taken += 1
        if taken == flipped_at and state.topology.rank == 1:
            for space in state.optimizer.states:
                if space.gather is not None:
                    space.gather.wait()
            state.optimizer.states[0].weight.payload.view(torch.uint8)[5] ^= 16
        return step(state, *args, **kwargs)

    training_run.train_step = flipping
    try:
        Trainer(parse_config(flags)).fit()
    except ReplicasDiffer as error:
        return str(error)
    finally:
        training_run.train_step = step
    return ""


@pytest.mark.parametrize("flipped_at", [None, 3, 4, 5])
def test_a_flipped_bit_ends_the_run(ranks: RankPool, tmp_path: Path, flipped_at: int | None) -> None:
    """Compared are steps 3 and 6, and 2, 4 and 6, which are saved. A bit that flips in front of step 5 is gone at 6."""
    texts = ranks.run(_fit, tmp_path, flipped_at, num_ranks=2)
    assert texts[0] == texts[1]
    faults = [found for found in read_events(tmp_path / EVENTS_FILE) if found["kind"] == "fault"]
    if flipped_at in (None, 5):
        assert texts[0] == "" and faults == [] and saved_iterations(tmp_path / "saved") == [2, 4, 6]
        return
    assert texts[0].startswith("ranks 0 (host ") and "hold different bits of weight " in texts[0]
    assert saved_iterations(tmp_path / "saved") == [2]
    assert [(found["fault"], found["ranks"]) for found in faults] == [("replicas_differ", [0, 1])]
    # Read one step late, unless the step is saved.
    assert faults[0]["iteration"] == 4


@pytest.mark.parametrize(
    "ending", [{"exit_interval": 5}, {"iterations_to_skip": [6]}], ids=["exit interval", "the last is left out"]
)
def test_the_last_step_is_compared_where_a_run_ends_early(
    ranks: RankPool, tmp_path: Path, ending: dict[str, Any]
) -> None:
    """Step 5 is the last, and no interval ends with it."""
    changed = {"save_interval": None, "check_weight_hash_across_dp_replicas_interval": 4, **ending}
    texts = ranks.run(_fit, tmp_path, 5, changed, num_ranks=2)
    assert all("hold different bits of weight " in text for text in texts)
    assert saved_iterations(tmp_path / "saved") == []
