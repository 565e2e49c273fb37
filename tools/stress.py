"""Disturb a run to see what its health shows: python -m tools.stress RUN --burst 40 --lr-factor 4 --from 40 -- FLAGS

Trains with the flags of `fp8-megatron train` after ``--``, into the folder RUN. In a burst, all tokens of some steps
are the same. A factor multiplies the learning rate from a step on. At the end it says which casts changed first, and
which steps were spikes.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from fp8_megatron.commands.arguments import Parser, output_folder, real, whole
from fp8_megatron.commands.program import LogOnStdout, exit_status
from fp8_megatron.config.io import parse_config
from fp8_megatron.reporting.cast_statistics import HealthSample
from fp8_megatron.reporting.run_log import EVENTS_FILE, EventKind, events_of_run, last_run, read_events
from fp8_megatron.training import training_run
from fp8_megatron.training.loss_spikes import SpikeGuard, changed_casts
from fp8_megatron.training.run_data import RunData
from fp8_megatron.training.trainer import Trainer


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(prog="stress.py", description=__doc__)
    parser.add_argument("run", type=output_folder, help="folder of the run")
    parser.add_argument("--burst", type=whole(), help="first step whose tokens are all the same")
    parser.add_argument("--burst-steps", type=whole(), default=3, help="how many such steps (default: 3)")
    parser.add_argument("--lr-factor", type=real(above=0.0), default=1.0, help="factor of the learning rate")
    parser.add_argument("--from", type=whole(), default=1, dest="first", help="first step with the factor (default: 1)")
    own = list(sys.argv[1:] if words is None else words)
    place = own.index("--") if "--" in own else len(own)
    options: argparse.Namespace = parser.parse_args(own[:place])
    options.flags = own[place + 1 :]
    return options


def with_burst(batches: Iterator[dict[str, Any]], first: int, count: int, per_step: int) -> Iterator[dict[str, Any]]:
    """`batches`, of which those of `count` steps from `first` on repeat their first token.

    Args:
        per_step: micro-batches of a step.
    """
    for index, batch in enumerate(batches):
        if first <= index // per_step + 1 < first + count:
            token = int(batch["tokens"].flatten()[0])
            batch = {**batch, **{key: torch.full_like(batch[key], token) for key in ("tokens", "labels")}}
        yield batch


def first_changes(samples: Sequence[HealthSample]) -> list[str]:
    """A line for each sample in which casts are worse than in the eight before it."""
    lines = []
    for index in range(2, len(samples)):
        found = changed_casts(samples[max(0, index - 8) : index], samples[index])
        if found:
            lines.append(f"  iteration {samples[index].iteration}: {', '.join(found)}")
    return lines


def run(options: argparse.Namespace) -> int:
    """Train and report; returns the exit status."""
    logging.basicConfig(level=logging.INFO, handlers=[LogOnStdout()])
    config = parse_config([*options.flags, "--output-dir", str(options.run)])
    samples: list[HealthSample] = []
    plain_loader, plain_step, plain_sampled = RunData.train_loader, training_run.train_step, SpikeGuard.sampled

    def loader(data: RunData, consumed_samples: int, **settings: Any) -> Iterator[Any]:
        batches = plain_loader(data, consumed_samples, **settings)
        if options.burst is None:
            return batches
        per_step = config.num_micro_batches(data.topology.world_size)
        return with_burst(batches, options.burst, options.burst_steps, per_step)

    def step(state: Any, *arguments: Any, **settings: Any) -> torch.Tensor:
        batch_size = config.global_batch_size(state.topology.world_size)
        if state.schedule.counted_samples // batch_size + 1 >= options.first:
            for group in state.optimizer.param_groups:
                group["lr"] *= options.lr_factor
        return plain_step(state, *arguments, **settings)

    def sampled(guard: SpikeGuard, sample: HealthSample) -> None:
        samples.append(sample)
        plain_sampled(guard, sample)

    RunData.train_loader, training_run.train_step, SpikeGuard.sampled = loader, step, sampled  # type: ignore[method-assign,assignment]
    try:
        Trainer(config).fit()
    finally:
        RunData.train_loader, training_run.train_step = plain_loader, plain_step  # type: ignore[method-assign]
        SpikeGuard.sampled = plain_sampled  # type: ignore[method-assign]
    print("casts that changed, by sample:", *(first_changes(samples) or ["  none"]), sep="\n")
    events = read_events(options.run / EVENTS_FILE)
    own = events_of_run(events, last_run(events) or "")
    spikes = [event for event in own if event["kind"] == EventKind.SPIKE.value]
    print("loss spikes:", *([f"  {spike['text']}" for spike in spikes] or ["  none"]), sep="\n")
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 after an error."""
    return exit_status(partial(run, parse_arguments(words)))


if __name__ == "__main__":
    sys.exit(main())
