"""Restarts by torchrun: what the attempts before this one ended of, and when another one is useless.

torchrun ends all ranks when one fails, and with ``--max-restarts`` starts them again. Each attempt reads the events of
those before it (`reporting.run_log`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ..device.processes import launch_id, parent_id
from ..device.variables import number
from ..errors import UserError
from ..reporting.run_log import EVENTS_FILE, EventKind, add_event, event, read_events

logger = logging.getLogger(__name__)

#: A fault that comes this often at one iteration, in the same way, will come again.
SAME_FAULT_LIMIT = 3
#: Faults of one host that make it suspect.
_SUSPECT_FAULTS = 2
#: What says how an attempt ended.
_LAST_WORDS = (EventKind.FAULT.value, EventKind.GIVE_UP.value, EventKind.STOP.value)

Event = dict[str, Any]


class Fault(str, Enum):
    """Why an attempt ended."""

    RANK_LOST = "rank_lost"
    """A rank is dead, or does not answer."""
    RANK_FAILED = "rank_failed"
    """A rank raised an error."""
    DIVERGED = "diverged"
    """Too many steps in a row were not finite."""
    LOSS_SPIKE = "loss_spike"
    """The loss left that of the last steps, and the run was to roll back then."""
    REPLICAS_DIFFER = "replicas_differ"
    """Ranks that hold the same tensor hold different bits."""
    VANISHED = "vanished"
    """All ranks ended without a word."""


class GaveUp(UserError):
    """The same fault came too often. The message is the report."""


@dataclass(frozen=True)
class Launch:
    """The run of torchrun that this process belongs to.

    Attributes:
        name: the same for all restarts. torchrun's count of restarts is not: with several nodes each counts its own.
        max_restarts: restarts that torchrun may make.
        num_nodes: nodes of the run.
    """

    name: str
    max_restarts: int = 0
    num_nodes: int = 1

    @classmethod
    def of_environment(cls) -> Launch:
        """What torchrun tells its ranks."""
        world, local = (number(name, 1) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        name = launch_id() or parent_id() or "unknown"
        return cls(name, number("TORCHELASTIC_MAX_RESTARTS", 0), max(1, world // local))


def log_fault(
    folder: Path, fault: Fault, text: str, *, iteration: int, hosts: dict[int, str] | None = None, error: str = ""
) -> None:
    """Write why this attempt ends. One rank calls it.

    Args:
        folder: of the run's log.
        text: one line.
        hosts: rank → host of the ranks at fault, where they are known.
        error: the error's type.
    """
    hosts = hosts or {}
    add_event(
        folder,
        EventKind.FAULT,
        text.strip().split("\n")[0],
        iteration=iteration,
        fault=fault.value,
        ranks=sorted(hosts),
        hosts=sorted(set(hosts.values())),
        error=error,
        launch=Launch.of_environment().name,
    )


def begin_attempt(folder: Path, launch: Launch, *, saves: bool, saves_by_interval: bool) -> None:
    """Log how the attempt before this one ended. The first rank calls it before anything is built.

    Args:
        folder: of the run's log.
        saves, saves_by_interval: whether the run has --save, and --save-interval.

    Raises:
        GaveUp: the same fault came `SAME_FAULT_LIMIT` times at one iteration.
    """
    if launch.max_restarts == 0:
        return
    events = of_launch(read_events(folder / EVENTS_FILE), launch.name)
    if not events:
        if not (saves and saves_by_interval):
            missing = "--save-interval" if saves else "--save"
            logger.warning("restarts(%d) without %s begin from scratch: give %s", launch.max_restarts, missing, missing)
        return
    events += _vanished(events, launch)
    before = next(e for e in reversed(events) if e["kind"] in _LAST_WORDS)
    logger.warning(
        "restart %d of at most %d, after: %s",
        1 + sum(e["kind"] == EventKind.RESTART.value for e in events),
        launch.max_restarts,
        before["text"],
        extra=event(EventKind.RESTART, iteration=before["iteration"], launch=launch.name),
    )
    for host, count in suspects(events).items():
        logger.warning("%s", _about_suspect(host, count, launch.num_nodes))
    repeated = repeated_fault(events)
    if repeated is not None:
        raise GaveUp(_given_up(folder, repeated, events, launch))


def _vanished(events: Sequence[Event], launch: Launch) -> list[Event]:
    """The fault of the last attempt if it ended without a word; it is logged."""
    beginnings = [index for index, e in enumerate(events) if e["kind"] == EventKind.RESTART.value]
    if any(e["kind"] in _LAST_WORDS for e in events[beginnings[-1] if beginnings else 0 :]):
        return []
    last = events[-1]
    text = f"the ranks ended without a word; their last event was: {last['text']}"
    fields = {"fault": Fault.VANISHED.value, "ranks": [], "hosts": [], "error": "", "launch": launch.name}
    logger.warning("%s", text, extra=event(EventKind.FAULT, iteration=last["iteration"], **fields))
    return [{"kind": EventKind.FAULT.value, "iteration": last["iteration"], "text": text, "time": "", **fields}]


def of_launch(events: Sequence[Event], launch: str) -> list[Event]:
    """The events of one launch; those that name no launch belong to the one before them."""
    found, current = [], None
    for item in events:
        current = item.get("launch", current)
        if current == launch:
            found.append(item)
    return found


def repeated_fault(events: Sequence[Event]) -> Event | None:
    """A fault that came `SAME_FAULT_LIMIT` times at one iteration in the same way, or None."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for item in filter(_is_fault, events):
        key = (item.get("fault"), item.get("error"), item.get("iteration"))
        counts[key] += 1
        if counts[key] == SAME_FAULT_LIMIT:
            return item
    return None


def suspects(events: Sequence[Event]) -> dict[str, int]:
    """Host → number of its faults, of hosts with at least two."""
    counts = Counter(host for item in filter(_is_fault, events) for host in item.get("hosts", []))
    return {host: count for host, count in counts.items() if count >= _SUSPECT_FAULTS}


def report(events: Sequence[Event], num_nodes: int) -> str:
    """A line for each fault, and one for each host that failed twice; empty without faults."""
    faults = list(filter(_is_fault, events))
    lines = [f"  {item['time'][:19]} iteration {item.get('iteration')}: {item.get('text')}" for item in faults]
    return "\n".join(lines + [_about_suspect(host, n, num_nodes) for host, n in suspects(events).items()])


def _given_up(folder: Path, repeated: Event, events: list[Event], launch: Launch) -> str:
    summary = (
        f"no more restarts: iteration {repeated['iteration']} failed {SAME_FAULT_LIMIT} times in the same way "
        f"({repeated['fault']}); mend the cause and start again with --load"
    )
    logger.error("%s", summary, extra=event(EventKind.GIVE_UP, iteration=repeated["iteration"], launch=launch.name))
    return f"{summary} (faults in {folder / EVENTS_FILE})\n{report(events, launch.num_nodes)}"


def _about_suspect(host: str, count: int, num_nodes: int) -> str:
    fix = f"; leave it out (Slurm: sbatch --exclude={host})" if num_nodes > 1 else ""
    return f"host {host} had {count} faults in this job{fix}"


def _is_fault(item: Event) -> bool:
    return item["kind"] == EventKind.FAULT.value
