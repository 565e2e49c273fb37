"""Steps that were measured on H100, and what the planner predicts for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fp8_megatron.config.io import parse_config
from fp8_megatron.planning.memory import padded_vocab_size
from fp8_megatron.planning.speed import H100, predict_step
from tests.planning.recorded_runs import ROOT, read


@dataclass(frozen=True)
class H100Run:
    """A run and its flags."""

    name: str
    flags: str
    world_size: int
    measured_ms: float

    @property
    def predicted_ms(self) -> float:
        """Milliseconds of a step."""
        config = parse_config(["--mock-data", *self.flags.replace("configs/", f"{ROOT}/configs/").split()])
        return 1e3 * predict_step(config, padded_vocab_size(config), world_size=self.world_size, rates=H100).total


def _row(file: str, key: str, **wanted: str) -> dict[str, Any]:
    return next(row for row in read(file)[key] if wanted.items() <= row.items())


def _of_345m(name: str) -> float:
    """Its steps have 32 sequences of 1,024 tokens."""
    return 1e3 * 32 * 1024 / _row("parity_gpt_345m_h100.json", "results", name=name)["tokens_per_second"]


_SMALL = "--config configs/gpt_1.3b.yaml --vocab-size 32000 --global-batch-size 32"
H100_RUNS = [
    H100Run(
        "Llama-3-8B of 8,192, 4 GPUs, 1 × 4, 16-bit head",
        "--config configs/llama_8b.yaml --micro-batch-size 1 --global-batch-size 16 --precision fp8 --no-fp8-lm-head",
        4,
        _row("llama8b_8k_4h100.json", "results", name="O3-16-bit-head")["step_ms"],
    ),
    H100Run(
        "GPT-1.3B, 4 GPUs, 8 × 1, 16-bit head",
        f"{_SMALL} --precision fp8 --no-fp8-lm-head",
        4,
        1e3 * _row("parity_gpt_1.3b_4h100.json", "runs", level="16-bit-head")["step_seconds"],
    ),
    H100Run(
        "GPT-1.3B, 4 GPUs, 8 × 1, BF16",
        f"{_SMALL} --precision bf16",
        4,
        1e3 * _row("parity_gpt_1.3b_4h100.json", "runs", level="bf16")["step_seconds"],
    ),
    H100Run(
        "GPT-345M, fast, 32 × 1",
        "--config configs/gpt_345m.yaml configs/fast.yaml --vocab-size 32000",
        1,
        _of_345m("fast"),
    ),
    H100Run(
        "GPT-345M in BF16, 32 × 1",
        "--config configs/gpt_345m.yaml --vocab-size 32000 --precision bf16",
        1,
        _of_345m("bf16"),
    ),
    H100Run(
        "GPT-7B, fast, two stages, 2 × 16",
        "--config configs/gpt_7b.yaml configs/fast.yaml --pipeline-model-parallel-size 2 --micro-batch-size 2 "
        "--global-batch-size 32",
        2,
        _row("pipelines_2h100.json", "rows", name="gpt-7b none")["step_ms"],
    ),
]
