"""Figures of docs/hardware.md equal the memory prediction and the page's formula, and are near the measurements."""

from __future__ import annotations

import re

import pytest

from fp8_megatron.config.io import parse_config
from fp8_megatron.config.schema import Config
from fp8_megatron.planning.memory import predict_memory
from tests.docs.documents import ROOT

_FAST = "configs/fast.yaml"
_SP = "--sequence-parallel"
_LLAMA_70B = (
    f"--config configs/llama_7b.yaml {_FAST} --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 "
    "--num-attention-heads 64 --group-query-attention --num-query-groups 8 --micro-batch-size 1 "
    f"--tensor-model-parallel-size 8 {_SP}"
)
_5_BYTES = "--main-params-dtype split --exp-avg-dtype int8 --exp-avg-sq-dtype uint8"
_7B = f"--config configs/gpt_7b.yaml {_FAST}"
_18B = f"--config configs/gpt_18b.yaml {_FAST} --micro-batch-size 4"

#: Rows that were measured too: the row's start, flags, ranks.
MEASURED = [
    ("GPT-7B, 1 GPU, 4 × 4", f"{_7B} --global-batch-size 16", 1),
    ("GPT-7B, 1 GPU, 4 × 1", f"{_7B} --global-batch-size 4", 1),
    ("GPT-7B, 2 GPUs, 4 × 1", f"{_7B} --global-batch-size 8", 2),
    ("GPT-7B, 4 GPUs, 4 × 1", f"{_7B} --global-batch-size 16", 4),
    (
        "GPT-7B, TP 2 × DP 2, 4 × 2",
        f"{_7B} --global-batch-size 16 --tensor-model-parallel-size 2 {_SP}",
        4,
    ),
    ("GPT-7B, TP 4, 4 × 4", f"{_7B} --global-batch-size 16 --tensor-model-parallel-size 4 {_SP}", 4),
    (
        "GPT-18B, 1 GPU, 4 × 1, recomputed",
        "--config configs/gpt_18b.yaml --fp8-recipe delayed --fp8-lm-head --micro-batch-size 4 --global-batch-size 4",
        1,
    ),
    (
        "Llama-3-70B of 8,192, TP 4, 1 × 1, 5-byte form",
        f"--config configs/llama_70b.yaml {_FAST} --tensor-model-parallel-size 4 --global-batch-size 1 {_5_BYTES}",
        4,
    ),
]
#: Rows of one node, on eight ranks with a global batch of 64: the row's start and flags.
PREDICTED = [
    ("GPT-7B | `configs/gpt_7b.yaml`, micro-batch 4", f"{_7B} --micro-batch-size 4"),
    ("GPT-7B | the same, micro-batch 8", f"{_7B} --micro-batch-size 8"),
    ("Llama-2-7B, 4,096 |", f"--config configs/llama_7b.yaml {_FAST} --micro-batch-size 4"),
    ("GPT-13B |", f"--config configs/gpt_13b.yaml {_FAST} --micro-batch-size 4"),
    ("GPT-18B |", _18B),
    ("Llama 70B, 4,096 | TP 8, micro-batch 1 |", _LLAMA_70B),
    ("Llama 70B, 4,096 | TP 8, micro-batch 1, 5-byte form |", f"{_LLAMA_70B} {_5_BYTES}"),
]


def _config(flags: str) -> Config:
    return parse_config([*flags.replace("configs/", f"{ROOT}/configs/").split(), "--mock-data"])


def _predicted_gb(config: Config, world_size: int) -> tuple[float, float, float]:
    """State, activations and logits of one rank as docs/hardware.md has them, 10^9 bytes."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    assert model.vocab_size is not None
    multiple = model.make_vocab_size_divisible_by * tp
    vocab = -(-model.vocab_size // multiple) * multiple
    memory = predict_memory(config, vocab, world_size=world_size)
    state = memory.linear.total + memory.rest.total
    tokens = config.training.micro_batch_size * model.seq_length
    queries = model.num_attention_heads * model.head_dim
    groups = model.query_groups * model.head_dim
    mlp = model.padded_ffn_hidden_size * (2 if model.swiglu else 1)
    layer = 2 * (2 * model.hidden_size + queries + 2 * groups + queries + mlp)
    per_token = model.num_layers * layer
    if config.training.recompute_granularity == "full":
        per_token = model.num_layers * 2 * model.hidden_size + layer
    return state / 1e9, tokens * per_token / tp / 1e9, 2 * tokens * vocab / tp / 1e9


def _row(start: str) -> list[float]:
    """Numbers of the last cells of the row that starts so."""
    lines = (ROOT / "docs" / "hardware.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith(f"| {start}")]
    assert len(rows) == 1, f"{len(rows)} rows start with '{start}'"
    cells = (re.match(r"[\d.]+", cell.strip()) for cell in rows[0].strip("|").split("|"))
    return [float(cell[0]) for cell in cells if cell]


@pytest.mark.parametrize(("start", "flags", "world_size"), MEASURED, ids=[row[0] for row in MEASURED])
def test_predictions_lie_below_what_was_measured(start: str, flags: str, world_size: int) -> None:
    predicted, measured = _row(start)
    assert sum(_predicted_gb(_config(flags), world_size)) == pytest.approx(predicted, abs=0.05)
    assert predicted < measured < predicted + 1.15, "the page says up to 1.1 GB"


@pytest.mark.parametrize(("start", "flags"), PREDICTED, ids=[row[0] for row in PREDICTED])
def test_one_node_is_what_the_prediction_says(start: str, flags: str) -> None:
    state, activations, logits = _predicted_gb(_config(f"{flags} --global-batch-size 64"), 8)
    assert _row(start) == pytest.approx([state, activations, state + activations + logits], abs=0.05)
