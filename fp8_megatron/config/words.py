"""Words of a command line or a file as values: numbers in ASCII digits, strings that can be paths and names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from ..errors import printable

_WHOLE = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*", re.ASCII)
_DECIMAL = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?(?:inf|infinity|nan)", re.ASCII)
#: Digits of a whole number. Far beyond every limit, and below what Python refuses to read.
_MOST_DIGITS = 300
_MOST_SHOWN = 80
#: Of two names, the share of letters in common: ``--tensor-parallel-size`` is near, ``--log-level`` is not.
_LEAST_LIKENESS, _LEAST_LIKENESS_OF_SHORT, _SHORT = 0.86, 0.8, 6
#: Linux takes no longer path.
_MOST_CHARACTERS = 4095


def whole_number(word: str) -> int:
    """The whole number that `word` writes in ASCII digits, with underscores between them or without.

    Raises:
        ValueError: it writes none.
    """
    if not _WHOLE.fullmatch(word) or len(word) > _MOST_DIGITS:
        raise ValueError(word)
    return int(word)


def number(word: str) -> float:
    """The number that `word` writes, as `decimal` reads it. Whole numbers may have underscores."""
    return float(whole_number(word)) if "_" in word else decimal(word)


def decimal(word: str) -> float:
    """The number that `word` writes in ASCII digits, or inf or nan. Raises ValueError for other words.

    It has no underscores: words of a list that are no numbers can be paths.
    """
    if not _DECIMAL.fullmatch(word.lower()) or len(word) > _MOST_DIGITS:
        raise ValueError(word)
    return float(word)


def text_problem(text: str) -> str | None:
    """Why `text` can be neither a path nor a name; None if it can."""
    if not text.strip():
        return "is empty (an unset shell variable?)"
    if any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        return "holds bytes that are not UTF-8"
    if not text.isprintable():
        return "holds a character that cannot be printed"
    if len(text) > _MOST_CHARACTERS:
        return f"has more than {_MOST_CHARACTERS:,} characters"
    return None


def shortened(text: str) -> str:
    """`text` for an error: as it is, or its beginning if it is long. What cannot be printed is written as an escape."""
    text = printable(text[:_MOST_CHARACTERS])
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def near_name(name: str, names: Iterable[str], *, cutoff: float | None = None) -> str | None:
    """The one of `names` that `name` may be a slip for; None if none is nearly spelt so. A mere likeness misleads."""
    cutoff = cutoff or (_LEAST_LIKENESS if len(name) > _SHORT else _LEAST_LIKENESS_OF_SHORT)
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=cutoff)), None)


def flag_name(setting: str) -> str:
    """The flag of a setting: ``num_layers`` is ``--num-layers``."""
    return "--" + setting.replace("_", "-")


def flag_with(setting: str, value: object) -> str:
    """A setting's flag as a user writes it with this value: ``--num-layers 2``, ``--no-swiglu``."""
    if isinstance(value, bool):
        return flag_name(setting if value else f"no_{setting}")
    words = value if isinstance(value, tuple) else ("none" if value is None else value,)
    return " ".join((flag_name(setting), *map(str, words)))


def multiples_near(size: int, multiple: int) -> str:
    """The nearest multiples below and above `size`: "192 or 256"."""
    below = size // multiple * multiple
    return f"{below} or {below + multiple}" if below else f"{multiple}"
