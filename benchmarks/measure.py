"""Measure the figures of README.md, docs/performance.md and docs/evidence.md again, one part at a time:

python benchmarks/measure.py small 7b --output-dir runs/measured

Each part is one or more commands of the benchmarks beside this one and takes some minutes. `--list` shows the parts,
the GPUs that each needs and what it runs. Where Transformer Engine is installed, megatron-core trains the same models
with it (benchmarks/peers/megatron_te.py); `--no-peers` leaves that row out. Comparisons train random tokens; the flags
after -- are for all their runs, so they may name data:

python benchmarks/measure.py moe --output-dir runs/moe -- --data-path text_document --tokenizer-model tokenizer.model
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

# Run as a script from a clone, installed or not.
sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.peers.runs import PEERS
from fp8_megatron.commands.arguments import Parser, output_folder
from fp8_megatron.commands.program import exit_status
from fp8_megatron.config.io import own_and_run_flags

#: The peer in comparisons.
PEER = "megatron-te-delayed"
_HERE = Path(__file__).parent
#: Time limit of one run of a comparison, seconds: the largest models take a minute to start and end.
_TIMEOUT = 150


@dataclass(frozen=True)
class Target:
    """Where a part writes, whether it runs the peer, and flags of pretrain_gpt.py for the runs of comparisons."""

    folder: Path
    with_peer: bool
    flags: Sequence[str] = ()


#: Script of this folder and its flags, for each run.
Commands = list[list[str]]


@dataclass(frozen=True)
class Part:
    """Commands for a number of GPUs of one node."""

    gpus: int
    about: str
    commands: Callable[[Target], Commands]


def _compare(
    target: Target,
    name: str,
    model: str,
    runs: Sequence[str],
    *flags: str,
    gpus: int = 1,
    micro: int,
    num_micro: int = 1,
    steps: int = 14,
    profiled: int = 0,
    peers: Sequence[str] = (PEER,),
    seconds: int = _TIMEOUT,
) -> list[str]:
    """compare.py; `flags` go to pretrain_gpt.py, and `peers` run if they are installed."""
    peers = peers if target.with_peer else []
    command = ["compare.py", "--model", model, "--nproc-per-node", str(gpus), "--runs", *runs, *peers]
    command += ["--micro-batch-size", str(micro), "--num-micro-batches", str(num_micro)]
    command += ["--train-iters", str(steps), "--profiled-steps", str(profiled), "--timeout", str(seconds)]
    return [*command, "--output-dir", str(target.folder / name), "--", *flags, *target.flags]


def _long(length: int) -> tuple[str, ...]:
    """Flags for sequences of `length` tokens, beyond the model's own."""
    return ("--seq-length", str(length), "--max-position-embeddings", str(length))


_TP4 = ("--tensor-model-parallel-size", "4")
_PP4 = ("--pipeline-model-parallel-size", "4")
_CP4 = ("--context-parallel-size", "4", "--cp-comm-type")
_ALL_RECOMPUTED = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
_FIVE_BYTES = ("--main-params-dtype", "split", "--exp-avg-dtype", "int8", "--exp-avg-sq-dtype", "uint8")
#: For sequences that are long enough for it.
_FP8_ATTENTION = "O3-fp8-attention"
_BOTH_ATTENTIONS = ("O3-fast", _FP8_ATTENTION)
#: Models whose steps Python launches by default.
_WITH_GRAPH = ("O3-fast", "O3-graph")
#: Models of transformers: `--models` of any_model.py, in parts that take some ten minutes each.
_TEXT = ("qwen3-1.7b", "gemma3-1b", "llama-1b", "gpt2-xl")
_IMAGES = ("vit-l", "vit-1.2b", "swin-1b", "bert-large")
_TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
#: Layers of GPT-7B whose weights' transposes four micro-batches share within 45 GB; of GPT-13B, whose steps are
#: recorded by default, within 55 (launched by Python, 36 are).
_KEEP_7B = ("--keep-fp8-transpose-cache", "10")
_KEEP_13B = ("--keep-fp8-transpose-cache", "16")
#: All of GPT-30B's layers, over four tensor-parallel GPUs.
_KEEP_30B = ("--keep-fp8-transpose-cache", "48")
#: Two virtual stages of GPT-7B's 32 layers on each of four.
_TWO_CHUNKS = ("--num-layers-per-virtual-pipeline-stage", "4")
#: Models whose steps are recorded by default; for the others O3-graph is the run with a graph.
_WITH_AND_WITHOUT_GRAPH = ("O3-fast", "O3-no-graph", "bf16", "bf16-no-graph")


#: Layouts of experts over four GPUs.
_EP2, _EP4 = (("--expert-model-parallel-size", size) for size in ("2", "4"))
_EXPERT_LAYOUTS = {"ep4": _EP4, "ep2-dp2": _EP2, "tp2-ep2": (*_TP2, *_EP2)}
#: Whole models fit 80 GB with it.
_EXPERTS_RECOMPUTED = ("--recompute-granularity", "selective", "--recompute-modules", "moe")
#: Both kinds of Megatron's experts.
_EXPERT_PEERS = ("megatron-bf16", "megatron-te-blockwise")


def _experts(target: Target, model: str, layers: int | None, layouts: Sequence[str], micros: Sequence[int]) -> Commands:
    """A model with experts in some layouts and sizes of a micro-batch. Its own runs are profiled: the time of
    communication, and how much of it stands beside no other kernel. tokens_per_expert.jsonl has the loads.

    Args:
        layers: of the model beside BF16 and peers; None: all, which fit in FP8 alone.
    """
    runs, peers, flags = ["O3-default"], (), (*_FIVE_BYTES, *_EXPERTS_RECOMPUTED)
    if layers is not None:
        runs, peers, flags = ["O3-default", "bf16"], _EXPERT_PEERS, ("--num-layers", str(layers))
    return [
        _compare(
            *(target, f"{model}-{layers or 'whole'}-{layout}-micro{micro}", model, runs),
            *(*_EXPERT_LAYOUTS[layout], *flags, "--save-tokens-per-expert-interval", "1"),
            gpus=4,
            micro=micro,
            profiled=2,
            peers=peers,
            seconds=550,
        )
        for layout in layouts
        for micro in micros
    ]


def _expert_bits(target: Target) -> Commands:
    """The first loss has the same bits under each size where the forward's arithmetic is the same: with two experts a
    token, in 16 bits and in blocks."""
    return [
        _compare(
            *(target, f"bits-ep{size}", "mixtral-8x7b", ["bf16", "O3-blockwise"]),
            *("--num-layers", "2", "--expert-model-parallel-size", size, "--deterministic-mode"),
            gpus=4,
            micro=1,
            steps=8,
            peers=(),
        )
        for size in ("1", "2", "4")
    ]


def _any_model(target: Target, name: str, models: Sequence[str]) -> list[str]:
    runs = ["bf16-amp", *["te-delayed"] * target.with_peer, "O2"]
    command = ["any_model.py", "--models", *models, "--runs", *runs, "--steps", "8"]
    return [*command, "--output", str(target.folder / f"any_model_{name}.json")]


def _headline(target: Target, model: str, micro: int, num_micro: int, *flags: str, gpus: int) -> list[str]:
    command = ["headline.py", "--gpus", str(gpus), "--model", model, "--micro-batch-size", str(micro)]
    command += ["--num-micro-batches", str(num_micro), "--output-dir", str(target.folder / f"{model}-{gpus}")]
    return [*command, "--", "--mock-data", *flags]


PARTS = {
    "kernels": Part(
        1,
        "every kernel over its floor, FP8 linear layers beside BF16's and Transformer Engine's",
        lambda to: [["kernels.py", "--output", str(to.folder / "kernels.json")]],
    ),
    "small": Part(
        1,
        "GPT-345M and GPT-1.3B, with CUDA graphs and without",
        lambda to: [
            _compare(to, "345m-4", "345m", _WITH_AND_WITHOUT_GRAPH, micro=4),
            _compare(to, "345m-32", "345m", _WITH_AND_WITHOUT_GRAPH, micro=32),
            _compare(to, "1.3b", "1.3b", _WITH_AND_WITHOUT_GRAPH, micro=8),
        ],
    ),
    "7b-2gpus": Part(
        2,
        "GPT-7B over two data-parallel GPUs",
        lambda to: [_compare(to, "7b-2", "7b", _WITH_GRAPH, gpus=2, micro=4, num_micro=4, steps=10)],
    ),
    "13b-2gpus": Part(
        2,
        "GPT-13B over two tensor-parallel GPUs",
        lambda to: [
            _compare(to, "13b-2", "13b", ["O3-fast", "O3-no-graph"], *_TP2, gpus=2, micro=4, num_micro=2, steps=10)
        ],
    ),
    "7b": Part(
        4,
        "GPT-7B, 4 × 4 micro-batches: the first figures of docs/performance.md",
        lambda to: [_compare(to, "7b", "7b", _WITH_GRAPH, *_KEEP_7B, gpus=4, micro=4, num_micro=4, steps=13)],
    ),
    "13b": Part(
        4,
        "GPT-13B, TP 2 with sequence parallelism, DP 2, 4 × 4 micro-batches",
        lambda to: [
            _compare(to, "13b", "13b", ["O3-fast", "O3-no-graph"], *_TP2, *_KEEP_13B, gpus=4, micro=4, num_micro=4)
        ],
    ),
    "llama": Part(
        4,
        "Llama-2-7B of 2,048 and 4,096 tokens, Llama-3-8B and GPT-7B of 8,192, data-parallel",
        lambda to: [
            _compare(to, "llama-7b-2k", "llama-7b", _WITH_GRAPH, *_long(2048), gpus=4, micro=4, num_micro=4),
            _compare(to, "llama-7b-4k", "llama-7b", _WITH_GRAPH, gpus=4, micro=2, num_micro=4),
            _compare(to, "llama-8b-8k", "llama-8b", [*_WITH_GRAPH, _FP8_ATTENTION], gpus=4, micro=1, num_micro=4),
            _compare(to, "7b-8k", "7b", [*_WITH_GRAPH, _FP8_ATTENTION], *_long(8192), gpus=4, micro=1, num_micro=4),
        ],
    ),
    "long": Part(
        4,
        "Llama-3-8B, a sequence of 32,768 or 131,072 tokens over four context-parallel GPUs",
        lambda to: [
            _compare(to, "32k-a2a", "llama-8b", _BOTH_ATTENTIONS, *_long(32768), *_CP4, "a2a", gpus=4, micro=1),
            _compare(to, "32k-p2p", "llama-8b", ["O3-fast"], *_long(32768), *_CP4, "p2p", gpus=4, micro=1),
            _compare(
                to,
                "131k",
                "llama-8b",
                ["O3-fp8-attention"],
                *(*_long(131072), *_CP4, "a2a", *_ALL_RECOMPUTED),
                gpus=4,
                micro=1,
                steps=8,
                peers=(),
            ),
        ],
    ),
    "large": Part(
        4,
        "GPT-30B and Llama-3-70B over four tensor-parallel GPUs, GPT-7B in four pipeline stages",
        lambda to: [
            _compare(to, "30b", "30b", ["O3-fast"], gpus=4, micro=2, num_micro=8, peers=()),
            _compare(to, "30b-kept", "30b", ["O3-fast"], *_KEEP_30B, gpus=4, micro=2, num_micro=8, peers=()),
            _compare(to, "llama-70b", "llama-70b", ["O3-fast"], *_TP4, *_FIVE_BYTES, gpus=4, micro=1, peers=()),
            _compare(to, "7b-4-stages", "7b", ["O3-fast"], *_PP4, gpus=4, micro=2, num_micro=16),
            _compare(
                *(to, "7b-4-stages-twice", "7b", ["O3-fast"], *_PP4, *_TWO_CHUNKS),
                gpus=4,
                micro=2,
                num_micro=16,
                peers=(),
            ),
        ],
    ),
    "moe": Part(
        4,
        "Qwen3-30B-A3B and Mixtral-8x7B over expert-parallel GPUs, whole, and by layers beside every peer: docs/moe.md",
        lambda to: [
            *_experts(to, "qwen3-30b-a3b", None, ("ep4", "ep2-dp2"), (1, 2)),
            *_experts(to, "mixtral-8x7b", None, ("ep4", "tp2-ep2"), (1, 2)),
            *_experts(to, "qwen3-30b-a3b", 8, ("ep4", "ep2-dp2"), (1, 2, 4)),
            *_experts(to, "mixtral-8x7b", 2, ("ep4", "tp2-ep2"), (1, 2, 4)),
            *_expert_bits(to),
        ],
    ),
    "fsdp2": Part(
        4,
        "Llama-3-8B of transformers under FSDP2: BF16, torchao's float8, O3",
        lambda to: [
            [
                *("torchrun", "4", "examples/llama_fsdp2.py", "--size", "8b", "--batch-size", "1"),
                *("--sequence-length", "8192", "--recompute", "--compile", "--steps", "12"),
                *("--loss-parts", "8", "--variants", variant),
                *("--output", str(to.folder / f"fsdp2-{variant}.json")),
            ]
            for variant in ("bf16", "torchao", "fp8")
        ],
    ),
    "scaling": Part(
        4,
        "GPT-7B over 1, 2 and 4 GPUs, weak and strong, and over TP 2 and 4",
        lambda to: [
            [
                *("scaling.py", "--model", "7b", "--gpus", "1", "2", "4", "--tensor-parallel", "2", "4"),
                *("--runs", "O3-fast", "--side-by-side", "--train-iters", "10", "--timeout", str(_TIMEOUT)),
                *("--output-dir", str(to.folder / "scaling")),
            ]
        ],
    ),
    "headline": Part(
        1,
        "GPT-345M, GPT-1.3B and eight of Llama-3-8B's layers beside every peer: the table of README.md",
        lambda to: [
            _headline(to, "345m", 16, 2, gpus=1),
            _headline(to, "1.3b", 8, 2, gpus=1),
            _headline(to, "llama-8b", 1, 4, "--num-layers", "8", gpus=1),
        ],
    ),
    "headline-2gpus": Part(
        2,
        "GPT-1.3B and sixteen of Llama-3-8B's layers over two data-parallel GPUs beside every peer",
        lambda to: [
            _headline(to, "1.3b", 8, 2, gpus=2),
            _headline(to, "llama-8b", 1, 4, "--num-layers", "16", gpus=2),
        ],
    ),
    "any-model-text": Part(
        1,
        "decoders of transformers beside BF16 and torchao, compiled too, and Transformer Engine: docs/evidence.md",
        lambda to: [_any_model(to, "text", _TEXT)],
    ),
    "any-model-images": Part(
        1,
        "ViT, Swin and BERT of transformers beside the same: docs/evidence.md",
        lambda to: [_any_model(to, "images", _IMAGES)],
    ),
}


def main() -> int:
    """Run the parts in turn; a failed part does not stop the next ones. Returns the exit status."""
    args = _parse()
    status = 0
    for name in args.parts:
        gpus = "1 GPU" if PARTS[name].gpus == 1 else f"{PARTS[name].gpus} GPUs"
        print(f"== {name} ({gpus}): {PARTS[name].about}", flush=True)
        for command in PARTS[name].commands(Target(args.output_dir, args.with_peer, args.flags)):
            command = resolved(command)
            print(shlex.join(["python", *command[1:]]), flush=True)
            if not args.list:
                status |= subprocess.run(command, cwd=_HERE.parent, check=False).returncode != 0
    return status


def _compares(part: str) -> bool:
    return any(command[0] == "compare.py" for command in PARTS[part].commands(Target(Path(), with_peer=False)))


def resolved(command: Sequence[str]) -> list[str]:
    """A part's command in a form that runs from the repository's root."""
    if command[0] == "torchrun":
        _, ranks, script, *flags = command
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        return [sys.executable, *launcher, script, *flags]
    script, *flags = command
    return [sys.executable, f"benchmarks/{script}", *flags]


def _parse() -> argparse.Namespace:
    parser = Parser(
        description="Measure again what README.md, docs/performance.md and docs/evidence.md quote.", passes_flags=True
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--list", action="store_true", help="show the parts and their commands, run nothing")
    parser.add_argument("--no-peers", action="store_true", help="this project alone")
    parser.add_argument("--output-dir", type=output_folder, default=Path("runs/measured"))
    own, flags = own_and_run_flags(sys.argv[1:])
    args = parser.parse_args(own)
    args.flags = flags
    if not args.parts and not args.list:
        parser.error(f"name a part: {', '.join(PARTS)}")
    args.parts = args.parts or list(PARTS)
    for name in args.parts:
        if name not in PARTS:
            parser.error(f"there is no part '{name}': choose of {', '.join(PARTS)}")
        if not args.list and torch.cuda.device_count() < PARTS[name].gpus:
            parser.error(f"part '{name}' needs {PARTS[name].gpus} GPUs, there are {torch.cuda.device_count()}")
    args.output_dir = args.output_dir.absolute()
    unread = [name for name in args.parts if not _compares(name)]
    if args.flags and unread:
        parser.error(f"{shlex.join(args.flags)} are for comparisons, and '{unread[0]}' has none; drop one")
    missing = PEERS[PEER].missing()
    if missing is not None and not args.no_peers:
        print(f"== {PEER} is left out: {missing}", flush=True)
    args.with_peer = missing is None and not args.no_peers
    if not args.list:
        args.output_dir.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    sys.exit(exit_status(main))
