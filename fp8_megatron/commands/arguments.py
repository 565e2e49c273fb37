"""Command lines of the tools: a parser whose errors are one line, and types with limits for its values."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..config.command_line import flags_of, is_flag, repeated_flags, setting_name
from ..config.words import near_name, number, shortened, whole_number
from ..errors import USER_ERROR_STATUS, UserError
from ..outputs import check_output_file, check_output_folder
from .program import tell

#: Largest seed that Python, NumPy and torch all take.
MAX_SEED = 2**32 - 1
#: Largest count of anything. It fits into every integer type that counts are kept in.
MAX_COUNT = 2**31 - 1


class Parser(argparse.ArgumentParser):
    """Prints an error as one line without the usage, and says if a flag is given twice.

    Args:
        passes_flags: flags of pretrain_gpt.py stand behind ``--`` (`config.io.own_and_run_flags`).
    """

    def __init__(self, *, passes_flags: bool = False, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**settings)
        self._passes_flags = passes_flags

    def error(self, message: str) -> NoReturn:
        """Print one line and exit."""
        line = " ".join(message.split())
        self.exit(USER_ERROR_STATUS, f"error: {line} ({self.prog} --help lists the flags)\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As `argparse.ArgumentParser.parse_args`. A note on stderr names flags that are given more than once."""
        words = list(sys.argv[1:] if args is None else args)
        note_repeated_flags(words)
        found, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(self._about(unknown[0].partition("=")[0]))
        return found

    def _about(self, unknown: str) -> str:
        """What to do about a word that belongs to no flag."""
        if not is_flag(unknown):
            return f"{shortened(unknown)!r} belongs to no flag; put one before it, or drop it"
        flags = {setting_name(flag): flag for flag in self._option_string_actions if is_flag(flag)}
        nearest = near_name(setting_name(unknown), flags)
        if nearest is not None:
            return f"unknown flag {unknown}; did you mean {flags[nearest]}?"
        fix = "put flags of the run behind --" if self._passes_flags else "drop it"
        return f"unknown flag {unknown}; {fix}"


def note_repeated_flags(words: Sequence[str]) -> None:
    """Print one line for each flag that stands more than once before ``--``, with other values each time."""
    own = words[: words.index("--")] if "--" in words else words
    for line in repeated_flags(flags_of(own)):
        tell(f"note: {line}")


def whole(*, least: int = 1, most: int = MAX_COUNT) -> Callable[[str], int]:
    """The type of a whole number within limits."""

    def parse(word: str) -> int:
        try:
            value = whole_number(word)
        except ValueError:
            limits = f"{least} to {most}" if least > -MAX_COUNT else "one"
            text = f"{shortened(word)!r} is not a whole number; give {limits}"
            raise argparse.ArgumentTypeError(text) from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{shortened(word)} is out of range; give {least} to {most}")
        return value

    return parse


def real(
    *, least: float = -math.inf, above: float = -math.inf, most: float = math.inf, or_zero: bool = False
) -> Callable[[str], float]:
    """The type of a finite number within limits, or of 0 too."""

    def parse(word: str) -> float:
        bounds = [f"{least:g} or more"] if least > -math.inf else []
        bounds += [f"more than {above:g}"] if above > -math.inf else []
        bounds += [f"at most {most:g}"] if most < math.inf else []
        limits = ("0, or " if or_zero else "") + (" and ".join(bounds) or "a finite number")
        try:
            value = number(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{shortened(word)!r} is not a number; give {limits}") from None
        if not ((math.isfinite(value) and least <= value <= most and value > above) or (or_zero and value == 0)):
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


def file_prefix(word: str) -> str:
    """The type of what the names of written files begin with. After a folder alone they would be hidden: ``.bin``."""
    if os.path.basename(nonempty(word)) in ("", ".", ".."):
        example = os.path.join(word, "corpus")
        raise argparse.ArgumentTypeError(f"{word} is a folder; add the start of the files' names, as in {example}")
    return word


def path(word: str) -> Path:
    """The type of a path that is read."""
    return Path(nonempty(word))


def existing(word: str) -> Path:
    """The type of a path that is read, and is there: large libraries need not be imported to find that it is not."""
    found = path(word)
    if not found.exists():
        raise argparse.ArgumentTypeError(f"{shortened(word)} does not exist; check the path")
    return found


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
