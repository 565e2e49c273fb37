"""The best layouts of a model on a cluster, with the memory of a rank and the time of a step, without a GPU.

    fp8-megatron plan --gpus 8 --gpu h100 -- --config configs/gpt_13b.yaml configs/fast.yaml
    fp8-megatron plan --gpus 128 --levels bf16 O3 5-byte -- --config configs/gpt_175b.yaml
    fp8-megatron plan --gpus 128 --build --levels bf16 O3 -- --config configs/gpt_175b.yaml
    fp8-megatron plan --largest 8 32 128 --output largest.png
    fp8-megatron plan --gpus 1 --gpu h200 --longest -- --config configs/llama_8b.yaml configs/fast.yaml

The flags after -- describe the run, as for training. Plan varies tensor-, pipeline- and expert-parallel sizes,
micro-batch size and recomputation. It keeps the global batch size and all other flags. Step times come from rates
measured on H200; on H100, what waits for memory takes longer by the ratio of the memories' bandwidths.
--build varies nothing: it builds a rank of every kind of pipeline stage without a GPU and counts its memory. --longest
varies the sequence length, recomputation and offloading.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..config.checks import ConfigError, check_config
from ..config.io import own_and_run_flags
from ..config.schema import Config
from ..config.words import flag_name
from ..models.registry import architecture_of
from .arguments import Parser, output_file, real, whole
from .program import exit_status
from .run_settings import LEVELS, run_command_line

if TYPE_CHECKING:
    from ..planning.layouts import Cluster, Layout

#: GPUs that a job can have.
_MOST_GPUS = 100_000
#: What --largest compares. Transformer Engine's model states are BF16's.
_LARGEST_LEVELS = ("bf16", "O3", "5-byte")
#: Settings of the cluster and of the table, and their defaults.
_DEFAULTS = {"gpus_per_node": 8, "gpu": "h100", "network_gb": 50.0, "top": 5}
#: 10^9 bytes of the memory of each GPU.
_MEMORY_GB = {"h100": 80.0, "h200": 141.0}
#: Which of these each question leaves unread.
_UNREAD = {
    "build": ("gpus_per_node", "gpu", "memory_gb", "network_gb", "top"),
    "longest": ("network_gb", "top"),
    "largest": ("network_gb", "top"),
}
_KINDS = ("state", "activations", "logits", "backward", "wire_buffers", "transposes", "recording", "tables")


def main(words: Sequence[str] | None = None, prog: str = "plan.py") -> int:
    """Exit status: 0, 1 if nothing fits, or 2 after an error."""
    return exit_status(partial(_main, list(sys.argv[1:] if words is None else words), prog))


def _arguments(words: list[str], prog: str) -> tuple[argparse.Namespace, list[str]]:
    """Plan's own flags, checked and with their defaults; and the flags of the run, which stand after --."""
    own, flags = own_and_run_flags(words)
    parser = _parser(prog)
    args = parser.parse_args(own)
    if args.output is not None and args.largest is None:
        parser.error("--output is for --largest; drop it")
    if args.build and args.largest is not None:
        parser.error("--build is for --gpus; drop it")
    if args.longest and (args.build or args.largest is not None):
        parser.error("--longest is for --gpus alone; drop --build and --largest")
    if args.longest and len(args.levels or ()) > 1:
        parser.error(f"--longest is for one precision; give one of --levels {' '.join(args.levels)}")
    question = next((name for name in _UNREAD if getattr(args, name)), None)
    ignored = [flag_name(name) for name in _UNREAD.get(question or "", ()) if getattr(args, name) is not None]
    if ignored:
        parser.error(f"{' '.join(ignored)}: has no effect with --{question}; drop it")
    for name, default in _DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    if args.memory_gb is None:
        args.memory_gb = _MEMORY_GB[args.gpu]
    return args, flags


def _main(words: list[str], prog: str) -> int:
    """Answer the question of the flags: --build, --largest, --longest, or the best layouts. See `main`."""
    args, flags = _arguments(words, prog)

    if args.build:
        from .plan_tables import report_build

        levels = args.levels or [None]
        runs = {level: _configuration([*flags, *(LEVELS[level] if level else [])], prog) for level in levels}
        report_build({level or config.precision.level: config for level, config in runs.items()}, args.gpus)
        return 0
    if args.largest is not None:
        from .plan_tables import report_largest

        clusters = [_cluster(args, gpus) for gpus in args.largest]
        levels = {level: LEVELS[level] for level in args.levels or _LARGEST_LEVELS}
        return report_largest(levels, flags, clusters, args.output, prog)
    cluster = _cluster(args, args.gpus)
    if args.longest:
        from .plan_tables import report_longest

        (level,) = args.levels or [None]
        config = _configuration([*flags, *(LEVELS[level] if level else [])], prog)
        check_config(config, args.gpus, on_this_machine=False)
        return report_longest(config, cluster)
    return _report_layouts(args, flags, cluster, prog)


def _report_layouts(args: argparse.Namespace, flags: list[str], cluster: Cluster, prog: str) -> int:
    """Print the best layouts of each level; returns 1 if none fits for some level, otherwise 0."""
    from ..planning.layouts import ROOM, best_layouts  # imports torch

    status = 0
    for level in args.levels or [None]:
        config = _configuration([*flags, *(LEVELS[level] if level else [])], prog, varies_layout=True)
        layouts = best_layouts(config, cluster, partial(_records, cluster))
        if layouts:
            print(_report(level or config.precision.level, layouts, cluster, args.top), flush=True)
            continue
        print(
            f"{level or config.precision.level}: nothing fits into {ROOM:.0%} of {args.memory_gb:g} GB on {args.gpus} "
            f"GPUs; give more GPUs or more memory, or --levels 5-byte",
            flush=True,
        )
        status = 1
    return status


def _cluster(args: argparse.Namespace, gpus: int) -> Cluster:
    from ..planning.layouts import Cluster
    from ..planning.speed import RATES

    return Cluster(gpus, args.gpus_per_node, args.memory_gb * 1e9, args.network_gb * 1e9, RATES[args.gpu])


def _parser(prog: str) -> argparse.ArgumentParser:
    usage = f"{prog} (--gpus N | --largest N ...) [flags] -- FLAGS OF THE RUN"
    parser = Parser(prog=prog, description=__doc__, usage=usage, passes_flags=True)
    sizes = parser.add_mutually_exclusive_group(required=True)
    sizes.add_argument("--gpus", type=whole(most=_MOST_GPUS), metavar="N", help="number of GPUs, over all nodes")
    sizes.add_argument(
        "--largest",
        nargs="+",
        type=whole(most=_MOST_GPUS),
        metavar="N",
        help="find the largest GPT that fits on each of these numbers of GPUs, for each level",
    )
    parser.add_argument(
        "--build",
        action="store_true",
        help="build the layout of the flags, one rank of each kind of pipeline stage, and count its memory (minutes)",
    )
    parser.add_argument(
        "--longest",
        action="store_true",
        help="find the longest sequence that fits, for each way to recompute, offload and chunk activations",
    )
    parser.add_argument("--output", type=output_file, metavar="FILE", help="draw --largest as an image")
    parser.add_argument(
        "--gpus-per-node", type=whole(most=_MOST_GPUS), metavar="N", help="GPUs of one node (default 8)"
    )
    parser.add_argument("--gpu", choices=list(_MEMORY_GB), help="the kind of GPU (default h100)")
    parser.add_argument(
        "--memory-gb", type=real(above=0), metavar="GB", help="memory of one GPU, 10^9 bytes (default: 80, 141 of h200)"
    )
    parser.add_argument(
        "--network-gb",
        type=real(above=0),
        metavar="GB",
        help="GB/s that a GPU sends to GPUs of other nodes (default 50: 400 Gbit/s)",
    )
    parser.add_argument(
        "--levels",
        nargs="+",
        choices=list(LEVELS),
        metavar="LEVEL",
        help=f"levels to compare: {' '.join(LEVELS)}",
    )
    parser.add_argument("--top", type=whole(most=1000), metavar="N", help="number of layouts to show (default 5)")
    return parser


def _configuration(flags: list[str], prog: str, *, varies_layout: bool = False) -> Config:
    """The configuration of a run. Without data it has random tokens, which need as much memory and time.

    Args:
        varies_layout: keep what the layout of the flags does not read, and another one may.
    """
    line = run_command_line(flags, prog)
    for name, given in (("skip_train", line.config.training.skip_train), ("dry_run", line.dry_run)):
        if given:
            raise ConfigError(f"{name}: layouts are planned for training; leave it out")
    config = replace(line.config, parallel=line.layout) if varies_layout else line.config
    if config.data.data_path or config.data.train_data_path:
        return config
    return replace(config, data=replace(config.data, mock_data=True))


def _records(cluster: Cluster, config: Config) -> bool:
    """Whether a run of `config` records its steps, if there is memory for it."""
    from ..training.graph_choice import may_record  # imports torch

    return may_record(config, cluster.gpus, cluster.gpus_per_node)


def _report(level: str, layouts: list[Layout], cluster: Cluster, top: int) -> str:
    """The fastest layouts, the memory of the best by kind, its wire bytes, and what no measurement vouches for."""
    from ..planning.layouts import ROOM, better_accumulation
    from ..planning.memory import padded_vocab_size
    from ..planning.speed import unmeasured, why_no_time
    from ..planning.wire import predict_wire_bytes

    best, config = layouts[0], layouts[0].config
    wire = predict_wire_bytes(config, padded_vocab_size(config), world_size=cluster.gpus)
    held = {kind: getattr(best.peak, kind) for kind in _KINDS}
    lines = [
        _table(level, layouts[:top], cluster),
        f"the first: GB of a rank of stage {best.stage}: "
        + ", ".join(f"{kind.replace('_', ' ')} {held[kind] / 1e9:.2f}" for kind in _KINDS if held[kind]),
        *(f"the first: {line}" for line in architecture_of(config.model).assumptions(config)),
        *_on_host(best, cluster),
        f"the first: GB that a rank sends in a step: gradients {wire.gradients / 1e9:.2f}, weights "
        f"{wire.weights / 1e9:.2f}",
    ]
    if best.step is not None:
        parts = ", ".join(f"{part.replace('_', ' ')} {1e3 * value:,.1f}" for part, value in vars(best.step).items())
        lines.append(f"the first: ms of a step: {parts}")
        other = better_accumulation(best, cluster)
        if other is not None and other.step is not None:
            lines.append(
                f"the first with --grad-accumulation {other.config.precision.grad_accumulation}: a step of "
                f"{1e3 * other.step.total:,.0f} ms, peak {other.peak.total / 1e9:.1f} GB"
            )
        lacking = unmeasured(config, world_size=cluster.gpus, gpus_per_node=cluster.gpus_per_node, rates=cluster.rates)
        if lacking:
            lines.append(f"predicted, never measured, for the first: {'; '.join(lacking)}")
        if any(layout.step is not None and _may_wait(layout) for layout in layouts[:top]):
            lines.append("≥: Python launches these steps, and the host may be slower than these kernels")
    else:
        lines.append(f"no step times: {why_no_time(config)}; the smallest peaks come first")
    times = "" if best.step is None else f"; step times on {cluster.rates.name}"
    lines.append(f"{len(layouts)} layouts fit into {ROOM:.0%} of {cluster.memory_bytes / 1e9:g} GB{times}")
    return "\n".join(lines)


def _may_wait(layout: Layout) -> bool:
    """Whether steps may take longer than their kernels: Python launches them, and layers are small."""
    from ..training.graph_choice import waits_for_host

    return not layout.records and waits_for_host(layout.config)


def _on_host(layout: Layout, cluster: Cluster) -> list[str]:
    """Host memory of a node for the activations of its ranks; nothing if they stay on the GPUs."""
    from ..planning.activations import predict_host_bytes

    host = predict_host_bytes(layout.config, world_size=cluster.gpus, stage=layout.stage)
    return [f"the first: GB on the host for a rank's activations: {host / 1e9:.2f}"] if host else []


def _table(level: str, layouts: list[Layout], cluster: Cluster) -> str:
    from ..reporting.tables import table_text

    context = layouts[0].config.parallel.context_parallel_size  # all have the configuration's
    shares = "" if context == 1 else f", CP {context}"
    model = layouts[0].config.model
    sizes = architecture_of(model).layout_sizes(model)
    headings = (
        *("TP", "PP", "DP", *(size.heading for size in sizes), "micro-\nbatch", "micro-\nbatches"),
        *("recompute", "graph", "peak GB", "step ms", "tokens/s\n/GPU"),
    )
    rows = []
    for layout in layouts:
        config = layout.config
        parallel, training = config.parallel, config.training
        tokens = config.global_batch_size(cluster.gpus) * config.model.seq_length
        seconds = None if layout.step is None else layout.step.total
        least, most = ("≥ ", "≤ ") if _may_wait(layout) else ("", "")
        row = (
            str(parallel.tensor_model_parallel_size),
            str(parallel.pipeline_model_parallel_size),
            str(config.data_parallel_size(cluster.gpus)),
            *(str(getattr(parallel, size.setting)) for size in sizes),
            str(training.micro_batch_size),
            str(config.num_micro_batches(cluster.gpus)),
            " ".join(training.recomputed_modules) or training.recompute_granularity or "none",
            "yes" if layout.records else "no",
            f"{layout.peak.total / 1e9:.1f}",
            "-" if seconds is None else f"{least}{1e3 * seconds:,.0f}",
            "-" if seconds is None else f"{most}{tokens / seconds / cluster.gpus:,.0f}",
        )
        rows.append(row)
    return table_text(headings, rows, title=f"Predicted for {level} on {cluster.gpus} GPUs{shares}, the fastest first")


if __name__ == "__main__":
    sys.exit(main())
