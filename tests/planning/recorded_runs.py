"""Training runs on H200 that stand in benchmarks/results, with the configuration that each of them had."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8_megatron.config.io import parse_config
from fp8_megatron.config.schema import Config

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class RecordedRun:
    """A run: its file, name, configuration, ranks, the slowest rank's milliseconds a step, and the largest peak."""

    file: str
    name: str
    config: Config
    world_size: int
    records: bool
    step_ms: float | None
    peak_gb: float

    @property
    def label(self) -> str:
        """For tests and messages."""
        return f"{self.file}: {self.name}"


def recorded_runs() -> list[RecordedRun]:
    """All runs of pretrain_gpt.py with a peak. Python launched steps without --cuda-graph-impl and `recorded`."""
    return [run for path in sorted(RESULTS.glob("*_*h200*.json")) for run in _runs_of(path)]


def read(file: str) -> Any:
    """A result file."""
    return json.loads((RESULTS / file).read_text())


def _defaults_of_then(words: list[str]) -> list[str]:
    """Flags for what a recorded command leaves open: scales from the tensor, gradients in blocks, a head in 16 bits,
    sums of several replicas' gradients in FP32.

    They were the defaults of most files; later commands give the first three, as `benchmarks/compare.py` does.
    """
    if "bf16" in words:
        return []
    open_flags = {
        "--fp8-recipe": ["--fp8-recipe", "tensorwise"],
        "--fp8-weight-grad-scaling": ["--fp8-weight-grad-scaling", "block"],
        "--fp8-lm-head": ["--no-fp8-lm-head"],
    }
    if _num_replicas(words) > 1:
        open_flags["--grad-accumulation-dtype"] = ["--grad-accumulation-dtype", "fp32"]
    return [word for flag, left in open_flags.items() if flag not in words for word in left]


def _num_replicas(words: list[str]) -> int:
    config = parse_config(words[words.index("pretrain_gpt.py") + 1 :])
    return config.num_replicas(int(words[words.index("--nproc-per-node") + 1]))


def _runs_of(path: Path) -> Iterator[RecordedRun]:
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        return
    rows = [row for key in ("results", "runs") if isinstance(content.get(key), list) for row in content[key]]
    for row in rows:
        command = row.get("command")
        if not isinstance(command, str) or "pretrain_gpt.py" not in command or row.get("peak_gb") is None:
            continue
        words = shlex.split(re.sub(r"\bconfigs/", f"{ROOT}/configs/", command))
        ranks = int(words[words.index("--nproc-per-node") + 1])
        config = parse_config([*_defaults_of_then(words), *words[words.index("pretrain_gpt.py") + 1 :]])
        records = config.training.cuda_graph_impl == "local" or row.get("recorded", False)
        yield RecordedRun(path.name, row["name"], config, ranks, records, row.get("step_ms"), row["peak_gb"])
