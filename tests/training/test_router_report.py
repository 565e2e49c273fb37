"""What the routers of a run report: experts' load and auxiliary losses, on any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from fp8_megatron.assembly import parts_of
from fp8_megatron.config.io import parse_config
from fp8_megatron.mcore.runtime import runtime, seed_everything
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.mcore.transformer_config import transformer_config
from fp8_megatron.moe.megatron.router import Router
from fp8_megatron.moe.router_report import TOKENS_FILE, router_table
from fp8_megatron.reporting.metrics_file import METRICS_FILE, read_rows
from fp8_megatron.training.trainer import Trainer
from tests.harness.ranks import RankPool
from tests.harness.runs import LLAMA_STYLE_FLAGS, tiny_flags

CPU = torch.device("cpu")
SEQ, SAMPLES, EXPERTS, TOP_K = 16, 8, 4, 2
LOSSES = ("load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss", "z_loss")
FLAGS = {
    **LLAMA_STYLE_FLAGS,
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_experts": EXPERTS,
    "moe_router_topk": TOP_K,
    "moe_ffn_hidden_size": 128,
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": ["1e-2", "1e-3", "1e-3"],
    "moe_z_loss_coeff": 1e-3,
    "moe_router_dtype": "fp32",
    "precision": "bf16",
    "seq_length": SEQ,
    "global_batch_size": SAMPLES,
    "train_iters": 3,
}


def _fit(folder: Path, layout: dict[str, Any]) -> None:
    reports: dict[str, Any] = {
        "moe_per_layer_logging": True,
        "save_tokens_per_expert_interval": 1,
        "eval_interval": 1,
        "eval_iters": 1,
    }
    Trainer(parse_config(tiny_flags(folder, **FLAGS, **reports, **layout))).fit()


def _rows(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    steps = [row for row in read_rows(folder / METRICS_FILE) if row["kind"] == "train"]
    return steps, read_rows(folder / TOKENS_FILE)


def _first_step(ranks: RankPool, folder: Path, layout: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """The first step's row and its tokens of every expert [layers, E]; all rows agree with each other."""
    ranks.run(_fit, folder, layout, num_ranks=2 if layout else 1)
    steps, tokens = _rows(folder)
    assert [row["iteration"] for row in tokens] == [1, 2, 3]
    for row in tokens:  # a validation before the step would add its own
        assert row["layers"] == [0, 1]
        assert [sum(counts) for counts in row["tokens"]] == [SAMPLES * SEQ * TOP_K] * 2
    for step, row in zip(steps, tokens, strict=True):
        mean = SAMPLES * SEQ * TOP_K / EXPERTS
        assert step["load_imbalance_by_layer"] == [max(counts) / mean for counts in row["tokens"]]
        assert step["min_load"] == min(min(counts) for counts in row["tokens"]) / mean
        assert step["load_imbalance"] == max(step["load_imbalance_by_layer"])
        for name in LOSSES:
            assert step[name] == pytest.approx(sum(step[f"{name}_by_layer"]) / 2)
    return steps[0], torch.tensor(tokens[0]["tokens"])


@pytest.fixture(scope="module")
def of_one_rank(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Tensor]:
    return _first_step(ranks, tmp_path_factory.mktemp("one"), {})


@pytest.mark.parametrize(
    "layout",
    [
        {"expert_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2},
        {"context_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ],
    ids=lambda layout: next(iter(layout)),
)
def test_reports_are_those_of_one_rank(
    layout: dict[str, Any], of_one_rank: tuple[dict[str, Any], Tensor], ranks: RankPool, tmp_path: Path
) -> None:
    """In the first step weights are the same; BF16 sums in another order may send single tokens elsewhere."""
    (one, counts), (step, of_layout) = of_one_rank, _first_step(ranks, tmp_path, layout)
    assert (of_layout - counts).abs().max() <= 2
    for name in LOSSES[:2] + LOSSES[3:]:
        assert step[name] == pytest.approx(one[name], rel=2e-3), name
    # Ranks see the loads of more samples at a time than one rank, except those of a pipeline.
    assert step[LOSSES[2]] == pytest.approx(one[LOSSES[2]], rel=2e-2)


def _by_hand(logits: Tensor) -> dict[str, float]:
    """The losses of logits [s, b, E]: E / (k · T²) · Σ_e tokens_e · Σ_t p_te; of sequences their mean."""

    def balance(logits: Tensor) -> float:
        probs = logits.softmax(dim=-1)
        tokens = torch.zeros(EXPERTS).index_add(
            0, logits.topk(TOP_K).indices.flatten(), torch.ones(logits.numel() // 2)
        )
        return float(EXPERTS / (TOP_K * len(logits) ** 2) * (tokens * probs.sum(dim=0)).sum())

    flat = logits.reshape(-1, EXPERTS)
    of_sequences = [balance(sequence) for sequence in logits.unbind(1)]
    z_loss = float(flat.logsumexp(dim=-1).square().mean())
    return dict(zip(LOSSES, (balance(flat), sum(of_sequences) / len(of_sequences), balance(flat), z_loss), strict=True))


def test_losses_and_loads_of_one_layer() -> None:
    """Losses by hand; a weight that prefers two experts shows; what has no gradient does not count."""
    config = parse_config(tiny_flags(Path("unused"), **{**FLAGS, "num_layers": 1}))
    with runtime(CPU), initialized(config.parallel, 1, CPU):
        seed_everything(1, CPU, tensor_parallel_rank=0, pipeline_rank=0)
        router = Router(
            transformer_config(config, CPU, parts_of(config).settings), ProcessGroupCollection.use_mpu_process_groups()
        )
        router.set_layer_number(1)
        table = router_table(config, num_sequences=1, num_ranks=1)
        assert tuple(table.means) == router.mean_names
        x = torch.rand(SEQ, 2, 64).bfloat16()
        torch.nn.init.normal_(router.weight)
        router(x)
        with torch.no_grad():
            router(x)
        report = table.unpack(table.pack({0: (router.load, router.means)}, CPU).tolist(), 1)
        expected = _by_hand(x.float() @ router.weight.float().t())
        assert report.means == {name: [pytest.approx(loss, rel=1e-5)] for name, loss in expected.items()}
        assert sum(report.tokens[0]) == SEQ * 2 * TOP_K
        router.start_step()
        router.weight.data[:2] += 1.0
        router.weight.data[2:] -= 1.0
        router(x)
        router(x)
        figures = table.unpack(table.pack({0: (router.load, router.means)}, CPU).tolist(), 2).figures()
    assert (figures["load_imbalance"], figures["min_load"], figures["idle_experts"]) == (2.0, 0.0, 2.0)
    assert figures["load_balancing_loss"] == pytest.approx(2.0, rel=1e-3)
