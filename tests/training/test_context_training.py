"""The trainer on ranks that share sequences: the steps, the log and the checkpoint of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8_megatron.checkpoint.description import read_description
from fp8_megatron.checkpoint.files import iteration_folder
from fp8_megatron.config.io import parse_config
from fp8_megatron.reporting.metrics_file import METRICS_FILE, read_rows
from fp8_megatron.training.trainer import Trainer
from tests.harness.ranks import RankPool
from tests.harness.runs import LLAMA_STYLE_FLAGS, tiny_flags

#: Of a step's record, what depends on samples and tokens alone.
COUNTS = ("kind", "iteration", "consumed_samples", "consumed_tokens", "global_batch_size", "learning_rate")


def _fit(folder: Path, context: int, load: Path | None = None) -> None:
    flags = tiny_flags(
        folder,
        **{**LLAMA_STYLE_FLAGS, "num_attention_heads": 4},
        global_batch_size=8,
        train_iters=4 if load is None else 6,
        lr_decay_iters=6,
        eval_interval=2,
        eval_iters=2,
        precision="bf16",
        log_interval=1,
        save=folder / "saved",
        load=load,
        check_weight_hash_across_dp_replicas_interval=None if context == 1 else 2,
        context_parallel_size=context,
    )
    Trainer(parse_config(flags)).fit()


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_it_trains_as_one_rank(ranks: RankPool, tmp_path: Path, num_ranks: int) -> None:
    """Losses of 128 tokens in BF16: a token's logits are off by 2⁻⁹, and Adam steps by gradients' signs.

    One rank then goes on from the checkpoint of two.
    """
    ranks.run(_fit, tmp_path / "one", 1, num_ranks=1)
    ranks.run(_fit, tmp_path / "shared", 2, num_ranks=num_ranks)
    one, shared = (read_rows(tmp_path / name / METRICS_FILE) for name in ("one", "shared"))
    counts = [[{key: record.get(key) for key in COUNTS} for record in run] for run in (one, shared)]
    assert counts[0] == counts[1] and {record["kind"] for record in one} >= {"train", "eval"}
    losses = [[record["loss"] for record in run if "loss" in record] for run in (one, shared)]
    assert losses[1] == pytest.approx(losses[0], abs=5e-3)
    description = read_description(iteration_folder(tmp_path / "shared" / "saved", 4))
    assert description["topology"]["context_parallel_size"] == 2
    assert description["topology"]["data_parallel_size"] == num_ranks // 2
    for name in ("one", "shared"):
        ranks.run(_fit, tmp_path / f"{name}_on", 1, tmp_path / name / "saved", num_ranks=1)
    ends = [
        [record["loss"] for record in read_rows(tmp_path / f"{name}_on" / METRICS_FILE) if record["kind"] == "train"]
        for name in ("one", "shared")
    ]
    assert len(ends[0]) == 2 and ends[1] == pytest.approx(ends[0], abs=5e-3)
