"""Verification cards: what a run of a model has shown, in a file that the same run can be compared with."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from ..config.setting_files import Dumper, read_mapping
from ..errors import UserError
from ..outputs import write_output
from .metrics_file import METRICS_FILE, read_rows

#: Losses that a card quotes, evenly over the steps.
NUM_LOSSES = 10
#: Steps left out of the speed: compilation, library start-up, the recording of steps.
_WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Result:
    """What a run has shown.

    Attributes:
        device: the GPU's name, or ``cpu``.
        losses: training loss by step, nats a token.
        tokens_per_second: of one rank, the median after the first steps.
        peak_memory_gib: of any rank; 0 on a CPU.
        resumed: largest relative difference between losses of the run and of one that resumed from half of it.
        conversion: what the comparison of logits said.
    """

    date: str
    device: str
    versions: Mapping[str, str]
    losses: Mapping[int, float]
    tokens_per_second: float
    peak_memory_gib: float
    resumed: float
    conversion: str


@dataclass(frozen=True)
class Card:
    """A model's card.

    Attributes:
        flags: of training: a model, its batch, the length, no data.
        ranks: GPUs, or processes on the CPU.
        result: None: nobody has made it.
    """

    path: Path
    title: str
    flags: Sequence[str]
    ranks: int
    on_gpus: bool
    result: Result | None

    @property
    def placement(self) -> list[str]:
        """Flags of ``fp8-megatron train`` that say where it runs."""
        if self.on_gpus or self.ranks == 1:
            return ["--gpus", str(self.ranks * self.on_gpus)]
        return ["--cpu-ranks", str(self.ranks)]

    @classmethod
    def read(cls, path: Path) -> Card:
        """Read a card.

        Raises:
            UserError: it cannot be read, or is no card.
        """
        values = read_mapping(path)
        try:
            found = values.get("result")
            result = None if found is None else Result(**{**found, "losses": dict(found["losses"])})
            return cls(path, str(values["title"]), shlex.split(values["flags"]), values["ranks"], values["gpu"], result)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise UserError(
                f"{path} is no card ({error}); give title, flags, ranks and gpu, and leave result to --make"
            ) from error

    def write(self) -> None:
        """Write a card with a result, and its page beside it."""
        assert self.result is not None
        run = {"title": self.title, "flags": shlex.join(self.flags), "ranks": self.ranks, "gpu": self.on_gpus}
        values = {**run, "result": asdict(self.result)}
        text = yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)
        write_output(self.path, text.encode(), "card")
        write_output(self.path.with_suffix(".md"), page(self).encode(), "card")


@dataclass(frozen=True)
class Agreement:
    """A quantity of the card beside that of a new run.

    Attributes:
        difference: relative. worse: as much of it as is slower, larger or another loss.
        limit: of `worse`; None: not compared, because the devices differ or it is a CPU.
    """

    quantity: str
    card: float
    now: float
    difference: float
    worse: float
    limit: float | None

    @property
    def holds(self) -> bool:
        """Whether it is within the limit. A difference that is not finite is not."""
        return self.limit is None or self.worse <= self.limit


def read_run(folder: Path) -> tuple[dict[int, float], float, float]:
    """Losses of a run by step, tokens a second of a rank (the median after the first steps), the peak in GiB.

    Raises:
        UserError: there is no step, or a loss that is not finite.
    """
    rows = [row for row in read_rows(folder / METRICS_FILE) if row["kind"] == "train"]
    broken = [row["iteration"] for row in rows if row["loss"] is None]
    if broken or not rows:
        raise UserError(f"{folder}: no finite loss in step {broken[0] if broken else 1}; this run is no verification")
    speed = statistics.median(row["tokens_per_second_per_gpu"] for row in rows[_WARM_UP_STEPS:] or rows)
    return {row["iteration"]: row["loss"] for row in rows}, speed, max(row["peak_memory_gib"] for row in rows)


def quoted(losses: Mapping[int, float]) -> dict[int, float]:
    """The losses of `NUM_LOSSES` steps, evenly over the run; the last step is one of them."""
    steps = sorted(losses)
    count = min(NUM_LOSSES, len(steps))
    chosen = [steps[-(-len(steps) * part // count) - 1] for part in range(1, count + 1)]
    return {step: losses[step] for step in chosen}


def largest_difference(first: Mapping[int, float], second: Mapping[int, float]) -> float:
    """The largest relative difference of losses at the steps that both have; infinite if they share none."""
    shared = first.keys() & second.keys()
    return max((abs(second[step] / first[step] - 1.0) for step in shared), default=math.inf)


def compare(card: Result, now: Result, *, loss: float, speed: float, memory: float) -> list[Agreement]:
    """Each quantity of `card` beside that of `now`.

    Args:
        loss, speed, memory: limits of relative differences. Speed and memory have none on a CPU or on another device.
    """
    last, loss_gap = max(card.losses), largest_difference(card.losses, now.losses)
    rows = [
        Agreement("losses", card.losses[last], now.losses.get(last, math.nan), loss_gap, loss_gap, loss),
        Agreement("losses after resuming", card.resumed, now.resumed, now.resumed, now.resumed, loss),
    ]
    is_comparable = card.device == now.device != "cpu"
    for name, before, after, limit, sign in (
        ("tokens/s", card.tokens_per_second, now.tokens_per_second, speed, -1),
        ("peak, GiB", card.peak_memory_gib, now.peak_memory_gib, memory, 1),
    ):
        if before > 0:
            gap = after / before - 1.0
            rows.append(Agreement(name, before, after, gap, sign * gap, limit if is_comparable else None))
    return rows


def page(card: Card) -> str:
    """A card with a result as a page of Markdown."""
    command = shlex.join(["fp8-megatron", "train", *card.placement, *card.flags])
    lines = [f"# {card.title}", "", "<!-- shown: fp8-megatron verify adds the data -->", "```bash", command, "```", ""]
    made = card.result
    assert made is not None
    versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
    lines += [
        f"Made on {made.date}, on {made.device}, ranks: {card.ranks}; {versions}.",
        "",
        "| step | " + " | ".join(map(str, made.losses)) + " |",
        "| --- |" + " --- |" * len(made.losses),
        "| loss | " + " | ".join(f"{loss:.4f}" for loss in made.losses.values()) + " |",
        "",
        f"- Speed: {made.tokens_per_second:,.0f} tokens/s a rank.",
        f"- Peak: {made.peak_memory_gib:.2f} GiB." if card.on_gpus else "- Peak: not measured on a CPU.",
        f"- Resumed from half of the steps: losses differ by at most {made.resumed:.1e}.",
        f"- Converted to Hugging Face: {made.conversion}.",
        "",
    ]
    return "\n".join(lines)
