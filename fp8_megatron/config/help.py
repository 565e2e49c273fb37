"""The text of --help, which tyro makes from the fields and their comments."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from types import UnionType
from typing import Annotated, Any, NoReturn, Union

import docstring_parser  # tyro's own
import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from .fields import UNSET, FieldType, OptionalCount, Switch
from .schema import Config


@dataclass(frozen=True)
class _CommandLine(Config):
    config: Annotated[tuple[str, ...], UNSET, tyro.conf.arg(metavar="FILE.yaml [FILE.yaml ...]")] = ()
    """YAML files of settings: {section: {name: value}} or {name: value}, names as the flags' with underscores. A file
    overrides those before it."""
    bf16: Annotated[Switch, tyro.conf.FlagCreatePairsOff] = False
    """Same as --precision bf16."""
    fp16: Annotated[Switch, tyro.conf.FlagCreatePairsOff] = False
    """Same as --precision fp16."""
    dry_run: Annotated[Switch, tyro.conf.FlagCreatePairsOff] = False
    """Check and print the configuration, memory of each rank and bytes on the wire; train nothing."""
    world_size: Annotated[OptionalCount, tyro.conf.arg(metavar="RANKS")] = None
    """Ranks that --dry-run is for. Default: those of the launcher."""


#: Written in paragraphs: tyro joins the lines of each.
_ABOUT = """\
Train a GPT in FP8 end to end. A first try, on random tokens:

  {prog} --config configs/gpt_345m.yaml --mock-data --train-iters 20

From token files to checkpoints:

  {prog} --config configs/gpt_345m.yaml --data-path PREFIX --tokenizer-model FILE --save runs/a

configs/ has models from 345M to 175B parameters; configs/fast.yaml goes over any of them. docs/ has the guides.

Settings come from --config and from flags. A flag overrides the files. `none` unsets a flag that has no default. A
switch is listed in the form that changes its default; --NAME and --no-NAME both work.
"""


def show_help(base: Config, paths: Sequence[str], prog: str) -> NoReturn:
    """Print the help of `prog` with the values of `base` as defaults, and exit with status 0."""
    sections = {field.name: _with_joined_lines(getattr(base, field.name)) for field in dataclasses.fields(Config)}
    tyro.cli(
        _CommandLine,
        prog=prog,
        description=_ABOUT.format(prog=prog),
        args=["--help"],
        default=_CommandLine(**sections, config=tuple(paths)),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.EnumChoicesFromValues, tyro.conf.FlagCreatePairsOff),
        registry=_flag_rules(),
    )
    raise AssertionError("tyro exits after --help")


def _with_joined_lines(section: Any) -> Any:
    """`section` of a derived class, in whose description the lines of each field's comment are joined. tyro takes an
    indented line for a new paragraph."""
    kind = type(section)
    comments = {
        comment.arg_name: " ".join((comment.description or "").split())
        for comment in docstring_parser.parse_from_object(kind).params
    }
    about = "\n".join([kind.__doc__ or "", "", *(f":param {name}: {text}" for name, text in comments.items())])
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(kind)}
    return type(kind.__name__, (kind,), {"__doc__": about})(**values)


def _flag_rules() -> ConstructorRegistry:
    """Rules that show optional fields and tuples with a plain metavar; tyro would print `{None}|INT`."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def optional_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if info.type_origin not in (Union, UnionType):
            return None
        field_type = FieldType.of(info.type)
        choices = field_type.choice_names
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="{" + ",".join(choices) + "}" if choices else field_type.base.__name__.upper(),
            instance_from_str=lambda words: words[0],  # `command_line` reads the words
            is_instance=lambda value: value is None or isinstance(value, field_type.base),
            str_from_instance=lambda value: [_shown(value)],
            choices=(*choices, "none") if choices else None,
        )

    @registry.primitive_rule
    def tuple_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[tuple[str, ...]] | None:
        if info.type_origin is not tuple:
            return None
        return PrimitiveConstructorSpec(
            nargs="*",
            metavar="STR [STR ...]",
            instance_from_str=tuple,
            is_instance=lambda value: isinstance(value, tuple),
            str_from_instance=list,
        )

    return registry


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return str(value.value if isinstance(value, Enum) else value)
