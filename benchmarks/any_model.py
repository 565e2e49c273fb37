"""Memory and step time of models of transformers with `fp8_megatron.initialize`, beside BF16 autocast, Transformer
Engine and torchao, each with and without torch.compile, and with forward and backward recorded (`record_step`):

python benchmarks/any_model.py --models vit-1.2b gpt2-xl --output runs/any_model.json

One process a model trains it under every run from the same weights on the same random batches. Memory is the peak of
measured steps, and what stays between steps. Speed and memory are quoted beside the fastest run that is not this
project's, compiled ones included; the last lines are the table of docs/evidence.md. ``--tiny`` takes tiny models, on a
CPU too, to see that everything runs. A run that fails is recorded with its error, and the others go on. Needs
transformers; peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import importlib.util
import json
import pstats
import shlex
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.autograd import DeviceType

# Run as a script from a clone, installed or not.
sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.any_model_results import Result, markdown, table
from benchmarks.any_model_work import WORKS, Batch, Trainee, build
from benchmarks.provenance import commit, device_name, versions
from fp8_megatron.any_model.recorded_step import RecordedStep, record_step
from fp8_megatron.commands.arguments import Parser, output_file, whole
from fp8_megatron.commands.program import exit_status
from fp8_megatron.device.cudnn import load_bundled
from fp8_megatron.device.device import select_device
from fp8_megatron.outputs import write_output

_USUAL_RUNS = ("bf16-amp", "te-delayed", "O1", "O2", "O3")
#: torchao is made for torch.compile. "bf16-unmasked" leaves out masks as `initialize` does. Ours has delayed
#: scales unless it says tensorwise. The last two compute activations again in backward.
RUNS = (*_USUAL_RUNS, "bf16-unmasked", "torchao-tensorwise", "O2-tensorwise", "O2-recompute", "O3-recompute")
#: The strongest rivals of most models, and ours beside them.
_COMPILED = ("bf16-amp", "torchao-tensorwise", "O2")
#: The package that a peer needs.
_NEEDS = {"te-delayed": "transformer_engine", "torchao-tensorwise": "torchao"}
#: Of one forward and backward.
Compute = Callable[[Batch], torch.Tensor]
#: A recorded run is recorded in the last one.
_WARM_UP_STEPS = 4
#: The share of a step that kernels fill at least where the host keeps up.
_BUSY_SHARE = 0.95
#: Lines of a profile.
_SHOWN = 40
_PACKAGES = ("torch", "triton", "transformers", "transformer_engine", "torchao")


def main() -> int:
    """Measure, print and write; returns the exit status."""
    args = parse()
    if args.child:
        _measure_model(args)
        return 0
    results: list[Result] = []
    for model in args.models:
        results += _in_a_process(model, args)
        if args.output is not None:  # after each model, so that a kill keeps those before
            write_output(args.output, (json.dumps(_report(results), indent=1) + "\n").encode())
    Console(width=150).print(table(results))
    print(markdown(results))
    return int(any(result.error is not None for result in results))


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=list(_USUAL_RUNS), help="launched by Python")
    parser.add_argument("--compiled-runs", nargs="*", choices=RUNS, default=list(_COMPILED), help="and compiled")
    parser.add_argument("--recorded-runs", nargs="*", choices=RUNS, default=[], help="once more, recorded (none)")
    parser.add_argument(
        "--compiled-recorded-runs", nargs="*", choices=RUNS, default=[], help="once more, compiled and recorded (none)"
    )
    parser.add_argument("--steps", type=whole(), default=10, help="measured steps (10)")
    parser.add_argument("--timeout", type=whole(), default=600, help="seconds for one model (600)")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same kinds")
    parser.add_argument("--profile", action="store_true", help="print kernels and host of more steps, on stderr")
    parser.add_argument("--output", type=output_file, help="the .json file to write (replaced if it exists)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if not cases(args):
        parser.error("nothing to measure: name runs with --runs, --compiled-runs or --recorded-runs")
    return args


def cases(args: argparse.Namespace) -> list[tuple[str, bool, bool]]:
    """(run, compiled, recorded) of each result."""
    kinds = (
        (args.runs, False, False),
        (args.compiled_runs, True, False),
        (args.recorded_runs, False, True),
        (args.compiled_recorded_runs, True, True),
    )
    return [(run, compiled, recorded) for runs, compiled, recorded in kinds for run in runs]


def _in_a_process(model: str, args: argparse.Namespace) -> list[Result]:
    """The results that a process for `model` printed, a line each, until it ended or its time was over."""
    command = [sys.executable, __file__, "--child", "--models", model, "--runs", *args.runs]
    command += ["--compiled-runs", *args.compiled_runs, "--recorded-runs", *args.recorded_runs]
    command += ["--compiled-recorded-runs", *args.compiled_recorded_runs, "--steps", str(args.steps)]
    command += ["--tiny"] if args.tiny else []
    command += ["--profile"] if args.profile else []
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=args.timeout, check=False)
        output, problem = done.stdout, f"the process ended with status {done.returncode}" if done.returncode else None
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        problem = f"no end within {args.timeout} s"
    results = [Result(**json.loads(line)) for line in output.splitlines() if line.startswith("{")]
    if problem is not None:
        results.append(Result(model, "-", False, error=problem))
    return results


def _measure_model(args: argparse.Namespace) -> None:
    model = args.models[0]
    load_bundled()
    device = select_device()
    for run, compiled, recorded in cases(args):
        needed = {WORKS[model].needs, _NEEDS.get(run, "torch")}
        missing = [package for package in sorted(needed) if importlib.util.find_spec(package) is None]
        if missing:
            print(f"{model} {run}: {missing[0]} is not installed; left out", file=sys.stderr, flush=True)
            continue
        result = Result(model, run, compiled, recorded)
        try:
            _measure(result, device, args)
        except Exception as error:  # a peer may fail in any way, and the others are measured all the same
            result.error = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(json.dumps(asdict(result)), flush=True)
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(result: Result, device: torch.device, args: argparse.Namespace) -> None:
    work = WORKS[result.model]
    trainee = build(work, result.run, device, tiny=args.tiny)
    compute = _loop(trainee, torch.compile(trainee.model) if result.compiled else trainee.model)
    if result.recorded:
        compute = record_step(compute, trainee.model)
    generator = torch.Generator(device).manual_seed(1)
    batches = [work.batch(generator, device, args.tiny) for _ in range(4)]
    losses, times = [], []
    is_cuda = device.type == "cuda"
    for step in range(_WARM_UP_STEPS + args.steps):
        if is_cuda:
            torch.cuda.synchronize()
        if step == _WARM_UP_STEPS and is_cuda:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        losses.append(_step(trainee, compute, batches[step % len(batches)]))
        if is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times[_WARM_UP_STEPS:])
    result.step_ms, result.samples_per_second = seconds * 1e3, len(next(iter(batches[0].values()))) / seconds
    result.losses = [float(loss) for loss in losses]
    if is_cuda:
        kept = compute.kept_bytes if isinstance(compute, RecordedStep) else 0
        result.peak_gb = (torch.cuda.max_memory_allocated() + kept) / 1e9
        result.resting_gb = (torch.cuda.memory_allocated() + kept) / 1e9
        kernels = _kernels(trainee, compute, batches[0])
        result.kernel_ms = sum(sum(times) for times in kernels.values())
        result.is_host_bound = result.kernel_ms < _BUSY_SHARE * result.step_ms
        if args.profile:
            _print_profile(kernels, trainee, compute, batches[0])


def _loop(trainee: Trainee, forward: Any) -> Compute:
    """Forward and backward of a batch."""

    def compute(batch: Batch) -> torch.Tensor:
        with trainee.context():
            loss: torch.Tensor = forward(**batch).loss
        loss.backward()
        return loss.detach()

    return compute


def _step(trainee: Trainee, compute: Compute, batch: Batch) -> torch.Tensor:
    loss = compute(batch)
    trainee.optimizer.step()
    trainee.optimizer.zero_grad(set_to_none=True)
    return loss


def _kernels(trainee: Trainee, compute: Compute, batch: Batch) -> dict[str, list[float]]:
    """Name → milliseconds of each launch of one step's kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        _step(trainee, compute, batch)
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            kernels[event.name].append(event.device_time_total / 1e3)
    return kernels


def _print_profile(kernels: dict[str, list[float]], trainee: Trainee, compute: Compute, batch: Batch) -> None:
    """Print the times of a step's kernels, then of another step's Python functions, on stderr."""
    times = {name: sum(each) for name, each in kernels.items()}
    print(f"kernels: {sum(times.values()):.1f} ms", file=sys.stderr)
    for name in sorted(times, key=lambda name: -times[name])[:_SHOWN]:
        print(f"{times[name]:8.2f} ms {len(kernels[name]):6} × {name[:110]}", file=sys.stderr)
    profiler = cProfile.Profile()
    profiler.runcall(_step, trainee, compute, batch)
    pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(_SHOWN)


def _report(results: list[Result]) -> dict[str, Any]:
    return {
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "device": device_name(),
        "versions": versions(_PACKAGES),
        "about": {name: work.about for name, work in WORKS.items()},
        "results": [{**asdict(result), "name": result.name} for result in results],
    }


if __name__ == "__main__":
    sys.exit(exit_status(main))
