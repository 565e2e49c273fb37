"""The health page: a run's losses, events and casts as one HTML file that needs no network.

`page_data` collects what the page shows from the files of a run's folder. `render` puts it into ``health_page.html``,
whose script draws it. Long runs and large models are thinned out, so that the file stays some megabytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from .metrics_file import HEALTH_FILE, METRICS_FILE, QUANTITIES, ROLES, read_rows
from .run_log import EVENTS_FILE, events_of_run, last_run, read_events

TEMPLATE = "health_page.html"
_PLACE = "/*DATA*/"

#: Steps that are drawn; of more, the ones with the lowest and the highest loss of each run of steps are.
MOST_STEPS = 4000
#: Samples × casts in the heat map, and in the histograms. A cell takes about 40 bytes, a histogram 100.
MOST_CELLS = 60_000
MOST_HISTOGRAMS = 20_000
_MOST_EVENTS = 500


def page_data(run: Path, *, live: bool = False) -> dict[str, Any]:
    """What the page of the run in the folder `run` shows, as JSON values.

    Args:
        live: the page asks its server for newer data.

    Raises:
        ValueError: the folder has neither metrics nor samples of casts.
    """
    metrics, health = run / METRICS_FILE, run / HEALTH_FILE
    if not metrics.is_file() and not health.is_file():
        raise ValueError(f"no {METRICS_FILE} or {HEALTH_FILE} in {run}: give the --output-dir of a run")
    rows = read_rows(metrics) if metrics.is_file() else []
    steps = [row for row in rows if row["kind"] == "train"]
    samples = [sample for sample in (read_rows(health) if health.is_file() else []) if _is_sample(sample)]
    events = read_events(run / EVENTS_FILE)
    # Metrics are of the run that wrote there last.
    newest = last_run(events) or ""
    events = events_of_run(events, newest)[-_MOST_EVENTS:]
    return {
        "name": run.resolve().name,
        "live": live,
        "skipped_steps": _number(steps[-1].get("skipped_steps")) or 0 if steps else 0,
        "steps": _columns(_thinned_steps(steps), ("iteration", "loss", "grad_norm", "load_imbalance")),
        "events": [_shown_event(event) for event in events],
        **_casts(samples),
    }


def render(data: dict[str, Any]) -> str:
    """The page with `data`, complete."""
    # In JSON, "<" only occurs inside texts. Escaped, no text can end the script element.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    template = files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    before, place, after = template.partition(_PLACE)
    assert place, f"{TEMPLATE} has no place for the data"
    return before + text + after


def _is_sample(row: dict[str, Any]) -> bool:
    """Whether a line of health.jsonl has all of its lists, one value a cast."""
    names = ("layers", "roles", "formats", "lowest_exponent", "exponents", *QUANTITIES)
    columns = [row.get(name) for name in names]
    if row["kind"] != "health" or not all(isinstance(column, list) for column in columns):
        return False
    texts = [text for column in columns[:3] if isinstance(column, list) for text in column]
    sizes = {len(column) for column in columns if isinstance(column, list)}
    return len(sizes) == 1 and all(isinstance(text, str) for text in texts)


def _thinned_steps(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(steps) <= MOST_STEPS:
        return list(steps)
    size = math.ceil(len(steps) / (MOST_STEPS // 2))
    kept: list[dict[str, Any]] = []
    for start in range(0, len(steps), size):
        run = sorted(steps[start : start + size], key=lambda step: _number(step.get("loss")) or 0.0)
        kept += sorted(run[:1] + run[1:][-1:], key=lambda step: int(step["iteration"]))
    return kept


def _casts(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The heat map: `samples` (iterations), `casts`, `quantities` [sample][cast], and `exponents` of some samples."""
    keys: dict[tuple[str, str], str] = {}
    for sample in samples:
        for layer, role, format in zip(sample["layers"], sample["roles"], sample["formats"], strict=True):
            if role in ROLES:
                keys.setdefault((layer, role), format)
    shown = _evenly(samples, MOST_CELLS // max(len(keys), 1))
    places = [
        {key: place for place, key in enumerate(zip(sample["layers"], sample["roles"], strict=True))}
        for sample in shown
    ]
    with_exponents = _evenly(range(len(shown)), MOST_HISTOGRAMS // max(len(keys), 1))
    return {
        "samples": [sample["iteration"] for sample in shown],
        "casts": [{"layer": layer, "role": role, "format": format} for (layer, role), format in keys.items()],
        "quantities": {
            name: [
                [_number(sample[name][place[key]]) if key in place else None for key in keys]
                for sample, place in zip(shown, places, strict=True)
            ]
            for name in QUANTITIES
        },
        "exponents": [
            {"sample": index, "casts": [_histogram(shown[index], places[index].get(key)) for key in keys]}
            for index in with_exponents
        ],
    }


def _histogram(sample: dict[str, Any], place: int | None) -> list[Any] | None:
    if place is None:
        return None
    lowest, shares = sample["lowest_exponent"][place], sample["exponents"][place]
    if _number(lowest) is None or not isinstance(shares, list):
        return None
    return [lowest, [_number(share) or 0.0 for share in shares]]


def _evenly(items: Sequence[Any], most: int) -> list[Any]:
    """At most about `most` of `items`, at even distances, and the last."""
    step = math.ceil(len(items) / max(most, 1)) or 1
    return list(items[::-1][::step])[::-1]


def _columns(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, list[float | None]]:
    return {name: [_number(row.get(name)) for row in rows] for name in names}


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _shown_event(event: dict[str, Any]) -> dict[str, Any]:
    return {
        "iteration": _number(event.get("iteration")) or 0,
        "kind": event["kind"],
        "time": event["time"],
        "text": str(event.get("text", "")),
    }
