"""The tables of docs/from-megatron.md, from `fp8_megatron/config/megatron_options.tsv`.

``python -m tests.docs.megatron_page`` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fp8_megatron.config.megatron_flags import Kind, Option, megatron_options
from fp8_megatron.config.megatron_settings import OTHER_DEFAULTS
from tests.docs.documents import ROOT

PAGE = ROOT / "docs" / "from-megatron.md"
_TABLE = re.compile(r"(<!-- options (\w+) -->\n)(.*?)(<!-- /options -->)", re.DOTALL)


def rows() -> list[Option]:
    """Every row of the table once, in its order."""
    return list({id(option): option for option in megatron_options().values()}.values())


def written() -> str:
    """The page with its tables made again."""
    text = PAGE.read_text(encoding="utf-8")
    return _TABLE.sub(lambda match: match[1] + _TABLES[match[2]](rows()) + match[4], text)


def _counts(options: Sequence[Option]) -> str:
    lines = [
        "| kind | options of Megatron-LM 0.20 | options of older versions, forks and MS-AMP |",
        "| --- | --- | --- |",
    ]
    names = {Kind.DOES: "works", Kind.NOTHING: "no effect", Kind.CANNOT: "refused"}
    for kind, title in names.items():
        counts = [
            sum(len(one.names) for one in options if one.kind is kind and (one.source == "0.20") is new)
            for new in (True, False)
        ]
        lines.append(f"| {title} | {counts[0]} | {counts[1]} |")
    return "\n".join(lines) + "\n"


def _does(options: Sequence[Option]) -> str:
    own = [_names([one]) for one in options if one.kind is Kind.DOES and not one.ours]
    renamed: dict[str, list[Option]] = {}
    for one in options:
        if one.kind is Kind.DOES and one.ours:
            renamed.setdefault(one.ours, []).append(one)
    lines = ["With the same name: " + ", ".join(own) + ".", "", "| Megatron's name | name here |", "| --- | --- |"]
    return "\n".join(lines + [f"| {_names(group)} | `{ours}` |" for ours, group in renamed.items()]) + "\n"


def _nothing(options: Sequence[Option]) -> str:
    return _by_note([one for one in options if one.kind is Kind.NOTHING], "why it has no effect")


def _cannot(options: Sequence[Option]) -> str:
    return _by_note([one for one in options if one.kind is Kind.CANNOT], "why it is refused, and what to use")


def _by_note(options: Sequence[Option], title: str) -> str:
    """One line for each note, with all options that have it."""
    groups: dict[str, list[Option]] = {}
    for one in options:
        groups.setdefault(one.note, []).append(one)
    lines = [f"| {title} | options |", "| --- | --- |"]
    return "\n".join(lines + [f"| {note} | {_names(group)} |" for note, group in groups.items()]) + "\n"


def _names(options: Sequence[Option]) -> str:
    return " ".join(f"`{name}`" for one in options for name in one.names)


def _defaults(options: Sequence[Option]) -> str:
    theirs = {name[2:].replace("-", "_"): one.default for one in options for name in one.names}
    lines = ["| flag | Megatron's default | default here |", "| --- | --- | --- |"]
    for name, ours in OTHER_DEFAULTS.items():
        lines.append(f"| `--{name.replace('_', '-')}` | {theirs[name] or 'none'} | {ours} |")
    return "\n".join(lines) + "\n"


_TABLES = {
    "defaults": _defaults,
    "counts": _counts,
    "does": _does,
    "nothing": _nothing,
    "cannot": _cannot,
}

if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
