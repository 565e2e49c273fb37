"""Late in training, where updates are small: levels of precision from the same weights, on a CPU.

    python benchmarks/late_training.py --output late_training_cpu.json

A byte-level GPT learns the sources of Python's standard library in BF16 with FP32 masters. Then each level goes on from
its weights, with a new optimizer and the same batches:

    cosine      the same text, the learning rate falls from 3e-4 to 1e-6
    fine-tuning other text (the help topics of pydoc), at a constant 1e-5

The gap is of the validation loss at the end, relative to the first level's of the same seed. Both levels run the same
FP8 layers, so a gap between O3 and FP32 masters comes from the storage of the master weights.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import statistics
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.random_batches import random_batches
from fp8_megatron.commands.arguments import Parser, output_file, seed, whole
from fp8_megatron.commands.program import exit_status
from fp8_megatron.config.schema import Config, ModelConfig, OptimizerConfig, PrecisionConfig, TrainingConfig
from fp8_megatron.formats import StorageDtype
from fp8_megatron.mcore.runtime import runtime, seed_everything
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.outputs import write_output
from fp8_megatron.training.build import build_training_state
from fp8_megatron.training.train_step import evaluate, train_step
from tools.compare_optimizers import load_tokens, tokens_of

CPU = torch.device("cpu")
VOCAB_SIZE, SEQ_LENGTH, BATCH = 128, 64, 8
VALIDATION_BATCHES = 32
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    seq_length=SEQ_LENGTH,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    init_method_std=0.02,
)
FIXED: dict[str, Any] = {"weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95, "clip_grad": 1.0}
BASE = OptimizerConfig(lr=3e-3, min_lr=3e-4, lr_decay_style="cosine", lr_warmup_iters=20, **FIXED)
PHASES = {
    "cosine": OptimizerConfig(lr=3e-4, min_lr=1e-6, lr_decay_style="cosine", lr_warmup_iters=5, **FIXED),
    "fine-tuning": OptimizerConfig(lr=1e-5, min_lr=1e-5, lr_decay_style="constant", lr_warmup_iters=5, **FIXED),
}
O3 = PrecisionConfig(precision="fp8", opt_level="O3", fp8_recipe="tensorwise")
LEVELS = {
    "FP32 masters": replace(O3, main_params_dtype=StorageDtype.FP32),
    "O3": O3,
    "5-byte": replace(
        O3, main_params_dtype=StorageDtype.SPLIT, exp_avg_dtype=StorageDtype.INT8, exp_avg_sq_dtype=StorageDtype.UINT8
    ),
    "fast": replace(
        O3,
        fp8_recipe="delayed",
        fp8_lm_head=True,
        fp8_weight_grad_scaling="delayed",
        grad_accumulation_dtype=StorageDtype.BF16,
    ),
    "bf16": PrecisionConfig(precision="bf16"),
}


def texts(phase: str) -> tuple[Tensor, Tensor]:
    """Training and validation tokens of a phase, in the alphabet of `compare_optimizers`."""
    if phase != "fine-tuning":
        return load_tokens()
    text = (Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py").read_bytes()
    tokens = tokens_of(text)
    return tokens[:-60_000], tokens[-60_000:]


def batches(tokens: Tensor, number: int) -> Iterator[dict[str, Tensor]]:
    """Sequences at random places, the same for one number."""
    return random_batches(tokens, seed=number, batch_size=BATCH, seq_length=SEQ_LENGTH)


def train(
    precision: PrecisionConfig,
    optimizer: OptimizerConfig,
    data: tuple[Tensor, Tensor],
    *,
    number: int,
    num_steps: int,
    weights: dict[str, Tensor] | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Validation loss at the end, and the FP32 masters by name.

    Args:
        number: the seed of batches, and of initial weights if `weights` is None.
        weights: the masters to start from.
    """
    training = TrainingConfig(
        seed=number, micro_batch_size=BATCH, global_batch_size=BATCH, train_iters=max(10, num_steps)
    )
    config = Config(model=MODEL, precision=precision, optimizer=optimizer, training=training)
    with runtime(CPU), initialized(config.parallel, MODEL.num_layers, CPU) as topology:
        seed_everything(number, CPU, tensor_parallel_rank=0, pipeline_rank=0)
        state = build_training_state(config, VOCAB_SIZE, topology, CPU)
        if weights is not None:
            state.optimizer.load_weights(weights.items())
        loader = batches(data[0], 1000 + number)
        for _ in range(num_steps):
            train_step(state, loader)
        loss, _ = evaluate(state, batches(data[1], 0), VALIDATION_BATCHES)
        if not math.isfinite(loss):
            raise ValueError(f"the validation loss of seed {number} is {loss}")
        return loss, {slot.name: space.get_master(slot) for space, slot in state.optimizer.slots()}


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(prog="late_training.py", description=__doc__)
    parser.add_argument("--levels", nargs="+", choices=list(LEVELS), default=["FP32 masters", "O3"])
    parser.add_argument("--seeds", type=seed, nargs="+", default=[1, 2, 3], help="of data and weights (1 2 3)")
    parser.add_argument("--base-steps", type=whole(least=30), default=300, help="before a phase (300)")
    parser.add_argument("--steps", type=whole(least=10), default=150, help="of a phase (150)")
    parser.add_argument("--output", type=output_file, help="JSON file to write")
    return parser.parse_args(words)


def summary(losses: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """A row for each phase and level, from phase → level → the loss of each seed."""
    rows = []
    for phase, by_level in losses.items():
        reference = next(iter(by_level.values()))
        for level, own in by_level.items():
            gaps = [loss / other - 1 for loss, other in zip(own, reference, strict=True)]
            rows.append(
                {
                    "name": f"{phase}: {level}",
                    "loss": statistics.fmean(own),
                    "gap_percent": 100 * statistics.fmean(gaps),
                    "largest_gap_percent": 100 * max(map(abs, gaps)),
                    "losses": own,
                }
            )
    return rows


def run(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Train, print and write; returns the exit status."""
    torch.set_num_threads(1)
    losses: dict[str, dict[str, list[float]]] = {phase: {level: [] for level in options.levels} for phase in PHASES}
    before: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for number in options.seeds:
        start = partial(train, LEVELS["bf16"], BASE, texts("base"), number=number)
        _, weights = start(num_steps=options.base_steps)
        for phase, optimizer in PHASES.items():
            data = texts(phase)
            before[phase].append(train(LEVELS["bf16"], optimizer, data, number=number, num_steps=0, weights=weights)[0])
            for level in options.levels:
                settings: dict[str, Any] = {"number": number, "num_steps": options.steps, "weights": weights}
                losses[phase][level].append(train(LEVELS[level], optimizer, data, **settings)[0])
                print(f"seed {number}, {phase}, {level}: {losses[phase][level][-1]:.5f}", flush=True)
    rows = summary(losses)
    for row in rows:
        print(f"{row['name']}: {row['loss']:.4f}, gap {row['gap_percent']:+.4f}%")
    if options.output is not None:
        report = {
            "command": shlex.join(["python", "benchmarks/late_training.py", *words]),
            "device": "cpu",
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "loss_before": {phase: statistics.fmean(found) for phase, found in before.items()},
            "rows": rows,
        }
        write_output(options.output, (json.dumps(report, indent=1) + "\n").encode(), "--output")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 after an error."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_status(partial(run, parse_arguments(words), words), ValueError, OSError)


if __name__ == "__main__":
    sys.exit(main())
