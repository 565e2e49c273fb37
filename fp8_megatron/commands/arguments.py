"""Command lines of the tools: a parser whose errors are one line, and types with limits for its values."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..config.command_line import flags_of, repeated_flags
from ..config.words import decimal, shortened, whole_number
from ..errors import USER_ERROR_STATUS, UserError
from ..outputs import check_output_file, check_output_folder

#: Largest seed that Python, NumPy and torch all take.
MAX_SEED = 2**32 - 1
#: Largest count of anything. It fits into every integer type that counts are kept in.
MAX_COUNT = 2**31 - 1


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
    own = words[: words.index("--")] if "--" in words else words
    for line in repeated_flags(flags_of(own)):
        print(f"note: {line}", file=sys.stderr)


def whole(*, least: int = 1, most: int = MAX_COUNT) -> Callable[[str], int]:
    """The type of a whole number within limits."""

    def parse(word: str) -> int:
        try:
            value = whole_number(word)
        except ValueError:
            text = f"{shortened(word)!r} is not a whole number; give {least} to {most}"
            raise argparse.ArgumentTypeError(text) from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{shortened(word)} is out of range; give {least} to {most}")
        return value

    return parse


def real(*, least: float = -math.inf, above: float = -math.inf, most: float = math.inf) -> Callable[[str], float]:
    """The type of a finite number within limits."""

    def parse(word: str) -> float:
        bounds = [f"{least:g} or more"] if least > -math.inf else []
        bounds += [f"more than {above:g}"] if above > -math.inf else []
        bounds += [f"at most {most:g}"] if most < math.inf else []
        limits = " and ".join(bounds) or "a finite number"
        try:
            value = decimal(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{shortened(word)!r} is not a number; give {limits}") from None
        if not (math.isfinite(value) and least <= value <= most and value > above):
            raise argparse.ArgumentTypeError(f"{shortened(word)} is out of range; give {limits}")
        return value

    return parse


seed = whole(least=0, most=MAX_SEED)


def nonempty(word: str) -> str:
    """The type of a text that is not empty. An unset variable of the shell gives an empty one."""
    if not word:
        raise argparse.ArgumentTypeError("the text is empty; give one (is a variable of the shell unset?)")
    if "\0" in word:
        raise argparse.ArgumentTypeError(f"{shortened(word)!r} has a NUL character; leave it out")
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
