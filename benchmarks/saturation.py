"""Training after one step with activations far beyond their delayed scales, by what the step does. On a CPU.

    python benchmarks/saturation.py --seeds 1 2 3 --output saturation.json

A tiny GPT learns the bytes of the documentation. In one step the output of every attention is multiplied by a factor:

    none        no factor
    taken       the step is taken with its clamped values
    fitting     the step is taken with scales that fit (current scaling)
    skipped     the step is skipped, as training does
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.random_batches import random_batches
from fp8_megatron.commands.arguments import Parser, output_file, whole
from fp8_megatron.commands.program import exit_status
from fp8_megatron.config.schema import Config, ModelConfig, OptimizerConfig, PrecisionConfig, TrainingConfig
from fp8_megatron.mcore.runtime import runtime, seed_everything
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.outputs import write_output
from fp8_megatron.quantization import amax_history
from fp8_megatron.training.build import build_training_state
from fp8_megatron.training.train_step import train_step

CPU = torch.device("cpu")
SEQ_LENGTH, MICRO_BATCH_SIZE = 64, 16
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=128,
    num_attention_heads=4,
    seq_length=SEQ_LENGTH,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
DOCS = Path(__file__).parents[1] / "docs"


def batches(seed: int) -> Iterator[dict[str, Tensor]]:
    """Sequences of the documentation's bytes, at random places."""
    text = torch.tensor(list(b"".join(path.read_bytes() for path in sorted(DOCS.glob("*.md")))))
    # Without the last byte, as in the committed results.
    return random_batches(text[:-1], seed=seed, batch_size=MICRO_BATCH_SIZE, seq_length=SEQ_LENGTH)


def losses(seed: int, factor: float, choice: str, *, before: int, after: int) -> list[float]:
    """The loss of every step; step `before` + 1 has the factor."""
    training = TrainingConfig(seed=seed, micro_batch_size=MICRO_BATCH_SIZE)
    config = Config(
        model=MODEL,
        precision=PrecisionConfig(fp8_lm_head=False, fp8_weight_grad_scaling="block"),
        optimizer=OptimizerConfig(lr=2e-3, weight_decay=0.1, adam_beta2=0.95, lr_decay_style="cosine"),
        training=training,
    )
    limit = amax_history.MOST_SATURATED
    amax_history.MOST_SATURATED = limit if choice == "skipped" else math.inf
    try:
        with runtime(CPU), initialized(config.parallel, MODEL.num_layers, CPU) as topology:
            seed_everything(seed, CPU, tensor_parallel_rank=0, pipeline_rank=0)
            state = build_training_state(config, 256, topology, CPU)
            (history,) = state.histories
            assert history is not None
            now = 1.0
            for name, module in state.model[0].named_modules():
                if name.endswith("core_attention"):
                    module.register_forward_hook(lambda module, inputs, output: output * now)
            found, loader = [], batches(seed)
            for step in range(before + 1 + after):
                is_bad = step == before and choice != "none"
                now = factor if is_bad else 1.0
                if is_bad and choice == "fitting":
                    history.is_warm = False
                found.append(train_step(state, loader)[0].item())
            return found
    finally:
        amax_history.MOST_SATURATED = limit


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=whole(least=0), nargs="+", default=[1, 2, 3], help="of weights and data")
    parser.add_argument("--before", type=whole(), default=20, help="steps before the one with the factor")
    parser.add_argument("--after", type=whole(), default=30, help="steps after it")
    parser.add_argument("--output", type=output_file, required=True, help="JSON file")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Write one row for each choice: how much higher the mean loss after the step is than without a factor."""
    args = parse(words)
    torch.set_num_threads(1)
    steps: dict[str, int] = {"before": args.before, "after": args.after}
    without = {seed: losses(seed, 1.0, "none", **steps)[-args.after :] for seed in args.seeds}
    rows: list[dict[str, Any]] = []
    for factor in (100.0, 1e4):
        for choice in ("taken", "fitting", "skipped"):
            behind = [
                fmean(losses(seed, factor, choice, **steps)[-args.after :]) - fmean(without[seed])
                for seed in args.seeds
            ]
            rows.append({"factor": factor, "choice": choice, "mean": round(fmean(behind), 4)})
            rows[-1]["by_seed"] = [round(value, 4) for value in behind]
            print(rows[-1], flush=True)
    settings = {"seeds": args.seeds, **steps, "most_saturated": amax_history.MOST_SATURATED}
    result = {"settings": settings, "rows": rows}
    write_output(args.output, (json.dumps(result, indent=1) + "\n").encode(), "--output")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
