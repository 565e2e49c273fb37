"""The results of a comparison of precision levels: parity.json, parity.md and parity.png."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from ..checkpoint.files import TRACKER
from ..config.command_line import flags_of
from ..config.io import parse_config
from ..config.schema import Config
from ..errors import UserError
from ..outputs import write_output
from ..reporting.parity import Parity, RunKey, RunResult, compare_runs
from ..reporting.parity_report import draw_parity, markdown_table, table_rows
from .origin import origin
from .parity_plan import RunPlan

RESULTS_FILE = "parity.json"
#: Settings that may differ between calls: seeds, where things are, how long ranks wait.
_MAY_DIFFER = {"seed", "data_cache_path", "nccl_communicator_config_path", "distributed_timeout_minutes"}
#: Sections of the configuration whose settings all runs share.
_COMMON = ("model", "data", "training", "optimizer", "parallel")
#: Fields of the plan that say from which checkpoint the runs start.
_STARTS = ("finetune_from", "continue_from")


def common_settings(config: Config) -> dict[str, Any]:
    """What all runs of a comparison have in common, as plain values."""
    return _settings(config, _COMMON)


def settings_of_level(plan: RunPlan, level: str) -> dict[str, Any]:
    """What the flags and files of a level and of all runs say now, as plain values."""
    config = parse_config([*plan.common_flags, *plan.level_flags[level]])
    return _settings(config, (*_COMMON, "precision"))


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The name of a setting that differs. One that is not in `before` came with a later version."""
    return next((name for name, value in now.items() if name in before and before[name] != value), None)


def _settings(config: Config, names: Sequence[str]) -> dict[str, Any]:
    sections = json.loads(json.dumps(asdict(config), default=str))
    return {name: value for section in names for name, value in sections[section].items() if name not in _MAY_DIFFER}


def read_results(plan: RunPlan, config: Config) -> tuple[RunPlan, dict[RunKey, RunResult]]:
    """The finished runs of earlier calls, and the plan with the flags of their levels and the steps before their runs.

    Raises:
        UserError: the file is damaged, or its runs have other settings; or it is gone, and unfinished runs are there.
    """
    plan = replace(plan, level_settings={level: settings_of_level(plan, level) for level in plan.levels})
    path = plan.output_dir / RESULTS_FILE
    saved = next(plan.output_dir.glob(f"runs/*/checkpoints/{TRACKER}"), None)
    if not path.exists():
        if saved is not None:
            raise UserError(
                f"{saved.parent} is of an unfinished run, and {path} with its settings is gone; put it back, remove "
                f"{plan.output_dir / 'runs'}, or give another --output-dir"
            )
        return plan, {}
    try:
        report = json.loads(path.read_text())
        runs = [RunResult.from_json(values) for values in report["runs"]]
        finetune_iteration = report.get("finetune_iteration")
        if finetune_iteration is not None:
            finetune_iteration = int(finetune_iteration)
        before, flags = dict(report["settings"]), dict(report.get("flags", {}))
        if any(not isinstance(word, str) for words in flags.values() for word in words):
            raise ValueError("the flags of a level are no words")
        of_levels = {level: dict(settings) for level, settings in report.get("level_settings", {}).items()}
        starts = {int(number): int(iteration) for number, iteration in report.get("starts", {}).items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is no result of this command ({error}); give another --output-dir") from error
    if not runs and saved is None:
        return plan, {}  # nothing was trained
    for name in _STARTS:
        given = getattr(plan, name)
        if given != (start := report.get(name, given)):
            raise UserError(
                f"{path} has runs with {name}({start}), this command has {name}({given}); give the same checkpoint, or "
                "another --output-dir"
            )
    if plan.ranks_per_run != (ranks := report.get("ranks_per_run", 1)):
        raise UserError(
            f"{path} has runs with --ranks-per-run {ranks}, this command has {plan.ranks_per_run}; give the same, or "
            "another --output-dir"
        )
    for level in plan.levels:
        if flags.get(level, plan.level_flags[level]) != plan.level_flags[level]:
            raise UserError(
                f"{path} has runs of level {level} with {shlex.join(flags[level])!r}, this command has "
                f"{shlex.join(plan.level_flags[level])!r}; give another --output-dir"
            )
    now = common_settings(config)
    if (differs := first_difference(before, now)) is not None:
        raise UserError(
            f"{path} has runs with {differs}({before[differs]}), this command has {differs}({now[differs]}); give the "
            "same flags, or another --output-dir"
        )
    for level, own in plan.level_settings.items():
        if (differs := first_difference(of_levels.get(level, {}), own)) is not None:
            raise UserError(
                f"{path} has runs of level {level} with {differs}({of_levels[level][differs]}), its files say "
                f"{differs}({own[differs]}) now; put them back, or give another --output-dir"
            )
    plan = replace(
        plan,
        level_flags={**flags, **plan.level_flags},
        level_settings={**of_levels, **plan.level_settings},
        finetune_iteration=finetune_iteration,
        steps_before=starts,
    )
    return plan, {(found.level, found.seed): found for found in runs}


def write_results(plan: RunPlan, config: Config, finished: Mapping[RunKey, RunResult]) -> Parity | None:
    """Write parity.json, parity.md and parity.png of what is finished; returns the comparison if there is one."""
    folder = plan.output_dir
    order = {level: index for index, level in enumerate(plan.levels)}
    runs = sorted(finished.values(), key=lambda found: (order.get(found.level, len(order)), found.seed))
    parity = compare_runs(runs, plan.levels[0])
    report = {
        "settings": common_settings(config),
        "flags": plan.level_flags,
        "level_settings": {
            level: settings for level, settings in plan.level_settings.items() if _has_file(plan.level_flags[level])
        },
        **{name: getattr(plan, name) for name in _STARTS},
        "finetune_iteration": plan.finetune_iteration,
        "starts": plan.steps_before,
        "ranks_per_run": plan.ranks_per_run,
        **origin(),
        "comparison": None if parity is None else asdict(parity),
        "runs": [found.to_json() for found in runs],
    }
    write_output(folder / RESULTS_FILE, (json.dumps(report, allow_nan=False) + "\n").encode(), "--output-dir")
    if parity is None or len(parity.levels) < 2:
        return None
    write_output(folder / "parity.md", markdown_table(parity).encode(), "--output-dir")
    tokens = plan.ranks_per_run * statistics.fmean(
        (found.num_steps - found.steps_before) * found.tokens_per_second * found.step_seconds for found in runs
    )
    draw_parity(runs, parity, folder / "parity.png", title=f"Precision levels over {tokens / 1e6:,.1f} M tokens")
    return parity


def _has_file(flags: Sequence[str]) -> bool:
    """Whether these flags name a file of settings. They say all there is to say otherwise."""
    return any(one.name == "config" for one in flags_of(flags))


def show_table(parity: Parity) -> None:
    """Print the comparison."""
    headings, *rows = table_rows(parity)
    table = Table(title=f"Against {parity.reference}")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "level" else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=150).print(table)
