"""Predictions that docs/planning.md quotes are those of the planner."""

from __future__ import annotations

import re

import pytest

from fp8_megatron.config.io import parse_config
from fp8_megatron.planning.layouts import largest_peak
from fp8_megatron.planning.memory import padded_vocab_size
from fp8_megatron.planning.speed import predict_step
from tests.docs.documents import ROOT
from tests.planning.recorded_runs import recorded_runs

#: The run of each row of the table.
STEPS = [
    ("GPT-1.3B, lean, 8 × 1", "gpt1.3b_h200.json: O3-lean"),
    ("GPT-7B, fast, 4 GPUs, 4 × 4, 10 layers kept", "gpt7b_4h200_graph.json: O3-fast"),
    ("GPT-13B, TP 2 × DP 2, graph", "gpt13b_4h200_tp2.json: O3-graph"),
    ("GPT-7B, four stages, 2 × 16", "gpt7b_pp4_4h200.json: O3-fast"),
    ("GPT-30B, TP 4, 2 × 8, 48 layers kept", "gpt30b_tp4_4h200.json: O3-fast"),
    ("Llama-2-7B of 2,048, 4 GPUs, 4 × 4", "llama7b_2k_4h200.json: O3-fast"),
    ("Llama-3-8B of 8,192, 4 GPUs, 1 × 4", "llama8b_8k_4h200.json: O3-fast"),
    (
        "Llama-3-8B of 32,768, CP 4 by `a2a`, FP8 attention",
        "llama8b_32k_cp4_a2a_4h200.json: O3-fp8-attention",
    ),
    ("Llama-3-70B of 8,192, TP 4, 5-byte form", "llama70b_tp4_4h200.json: O3-fast"),
]
RUNS = {run.label: run for run in recorded_runs()}


def _quoted(section: str, start: str) -> float:
    """The first number of the row of a section that starts so."""
    text = (ROOT / "docs" / "planning.md").read_text()
    text = re.split(r"^## ", text.split(f"\n## {section}\n")[1], flags=re.MULTILINE)[0]
    (row,) = (line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return float(row.split("|")[2].replace(",", ""))


@pytest.mark.parametrize(("start", "level"), [("BF16", "--precision bf16"), ("O3", "--precision fp8")])
def test_gpt_175b(start: str, level: str) -> None:
    flags = f"--config {ROOT}/configs/gpt_175b.yaml --mock-data --pipeline-model-parallel-size 4 {level}"
    stage, peak = largest_peak(parse_config(flags.split()), 128)
    assert stage == 0 and peak.total / 1e9 == pytest.approx(_quoted("Memory", start), abs=0.05001)


@pytest.mark.parametrize(("start", "label"), STEPS)
def test_step_time(start: str, label: str) -> None:
    run = RUNS[label]
    step = predict_step(run.config, padded_vocab_size(run.config), world_size=run.world_size)
    assert 1e3 * step.total == pytest.approx(_quoted("Step time", start), abs=0.5001)


@pytest.mark.parametrize(
    ("start", "world_size", "num_micro_batches", "micro_batch"),
    [
        ("8 GPUs of a node, 320 micro-batches of 2,048 tokens", 8, 320, 1),
        ("64 GPUs, 8 micro-batches of 2,048 tokens", 64, 8, 1),
        ("64 GPUs, 8 micro-batches of 4,096 tokens", 64, 8, 2),
        ("64 GPUs, 8 micro-batches of 8,192 tokens", 64, 8, 4),
    ],
)
def test_where_to_add_up_gradients(start: str, world_size: int, num_micro_batches: int, micro_batch: int) -> None:
    found = []
    for mode in ("sharded", "local"):
        flags = f"--config {ROOT}/configs/gpt_13b.yaml --mock-data --grad-accumulation {mode}"
        batch = num_micro_batches * micro_batch * world_size // 2
        sizes = ["--micro-batch-size", str(micro_batch), "--global-batch-size", str(batch)]
        config = parse_config([*flags.split(), *sizes])
        step = predict_step(config, padded_vocab_size(config), world_size=world_size)
        found.append((1e3 * step.total, largest_peak(config, world_size)[1].total / 1e9))
    (sharded, less), (local, more) = found
    text = (ROOT / "docs" / "planning.md").read_text()
    assert f"| {start} | {sharded:,.0f} | {local:,.0f} | {more - less:.1f} |" in text
