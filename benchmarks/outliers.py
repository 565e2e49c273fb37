"""What outliers of SwiGLU cost each recipe: a trained model gets them at once, and all continue on the same data.

    python benchmarks/outliers.py --output outliers.json -- --data-path DATA --tokenizer-model MODEL …

After 200 billion tokens the weights of gate and up of some channels are aligned, and SwiGLU's output grows with the
square of its input (arXiv 2409.12517, section 4). Here one channel of each layer is aligned by hand: gate is made three
standard deviations wide, up a multiple of it, so that the channel's largest output of 4,096 random tokens is 10² to 10⁴
times the median of all outputs. The channel's column of the second projection is divided by as much, so the model
computes about the same. Everything goes through checkpoints: train in BF16, convert to Hugging Face's files, change
them, convert back, continue.

Flags behind -- are those of all runs; those of a tiny model are the default.
"""

# the path to the package comes before its import
from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.provenance import device_name, write_rows
from fp8_megatron.commands.program import exit_status

#: Of a sampled step, which the watch over layers reads too.
WATCHED = ("--fp8-health-interval", "5")
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
    "--micro-batch-size 8 --global-batch-size 8 --lr 2e-3 --lr-decay-style constant --eval-interval 0 --num-workers 0"
).split()
NUM_TOKENS = 4096


@dataclass(frozen=True)
class Row:
    """A recipe behind an outlier.

    Attributes:
        factor: what was asked for. reached: the least of the layers' (`align_`).
        first, last_quarter: the loss of the first step, and the mean of the last quarter. gap: to BF16's.
        underflowed: the largest fraction of a second projection's input that became 0, in the first and last sample.
    """

    factor: float
    reached: float
    recipe: str
    first: float
    last_quarter: float
    gap: float
    skipped: int
    underflowed: tuple[float, float] | None


def align_(weights: dict[str, Tensor], prefix: str, factor: float, channel: int) -> float:
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


def align_model(folder: Path, factor: float) -> float:
    """Give every layer of a converted model an outlier; returns the smallest factor that it came to."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    layers = sorted({name.partition("mlp.")[0] for name in weights if ".mlp." in name})
    reached = [align_(weights, prefix, factor, channel=7 * index) for index, prefix in enumerate(layers)]
    save_file(weights, path, metadata={"format": "pt"})
    return min(reached)


def command(*words: object) -> None:
    """Run a subcommand of fp8-megatron."""
    subprocess.run([sys.executable, "-m", "fp8_megatron.cli", *map(str, words)], check=True)


def rows(folder: Path, file: str) -> list[dict[str, Any]]:
    """The lines of a run's file."""
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def continued(
    folder: Path, aligned: Path, recipe: Sequence[str], flags: Sequence[str], num_steps: int
) -> dict[str, Any]:
    """What a recipe made of the aligned model: fields of `Row`."""
    command(
        *("train", *flags, *recipe, "--train-iters", num_steps, "--output-dir", folder, "--log-interval", 1),
        *("--load", aligned, "--finetune", "--save", "none", "--save-interval", "none"),
    )
    steps = [row for row in rows(folder, "metrics.jsonl") if "loss" in row]
    losses = [row["loss"] for row in steps]
    samples = rows(folder, "health.jsonl") if (folder / "health.jsonl").exists() else []
    underflowed = [
        max(
            lost
            for layer, role, lost in zip(sample["layers"], sample["roles"], sample["underflowed"], strict=True)
            if role == "input" and layer.endswith("fc2")
        )
        for sample in samples
    ]
    return {
        "first": losses[0],
        "last_quarter": fmean(losses[-num_steps // 4 :]),
        "skipped": steps[-1]["skipped_steps"],
        "underflowed": (underflowed[0], underflowed[-1]) if underflowed else None,
    }


def stressed(factor: float, options: argparse.Namespace, trained: Path, flags: Sequence[str]) -> list[Row]:
    """All recipes behind one factor; BF16 is the first."""
    work: Path = options.work
    hf, aligned = work / f"hf-{factor:g}", work / f"aligned-{factor:g}"
    for folder in (hf, aligned):
        shutil.rmtree(folder, ignore_errors=True)
    command("convert", "--input", trained, "--output", hf, "--to", "hf", "--dtype", "fp32", "--no-verify")
    reached = align_model(hf, factor)
    command("convert", "--input", hf, "--output", aligned, "--to", "ours", "--no-verify")
    found: list[Row] = []
    for name in ("bf16", *(name for name in options.recipes if name != "bf16")):
        folder = work / f"{factor:g}-{name.replace(',', '').replace(' ', '-')}"
        shutil.rmtree(folder, ignore_errors=True)
        watched = () if name == "bf16" else WATCHED
        result = continued(folder, aligned, RECIPES[name], [*flags, *watched], options.continue_iters)
        gap = result["last_quarter"] - (found[0].last_quarter if found else result["last_quarter"])
        found.append(Row(factor=factor, reached=reached, recipe=name, gap=gap, **result))
        print(found[-1], flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factors", type=float, nargs="+", default=[1e2, 1e3, 1e4, 1e5])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=[*RECIPES][:5], help="those of Hopper")
    parser.add_argument("--train-iters", type=int, default=300, help="steps before the outliers")
    parser.add_argument("--continue-iters", type=int, default=60, help="steps with them")
    parser.add_argument("--work", type=Path, required=True, help="folder for runs and checkpoints")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("flags", nargs="*", help="flags of the runs, behind --")
    options = parser.parse_args()
    flags, trained = [*MODEL, *options.flags], options.work / "trained"
    if not trained.exists():
        steps = options.train_iters
        command(
            *("train", *flags, "--precision", "bf16", "--train-iters", steps, "--output-dir", options.work / "start"),
            *("--save", trained, "--save-interval", steps),
        )
    found = [row for factor in options.factors for row in stressed(factor, options, trained, flags)]
    write_rows(options.output, "benchmarks/outliers.py", None, found, device=device_name())
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
