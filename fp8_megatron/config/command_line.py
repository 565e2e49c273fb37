"""The words of a command line as settings: which flag each word belongs to. A mistake is one line with flag and fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .fields import FieldType
from .words import flag_name, near_name, shortened


@dataclass(frozen=True)
class Given:
    """One flag of a command line.

    Attributes:
        flag: the flag, as written.
        name: the setting that it sets.
        words: its values; for a switch ``true`` or ``false``.
    """

    flag: str
    name: str
    words: tuple[str, ...]


def read_words(
    words: Sequence[str], types: Mapping[str, FieldType], others: Sequence[str] = (), refused: Sequence[str] = ()
) -> tuple[list[Given], list[str]]:
    """The flags of a command line in order, and one line for each mistake.

    A flag is ``--name value`` or ``--name=value``. A switch is ``--name`` or ``--no-name``. A list takes all words up
    to the next flag. Dashes and underscores in names are alike.

    Args:
        words: the command line.
        types: the settings by name.
        others: further flags that an unknown one may be a slip for.
        refused: flags that are errors themselves. They are named only where the slip is small.
    """
    given: list[Given] = []
    problems: list[str] = []
    for flag, value, after in split_flags(words):
        if flag is None:
            problems += map(_stray, after)
            continue
        name = setting_name(flag)
        turned_off = name.removeprefix("no_") if name not in types else name
        if name not in types and turned_off in types and types[turned_off].base is bool:
            name, truth = turned_off, "false"
        else:
            truth = "true"
        most = 0 if value is not None else _most_words(types.get(name), len(after))
        values = after[:most] if value is None else [value]
        if name not in types:
            problems.append(f"unknown flag {shortened(flag)}{_suggestion(name, types, others, refused)}")
        elif types[name].base is bool:
            if value is not None:
                problems.append(f"{flag}={shortened(value)}: a switch has no value; give it alone, or as --no-…")
            given.append(Given(flag, name, (truth,)))
        elif not values:
            problems.append(f"{flag} has no value; give one after it, or drop it (an unset shell variable?)")
        else:
            given.append(Given(flag, name, tuple(values)))
        problems += map(_stray, after[most:])
    return given, problems


def split_flags(words: Sequence[str]) -> Iterator[tuple[str | None, str | None, list[str]]]:
    """Each flag of a command line: flag, the value after ``=`` or None, the words up to the next flag.

    A word that belongs to no flag comes alone, behind the flag None.
    """
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if not is_flag(flag):
            yield None, None, [word]
            continue
        after = []
        while rest and not is_flag(rest[0]):
            after.append(rest.pop(0))
        yield flag, value if equals else None, after


def flags_of(words: Sequence[str]) -> list[Given]:
    """The flags of a command line whose settings are not known: each takes all words up to the next flag."""
    return [
        Given(flag, setting_name(flag), (*(() if value is None else (value,)), *after))
        for flag, value, after in split_flags(words)
        if flag is not None
    ]


def repeated_flags(given: Sequence[Given]) -> list[str]:
    """One line for each setting that is given more than once with other values."""
    by_name: dict[str, list[Given]] = {}
    for one in given:
        by_name.setdefault(one.name, []).append(one)
    return [
        f"{flag_name(name)} is given {len(several)} times; the last one counts: {_shown(several[-1])}"
        for name, several in by_name.items()
        if name != "config" and len({one.words for one in several}) > 1
    ]


def setting_name(flag: str) -> str:
    """The name of a flag's setting: ``--num-layers`` is ``num_layers``."""
    return flag.removeprefix("--").replace("-", "_")


def is_flag(word: str) -> bool:
    """Whether a word of a command line is a flag."""
    return word.startswith("--") and len(word) > 2


def _most_words(field_type: FieldType | None, num_words: int) -> int:
    """How many of the words after a flag are its values; an unknown flag takes all."""
    if field_type is None or field_type.base is tuple:
        return num_words
    return 0 if field_type.base is bool else 1


def _stray(word: str) -> str:
    return f"{shortened(word)!r} belongs to no flag; put one before it, or drop it"


def _suggestion(name: str, types: Mapping[str, FieldType], others: Sequence[str], refused: Sequence[str]) -> str:
    flags = {setting_name(flag): flag for flag in others} | {name: flag_name(name) for name in types}
    errors = {setting_name(flag): flag for flag in refused}
    near = filter(None, (near_name(name, flags), near_name(name, errors, cutoff=0.9)))
    nearest = max(near, key=lambda other: difflib.SequenceMatcher(None, other, name).ratio(), default=None)
    return "; --help lists the flags" if nearest is None else f"; did you mean {(errors | flags)[nearest]}?"


def _shown(one: Given) -> str:
    text = one.flag if one.words in (("true",), ("false",)) else " ".join((one.flag, *one.words))
    return shortened(text)
