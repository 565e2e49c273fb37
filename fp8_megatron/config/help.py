"""The text of --help, from the fields of the configuration and their comments."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import shutil
import sys
import textwrap
from collections.abc import Iterator
from enum import Enum
from itertools import pairwise
from typing import Any, NoReturn

from .fields import FieldType, field_types
from .schema import Config
from .words import flag_name

#: Columns of the text on a wider terminal.
_MOST_COLUMNS = 120
_ABOUT = """\
Train a GPT in FP8 end to end. A first try, on random tokens:

  {prog} --config configs/gpt_345m.yaml --mock-data --train-iters 20

From token files to checkpoints:

  {prog} --config configs/gpt_345m.yaml --data-path PREFIX --tokenizer-model FILE --save runs/a

configs/ has models from 345M to 175B parameters; configs/fast.yaml goes over any of them. docs/ has the guides.

Settings come from --config and from flags. A flag overrides the files. `none` unsets a flag that has no default. A
switch is listed in the form that changes its default; --NAME and --no-NAME both work.
"""
#: Flags that are no settings.
_BESIDE = {
    "-h, --help": "Show this text.",
    "--config FILE.yaml [FILE.yaml ...]": "YAML files of settings: {section: {name: value}} or {name: value}, names as "
    "the flags' with underscores. A file overrides those before it.",
    "--bf16": "Same as --precision bf16.",
    "--fp16": "Same as --precision fp16.",
    "--dry-run": "Check and print the configuration, memory of each rank and bytes on the wire; train nothing.",
    "--world-size RANKS": "Ranks that --dry-run is for. Default: those of the launcher.",
}


def show_help(base: Config, prog: str) -> NoReturn:
    """Print the help of `prog` with the values of `base` as defaults, and exit with status 0."""
    print(f"usage: {prog} [FLAGS]\n\n{_ABOUT.format(prog=prog)}\noptions")
    for flag, text in _BESIDE.items():
        print(_entry(flag, text))
    for section in dataclasses.fields(Config):
        settings = getattr(base, section.name)
        print(f"\n{section.name} options\n{' '.join((type(settings).__doc__ or '').split())}")
        for flag, text in _flags(settings):
            print(_entry(flag, text))
    sys.exit(0)


def _entry(flag: str, text: str) -> str:
    width = min(shutil.get_terminal_size().columns, _MOST_COLUMNS)
    return f"  {flag}\n{textwrap.fill(text, width, initial_indent=' ' * 8, subsequent_indent=' ' * 8)}"


def _flags(section: Any) -> Iterator[tuple[str, str]]:
    """(flag with its values, comment and default) of each field of a section."""
    comments = _comments(type(section))
    for name, kind in field_types(type(section)).items():  # type: ignore[arg-type]
        default = getattr(section, name)
        if kind.base is bool:
            yield flag_name(f"no_{name}" if default else name), comments[name]
            continue
        shown = default.value if isinstance(default, Enum) else default
        note = (
            "" if shown in (None, "", ()) else f" (default: {' '.join(shown) if isinstance(shown, tuple) else shown})"
        )
        yield f"{flag_name(name)} {_values(kind)}", comments[name] + note


def _values(kind: FieldType) -> str:
    if kind.choices:
        return "{" + ",".join(map(str, kind.choice_names)) + "}"
    return "STR [STR ...]" if kind.base is tuple else kind.base.__name__.upper()


def _comments(section: type) -> dict[str, str]:
    """The comment behind each field of a section, on one line."""
    definitions = [
        ast.parse(inspect.getsource(each)).body[0] for each in section.__mro__ if dataclasses.is_dataclass(each)
    ]
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(comment.value).split())
        for definition in definitions
        if isinstance(definition, ast.ClassDef)
        for field, comment in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(comment, ast.Expr)
    }
