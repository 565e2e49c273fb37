"""Read a `Config` from YAML files and flags, write it to YAML, and print it."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union

import tyro
import yaml
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from .checks import ConfigError
from .fields import UNSET, Switch
from .limits import FieldType, field_types
from .schema import Config, OptimizerConfig, Precision

# YAML 1.2's plain scalars. PyYAML reads YAML 1.1, where 3e-4 is a string, off is false and 1:30 is 90.
_PLAIN_SCALARS = {
    None: [
        ("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)\Z")),
        ("tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")),
        ("tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9][0-9_]*)\Z")),
        ("tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z")),
        ("tag:yaml.org,2002:float", re.compile(r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z")),
    ]
}


#: Pairs of `OptimizerConfig` fields that set the same thing. The one given later replaces the other.
_ALTERNATIVES = (("lr_warmup_iters", "lr_warmup_fraction"),)


class _Loader(yaml.SafeLoader):
    """Reads YAML 1.2 scalars. A duplicate key is an error."""

    yaml_implicit_resolvers = _PLAIN_SCALARS

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key '{key_node.value}' is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or 1.2 would read as something else."""

    yaml_implicit_resolvers = {**yaml.SafeDumper.yaml_implicit_resolvers, **_PLAIN_SCALARS}  # noqa: RUF012


def _expected(field_type: FieldType) -> str:
    """The values that a field takes, in words for an error."""
    if field_type.choices:
        expected = "one of " + ", ".join(field_type.choice_names)
    else:
        names = {tuple: "a list of strings", str: "a string", bool: "true or false"}
        expected = names.get(field_type.base, field_type.base.__name__)
    return expected + (" or null" if field_type.optional else "")


def _from_yaml(field_type: FieldType, value: Any) -> Any:
    """The field's value for a YAML value. Raises ValueError if the types differ."""
    if value is None and field_type.optional:
        return None
    if field_type.base is tuple:
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in items):
            raise ValueError
        return tuple(str(item) for item in items)  # YAML reads a blend's weights as numbers
    if field_type.choices:
        return _choice(field_type, value)
    if field_type.base is float and type(value) is int:
        return float(value)
    if type(value) is not field_type.base:
        raise ValueError
    return value


def _from_flag(field_type: FieldType, text: str) -> Any:
    """The field's value for one command-line word; `none` unsets an optional field."""
    if field_type.optional and text.lower() == "none":
        return None
    return _choice(field_type, text) if field_type.choices else field_type.base(text)


def _choice(field_type: FieldType, name: Any) -> Any:
    if name not in field_type.choice_names:
        raise ValueError
    return field_type.choices[field_type.choice_names.index(name)]


@dataclass(frozen=True)
class _CommandLine(Config):
    config: Annotated[tuple[str, ...], UNSET, tyro.conf.arg(metavar="FILE.yaml [FILE.yaml ...]")] = ()
    """YAML files of settings: {section: {name: value}} or {name: value}, names as the flags' with underscores. A file
    overrides those before it."""
    bf16: Annotated[Switch, tyro.conf.FlagCreatePairsOff] = False
    """Same as --precision bf16."""
    fp16: Annotated[Switch, tyro.conf.FlagCreatePairsOff] = False
    """Same as --precision fp16."""


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


def parse_config(argv: Sequence[str] | None = None, *, prog: str = "pretrain_gpt.py") -> Config:
    """The configuration of a command line. Each --config FILE.yaml overrides the defaults; flags override the files.

    Args:
        argv: words after the program's name; ``sys.argv[1:]`` if None.
        prog: the program's name in help and errors.

    Raises:
        ConfigError: a YAML file is missing or malformed, has an unknown key or a value of the wrong type, or flags
            contradict each other.
        SystemExit: code 2, with a message on stderr, for an unknown flag or a bad value; code 0 after --help.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    finder = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    finder.add_argument("--config", nargs="+", action="extend", default=[])
    paths = finder.parse_known_args(words)[0].config
    base = Config()
    for path in paths:
        base = load_config(path, base)
    flags = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    base = _without_alternatives(base, flags)
    asks_for_help = "-h" in words or "--help" in words
    parsed = tyro.cli(
        _CommandLine,
        prog=prog,
        description=_ABOUT.format(prog=prog),
        args=words,
        default=_CommandLine(**_sections(base), config=tuple(paths)),
        config=(
            tyro.conf.OmitArgPrefixes,
            tyro.conf.EnumChoicesFromValues,
            *((tyro.conf.FlagCreatePairsOff,) if asks_for_help else ()),
        ),
        registry=_flag_rules(),
    )
    return _with_precision_alias(parsed, flags)


def _without_alternatives(base: Config, given: Collection[str]) -> Config:
    """`base` with a setting reset to its default where `given` names its alternative (`_ALTERNATIVES`)."""
    replaced: dict[str, Any] = {
        name: OptimizerConfig.__dataclass_fields__[name].default
        for pair in _ALTERNATIVES
        for name, other in (pair, pair[::-1])
        if other in given and name not in given
    }
    return dataclasses.replace(base, optimizer=dataclasses.replace(base.optimizer, **replaced))


def _with_precision_alias(parsed: _CommandLine, given: Collection[str]) -> Config:
    """The parsed configuration, with --bf16 or --fp16 applied to its precision."""
    config = Config(**_sections(parsed))
    if parsed.bf16 and parsed.fp16:
        raise ConfigError("--bf16 contradicts --fp16; give one of them")
    if not parsed.bf16 and not parsed.fp16:
        return config
    alias: Precision = "bf16" if parsed.bf16 else "fp16"
    if "precision" in given and config.precision.precision != alias:
        raise ConfigError(f"--{alias} contradicts --precision {config.precision.precision}; give one of them")
    return dataclasses.replace(config, precision=dataclasses.replace(config.precision, precision=alias))


def own_and_run_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a tool's command line at ``--``: its own flags, and the flags of pretrain_gpt.py."""
    flags = list(argv)
    end = flags.index("--") if "--" in flags else len(flags)
    return flags[:end], flags[end + 1 :]


def load_config(path: str | Path, base: Config | None = None) -> Config:
    """`base`, or the defaults, overridden by a YAML file. Its keys are under their sections or at the top level.

    Raises:
        ConfigError: as in `parse_config`; lists all problems of the file, one per line.
    """
    types = {section: field_types(type(default)) for section, default in _sections(Config()).items()}
    values: dict[str, dict[str, Any]] = {section: {} for section in types}
    problems = []
    for section, key, value in _entries(_read_mapping(path), types):
        label = f"{section}.{key}" if section else key
        owner = next((name for name, fields in types.items() if key in fields), None)
        if owner is None or section not in (owner, None):
            problems.append(f"{path}: unknown key '{label}'{_suggestion(key, owner, types)}")
        elif key in values[owner]:
            problems.append(f"{path}: '{key}' is given twice, at the top and under '{owner}'; keep one")
        else:
            values[owner][key] = None
            try:
                values[owner][key] = _from_yaml(types[owner][key], value)
            except ValueError:
                problems.append(f"{path}: {label}: {value!r} is not {_expected(types[owner][key])}")
    if problems:
        raise ConfigError("\n".join(problems))
    overridden = _sections(_without_alternatives(base or Config(), values["optimizer"])).items()
    return Config(**{name: dataclasses.replace(section, **values[name]) for name, section in overridden})


def save_config(config: Config, path: str | Path) -> None:
    """Write all settings by section as YAML. `load_config` reads back an equal configuration. Makes parent folders."""
    sections = {name: _plain_values(section) for name, section in _sections(config).items()}
    text = yaml.dump(sections, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def format_config(config: Config) -> str:
    """The configuration by section, as text. A star marks a value that is not the default; the default follows it."""
    lines = []
    for name, default in _sections(Config()).items():
        lines.append(f"{name}:")
        values, defaults = _plain_values(getattr(config, name)), _plain_values(default)
        for key, value in values.items():
            changed = value != defaults[key]
            note = f"  (default {_shown(defaults[key])})" if changed else ""
            lines.append(f"  {'*' if changed else ' '} {key} = {_shown(value)}{note}")
    return "\n".join(lines)


def _sections(config: Config) -> dict[str, Any]:
    """The sections of a configuration by name."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(Config)}


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
            instance_from_str=lambda words: _from_flag(field_type, words[0]),
            is_instance=lambda value: value is None or isinstance(value, field_type.base),
            str_from_instance=lambda value: [_shown(value.value if isinstance(value, Enum) else value)],
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


def _read_mapping(path: str | Path) -> Mapping[Any, Any]:
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot read the configuration file: {reason}; check --config") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: holds a {type(content).__name__}; expected a mapping such as 'num_layers: 24'")
    return content


def _entries(
    content: Mapping[Any, Any], types: Mapping[str, Mapping[str, FieldType]]
) -> Iterator[tuple[str | None, str, Any]]:
    """Each (section or None, key, value) of a file. An empty section gives none."""
    for name, value in content.items():
        if isinstance(value, Mapping) and name in types:
            yield from ((name, str(key), inner) for key, inner in value.items())
        elif value is not None or name not in types:
            yield None, str(name), value


def _suggestion(key: str, owner: str | None, types: Mapping[str, Mapping[str, FieldType]]) -> str:
    if owner is not None:
        return f"; '{key}' belongs under '{owner}'"
    known = [name for section, fields in types.items() for name in (section, *fields)]
    nearest = difflib.get_close_matches(key.replace("-", "_"), known, n=1)
    return f"; did you mean '{nearest[0]}'?" if nearest else "; --help lists the names"


def _plain_values(section: Any) -> dict[str, Any]:
    """A section's fields as YAML types: enums become their values, tuples become lists."""
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    return {
        key: value.value if isinstance(value, Enum) else list(value) if isinstance(value, tuple) else value
        for key, value in values.items()
    }


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
