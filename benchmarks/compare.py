"""Train one model with this project, in BF16 and with peers, one after another on the same GPUs, and compare the runs.

python benchmarks/compare.py --model 7b --nproc-per-node 4 --micro-batch-size 4 --num-micro-batches 4 \
    --runs O3-fast O3 bf16 megatron-te-delayed torchao-tensorwise --output-dir runs/compare-7b

Runs are flags of this project (`RUNS`) and programs of benchmarks/peers (`PEERS`). All train the same tokens from the
same initial weights. The default of --runs is the list above, without peers that are not installed or do not support
the layout. Everything after -- goes to all runs as flags of pretrain_gpt.py. Without data among them the tokens are
random.

Another program can be a peer: ``--peer "name=command"``. Its output must have a line
``JSON {"tok_s_gpu": …, "step_ms": …, "tflops_gpu": …, "tflops_causal": …, "mem_gb": …, "losses": […]}``.

Writes comparison.json (commands, commit, versions, every figure, time by kind of kernel), comparison.md and
comparison.png. Speed is the median over the steps after the first ones, profiled steps left out.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

# Run as a script from a clone, installed or not.
sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.comparison import Result, finite, table_of, write_report
from benchmarks.peers.runs import MUON, PEERS
from benchmarks.provenance import device_name
from fp8_megatron.commands.arguments import Parser, output_folder, whole
from fp8_megatron.commands.program import exit_status, told_error
from fp8_megatron.config.io import own_and_run_flags, parse_config
from fp8_megatron.device.cudnn import users_environment
from fp8_megatron.reporting.flops import model_flops_per_token, peak_flops
from fp8_megatron.reporting.metrics_file import METRICS_FILE, read_rows

MODELS = {
    "345m": "gpt_345m",
    "1.3b": "gpt_1.3b",
    "7b": "gpt_7b",
    "13b": "gpt_13b",
    "18b": "gpt_18b",
    "30b": "gpt_30b",
    "llama-7b": "llama_7b",
    "llama-1b": "llama_1b",
    "llama-8b": "llama_8b",
    "llama-70b": "llama_70b",
    "qwen3-8b": "qwen3_8b",
    "qwen3-30b-a3b": "qwen3_30b_a3b",
    "mixtral-8x7b": "mixtral_8x7b",
}
_CURRENT = ["--precision", "fp8", "--fp8-recipe", "tensorwise"]
_HISTORY = ["--precision", "fp8", "--fp8-recipe", "delayed"]
_BLOCKS = ["--fp8-weight-grad-scaling", "block"]
_HEAD = ["--fp8-lm-head", "--grad-accumulation-dtype", "bf16"]
_DELAYED = [*_HISTORY, "--no-fp8-lm-head", *_BLOCKS]
_FAST = [*_HISTORY, *_HEAD, "--fp8-weight-grad-scaling", "delayed"]
_GRAPH, _NO_GRAPH = (["--cuda-graph-impl", impl] for impl in ("local", "none"))
RUNS = {
    "O3": _CURRENT,
    "O3-delayed": _DELAYED,
    "O3-blockwise": ["--precision", "fp8", "--fp8-recipe", "blockwise"],
    "O3-lean": [*_HISTORY, *_HEAD, *_BLOCKS],
    "O3-default": _HISTORY,
    "O3-16-bit-head": [*_HISTORY, "--no-fp8-lm-head"],
    "O3-fast": _FAST,
    "O3-fp8-attention": [*_FAST, "--fp8-dot-product-attention"],
    "O3-muon": [*_FAST, *MUON],
    "O3-graph": [*_FAST, *_GRAPH],
    "O3-no-graph": [*_FAST, *_NO_GRAPH],
    "O3-nccl": [*_DELAYED, "--dp-transport", "nccl"],
    "O3-no-overlap": [*_DELAYED, "--no-overlap-grad-reduce", "--no-overlap-param-gather"],
    "O1": [*_CURRENT, "--opt-level", "O1"],
    "O2": [*_CURRENT, "--opt-level", "O2"],
    "bf16": ["--precision", "bf16"],
    "bf16-graph": ["--precision", "bf16", *_GRAPH],
    "bf16-no-graph": ["--precision", "bf16", *_NO_GRAPH],
    "te-delayed": ["--precision", "te", "--fp8-recipe", "delayed"],
    "te-tensorwise": ["--precision", "te", "--fp8-recipe", "tensorwise"],
    "te-blockwise": ["--precision", "te", "--fp8-recipe", "blockwise"],
}
#: The default runs.
DEFAULT_RUNS = ["O3-fast", "O3", "bf16", "megatron-te-delayed", "torchao-tensorwise"]
#: Steps left out of the throughput: compilation, library start-up, the allocator's first blocks.
WARM_UP_STEPS = 5
#: Seconds that torchrun needs to end its ranks.
_LAUNCHER_SECONDS = 45
#: What a run logs once its steps are a CUDA graph.
_RECORDED = "recorded a step as a CUDA graph"
#: Keys that a peer's JSON line must have.
_PEER_FIGURES = ("tok_s_gpu", "step_ms", "tflops_gpu", "tflops_causal", "mem_gb", "losses")


def main(argv: Sequence[str] | None = None) -> int:
    """Run, then print and write the comparison; returns the exit status."""
    args = parse(argv)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    _remove(args.output_dir, "comparison.json", "comparison.md", "comparison.png")
    own = {name: _own_command(args, name) for name in args.runs if name in RUNS}
    peers = {name: _peer_command(args, name) for name in args.runs if name in PEERS}
    peers |= {name: shlex.split(command) for name, command in args.peer}
    results: list[Result] = []
    succeeded = True
    for name, command in (own | peers).items():
        _remove(args.output_dir / name, METRICS_FILE, "profile_rank*.json")
        ended = _run(name, command, args.output_dir / f"{name}.log", args.timeout)
        # A run of this project that was stopped after its last step still has all figures.
        if ended or name in own:
            try:
                results.append(_own_result(args, name, command) if name in own else _peer_result(args, name, command))
            except ValueError as error:
                if ended:
                    print(f"error: {name}: {error}", file=sys.stderr)
                ended = False
            else:
                write_report(args, results)
        succeeded = succeeded and ended
    if results:
        Console(width=150).print(table_of(args, results))
    for result in results:
        if result.broken_steps:
            print(f"error: {result.name} has no finite loss in steps {result.broken_steps}", file=sys.stderr)
            succeeded = False
    return 0 if succeeded else 1


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; `passed` are the flags of all runs, with --mock-data unless they name data."""
    parser = Parser(description="Compare training speed and memory side by side.", passes_flags=True)
    parser.add_argument("--model", choices=list(MODELS), required=True)
    parser.add_argument("--runs", nargs="*", choices=[*RUNS, *PEERS], help=f"default: {' '.join(DEFAULT_RUNS)}")
    parser.add_argument(
        "--default-runs",
        nargs="+",
        choices=[*RUNS, *PEERS],
        default=DEFAULT_RUNS,
        help="without --runs: of these, peers that cannot take part are left out",
    )
    parser.add_argument(
        "--peer", action="append", default=[], type=_peer, metavar="NAME=COMMAND", help="another program"
    )
    parser.add_argument("--nproc-per-node", type=whole(), default=1)
    parser.add_argument("--micro-batch-size", type=whole(), default=4)
    parser.add_argument("--num-micro-batches", type=whole(), default=1, help="per rank and step")
    parser.add_argument("--train-iters", type=whole(), default=14)
    parser.add_argument(
        "--profiled-steps", type=whole(least=0), default=2, help="at the end; 0 saves the time and has no breakdown"
    )
    parser.add_argument("--timeout", type=whole(most=10**7), default=600, help="seconds for one run")
    parser.add_argument("--output-dir", type=output_folder, required=True)
    own, passed = own_and_run_flags(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(own)
    least = WARM_UP_STEPS + args.profiled_steps + 3
    if args.train_iters < least:
        parser.error(f"--train-iters {args.train_iters}: give at least {least}")
    config = parse_config(["--config", str(_config_file(args)), *passed])
    has_data = config.data.data_path or config.data.train_data_path or config.data.mock_data
    args.passed, args.parallel = [*passed, *([] if has_data else ["--mock-data"])], config.parallel
    wanted = args.default_runs if args.runs is None else args.runs
    left_out = {name: why for name in wanted if (why := _cannot_run(args, name)) is not None}
    if args.runs is None:
        args.runs = [name for name in wanted if name not in left_out]
        for name, why in left_out.items():
            print(f"== {name} is left out: {why}", flush=True)
    elif left_out:
        parser.error("; ".join(f"{name}: {why}" for name, why in left_out.items()))
    return args


def _cannot_run(args: argparse.Namespace, name: str) -> str | None:
    """Why a peer cannot take part, and what to do about it."""
    if name not in PEERS:
        return None
    if args.parallel.ranks_per_sample > 1 and PEERS[name].program == "torchao_fsdp2":
        return "it is data-parallel alone; leave the parallel sizes out"
    return PEERS[name].missing()


def _peer(text: str) -> tuple[str, str]:
    """Name and command of a --peer."""
    name, _, command = text.partition("=")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no command for a shell: {error}") from error
    if not name or "/" in name or not words:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=COMMAND, no slash in the name")
    return name, command


def _remove(folder: Path, *patterns: str) -> None:
    """Remove an older run's files: if this run fails, they would be taken for its figures."""
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        path.unlink()


def _config_file(args: argparse.Namespace) -> Path:
    return Path(__file__).parents[1] / "configs" / f"{MODELS[args.model]}.yaml"


def _work_flags(args: argparse.Namespace) -> list[str]:
    """Flags of pretrain_gpt.py for all runs: what they train."""
    data_parallel_size = args.nproc_per_node // args.parallel.ranks_per_sample
    batch = args.micro_batch_size * args.num_micro_batches * data_parallel_size
    return [
        *("--config", f"configs/{_config_file(args).name}", *args.passed),
        *("--micro-batch-size", str(args.micro_batch_size), "--global-batch-size", str(batch)),
        *("--train-iters", str(args.train_iters), "--lr-warmup-iters", "2", "--eval-interval", "0"),
    ]


def _flags(args: argparse.Namespace, name: str) -> list[str]:
    """Flags of one of this project's runs."""
    first_profiled = args.train_iters - args.profiled_steps + 1
    profile = [
        *("--profile", "--profile-step-start", str(first_profiled)),
        *("--profile-step-end", str(args.train_iters + 1), "--profile-ranks", *map(str, range(args.nproc_per_node))),
    ]
    return [
        *(*_work_flags(args), *RUNS[name], "--log-interval", str(args.train_iters + 1)),
        *("--no-tensorboard", "--output-dir", str(args.output_dir / name)),
        *(profile if args.profiled_steps else []),
    ]


def _own_command(args: argparse.Namespace, name: str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.nproc_per_node)]
    return [sys.executable, *launcher, "pretrain_gpt.py", *_flags(args, name)]


def _peer_command(args: argparse.Namespace, name: str) -> list[str]:
    figures = args.output_dir / name / "figures.json"
    return PEERS[name].command(args.nproc_per_node, figures, _work_flags(args))


def _run(name: str, command: list[str], log: Path, timeout: int) -> bool:
    print(f"== {name}: {_shown(command)}", flush=True)
    with log.open("w") as output:
        try:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=users_environment())
        except OSError as error:
            print(f"error: {name} cannot be started: {error}", file=sys.stderr, flush=True)
            return False
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            _stop(process)
            print(f"error: {name} took longer than {timeout} s", file=sys.stderr, flush=True)
            return False
    if status != 0:
        told = told_error(log.read_text(errors="replace"))
        print(f"error: {name} ended with status {status}: {told}; its log is {log}", file=sys.stderr, flush=True)
        return False
    return True


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a run and, through its launcher, its ranks, which would disturb the next run."""
    process.terminate()
    try:
        process.wait(_LAUNCHER_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _has_every_figure(args: argparse.Namespace, name: str) -> bool:
    """Whether a run, even a stopped one, has finished its steps and its profile."""
    metrics = args.output_dir / name / METRICS_FILE
    if not all(path.exists() for path in (metrics, *_profiles(args, name))):
        return False
    return sum(record["kind"] == "train" for record in read_rows(metrics)) == args.train_iters


def _profiles(args: argparse.Namespace, name: str) -> list[Path]:
    """Profiles that the ranks of a run write, if steps are profiled."""
    ranks = range(args.nproc_per_node if args.profiled_steps else 0)
    return [args.output_dir / name / f"profile_rank{rank}.json" for rank in ranks]


def _shown(command: list[str]) -> str:
    return shlex.join(["python" if part == sys.executable else part for part in command])


def _own_result(args: argparse.Namespace, name: str, command: list[str]) -> Result:
    """Figures of a run from its metrics and its profile. The profiled steps and the one before are not timed.

    Raises:
        ValueError: the run has not finished its steps or its profile.
    """
    folder = args.output_dir / name
    if not _has_every_figure(args, name):
        raise ValueError(f"no figures of all its steps in {folder}")
    steps = [record for record in read_rows(folder / METRICS_FILE) if record["kind"] == "train"]
    untimed_at_end = args.profiled_steps + 1 if args.profiled_steps else 0
    timed = steps[WARM_UP_STEPS : len(steps) - untimed_at_end]
    config = parse_config(["--config", str(folder / "config.yaml")])
    vocab = config.model.vocab_size or 0
    rate = statistics.median(record["tokens_per_second_per_gpu"] for record in timed)
    full, causal = (model_flops_per_token(config.model, causal=c, padded_vocab_size=vocab) for c in (False, True))
    peak = peak_flops(device_name(), config.precision.precision)
    kinds: dict[str, float] = defaultdict(float)
    profiles = [json.loads(path.read_text()) for path in _profiles(args, name)]
    for kernel in profiles[0]["kernels"] if profiles else []:
        kinds[kernel["category"]] += kernel["ms_per_step"]
    return Result(
        name=name,
        command=_shown(command),
        tokens_per_second_per_gpu=rate,
        step_ms=1e3 * statistics.median(record["step_seconds"] for record in timed),
        tflops_per_gpu=rate * full / 1e12,
        causal_tflops_per_gpu=rate * causal / 1e12,
        mfu=None if peak is None else rate * full / peak,
        peak_gb=max(record["peak_memory_gib"] for record in steps) * 2**30 / 1e9,
        final_loss=finite(steps[-1]["loss"]),
        losses=[finite(record["loss"]) for record in steps],
        ms_by_kind_of_kernel=dict(sorted(kinds.items(), key=lambda item: -item[1])),
        profiled_step_ms=[profile["step"] for profile in profiles],
        recorded=_RECORDED in (args.output_dir / f"{name}.log").read_text(),
    )


def _peer_result(args: argparse.Namespace, name: str, command: list[str]) -> Result:
    """Figures of a peer from its output.

    Raises:
        ValueError: the line of figures is missing or incomplete.
    """
    log = args.output_dir / f"{name}.log"
    line = next((line for line in log.read_text().splitlines() if line.startswith("JSON ")), None)
    if line is None:
        raise ValueError(f"no line 'JSON {{…}}' in {log}: the peer must print its figures")
    values = json.loads(line.removeprefix("JSON "))
    if missing := [key for key in _PEER_FIGURES if values.get(key) in (None, [])]:
        raise ValueError(f"no {', '.join(missing)} in the JSON line of {log}: the peer must print them")
    peak = peak_flops(device_name(), "bf16" if "bf16" in name else "fp8")
    return Result(
        name=name,
        command=_shown(command),
        tokens_per_second_per_gpu=values["tok_s_gpu"],
        step_ms=values["step_ms"],
        tflops_per_gpu=values["tflops_gpu"],
        causal_tflops_per_gpu=values["tflops_causal"],
        mfu=None if peak is None else values["tflops_gpu"] * 1e12 / peak,
        peak_gb=values["mem_gb"],
        final_loss=finite(values["losses"][-1]),
        losses=[finite(loss) for loss in values["losses"]],
    )


if __name__ == "__main__":
    sys.exit(exit_status(main))
