"""What routers say of a step is of all layers and all ranks, whatever the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8_megatron.config.io import parse_config
from fp8_megatron.reporting.metrics_file import METRICS_FILE, read_rows
from fp8_megatron.training.trainer import Trainer
from tests.harness.ranks import RankPool
from tests.harness.runs import tiny_flags

LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss")
EXPERTS: dict[str, Any] = {
    "num_layers": 4,
    "num_experts": 4,
    "moe_layer_freq": "[0,1,1,1]",
    "moe_ffn_hidden_size": 128,
    "disable_bias_linear": True,
    "moe_router_load_balancing_type": list(LOSSES[:3]),
    "moe_aux_loss_coeff": ["1e-2", "1e-2", "1e-2"],
    "moe_z_loss_coeff": 1e-3,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 1,
    "moe_per_layer_logging": True,
}


def _rows(folder: Path, words: dict[str, Any]) -> None:
    Trainer(parse_config(tiny_flags(folder, **EXPERTS, **words))).fit()


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one rank reports of the first step."""
    folder = tmp_path_factory.mktemp("one")
    ranks.run(_rows, folder, {}, num_ranks=1)
    return _first_step(folder)


def _first_step(folder: Path) -> dict[str, Any]:
    return next(row for row in read_rows(folder / METRICS_FILE) if row["kind"] == "train")


@pytest.mark.parametrize(
    "words",
    [
        {"expert_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2},
        {"context_parallel_size": 2, "attention_dropout": 0.0},
    ],
    ids=str,
)
def test_every_layout_reports_the_same(
    ranks: RankPool, tmp_path: Path, one_rank: dict[str, Any], words: dict[str, Any]
) -> None:
    """The first step has the same weights and tokens. Casts and sums differ by roundings of BF16, 2⁻⁸."""
    ranks.run(_rows, tmp_path, words, num_ranks=2)
    one, two = one_rank, _first_step(tmp_path)
    assert one["experts"]["layers"] == [1.0, 2.0, 3.0]
    for name in LOSSES:
        assert two[name] == pytest.approx(one[name], rel=2**-6)
        assert two["experts"][name] == pytest.approx(one["experts"][name], rel=2**-6)
        assert one[name] == pytest.approx(sum(one["experts"][name]) / 3)
    # A token at a tie may go to another expert: some of 512.
    assert two["experts"]["largest_expert_load"] == pytest.approx(one["experts"]["largest_expert_load"], rel=0.05)
    assert one["largest_expert_load"] == max(one["experts"]["largest_expert_load"]) >= 1.0


def test_a_model_without_experts_reports_none(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_fit_dense, tmp_path, num_ranks=1)
    row = _first_step(tmp_path)
    assert "experts" not in row and all(row[name] is None for name in (*LOSSES, "largest_expert_load"))


def _fit_dense(folder: Path) -> None:
    Trainer(parse_config(tiny_flags(folder, train_iters=1))).fit()
