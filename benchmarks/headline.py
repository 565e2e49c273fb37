"""The headline table in one command: this project with its fastest flags and with current scales, Transformer Engine,
BF16 of three programs and torchao, one after another on the GPUs of this machine.

python benchmarks/headline.py --output-dir runs/headline

One GPU trains GPT-345M with 2 × 16 sequences of 1,024 tokens a step. Several train GPT-7B, data-parallel, with 4 × 4
sequences of 2,048 on each. ``--model``, ``--micro-batch-size`` and ``--num-micro-batches`` choose other work,
``--runs`` other rows. Everything after -- goes to all rows as flags of pretrain_gpt.py. Peers that are not installed
are named and left out; benchmarks/README.md says how to install them. Writes comparison.json, comparison.md and
comparison.png.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

# Run as a script from a clone, installed or not.
sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import compare
from fp8_megatron.commands.arguments import Parser, output_folder, whole
from fp8_megatron.commands.program import exit_status
from fp8_megatron.config.io import own_and_run_flags

#: This project's fastest flags (configs/fast.yaml), current scales, and the peers; torch-* compile their layers.
RUNS = ["O3-fast", "O3", "megatron-te-delayed", "bf16", "megatron-bf16", "torchao-tensorwise", "torch-bf16"]
#: Model, micro-batch size and micro-batches a step, on one GPU and on several.
_ONE_GPU, _SEVERAL = ("345m", 16, 2), ("7b", 4, 4)
_TRAIN_ITERS = 13


def comparison_flags(argv: list[str], num_gpus: int) -> list[str]:
    """Flags of compare.py for this command line."""
    parser = Parser(description=(__doc__ or "").partition("\n\n")[0], passes_flags=True)
    parser.add_argument("--gpus", type=whole(), default=num_gpus, help="default: all that this machine has")
    parser.add_argument("--model", choices=list(compare.MODELS))
    parser.add_argument("--micro-batch-size", type=whole())
    parser.add_argument("--num-micro-batches", type=whole(), help="per rank and step")
    parser.add_argument("--runs", nargs="+", help=f"as compare.py's; default: {' '.join(RUNS)}")
    parser.add_argument("--timeout", type=whole(most=10**7), default=150, help="seconds for one run")
    parser.add_argument("--output-dir", type=output_folder, default=Path("runs/headline"))
    own, passed = own_and_run_flags(argv)
    args = parser.parse_args(own)
    if not 1 <= args.gpus <= num_gpus:
        parser.error(f"--gpus {args.gpus}: this machine has {num_gpus} GPUs")
    model, micro_batch_size, num_micro_batches = _ONE_GPU if args.gpus == 1 else _SEVERAL
    runs = ["--runs", *args.runs] if args.runs else ["--default-runs", *RUNS]
    return [
        *("--model", args.model or model, *runs, "--nproc-per-node", str(args.gpus)),
        *("--micro-batch-size", str(args.micro_batch_size or micro_batch_size)),
        *("--num-micro-batches", str(args.num_micro_batches or num_micro_batches)),
        *("--train-iters", str(_TRAIN_ITERS), "--profiled-steps", "0", "--timeout", str(args.timeout)),
        *("--output-dir", str(args.output_dir), "--", *(passed or ["--mock-data"])),
    ]


def main() -> int:
    """Compare; returns the exit status."""
    return compare.main(comparison_flags(sys.argv[1:], torch.cuda.device_count()))


if __name__ == "__main__":
    sys.exit(exit_status(main))
