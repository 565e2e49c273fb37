"""Read a `Config` from YAML files and flags, write it to YAML, and print it."""

from __future__ import annotations

import dataclasses
import reprlib
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from .checks import ConfigError
from .command_line import Given, read_words, repeated_flags
from .deepspeed import words_of_deepspeed
from .fields import MAX_RANKS, FieldType, field_types
from .ignored import without_unread
from .megatron_flags import SWITCHES, Chosen, Kind, chosen_precision, idle_note, megatron_options, translate
from .megatron_settings import as_megatron_settles, evaluation_note, precision_note, unread_settings
from .schema import Config, ParallelConfig
from .setting_files import Dumper, read_mapping, words_of_files
from .words import decimal, flag_name, near_name, number, shortened, whole_number

#: Settings of which each sets what the first one sets. One that is given later replaces the others.
_ALTERNATIVES = (
    ("lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_samples"),
    ("train_iters", "train_samples"),
    ("lr_decay_iters", "lr_decay_samples"),
    ("lr_wsd_decay_iters", "lr_wsd_decay_samples"),
    ("rampup_batch_size", "step_batch_size_schedule"),
    ("data_path", "data_args_path"),
    ("train_data_path", "per_split_data_args_path"),
)
#: Settings that give way to another one that is given later, and that other one.
_GIVE_WAY = (("split", "train_data_path"),)
#: Flags that are no settings.
_BESIDE = {"config": FieldType(tuple), "dry_run": FieldType(bool), "world_size": FieldType(int)}
#: Settings without a default in Megatron: a run must state one of each.
_WITHOUT_DEFAULT = (
    ("num_layers",),
    ("hidden_size",),
    ("num_attention_heads",),
    ("seq_length",),
    ("micro_batch_size",),
    ("lr",),
    ("train_iters", "train_samples"),
)


def _expected(field_type: FieldType) -> str:
    """The values that a field takes, in words for an error."""
    if field_type.choices:
        expected = "one of " + ", ".join(field_type.choice_names)
    else:
        names = {tuple: "a list of strings", str: "a string", bool: "true or false", int: "a whole number"}
        expected = names.get(field_type.base, "a number")
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
        return decimal(str(value))
    if type(value) is not field_type.base:
        raise ValueError
    return value


def _from_flag(field_type: FieldType, words: tuple[str, ...]) -> Any:
    """The field's value for the words of its flag. `none` unsets a list and an optional field.

    Raises:
        ValueError: no value of the field is written so.
    """
    if (field_type.optional or field_type.base is tuple) and [word.lower() for word in words] == ["none"]:
        return () if field_type.base is tuple else None
    if field_type.base is tuple:
        return words
    (word,) = words
    if field_type.choices:
        return _choice(field_type, word)
    if field_type.base is bool:
        return word == "true"
    read = {int: whole_number, float: number}.get(field_type.base, str)
    return read(word)


def _choice(field_type: FieldType, name: Any) -> Any:
    if name not in field_type.choice_names:
        raise ValueError
    return field_type.choices[field_type.choice_names.index(name)]


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """What a command line says.

    Attributes:
        config: the settings.
        layout: those of ranks as they are given; `config` has defaults for what its own layout does not read.
        notes: lines for the start of the run: what was given twice, accepted with nothing to do, or changed.
        stated: settings that the flags or a file give.
        dry_run: print what the run would be instead of training.
        world_size: ranks that a dry run is for; None: those of the launcher.
    """

    config: Config
    layout: ParallelConfig
    notes: tuple[str, ...]
    stated: frozenset[str]
    dry_run: bool = False
    world_size: int | None = None

    def check_no_world_size(self) -> None:
        """Raise `ConfigError` for --world-size without --dry-run: the launcher says how many ranks there are."""
        if self.world_size is not None:
            raise ConfigError("--world-size is for --dry-run; the launcher says how many ranks there are")

    def check_stated(self) -> None:
        """Raise `ConfigError` if a setting that has no default in Megatron is not given."""
        known = {name for fields in _field_types().values() for name in fields}
        missing = [
            flag_name(next(name for name in names if name in known))
            for names in _WITHOUT_DEFAULT
            if not self.stated & set(names)
        ]
        if missing:
            raise ConfigError(
                f"not given: {' '.join(missing)}; give them, or a --config file such as configs/gpt_345m.yaml"
            )


def parse_config(argv: Sequence[str] | None = None, *, prog: str = "pretrain_gpt.py") -> Config:
    """The configuration of a command line, as `parse_command_line` reads it."""
    return parse_command_line(argv, prog=prog).config


def parse_command_line(
    argv: Sequence[str] | None = None, *, prog: str = "pretrain_gpt.py", base: Config | None = None
) -> CommandLine:
    """The configuration of a command line. Each --config FILE.yaml overrides the defaults; flags override the files.

    Megatron's options mean what they mean there (`megatron_flags`).

    Args:
        argv: words after the program's name; ``sys.argv[1:]`` if None.
        prog: the program's name in help.
        base: what files and flags override. Default: the defaults.

    Raises:
        ConfigError: a YAML file is missing or malformed, a flag or key is unknown or has a value of the wrong type, a
            flag asks for what there is not, or flags contradict each other. The text has one line for each problem.
        SystemExit: code 0 after --help.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    sections = _field_types()
    types = {name: kind for fields in sections.values() for name, kind in fields.items()}
    known = {**types, **SWITCHES, **_BESIDE}
    of_deepspeed, problems = words_of_deepspeed(words)
    translation = translate([*of_deepspeed, *words], known)
    options = megatron_options().values()
    others = [name for option in options if option.kind is not Kind.CANNOT for name in option.names]
    refused = [name for option in options if option.kind is Kind.CANNOT for name in option.names]
    given, bad_words = read_words(translation.words, known, others, refused)
    problems = [*problems, *translation.problems, *bad_words]
    paths = [path for one in given if one.name == "config" for path in one.words]
    base, stated = _with_files(paths, base)
    if "-h" in words or "--help" in words:
        from .help import show_help

        show_help(base, prog)
    values, bad_values = _values_of(given, sections)
    problems += bad_values
    if problems:
        raise ConfigError("\n".join(problems))
    chosen = _chosen_precision(given, base, has_files=bool(paths))
    values["precision"] = {**values["precision"], **chosen.settings}
    stated |= _names(values)
    config = _overridden(base, values)
    words_of_data, problems = words_of_files(config.data)
    if problems:
        raise ConfigError("\n".join(problems))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, **words_of_data))
    config, changes = as_megatron_settles(config)
    layout = config.parallel
    config, of_modes = without_unread(config)
    unread = unread_settings(config) - of_modes.keys()
    idle = [*translation.idle, *dict.fromkeys(one.flag for one in given if one.name in unread)]
    notes = [f"deepspeed_config means {' '.join(of_deepspeed)} here"] if of_deepspeed else []
    notes += [*repeated_flags(given), *translation.renamed, *chosen.notes, *changes]
    notes += [*filter(None, [evaluation_note(config)]), *of_modes.values()]
    if idle:
        notes.append(idle_note(idle))
    if "precision" not in stated:
        notes.append(precision_note(config.precision))
    last = {one.name: one.words for one in given}
    return CommandLine(
        config,
        layout,
        tuple(notes),
        frozenset(stated),
        dry_run=last.get("dry_run") == ("true",),
        world_size=_world_size(last.get("world_size")),
    )


def _with_files(paths: Sequence[str], base: Config | None) -> tuple[Config, set[str]]:
    """`base`, or the defaults, overridden by files; and the names of the settings that `base` or a file states."""
    stated = set() if base is None else _names({"model": vars(base.model)})
    config = base or Config()
    for path in paths:
        of_file = _read_file(path)
        config = _overridden(config, of_file)
        stated |= _names(of_file)
    return config, stated


def _world_size(words: tuple[str, ...] | None) -> int | None:
    """The ranks that --world-size names. Raises `ConfigError` for what is not a number of ranks."""
    if words is None:
        return None
    try:
        size = whole_number(words[0])
    except ValueError:
        size = 0
    if not 1 <= size <= MAX_RANKS:
        raise ConfigError(f"--world-size {shortened(words[0])!r} is not a number of ranks; give 1 to {MAX_RANKS}")
    return size


def _values_of(
    given: Sequence[Given], sections: Mapping[str, Mapping[str, FieldType]]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The values of flags by section and name, and one line for each word that is no value."""
    values: dict[str, dict[str, Any]] = {section: {} for section in sections}
    problems: list[str] = []
    for one in given:
        section = next((section for section, fields in sections.items() if one.name in fields), None)
        if section is None:
            continue
        kind = sections[section][one.name]
        try:
            values[section][one.name] = _from_flag(kind, one.words)
        except ValueError:
            value = shortened(" ".join(one.words))
            problems.append(f"{one.flag} {value!r} is not {_expected(kind).replace('null', 'none')}")
    return values, problems


def _field_types() -> dict[str, Mapping[str, FieldType]]:
    """The fields' types by section and name."""
    return {section: field_types(type(default)) for section, default in vars(Config()).items()}  # type: ignore[arg-type]


def _overridden(base: Config, values: Mapping[str, Mapping[str, Any]]) -> Config:
    """`base` with values by section and name instead of its own."""
    sections = vars(_without_alternatives(base, _names(values)))
    return Config(**{name: dataclasses.replace(section, **values[name]) for name, section in sections.items()})


def _without_alternatives(base: Config, given: Collection[str]) -> Config:
    """`base` with a setting reset to its default where `given` names an alternative of it (`_ALTERNATIVES`)."""
    replaced = {name for names in _ALTERNATIVES if set(names) & set(given) for name in names if name not in given}
    replaced |= {name for name, other in _GIVE_WAY if other in given and name not in given}
    defaults = vars(Config())
    sections = {
        section: {name: getattr(defaults[section], name) for name in names if name in replaced}
        for section, names in _field_types().items()
    }
    return Config(**{name: dataclasses.replace(old, **sections[name]) for name, old in vars(base).items()})


def _names(values: Mapping[str, Mapping[str, Any]]) -> set[str]:
    return {name for fields in values.values() for name in fields}


def _chosen_precision(given: Sequence[Given], base: Config, *, has_files: bool) -> Chosen:
    """The settings of precision that switches choose. Raises `ConfigError` where they contradict each other."""
    last = {one.name: one.words for one in given}
    on = {name: words for name, words in last.items() if words != ("false",)}
    chosen = chosen_precision(on, base.precision, has_files=has_files)
    if chosen.problems:
        raise ConfigError("\n".join(chosen.problems))
    return chosen


def own_and_run_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a tool's command line at ``--``: its own flags, and the flags of pretrain_gpt.py."""
    flags = list(argv)
    end = flags.index("--") if "--" in flags else len(flags)
    return flags[:end], flags[end + 1 :]


def load_config(path: str | Path) -> Config:
    """The defaults, overridden by a YAML file. Its keys are under their sections or at the top level.

    Raises:
        ConfigError: as in `parse_command_line`; lists all problems of the file, one per line.
    """
    return _overridden(Config(), _read_file(path))


def stated_settings(path: str | Path) -> frozenset[str]:
    """The names of the settings that a YAML file gives. Raises as `load_config`."""
    return frozenset(_names(_read_file(path)))


def _read_file(path: str | Path) -> dict[str, dict[str, Any]]:
    """The values of a YAML file by section and name. Raises `ConfigError` with all its problems."""
    types = _field_types()
    values: dict[str, dict[str, Any]] = {section: {} for section in types}
    problems = []
    for section, key, value in _entries(read_mapping(path), types):
        label = shortened(f"{section}.{key}" if section else key)
        owner = next((name for name, fields in types.items() if key in fields), None)
        if section is None and owner is None and key in types:
            problems.append(f"{path}: '{key}' is a section, not a setting; write it as {key}: {{name: value}}")
        elif owner is None or section not in (owner, None):
            problems.append(f"{path}: unknown key '{label}'{_suggestion(key, owner, types)}")
        elif key in values[owner]:
            problems.append(f"{path}: '{key}' is given twice, at the top and under '{owner}'; keep one")
        else:
            values[owner][key] = None
            try:
                values[owner][key] = _from_yaml(types[owner][key], value)
            except ValueError:
                shown = shortened(reprlib.repr(value))
                problems.append(f"{path}: {label}: {shown} is not {_expected(types[owner][key])}")
    if problems:
        raise ConfigError("\n".join(problems))
    return values


def config_text(config: Config) -> str:
    """All settings by section as YAML. `load_config` reads back an equal configuration."""
    sections = {name: _plain_values(section) for name, section in vars(config).items()}
    return yaml.dump(sections, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def format_config(config: Config) -> str:
    """The configuration by section, as text. A star marks a value that is not the default; the default follows it."""
    lines = []
    for name, default in vars(Config()).items():
        lines.append(f"{name}:")
        values, defaults = _plain_values(getattr(config, name)), _plain_values(default)
        for key, value in values.items():
            lines.append(_changed(key, value, defaults[key]) or f"    {key} = {_shown(value)}")
    return "\n".join(lines)


def format_changes(config: Config) -> str:
    """The settings that differ from their defaults, by section, as text. Sections without any are left out."""
    lines = []
    for name, default in vars(Config()).items():
        values, defaults = _plain_values(getattr(config, name)), _plain_values(default)
        changes = filter(None, (_changed(key, value, defaults[key]) for key, value in values.items()))
        if found := [line.replace("* ", "", 1) for line in changes]:
            lines += [f"{name}:", *found]
    return "\n".join(lines)


def _changed(key: str, value: Any, default: Any) -> str | None:
    """The line of a setting that differs from its default."""
    return None if value == default else f"  * {key} = {_shown(value)}  (default {_shown(default)})"


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
    nearest = near_name(key.replace("-", "_"), known)
    return "; --help lists the names" if nearest is None else f"; did you mean '{nearest}'?"


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
