"""The effect of FP8 between pipeline stages on the loss, and its precision, on one device.

python benchmarks/pipeline_casts.py runs/casts.json --stages 1 2 4 --seeds 1 2 3 -- --config configs/llama_125m.yaml …

The last layer of each stage but the last passes its output through the cast of ``--fp8-pipeline-communication``, and
its output's gradient in backward: the values of stages on ranks of their own. One stage casts nothing and is the
reference. The flags after ``--`` go to pretrain_gpt.py; with --fp32 they describe a Llama in FP32 (`fp32_llama`), whose
layers a CPU computes in a fraction of the time. Runs that the output file holds are kept; --add takes those of other
files. --measure N also measures one crossing in N against the values in BF16, under several ways to scale. Python
does the measuring: give ``--cuda-graph-impl none``.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import logging
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if importlib.util.find_spec("fp8_megatron") is None:  # a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import fp32_llama
from benchmarks.provenance import commit, device_name, versions
from fp8_megatron.collectives.packed import packed, unpacked
from fp8_megatron.commands.program import exit_status
from fp8_megatron.config.io import own_and_run_flags, parse_config
from fp8_megatron.formats import E4M3, E5M2, GRAD_BLOCK
from fp8_megatron.kernels.reference import decode, encode, scale_from_amax
from fp8_megatron.mcore import gpt
from fp8_megatron.outputs import check_output_file, write_output
from fp8_megatron.quantization.stats import snr_db
from fp8_megatron.reporting.parity import Parity, RunResult, compare_runs, read_run
from fp8_megatron.training.trainer import Trainer

#: Name → (format, elements that share a scale).
FORMS: dict[str, tuple[torch.dtype, str]] = {
    "E4M3, tensor": (E4M3, "tensor"),
    "E4M3, row": (E4M3, "row"),
    "E4M3, block": (E4M3, "block"),
    "E5M2, tensor": (E5M2, "tensor"),
    "E5M2, row": (E5M2, "row"),
}


class _Crossing(torch.autograd.Function):
    """A tensor as the next stage receives it; in backward its gradient as the previous stage receives it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, look: Callable[[str, Tensor], None]) -> Tensor:
        ctx.look = look
        look("activations", x)
        return _sent(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.look("gradients", grad)
        return _sent(grad), None


def _sent(x: Tensor) -> Tensor:
    return unpacked(packed(x.contiguous(), E4M3), x.shape, E4M3)


@dataclass
class Sample:
    """Figures of the crossings that were measured.

    Attributes:
        every: of so many crossings of a kind one is measured; 0: none.
        of_trained: by number of stages, what their casts do to a model that was trained without them.
    """

    every: int = 0
    seen: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    found: dict[tuple[str, ...], list[float]] = field(default_factory=lambda: defaultdict(list))
    of_trained: dict[str, list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))

    def look(self, kind: str, x: Tensor) -> None:
        """Measure `x` [s, b, h] if its turn has come."""
        self.seen[kind] += 1
        if not self.every or self.seen[kind] % self.every:
            return
        rows = x.detach().float().flatten(0, -2)
        for name, (dtype, group) in FORMS.items():
            values = {"tensor": rows.view(1, -1), "row": rows, "block": rows.view(-1, GRAD_BLOCK)}[group]
            scales = scale_from_amax(values.abs().amax(dim=1, keepdim=True), dtype, power_of_two=group == "block")
            cast = decode(encode(values, scales, dtype), scales)
            self.found[kind, name, "snr_db"].append(snr_db(cast, values))
            zeroed = ((cast == 0) & (values != 0)).float().mean()
            self.found[kind, name, "zeroed_fraction"].append(zeroed.item())
        amaxes = rows.abs().amax(dim=1)
        self.found[kind, "rows", "largest_over_median_amax"].append((amaxes.max() / amaxes.median()).item())

    def summary(self) -> dict[str, dict[str, dict[str, float]]]:
        """By what crossed and form, the median of each figure over what was measured."""
        result: dict[str, dict[str, dict[str, float]]] = {}
        for (kind, form, figure), values in self.found.items():
            result.setdefault(kind, {}).setdefault(form, {})[figure] = statistics.median(values)
        return result


def border_layers(num_layers: int, num_stages: int) -> list[int]:
    """The last layer of each of `num_stages` equal stages but the last, numbered from 0."""
    if num_layers % num_stages:
        raise ValueError(f"--stages {num_stages} does not divide num_layers({num_layers}); choose one that does")
    return [stage * num_layers // num_stages - 1 for stage in range(1, num_stages)]


def cast_outputs(module: torch.nn.Module, layers: Sequence[int], look: Callable[[str, Tensor], None]) -> None:
    """Let what leaves these layers of a whole GPT cross as between stages, and its gradient."""

    def cross(layer: torch.nn.Module, inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        return _Crossing.apply(output[0], look), output[1]

    for index in layers:
        module.decoder.layers[index].register_forward_hook(cross)  # type: ignore[union-attr,operator,index]


def main() -> int:
    """Train what the file does not hold, print the gaps, write the file."""
    own, words = own_and_run_flags(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="JSON file of results")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4], help="numbers of pipeline stages")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="seeds of every number of stages")
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="files whose runs are added")
    parser.add_argument("--fp32", action="store_true", help="everything but the casts is in FP32")
    parser.add_argument("--measure", type=int, default=0, metavar="N", help="measure one crossing in N; 0: none")
    args = parser.parse_args(own)
    check_output_file(args.output, "output")
    logging.basicConfig(level=logging.WARNING)
    files = [json.loads(path.read_text()) for path in (args.output, *args.add) if path.exists()]
    runs = {(run.level, run.seed): run for one in files for run in map(RunResult.from_json, one["runs"])}
    precision = {name: value for one in files for name, value in one["precision"].items()}
    of_trained: dict[str, dict[str, Any]] = {}
    for one in files:
        for name, by_seed in one.get("casts of a trained model", {}).items():
            of_trained.setdefault(name, {}).update(by_seed)
    result = {
        "casts of a trained model": of_trained,
        "commit": commit(),
        "device": device_name(),
        "versions": versions(("torch", "triton", "megatron-core")),
        "flags": " ".join(words) or files[0]["flags"],
    }
    for seed, stages in itertools.product(args.seeds, args.stages):
        level = f"{stages} stages" if stages > 1 else "1 stage"
        if (level, seed) not in runs:
            sample = Sample(args.measure)
            train = _train_in_fp32 if args.fp32 else _train
            runs[level, seed] = train(words, level, seed, stages, sample)
            if sample.found:
                precision[level] = sample.summary()
            for stages_of_casts, figures in sample.of_trained.items():
                of_trained.setdefault(stages_of_casts, {})[str(seed)] = figures[0]
            _write(args.output, result, runs, precision)
    parity = _write(args.output, result, runs, precision)
    for one in [] if parity is None else parity.levels:
        width = "" if one.half_width is None else f" ± {one.half_width:.3%}"
        print(f"{one.level}: validation {one.gap:+.3%}{width}, training {one.tail_gap:+.3%}, seeds {one.seeds}")
    print(json.dumps({"precision": precision, "casts of a trained model": of_trained}, indent=1))
    return 0


def _write(
    path: Path,
    result: dict[str, Any],
    runs: dict[tuple[str, int], RunResult],
    precision: dict[str, Any],
) -> Parity | None:
    """Write what is known, and return the gaps."""
    parity = compare_runs(list(runs.values()), "1 stage")
    gaps = [] if parity is None else [asdict(one) for one in parity.levels]
    known = {**result, "gaps": gaps, "precision": precision, "runs": [run.to_json() for _, run in sorted(runs.items())]}
    write_output(path, (json.dumps(known, indent=1) + "\n").encode())
    return parity


def _train(words: list[str], level: str, seed: int, stages: int, sample: Sample) -> RunResult:
    """One run, with the borders of `stages` stages."""
    build = gpt._build_chunk

    def build_with_borders(config: Any, *others: Any) -> gpt.ModelChunk:
        chunk = build(config, *others)
        cast_outputs(chunk.module, border_layers(config.model.num_layers, stages), sample.look)
        return chunk

    gpt._build_chunk = build_with_borders
    try:
        with tempfile.TemporaryDirectory() as folder:
            quiet = ["--no-tensorboard", "--progress", "off"]
            config = parse_config([*words, "--seed", str(seed), "--output-dir", folder, *quiet])
            began = time.monotonic()
            Trainer(config).fit()
            seconds = time.monotonic() - began
            run = read_run(Path(folder), level, seed, num_steps=config.train_iters(1), wall_seconds=seconds)
    finally:
        gpt._build_chunk = build
    if run is None:
        raise ValueError(f"{level}, seed {seed}: the run did not end with a validation; give --eval-interval")
    if run.diverged:
        raise ValueError(f"{level}, seed {seed}: a loss at the end of training is not finite")
    return run


def _divisors(n: int) -> list[int]:
    return [d for d in range(2, n + 1) if n % d == 0]


def _train_in_fp32(words: list[str], level: str, seed: int, stages: int, sample: Sample) -> RunResult:
    """One run of `fp32_llama`."""
    config = parse_config([*words, "--seed", str(seed)])

    def cross(x: Tensor) -> Tensor:
        return _Crossing.apply(x, sample.look).float()

    began = time.monotonic()
    num_layers = config.model.num_layers
    trained = fp32_llama.train(config, border_layers(num_layers, stages), cross)
    seconds, steps = time.monotonic() - began, len(trained.training)
    tail = trained.training[-max(1, steps // 10) :]
    loss = trained.validation_loss()
    if stages == 1:
        exact = trained.gradient()
        for others in _divisors(num_layers):
            trained.casts.clear()
            trained.casts.update(border_layers(num_layers, others))
            sample.of_trained[f"{others} stages"].append(
                {"loss_gap": trained.validation_loss() / loss - 1, "gradient_snr_db": snr_db(trained.gradient(), exact)}
            )
    return RunResult(
        level=level,
        seed=seed,
        num_steps=steps,
        final_loss=loss,
        tail_loss=statistics.fmean(tail),
        step_seconds=seconds / steps,
        tokens_per_second=steps * config.training.micro_batch_size * config.model.seq_length / seconds,
        peak_memory_gib=0.0,
        skipped_steps=0,
        wall_seconds=seconds,
        validation=[(steps, loss)],
        training=list(enumerate(trained.training, 1)),
    )


if __name__ == "__main__":
    sys.exit(exit_status(main, ValueError, OSError))
