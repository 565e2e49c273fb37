"""What outliers cost each recipe: a trained model gets them at once, and all recipes continue on the same data.

    python benchmarks/outliers.py --work DIR --output FILE -- --data-path DATA --tokenizer-model MODEL …

After 200 billion tokens the weights of gate and up of some channels are aligned, and SwiGLU's output grows with the
square of its input (arXiv 2409.12517, section 4). Here one channel of each layer is aligned by hand: gate is made three
standard deviations wide, up a multiple of it, so that the channel's largest output of 4,096 random tokens is 10² to 10⁴
times the median of all outputs. The channel's column of the second projection is divided by as much, so the model
computes about the same. One channel of the norm before attention is made as much larger, and its columns of query, key
and value smaller, which changes nothing but the range of what is cast. Everything goes through checkpoints: train in
BF16, convert to Hugging Face's files, change them, convert back, continue.

Flags behind -- are those of all runs; those of a tiny model are the default unless they name a --config. The file is
written after each recipe; the same command again leaves out what the file has.
"""

# the path to the package comes before its import
from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.provenance import device_name, write_rows
from fp8_megatron.checkpoint.files import TRACKER
from fp8_megatron.commands.program import exit_status

RECIPES = {
    "bf16": ["--precision", "bf16"],
    "delayed": ["--fp8-recipe", "delayed"],
    "delayed, then blockwise": [
        *("--fp8-recipe", "delayed", "--fp8-fallback-recipe", "blockwise"),
        *("--fp8-fallback-underflow", "0.05"),
    ],
    "tensorwise": ["--fp8-recipe", "tensorwise"],
    "blockwise": ["--fp8-recipe", "blockwise"],
    "mxfp8": ["--fp8-recipe", "mxfp8"],
    "nvfp4": ["--fp8-recipe", "nvfp4"],
}
#: A tiny model of Llama's style.
MODEL = (
    "--num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 "
    "--micro-batch-size 8 --global-batch-size 8 --lr 2e-3 --lr-decay-style constant --num-workers 0"
).split()
NUM_TOKENS = 4096


#: Whose FP8 input the outliers are in: layers' names end so.
PLACES = ("fc2", "qkv")


@dataclass(frozen=True)
class Row:
    """A recipe behind an outlier.

    Attributes:
        factor, attention_factor: what was asked for. reached: the least of the layers' SwiGLU (`align_mlp_`).
        first, last_quarter: the loss of the first step, and the mean of the last quarter. gap: to BF16's last quarter.
        underflowed: of `PLACES`, the largest fraction of an input that became 0, in the first and last sample.
        left: how many layers changed their recipe.
        tokens_per_second: the median step's.
    """

    factor: float
    attention_factor: float
    reached: float
    recipe: str
    first: float
    last_quarter: float
    gap: float
    skipped: int
    underflowed: dict[str, tuple[float, float]] | None
    left: int
    tokens_per_second: float
    peak_memory_gib: float


def align_mlp_(weights: dict[str, Tensor], prefix: str, factor: float, channel: int) -> float:
    """Give a layer's MLP an outlier; returns the largest output over the median of all.

    Args:
        weights: of a Llama in Hugging Face's names, changed in place.
        factor: largest output of the channel / median of the outputs' magnitudes.
    """
    names = [f"{prefix}mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    gate, up, down = (weights[name].double() for name in names)
    norm = weights[f"{prefix}post_attention_layernorm.weight"].double()
    x = torch.randn(NUM_TOKENS, gate.shape[1], generator=torch.Generator().manual_seed(channel)).double() * norm
    before = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
    gate[channel] *= 3.0 / (x @ gate[channel]).std()
    aligned = x @ gate[channel]
    grown = torch.nn.functional.silu(aligned) * aligned
    up[channel] = gate[channel] * (factor * before.abs().median() / grown.abs().amax())
    after = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
    down[:, channel] *= before[:, channel].std() / after[:, channel].std()
    for name, value in zip(names, (gate, up, down), strict=True):
        weights[name] = value.to(weights[name].dtype).contiguous()
    return float(after[:, channel].abs().amax() / after.abs().median())


def align_attention_(weights: dict[str, Tensor], prefix: str, factor: float, channel: int) -> None:
    """Give the input of a layer's query, key and value an outlier; arguments as those of `align_mlp_`.

    Of channels as large as the residual stream's: the largest of `NUM_TOKENS` normal values becomes `factor` times the
    median of all channels' magnitudes. The layer computes the same.
    """
    norm = weights[f"{prefix}input_layernorm.weight"]
    x = torch.randn(NUM_TOKENS, norm.numel(), generator=torch.Generator().manual_seed(channel)) * norm
    grown = factor * x.abs().median() / x[:, channel].abs().amax()
    norm[channel] *= grown
    for name in ("q", "k", "v"):
        weights[f"{prefix}self_attn.{name}_proj.weight"][:, channel] /= grown


def align_model(folder: Path, factor: float, attention_factor: float) -> float:
    """Give every layer of a converted model its outliers; returns the smallest factor that SwiGLU came to."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    layers = sorted({name.partition("mlp.")[0] for name in weights if ".mlp." in name})
    reached = [align_mlp_(weights, prefix, factor, channel=7 * index) for index, prefix in enumerate(layers)]
    if attention_factor:
        for index, prefix in enumerate(layers):
            align_attention_(weights, prefix, attention_factor, channel=7 * index)
    save_file(weights, path, metadata={"format": "pt"})
    return min(reached)


def command(*words: object) -> None:
    """Run a subcommand of fp8-megatron."""
    subprocess.run([sys.executable, "-m", "fp8_megatron.cli", *map(str, words)], check=True)


def rows(folder: Path, file: str) -> list[dict[str, Any]]:
    """The lines of a run's file."""
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def continued(folder: Path, aligned: Path, flags: Sequence[object], num_steps: int) -> dict[str, Any]:
    """What a recipe made of the aligned model: fields of `Row`."""
    command(
        *("train", *flags, "--train-iters", num_steps, "--output-dir", folder, "--log-interval", 1),
        *("--load", aligned, "--finetune", "--save", "none", "--save-interval", "none"),
    )
    steps = [row for row in rows(folder, "metrics.jsonl") if "loss" in row]
    losses = [row["loss"] for row in steps]
    samples = rows(folder, "health.jsonl") if (folder / "health.jsonl").exists() else []
    return {
        "first": losses[0],
        "last_quarter": fmean(losses[-num_steps // 4 :]),
        "skipped": steps[-1]["skipped_steps"],
        "underflowed": {place: tuple(_underflowed(samples[at], place) for at in (0, -1)) for place in PLACES}
        if samples
        else None,
        "left": sum(len(row["layers"]) for row in rows(folder, "events.jsonl") if row["kind"] == "fallback"),
        "tokens_per_second": median(row["tokens_per_second_per_gpu"] for row in steps),
        "peak_memory_gib": max(row["peak_memory_gib"] for row in steps),
    }


def _underflowed(sample: dict[str, Any], place: str) -> float:
    """The most that one layer's input lost in a line of health.jsonl."""
    casts = zip(sample["layers"], sample["roles"], sample["underflowed"], strict=True)
    return max(lost for layer, role, lost in casts if role == "input" and layer.endswith(place))


def aligned_model(factor: float, options: argparse.Namespace) -> tuple[Path, float]:
    """The checkpoint with outliers, and what SwiGLU's came to."""
    hf, aligned = options.work / f"hf-{factor:g}", options.work / f"aligned-{factor:g}"
    for folder in (hf, aligned):
        shutil.rmtree(folder, ignore_errors=True)
    command("convert", "--input", options.trained, "--output", hf, "--to", "hf", "--dtype", "fp32", "--no-verify")
    reached = align_model(hf, factor, options.attention_factor)
    command("convert", "--input", hf, "--output", aligned, "--to", "ours", "--no-verify")
    return aligned, reached


def stressed(factor: float, options: argparse.Namespace, flags: Sequence[object], done: list[Row]) -> None:
    """All recipes behind one factor, BF16 first; `done` and the file get a row after each."""
    asked = ["bf16", *(name for name in options.recipes if name != "bf16")]
    found = {row.recipe: row for row in done if row.factor == factor}
    if found.keys() >= set(asked):
        return
    aligned, reached = aligned_model(factor, options)
    for name in (name for name in asked if name not in found):
        folder = options.work / f"{factor:g}-{name.replace(',', '').replace(' ', '-')}"
        shutil.rmtree(folder, ignore_errors=True)
        watched = [] if name == "bf16" else ["--fp8-health-interval", options.health_interval]
        result = continued(folder, aligned, [*flags, *RECIPES[name], *watched], options.continue_iters)
        gap = result["last_quarter"] - (found["bf16"].last_quarter if found else result["last_quarter"])
        found[name] = Row(
            factor=factor,
            attention_factor=options.attention_factor,
            reached=reached,
            recipe=name,
            gap=gap,
            **result,
        )
        print(found[name], flush=True)
        done.append(found[name])
        write_rows(options.output, "benchmarks/outliers.py", None, done, device=device_name())


def rows_of_before(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Row]:
    """What the file has of the same models and data.

    Raises:
        SystemExit: it has those of others.
    """
    if not options.output.exists():
        return []
    before = json.loads(options.output.read_text())
    then = vars(parser.parse_args(shlex.split(before["command"])[2:]))
    for name in ("train_iters", "continue_iters", "continue_lr", "attention_factor", "health_interval", "flags"):
        if then[name] != vars(options)[name]:
            parser.error(
                f"{options.output} is of other runs ({name} {then[name]}, asked for {vars(options)[name]}): give "
                f"another --output"
            )
    return [Row(**row) for row in before["rows"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factors", type=float, nargs="+", default=[1e2, 1e3, 1e4, 1e5], help="of SwiGLU's outliers")
    parser.add_argument("--attention-factor", type=float, default=1e2, help="of attention's input; 0: none there")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=[*RECIPES][:5], help="those of Hopper")
    parser.add_argument("--trained", type=Path, help="a checkpoint to begin with; default: train one in BF16")
    parser.add_argument("--train-iters", type=int, default=300, help="steps before the outliers")
    parser.add_argument("--continue-iters", type=int, default=60, help="steps with them")
    parser.add_argument("--continue-lr", default="2e-4", help="learning rate with them")
    parser.add_argument("--health-interval", type=int, default=5, help="steps between samples, which the watch reads")
    parser.add_argument("--work", type=Path, required=True, help="folder for runs and checkpoints")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("flags", nargs="*", help="flags of the runs, behind --")
    options = parser.parse_args()
    done = rows_of_before(parser, options)
    flags = [*([] if "--config" in options.flags else MODEL), *options.flags, "--eval-interval", 0]
    if options.trained is None:
        options.trained, steps = options.work / "trained", options.train_iters
        if not (options.trained / TRACKER).exists():
            kept = ["--output-dir", options.work / "start", "--save", options.trained, "--save-interval", steps]
            command("train", *flags, "--precision", "bf16", "--train-iters", steps, *kept)
    rate = ["--lr", options.continue_lr, "--min-lr", options.continue_lr, "--lr-decay-style", "constant"]
    for factor in options.factors:
        stressed(factor, options, [*flags, *rate, "--lr-warmup-fraction", 0], done)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
