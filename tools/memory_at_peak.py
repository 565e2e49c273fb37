"""Show which allocations hold a GPU's memory at its peak: pretrain_gpt.py with the allocator's history on.

torchrun --nproc-per-node 4 -m tools.memory_at_peak runs/memory.txt --config configs/gpt_7b.yaml --mock-data \
    --train-iters 3 --eval-interval 0

The first argument is the file that rank 0 writes: the allocations alive at the peak, added up by the code that made
them, largest first. The other arguments go to pretrain_gpt.py. Recording every stack slows a run down. Buffers that
ranks share (--dp-transport copy_engine) are outside torch's allocator: choose nccl to see them. Memory that a recorded
step keeps between launches counts as free: use --cuda-graph-impl none if that matters.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fp8_megatron.commands import pretrain_gpt
from fp8_megatron.commands.program import exit_status
from fp8_megatron.errors import UserError
from fp8_megatron.outputs import check_output_file, write_output

_MAX_ENTRIES = 3_000_000
_FRAMES_SHOWN = 3


def main() -> int:
    """Train and write; returns the run's exit status."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise UserError("the first argument is the file to write: torchrun … -m tools.memory_at_peak FILE --config …")
    output = Path(sys.argv.pop(1))
    check_output_file(output, "FILE")
    if not torch.cuda.is_available():
        raise UserError(f"FILE {output} shows a GPU's memory, and torch finds no GPU here; use a machine with one")
    records = os.environ.get("RANK", "0") == "0"
    if records:
        torch.cuda.memory._record_memory_history(
            enabled="all", context="alloc", stacks="python", max_entries=_MAX_ENTRIES
        )
    status = pretrain_gpt.main()
    if records:
        history = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        write_output(output, peak_table(history).encode())
    return status


def peak_table(history: Iterable[dict[str, Any]]) -> str:
    """Bytes alive at the peak by the innermost frames of this project or megatron-core that allocated them.

    Args:
        history: the allocator's entries in order, each with action, addr, size and frames (innermost first).
    """
    entries = [entry for entry in history if entry["action"] in ("alloc", "free_completed")]
    alive: dict[int, int] = {}
    now = peak = last = 0
    for index, entry in enumerate(entries):
        now += _change(alive, entry)
        if now > peak:
            peak, last = now, index
    at_peak: dict[int, dict[str, Any]] = {}
    for entry in entries[: last + 1]:
        if entry["action"] == "alloc":
            at_peak[entry["addr"]] = entry
        else:
            at_peak.pop(entry["addr"], None)
    nbytes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for entry in at_peak.values():
        place = _place(entry["frames"])
        nbytes[place] += entry["size"]
        counts[place] += 1
    lines = [f"{peak / 1e9:9.3f} GB at the peak"]
    lines += [f"{size / 1e9:9.3f} GB in {counts[place]:5d}  {place}" for place, size in nbytes.most_common()]
    return "\n".join(lines) + "\n"


def _change(alive: dict[int, int], entry: dict[str, Any]) -> int:
    if entry["action"] == "alloc":
        alive[entry["addr"]] = entry["size"]
        return int(entry["size"])
    return -alive.pop(entry["addr"], 0)


def _place(frames: list[dict[str, Any]]) -> str:
    ours = [frame for frame in frames if "megatron" in frame["filename"]]
    shown = (f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}" for frame in ours[:_FRAMES_SHOWN])
    return " < ".join(shown) or "elsewhere"


if __name__ == "__main__":
    sys.exit(exit_status(main))
