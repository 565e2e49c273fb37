"""Count what FP8 layers keep of their inputs between forward and backward: `python benchmarks/kept_inputs.py`.

A model of transformers runs one forward of one sample on a CPU, in three forms: each layer keeps its own input; layers
with the same input share it (`nn/siblings.py`); and they also keep nothing behind an activation that backward computes
again (`initialize(…, recompute_activations=True)`). Bytes follow from shapes, so they are a GPU's too.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Run as a script from a clone, installed or not.
sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.any_model_work import WORKS, build
from benchmarks.provenance import write_rows
from fp8_megatron.commands.arguments import Parser, output_file
from fp8_megatron.commands.program import exit_status
from fp8_megatron.formats import E4M3
from fp8_megatron.nn.module import FP8Linear

_FORMS = ("own", "shared", "recomputed")
_MODELS = [name for name, work in WORKS.items() if work.needs == "transformers"]


@dataclass(frozen=True)
class Row:
    """One model. Megabytes (10^6) in FP8 for each sample of a batch."""

    name: str
    about: str
    own_mb: float
    shared_mb: float
    recomputed_mb: float


def measure(name: str, *, tiny: bool) -> Row:
    """One model in the three forms."""
    return Row(name, WORKS[name].about, *(_kept_mb(name, form, tiny=tiny) for form in _FORMS))


def _kept_mb(name: str, form: str, *, tiny: bool) -> float:
    gc.collect()  # the model before; parameters and optimizer refer to each other
    device = torch.device("cpu")
    trainee = build(WORKS[name], "O2-recompute" if form == "recomputed" else "O2", device, tiny=tiny)
    if form == "own":
        for module in trainee.model.modules():
            if isinstance(module, FP8Linear):
                module.sharing = None  # type: ignore[assignment]
    batch = WORKS[name].batch(torch.Generator().manual_seed(0), device, tiny)
    sample = {key: value[:1] for key, value in batch.items()}
    for _ in range(2):  # the first forward finds out which layers share an input
        with trainee.context():
            loss = trainee.model(**sample).loss
        kept = {tensor.data_ptr(): tensor.nbytes for tensor in _saved(loss) if tensor.dtype is E4M3}
    return sum(kept.values()) / 1e6


def _saved(loss: Tensor) -> Iterator[Tensor]:
    """What the FP8 layers of a forward have saved for backward."""
    seen: set[Any] = set()
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield from (saved for saved in getattr(node, "saved_tensors", ()) if saved is not None)
        nodes += [following for following, _ in node.next_functions]


def main(words: Sequence[str] | None = None) -> None:
    """Count, print, and write the JSON if one is asked for."""
    parser = Parser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--models", nargs="+", choices=_MODELS, default=_MODELS)
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same kinds")
    parser.add_argument("--output", type=output_file, help="write the rows as JSON")
    arguments = parser.parse_args(words)
    rows = []
    print(f"{'MB a sample':12} {'own':>9} {'shared':>9} {'recomputed':>11}")
    for name in arguments.models:
        row = measure(name, tiny=arguments.tiny)
        print(f"{name:12} {row.own_mb:9.2f} {row.shared_mb:9.2f} {row.recomputed_mb:11.2f}", flush=True)
        rows.append(row)
    if arguments.output:
        write_rows(arguments.output, "benchmarks/kept_inputs.py", words, rows, device="cpu")


if __name__ == "__main__":
    sys.exit(exit_status(main))
