"""Command lines of the tools: a parser whose errors are one line, and types with limits for its values."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from ..errors import USER_ERROR_STATUS, UserError
from ..outputs import check_output_file, check_output_folder

#: Largest seed that Python, NumPy and torch all take.
MAX_SEED = 2**32 - 1
#: Largest count of anything. It fits into every integer type that counts are kept in.
MAX_COUNT = 2**31 - 1

_WHOLE = re.compile(r"[-+]?[0-9]{1,18}")
_REAL = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


class Parser(argparse.ArgumentParser):
    """Prints an error as one line without the usage, and says if a flag is given twice."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**settings)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit."""
        line = " ".join(message.split())
        self.exit(USER_ERROR_STATUS, f"error: {line} ({self.prog} --help lists the flags)\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As `argparse.ArgumentParser.parse_args`. A note on stderr names flags that are given more than once."""
        words = list(sys.argv[1:] if args is None else args)
        note_repeated_flags(words)
        return super().parse_args(words, namespace)


def note_repeated_flags(words: Sequence[str]) -> None:
    """Print one line for each flag that stands more than once before ``--``, with other values each time."""
    own = list(words[: words.index("--")] if "--" in words else words)
    starts = [index for index, word in enumerate(own) if word.startswith("--")]
    values: dict[str, list[tuple[str, ...]]] = {}
    for start, end in pairwise([*starts, len(own)]):
        flag, equals, value = own[start].partition("=")
        values.setdefault(flag, []).append((*([value] if equals else []), *own[start + 1 : end]))
    for flag, given in values.items():
        if len(Counter(given)) > 1:
            last = " ".join(given[-1]).encode(errors="backslashreplace").decode()
            print(f"note: {flag} is given {len(given)} times; the last one counts: {flag} {last}", file=sys.stderr)


def whole(*, least: int = 1, most: int = MAX_COUNT) -> Callable[[str], int]:
    """The type of a whole number within limits."""

    def parse(word: str) -> int:
        if not _WHOLE.fullmatch(word):
            raise argparse.ArgumentTypeError(f"{_quoted(word)} is not a whole number; give {least} to {most}")
        value = int(word)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is out of range; give {least} to {most}")
        return value

    return parse


def real(*, least: float = -math.inf, above: float = -math.inf, most: float = math.inf) -> Callable[[str], float]:
    """The type of a finite number within limits."""

    def parse(word: str) -> float:
        bounds = [f"{least:g} or more"] if least > -math.inf else []
        bounds += [f"more than {above:g}"] if above > -math.inf else []
        bounds += [f"at most {most:g}"] if most < math.inf else []
        limits = " and ".join(bounds) or "a finite number"
        if not _REAL.fullmatch(word):
            raise argparse.ArgumentTypeError(f"{_quoted(word)} is not a finite number; give {limits}")
        value = float(word)
        if not (math.isfinite(value) and least <= value <= most and value > above):
            raise argparse.ArgumentTypeError(f"{word} is out of range; give {limits}")
        return value

    return parse


seed = whole(least=0, most=MAX_SEED)


def nonempty(word: str) -> str:
    """The type of a text that is not empty. An unset variable of the shell gives an empty one."""
    if not word:
        raise argparse.ArgumentTypeError("the text is empty; give one (is a variable of the shell unset?)")
    if "\0" in word:
        raise argparse.ArgumentTypeError(f"{_quoted(word)} has a NUL character; leave it out")
    return word


def path(word: str) -> Path:
    """The type of a path that is read."""
    return Path(nonempty(word))


def output_file(word: str) -> Path:
    """The type of a file that is written later. It is tried at once."""
    return _checked(check_output_file, word)


def output_folder(word: str) -> Path:
    """The type of a folder that is filled later. It is tried at once."""
    return _checked(check_output_folder, word)


def _checked(check: Callable[[Path, str], None], word: str) -> Path:
    found = path(word)
    try:
        check(found, "")
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return found


def _quoted(word: str) -> str:
    return repr(word if len(word) <= 60 else f"{word[:57]}...")
