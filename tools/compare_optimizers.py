#!/usr/bin/env python3
"""Compare dtypes of optimizer state with FP32 AdamW: train one tiny GPT with each of them, on the CPU.

    OMP_NUM_THREADS=1 python -m tools.compare_optimizers --output benchmarks/results/optimizer_dtypes_cpu.json

A byte-level GPT of 109,000 parameters learns the sources of Python's standard library. For one seed, every setting has
the same initial weights, batches and learning rates as FP32 AdamW. It differs in how the optimizer's kernel
(`kernels.ops.adamw_step_`, the reference here) reads and writes its operands. Activations are always FP32, so
differences come from the optimizer. Prints a table and writes JSON.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import platform
import random
import shlex
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fp8_megatron.commands.arguments import Parser, output_file, real, whole
from fp8_megatron.commands.arguments import seed as seed_type
from fp8_megatron.commands.program import exit_status
from fp8_megatron.kernels import ops
from fp8_megatron.outputs import write_output
from fp8_megatron.quantization.stats import snr_db
from tools.build_quickstart_corpus import library_documents
from tools.optimizer_settings import SETTINGS, Setting, Space

VOCAB_SIZE, WIDTH, NUM_LAYERS, NUM_HEADS, SEQ_LENGTH, BATCH = 96, 64, 2, 4, 64, 8
LINEAR = {
    f"{layer}.{name}": shape
    for layer in range(NUM_LAYERS)
    for name, shape in {
        "qkv": (3 * WIDTH, WIDTH),
        "proj": (WIDTH, WIDTH),
        "fc1": (4 * WIDTH, WIDTH),
        "fc2": (WIDTH, 4 * WIDTH),
    }.items()
}
MATRIX = {"embedding": (VOCAB_SIZE, WIDTH), "position": (SEQ_LENGTH, WIDTH)}
CLIP_GRAD, WARM_UP_STEPS = 1.0, 100
#: Steps at which the parameters are compared: before and after chance perturbations have grown.
SNAPSHOT_STEPS = (100, 500)


def initial_values(seed: int, perturbation: float) -> dict[str, Tensor]:
    """Normal with a standard deviation of fan_in^-1/2, half of it where a residual branch ends."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, shape in {**LINEAR, **MATRIX}.items():
        std = 0.08 if name == "embedding" else 0.02 if name == "position" else shape[1] ** -0.5
        std *= 0.5 if name.endswith(("proj", "fc2")) else 1.0
        value = std * torch.randn(shape, generator=generator)
        values[name] = value * (1.0 + perturbation * torch.randn(shape, generator=generator))
    return values


def loss_of(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Mean cross-entropy of tokens [batch, seq + 1]: pre-norm GPT, tied head, no biases, norms without weights."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    x = weights["embedding"][inputs] + weights["position"]
    for layer in range(NUM_LAYERS):
        qkv = F.linear(F.layer_norm(x, (WIDTH,)), weights[f"{layer}.qkv"])
        q, k, v = qkv.view(*inputs.shape, 3, NUM_HEADS, WIDTH // NUM_HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.linear(attended, weights[f"{layer}.proj"])
        hidden = F.gelu(F.linear(F.layer_norm(x, (WIDTH,)), weights[f"{layer}.fc1"]))
        x = x + F.linear(hidden, weights[f"{layer}.fc2"])
    logits = F.linear(F.layer_norm(x, (WIDTH,)), weights["embedding"])
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tokens_of(text: bytes) -> Tensor:
    """A token for each byte, int64: 0 to 94 for printable ASCII, 95 for a line end, 0 for all else."""
    codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return torch.where(codes == 10, 95, torch.where((codes >= 32) & (codes < 127), codes - 32, 0))


@cache
def load_tokens(max_bytes: int = 3_000_000, valid_bytes: int = 200_000) -> tuple[Tensor, Tensor]:
    """Training and validation tokens: printable ASCII and line ends of the standard library's sources, shuffled."""
    documents = [text for _, text in library_documents(Path(sysconfig.get_paths()["stdlib"]))]
    random.Random(1234).shuffle(documents)
    tokens = tokens_of("".join(documents)[:max_bytes].encode("ascii", "replace"))
    return tokens[:-valid_bytes], tokens[-valid_bytes:]


@dataclass
class Run:
    """One seed of one setting; losses are None if training ended with non-finite values."""

    seed: int
    train_loss: float | None = None
    validation_loss: float | None = None
    largest_loss: float = 0.0
    """After the warm-up."""
    parameter_snr_db: dict[int, float] = field(default_factory=dict)
    """Step → Σ p² / Σ (p - p of FP32 AdamW)² in dB; empty for FP32 AdamW itself."""
    diverged_at: int | None = None
    seconds: float = 0.0


def train(setting: Setting, seed: int, num_steps: int, lr: float) -> tuple[Run, dict[int, Tensor]]:
    """One run, and its parameters at the snapshot steps and the end."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    data = load_tokens()
    values = initial_values(seed, setting.perturbation)
    spaces = [Space(shapes, values, setting, is_linear=shapes is LINEAR) for shapes in (LINEAR, MATRIX)]
    order = torch.Generator().manual_seed(1000 + seed)
    losses: list[float] = []
    snapshots = {}
    result = Run(seed)
    for step in range(1, num_steps + 1):
        starts = torch.randint(len(data[0]) - SEQ_LENGTH, (BATCH, 1), generator=order)
        leaves = [space.compute_value().clone().requires_grad_() for space in spaces]
        loss = loss_of(_by_name(spaces, leaves), data[0][starts + torch.arange(SEQ_LENGTH + 1)])
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            result.diverged_at = step
            break
        grads = torch.autograd.grad(loss, leaves)
        stored = [space.stored_grad(grad) for space, grad in zip(spaces, grads, strict=True)]
        norm = torch.stack([ops.squared_norm(*grad) for grad in stored]).sum().sqrt().view(1)
        factor = CLIP_GRAD / norm.clamp_min(CLIP_GRAD)
        step_lr = lr * min(step / WARM_UP_STEPS, 1.0) * (0.55 + 0.45 * math.cos(math.pi * step / num_steps))
        for space, grad in zip(spaces, stored, strict=True):
            space.step(grad, factor, step, step_lr)
        if step in SNAPSHOT_STEPS or step == num_steps:
            snapshots[step] = torch.cat([space.master_value() for space in spaces])
    result.largest_loss = max(losses[WARM_UP_STEPS:], default=0.0)
    if result.diverged_at is None:
        result.train_loss = statistics.fmean(losses[-100:])
        result.validation_loss = _validate(spaces, data[1])
    result.seconds = time.perf_counter() - started
    return result, snapshots


def _by_name(spaces: Sequence[Space], flats: Sequence[Tensor]) -> dict[str, Tensor]:
    return {
        name: flat[place][: space.shapes[name][0] * space.shapes[name][1]].view(space.shapes[name])
        for space, flat in zip(spaces, flats, strict=True)
        for name, place in space.tensors.items()
    }


@torch.no_grad()
def _validate(spaces: Sequence[Space], tokens: Tensor) -> float:
    weights = _by_name(spaces, [space.compute_value() for space in spaces])
    sequences = tokens[: len(tokens) // (SEQ_LENGTH + 1) * (SEQ_LENGTH + 1)].view(-1, SEQ_LENGTH + 1)
    return statistics.fmean(loss_of(weights, batch).item() for batch in sequences[:1280].split(64))


def compare(
    settings: Sequence[Setting], seeds: Sequence[int], num_steps: int, lr: float, num_jobs: int, console: Console
) -> list[tuple[Setting, list[Run]]]:
    """Every setting under every seed, with the parameters' distance from FP32 AdamW's of the same seed and β₂."""
    jobs = [(setting, seed) for setting in settings for seed in seeds]
    exact: dict[tuple[float, int], dict[int, Tensor]] = {}
    runs: dict[Setting, list[Run]] = {setting: [] for setting in settings}
    with ProcessPoolExecutor(min(num_jobs, len(jobs)), multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(train, setting, seed, num_steps, lr) for setting, seed in jobs]
        for (setting, seed), future in zip(jobs, futures, strict=True):
            run, snapshots = future.result()
            if setting.is_exact:
                exact[setting.beta2, seed] = snapshots
            else:
                run.parameter_snr_db = {
                    step: snr_db(value, exact[setting.beta2, seed][step]) for step, value in snapshots.items()
                }
            runs[setting].append(run)
            console.print(f"{setting.group}: {setting.name}: {run}", highlight=False, soft_wrap=True)
    return list(runs.items())


def summary(results: Sequence[tuple[Setting, list[Run]]]) -> list[dict]:
    """Per setting, over the seeds: mean losses, mean ± standard deviation of the gap to FP32 AdamW, parameter error."""
    exact = {(setting.beta2, run.seed): run for setting, runs in results if setting.is_exact for run in runs}
    rows = []
    for setting, runs in results:
        row: dict = {**asdict(setting), "runs": [asdict(run) for run in runs]}
        if all(run.diverged_at is None for run in runs):
            for name in ("train_loss", "validation_loss"):
                row[name] = statistics.fmean(getattr(run, name) for run in runs)
                gaps = [getattr(run, name) - getattr(exact[setting.beta2, run.seed], name) for run in runs]
                row[f"{name}_gap"] = statistics.fmean(gaps)
                row[f"{name}_gap_std"] = statistics.stdev(gaps) if len(gaps) > 1 else None
            steps = runs[0].parameter_snr_db
            row["parameter_snr_db"] = {
                step: statistics.fmean(run.parameter_snr_db[step] for run in runs) for step in steps
            }
        rows.append(row)
    return rows


def print_table(rows: Sequence[dict], console: Console) -> None:
    """One line a setting."""
    steps = sorted({step for row in rows for step in row.get("parameter_snr_db", ())})
    table = Table(title="Optimizer state in low precision, against FP32 AdamW")
    for heading in ("setting", "train loss", "gap", "validation", "gap", *(f"dB at {step}" for step in steps)):
        table.add_column(heading, justify="left" if heading == "setting" else "right")
    group = None
    for row in rows:
        if row["group"] != group:
            group = row["group"]
            table.add_section()
            table.add_row(f"[bold]{group}")
        cells = [row["name"]]
        if "train_loss" in row:
            for name in ("train_loss", "validation_loss"):
                cells += [f"{row[name]:.4f}", _gap(row, name)]
            cells += [f"{row['parameter_snr_db'][step]:.1f}" if row["parameter_snr_db"] else "-" for step in steps]
        else:
            cells.append(f"not finite at step {[run['diverged_at'] for run in row['runs']]}")
        table.add_row(*cells)
    console.print(table)


def _gap(row: dict, name: str) -> str:
    std = row[f"{name}_gap_std"]
    return f"{row[f'{name}_gap']:+.4f}" + (f" ± {std:.4f}" if std is not None else "")


def main(words: Sequence[str] | None = None) -> int:
    """Exit status."""
    parser = Parser(description=__doc__)
    parser.add_argument("--output", type=output_file, help="the .json file to write (replaced if it exists)")
    parser.add_argument("--steps", type=whole(), default=2000, help="(2000)")
    parser.add_argument("--seeds", type=seed_type, nargs="+", default=[1, 2], help="(1 2)")
    parser.add_argument(
        "--lr", type=real(above=0), default=3e-3, help="largest learning rate; cosine to a tenth (3e-3)"
    )
    parser.add_argument("--jobs", type=whole(), default=1, help="runs at a time, one core each (1)")
    parser.add_argument("--groups", nargs="+", choices=sorted({setting.group for setting in SETTINGS}), help="(all)")
    arguments = parser.parse_args(words)
    console = Console(width=120)
    groups = arguments.groups
    chosen = [setting for setting in SETTINGS if not groups or setting.group in groups]
    # Every group is compared with FP32 AdamW of the same β₂, so that always runs.
    betas = {setting.beta2 for setting in chosen}
    settings = [setting for setting in SETTINGS if setting in chosen or (setting.is_exact and setting.beta2 in betas)]
    rows = summary(compare(settings, arguments.seeds, arguments.steps, arguments.lr, arguments.jobs, console))
    print_table(rows, console)
    if arguments.output:
        commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
        report = {
            "command": shlex.join(
                ["python", "-m", "tools.compare_optimizers", *(sys.argv[1:] if words is None else words)]
            ),
            "commit": commit.stdout.strip() or None,
            "device": "cpu",
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "num_params": sum(math.prod(shape) for shape in [*LINEAR.values(), *MATRIX.values()]),
            "tokens_per_step": BATCH * SEQ_LENGTH,
            "results": rows,
        }
        write_output(arguments.output, (json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode(), "--output")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
