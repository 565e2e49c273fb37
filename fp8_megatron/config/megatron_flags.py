"""Megatron's options: the flags of this project that each one means. `megatron_options.tsv` has a row for every option.

The kind of a row says what happens to its option. `does`: it is a flag of ours, or the column `ours` names one.
`nothing`: it is accepted and has no effect. `cannot`: it is refused by name, unless its value is Megatron's default.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import resources
from types import MappingProxyType

from .command_line import flags_of, setting_name, split_flags
from .words import decimal, shortened

_TABLE = "megatron_options.tsv"


class Kind(Enum):
    """What happens to an option."""

    DOES = "does"
    NOTHING = "nothing"
    CANNOT = "cannot"


@dataclass(frozen=True)
class Option:
    """One row of the table.

    Attributes:
        names: all spellings, with their dashes.
        arity: words after it: ``0`` (a switch), ``1``, ``optional`` (one or none) or ``list`` (all of them).
        default: Megatron's default as it is written on a command line; empty if there is none.
        source: the version of Megatron that has it: ``0.20`` or ``older``; ``fork`` for forks that publish scripts;
            ``MS-AMP`` for its GPT scripts.
        kind: what happens to it.
        ours: with `Kind.DOES`, our flag, then either the word to give it (after an option without one) or pairs
            ``theirs=ours`` of values that differ. Empty: the option is a flag of ours by its own name.
        note: with `Kind.NOTHING`, why nothing is to be done; with `Kind.CANNOT`, the reason and what to use instead.
    """

    names: tuple[str, ...]
    arity: str
    default: str
    source: str
    kind: Kind
    ours: str
    note: str


@dataclass(frozen=True)
class Translation:
    """A command line in flags of ours.

    Attributes:
        words: the command line; a flag that is in no row stands as it was.
        idle: options that were accepted with nothing to do, as given.
        renamed: one line for each value that has another name here.
        problems: one line for each option that cannot be served.
    """

    words: tuple[str, ...]
    idle: tuple[str, ...]
    renamed: tuple[str, ...]
    problems: tuple[str, ...]


@cache
def megatron_options() -> Mapping[str, Option]:
    """Every option by its name as a setting (``--num-layers`` is ``num_layers``)."""
    text = resources.files(__package__).joinpath(_TABLE).read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
    found: dict[str, Option] = {}
    for row in rows:
        option = Option(tuple(row.pop("options").split()), kind=Kind(row.pop("kind")), **row)
        for name in option.names:
            other = found.setdefault(setting_name(name), option)
            assert other is option, f"{name} has two rows"
    return MappingProxyType(found)


def translate(words: Sequence[str]) -> Translation:
    """A command line with every option of Megatron's as a flag of ours."""
    out: list[str] = []
    idle: list[str] = []
    renamed: list[str] = []
    problems: list[str] = []
    for flag, value, values in split_flags(words):
        if flag is None:
            out += values
            continue
        option = megatron_options().get(setting_name(flag))
        if option is None or (option.kind is Kind.DOES and not option.ours):
            out += [flag if value is None else f"{flag}={value}", *values]
            continue
        given, rest = _split(option, value, values)
        problem = _form_problem(option, flag, given, value)
        if problem is not None:
            problems.append(problem)
        elif option.kind is Kind.DOES:
            ours = _ours(option, given)
            out += ours
            if given and ours[1:] != given:
                renamed.append(f"{flag} {shortened(' '.join(given))} is {' '.join(ours)} here")
        elif option.kind is Kind.NOTHING or _is_default(option, given) or _is_said_by_rope(flag, words):
            idle.append(" ".join((flag, *given)))
        else:
            problems.append(f"{shortened(' '.join((flag, *given)))} is not supported: {option.note}")
        out += rest
    return Translation(tuple(out), tuple(idle), tuple(renamed), tuple(problems))


def idle_note(idle: Sequence[str]) -> str:
    """The line at the start about options that are accepted and have no effect."""
    return f"no effect here: {' '.join(idle)} (docs/from-megatron.md says why)"


def _split(option: Option, value: str | None, values: list[str]) -> tuple[list[str], list[str]]:
    """The words that belong to `option`, and those after them."""
    if value is not None:
        return [value], values
    most = {"0": 0, "1": 1, "optional": 1}.get(option.arity, len(values))
    return values[:most], values[most:]


def _form_problem(option: Option, flag: str, given: Sequence[str], value: str | None) -> str | None:
    if option.arity == "0":
        return None if value is None else f"{flag}={shortened(value)}: a switch has no value; give it alone"
    return (
        None
        if given or option.arity == "optional"
        else f"{flag} has no value; give one after it, or drop it (an unset shell variable?)"
    )


def _ours(option: Option, given: Sequence[str]) -> list[str]:
    """The words of ours for `option` with the words `given`."""
    target, *rest = option.ours.split()
    values = dict(pair.split("=") for pair in rest if "=" in pair)
    fixed = [word for word in rest if "=" not in word]
    return [target, *(values.get(word, word) for word in given or fixed)]


def _is_said_by_rope(flag: str, words: Sequence[str]) -> bool:
    """Whether an option is --no-position-embedding beside RoPE, which Megatron takes, as there are no others."""
    if setting_name(flag) != "no_position_embedding":
        return False
    given = {one.name: one.words for one in flags_of(words)}
    return "use_rotary_position_embeddings" in given or given.get("position_embedding_type") == ("rope",)


def _is_default(option: Option, given: Sequence[str]) -> bool:
    """Whether an option has Megatron's default, so that it asks for nothing."""
    if not option.default or len(given) != 1:
        return False
    try:
        return decimal(given[0]) == decimal(option.default)
    except ValueError:
        return given[0] == option.default
