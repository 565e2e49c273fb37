"""Steps of one GPU at several lengths, by what leaves its memory:

python benchmarks/long_sequences.py --runs 8192:none 8192:mlp+offload 131072:full+offload+chunks --output runs/long.json

A run is a length and a form: none, or some of mlp, full (what is recomputed), offload (activations of all layers but
the last go to the host), chunks (the loss over 8,192 positions at a time) and cut (MLPs too). Tokens are random. Flags
after -- come behind configs/llama_8b.yaml and configs/fast.yaml.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

# Run as a script from a clone, installed or not.
sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.provenance import commit, device_name
from fp8_megatron.commands.arguments import Parser, output_file, whole
from fp8_megatron.commands.program import exit_status
from fp8_megatron.config.checks import check_config
from fp8_megatron.config.io import own_and_run_flags, parse_config
from fp8_megatron.config.schema import Config
from fp8_megatron.device.device import prepare_cuda_environment, select_device
from fp8_megatron.mcore.runtime import runtime, seed_everything
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.outputs import write_output
from fp8_megatron.planning.activations import predict_host_bytes, predict_peak
from fp8_megatron.planning.vocabulary import padded_vocab_size, vocab_size
from fp8_megatron.reporting.flops import model_flops_per_token
from fp8_megatron.training.batches import Batch
from fp8_megatron.training.build import build_training_state
from fp8_megatron.training.train_step import train_step

ROOT = Path(__file__).parents[1]
_BASE = f"--config {ROOT}/configs/llama_8b.yaml {ROOT}/configs/fast.yaml --mock-data --cuda-graph-impl none"
_RECOMPUTATIONS = {
    "mlp": "--recompute-granularity selective --recompute-modules mlp",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
_CHUNK = 8192


@dataclass
class Row:
    """One run. GB are 10⁹ bytes.

    Attributes:
        seconds: of a step; the median.
        tflop_per_s: Megatron's convention, full attention; causal_tflop_per_s counts half of attention.
        host_gb: what the activations take there, predicted.
        losses: of each step.
        error: why it has no figures.
    """

    tokens: int
    form: str
    predicted_gb: float
    host_gb: float
    seconds: float | None = None
    tokens_per_second: float | None = None
    tflop_per_s: float | None = None
    causal_tflop_per_s: float | None = None
    peak_gb: float | None = None
    losses: list[float] | None = None
    error: str | None = None


def main() -> int:
    """Measure, print and write; returns the exit status."""
    own, flags = own_and_run_flags(sys.argv[1:])
    args = _parse(own)
    prepare_cuda_environment(needs_launch_order=False)
    device = select_device()
    rows = []
    for run in args.runs:
        length, form = run.split(":")
        row = measured(configuration(int(length), form, flags), form, device, args.warm_up, args.steps)
        rows.append(row)
        print(json.dumps(asdict(row)), flush=True)
        report = {
            "command": shlex.join([Path(sys.executable).name, *sys.argv]),
            "commit": commit(),
            "device": device_name(),
            "torch": torch.__version__,
            "rows": [asdict(one) for one in rows],
        }
        write_output(args.output, (json.dumps(report, indent=1) + "\n").encode(), "--output")
    return 0


def configuration(length: int, form: str, flags: list[str]) -> Config:
    """The configuration of a run.

    Raises:
        ConfigError: it cannot train.
    """
    words = [*_BASE.split(), "--seq-length", str(length), "--max-position-embeddings", str(length)]
    words += ["--micro-batch-size", "1", "--global-batch-size", "1", *flags]
    parts = form.split("+")
    for part in parts:
        words += _RECOMPUTATIONS.get(part, "").split()
    if "chunks" in parts:
        words += ["--loss-chunk-size", str(_CHUNK)]
    if "cut" in parts:
        words += ["--mlp-chunks-for-training", str(-(-length // _CHUNK))]
    if "offload" in parts:
        words += ["--cpu-offloading-num-layers", str(parse_config(words).model.num_layers - 1)]
    config = parse_config(words)
    check_config(config, 1)
    return config


def measured(config: Config, form: str, device: torch.device, warm_up: int, steps: int) -> Row:
    """One run's figures; after an allocation that failed, its error."""
    rows, length = padded_vocab_size(config), config.model.seq_length
    predicted = predict_peak(config, rows, world_size=1).total / 1e9
    row = Row(length, form, round(predicted, 2), round(predict_host_bytes(config, world_size=1) / 1e9, 2))
    try:
        seconds, row.losses = _steps(config, device, warm_up, steps)
    except torch.OutOfMemoryError as error:
        row.error = str(error).splitlines()[0]
        return row
    finally:
        if device.type == "cuda":
            row.peak_gb = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        gc.collect()
        torch.cuda.empty_cache()
    row.seconds = round(seconds, 4)
    tokens = config.tokens_per_micro_batch * config.num_micro_batches(1)
    row.tokens_per_second = round(tokens / seconds, 1)
    flops = partial(model_flops_per_token, config.model, padded_vocab_size=rows)
    row.tflop_per_s, row.causal_tflop_per_s = (
        round(flops(causal=causal) * tokens / seconds / 1e12, 1) for causal in (False, True)
    )
    return row


def _steps(config: Config, device: torch.device, warm_up: int, steps: int) -> tuple[float, list[float]]:
    """The median time of a step, and the losses of all."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with runtime(device), initialized(config.parallel, config.model.num_layers, device) as topology:
        state = build_training_state(
            config, padded_vocab_size(config), topology, device, unpadded_vocab_size=vocab_size(config)
        )
        seed_everything(config.training.seed, device, tensor_parallel_rank=0, pipeline_rank=0)
        generator = torch.Generator().manual_seed(config.training.seed)
        times, losses = [], []
        for _ in range(warm_up + steps):
            batches = [_batch(config, generator) for _ in range(config.num_micro_batches(1))]
            began = time.perf_counter()
            packed = train_step(state, iter(batches))
            losses.append(packed[0].item())
            times.append(time.perf_counter() - began)
        return statistics.median(times[warm_up:]), losses


def _batch(config: Config, generator: torch.Generator) -> Batch:
    length = config.model.seq_length
    tokens = torch.randint(vocab_size(config), (1, length + 1), generator=generator)
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "position_ids": torch.arange(length)[None],
        "loss_mask": torch.ones(1, length),
    }


def _parse(words: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", required=True, metavar="LENGTH:FORM")
    parser.add_argument("--warm-up", type=whole(most=1000), default=1, metavar="N", help="steps before (default 1)")
    parser.add_argument("--steps", type=whole(most=1000), default=2, metavar="N", help="timed steps (default 2)")
    parser.add_argument("--output", type=output_file, required=True, metavar="FILE.json")
    args = parser.parse_args(words)
    for run in args.runs:
        length, _, form = run.partition(":")
        unknown = set(form.split("+")) - {"none", "offload", "chunks", "cut", *_RECOMPUTATIONS}
        if not length.isdigit() or unknown:
            parser.error(f"--runs {run}: give a length and none, or some of mlp full offload chunks cut joined by +")
    return args


if __name__ == "__main__":
    sys.exit(exit_status(main))
