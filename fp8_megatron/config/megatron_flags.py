"""Megatron's options: the flags of this project that each one means. `megatron_options.tsv` has a row for every option.

The kind of a row says what happens to its option. `does`: it is a flag of ours, or the column `ours` names one.
`nothing`: it is accepted and has no effect. `cannot`: it is refused by name, unless its value is Megatron's default.
A flag that is in no row and is the beginning of one alone is that one, as argparse reads it.

Switches of Megatron and MS-AMP choose the precision (`chosen_precision`). --bf16 and --fp16 name the 16-bit type. A
switch of FP8 beside them leaves FP8 on. --accumulate-allreduce-grads-in-fp32 is --grad-accumulation-dtype fp32 of FP8.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from .command_line import flags_of, setting_name, split_flags
from .fields import FieldType
from .precision import Precision, PrecisionConfig
from .words import decimal, flag_name, shortened

_TABLE = "megatron_options.tsv"
#: Flags that stand beside the settings. Their words are no setting's values.
SWITCHES: Mapping[str, FieldType] = MappingProxyType(
    {
        "bf16": FieldType(bool),
        "fp16": FieldType(bool),
        "fp8_format": FieldType(str, ("hybrid", "e4m3")),
        "fp8_hybrid": FieldType(bool),
        "fp8_e4m3": FieldType(bool),
        "msamp": FieldType(bool),
        "msamp_opt_level": FieldType(str, ("O1", "O2", "O3")),
        "transformer_impl": FieldType(str, ("transformer_engine", "local")),
        "accumulate_allreduce_grads_in_fp32": FieldType(bool),
        "deepspeed_config": FieldType(str),
    }
)
#: Flags that turn FP8 on, in the order in which one is named.
_FP8_SWITCHES = ("fp8_format", "fp8_hybrid", "fp8_e4m3", "msamp", "msamp_opt_level", "fp8_recipe")
#: Megatron's defaults of the settings that its FP8 switches turn on.
_MEGATRONS_RECIPE = {"fp8_recipe": "delayed", "fp8_amax_history_len": 1, "fp8_amax_compute_algo": "most_recent"}
_SIXTEEN_BITS: tuple[Precision, ...] = ("bf16", "fp16")


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
            ``theirs=ours`` of values that differ; behind a ``+`` flags that it brings, unless the command line has
            them. Empty: the option is a flag of ours by its own name. Pairs ``theirs=`` are values that ask for
            nothing, also with `Kind.CANNOT`.
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


def translate(words: Sequence[str], own: Collection[str] = ()) -> Translation:
    """A command line with every option of Megatron's as a flag of ours.

    Args:
        words: the command line.
        own: names of our flags, which may be abbreviated too.
    """
    out: list[str] = []
    idle: list[str] = []
    renamed: list[str] = []
    problems: list[str] = []
    brought: list[list[str]] = []
    for flag, value, values in split_flags(words):
        if flag is None:
            out += values
            continue
        option = megatron_options().get(setting_name(flag))
        whole = None if option else _whole_name(setting_name(flag), own)
        if whole is not None:
            renamed.append(f"{flag} is {flag_name(whole)} here")
            flag, option = flag_name(whole), megatron_options().get(whole)
        if option is None or (option.kind is Kind.DOES and not option.ours):
            out += [flag if value is None else f"{flag}={value}", *values]
            continue
        given, rest = _split(option, value, values)
        problem = _form_problem(option, flag, given, value)
        if problem is not None:
            problems.append(problem)
        elif option.kind is Kind.NOTHING or _asks_for_nothing(option, given) or _is_said_by_rope(flag, words):
            idle.append(" ".join((flag, *given)))
        elif option.kind is Kind.DOES:
            ours, more = _ours(option, given)
            out += ours
            brought += more
            has_other_name = ours[0] not in option.names and bool(given or more)
            if (given and ours[1:] != given) or has_other_name or option.source != "0.20":
                renamed.append(f"{shortened(' '.join((flag, *given)))} is {' '.join(sum(more, ours))} here")
        else:
            problems.append(f"{shortened(' '.join((flag, *given)))} is not supported: {option.note}")
        out += rest
    has = {setting_name(flag) for flag, _, _ in split_flags(out) if flag is not None}
    for name, *values in brought:
        out += [] if setting_name(name) in has else [name, *values]
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


def _whole_name(start: str, own: Collection[str]) -> str | None:
    """The setting of the one option, or flag of ours, whose name begins with `start`; None if there is not one."""
    if start in own or (start.startswith("no_") and start[3:] in own):
        return None
    options = {id(option): name for name, option in megatron_options().items() if name.startswith(start)}
    names = {*options.values(), *(name for name in own if name.startswith(start) and name not in megatron_options())}
    return names.pop() if len(names) == 1 else None


def _ours(option: Option, given: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The words of ours for `option` with the words `given`, and the flags that it brings, each with its values."""
    own, _, brought = option.ours.partition(" + ")
    target, *rest = own.split()
    values = _pairs(option)
    fixed = [word for word in rest if "=" not in word]
    more = [[flag, *after] for flag, _, after in split_flags(brought.split()) if flag is not None]
    return [target, *(values.get(word, word) for word in given or fixed)], more


def _pairs(option: Option) -> dict[str, str]:
    """Values of `option` that have another name here."""
    return dict(pair.split("=") for pair in option.ours.split() if "=" in pair)


def _is_said_by_rope(flag: str, words: Sequence[str]) -> bool:
    """Whether an option is --no-position-embedding beside RoPE, which Megatron takes, as there are no others."""
    if setting_name(flag) != "no_position_embedding":
        return False
    given = {one.name: one.words for one in flags_of(words)}
    return "use_rotary_position_embeddings" in given or given.get("position_embedding_type") == ("rope",)


def _asks_for_nothing(option: Option, given: Sequence[str]) -> bool:
    """Whether an option's value asks for nothing: a refused one has Megatron's default, or the row says so."""
    if len(given) == 1 and _pairs(option).get(given[0]) == "":
        return True
    if option.kind is Kind.DOES or not option.default or len(given) != 1:
        return False
    try:
        return decimal(given[0]) == decimal(option.default)
    except ValueError:
        return given[0] == option.default


@dataclass(frozen=True)
class Chosen:
    """What switches choose.

    Attributes:
        settings: fields of `PrecisionConfig` and their values.
        notes: lines for the start of the run.
        problems: one line for each contradiction.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def chosen_precision(given: Mapping[str, tuple[str, ...]], base: PrecisionConfig, *, has_files: bool) -> Chosen:
    """The settings that the flags of a command line choose together.

    Args:
        given: each flag's words by setting; the last where one is given twice. Switches that are off are left out.
        base: the settings of the --config files, or the defaults.
        has_files: whether there are such files.
    """
    if {"bf16", "fp16"} <= set(given):
        return _problem("--bf16 contradicts --fp16; give one of them")
    for name, kind in SWITCHES.items():
        if name in given and kind.choices and given[name][0] not in kind.choices:
            return _problem(f"{flag_name(name)} {given[name][0]!r} is not one of {', '.join(kind.choices)}")
    fp8_flags = [flag_name(name) for name in _FP8_SWITCHES if name in given]
    problem = _contradiction(given, base, fp8_flags)
    if problem is not None:
        return _problem(problem)
    precision = _precision(given, base.precision, bool(fp8_flags))
    settings: dict[str, Any] = {} if precision is None else {"precision": precision}
    if "msamp_opt_level" in given:
        settings["opt_level"] = given["msamp_opt_level"][0]
    is_megatrons = bool({"fp8_format", "fp8_hybrid", "fp8_e4m3"} & set(given))
    if is_megatrons and not has_files and given.get("fp8_recipe", ("delayed",)) == ("delayed",):
        settings |= {name: value for name, value in _MEGATRONS_RECIPE.items() if name not in given}
    # Without FP8 gradients are added in FP32 anyway.
    if "accumulate_allreduce_grads_in_fp32" in given and (precision or base.precision) == "fp8":
        if given.get("grad_accumulation_dtype", ("fp32",)) != ("fp32",):
            return _problem(
                f"--accumulate-allreduce-grads-in-fp32 contradicts --grad-accumulation-dtype "
                f"{given['grad_accumulation_dtype'][0]}; give one of them"
            )
        settings["grad_accumulation_dtype"] = "fp32"
    notes = []
    if "fp16" in given and fp8_flags:
        notes.append(f"--fp16 beside {fp8_flags[0]}: the 16-bit type of FP8 layers is BF16, without a loss scale")
    recipe = given["fp8_recipe"][0] if "fp8_recipe" in given else settings.get("fp8_recipe", base.fp8_recipe)
    asks_for_e4m3 = "fp8_e4m3" in given or given.get("fp8_format") == ("e4m3",)
    if asks_for_e4m3 and recipe not in ("blockwise", "mxfp8", "nvfp4"):
        return _problem(
            f"{'--fp8-e4m3' if 'fp8_e4m3' in given else '--fp8-format e4m3'}: output gradients are E5M2 under "
            f"fp8_recipe({recipe}); give --fp8-format hybrid, or --fp8-recipe blockwise"
        )
    return Chosen(settings, tuple(notes))


def _precision(given: Mapping[str, tuple[str, ...]], of_files: Precision, has_fp8_switch: bool) -> str | None:
    """The precision that flags choose; None if they leave it to the files."""
    if "precision" in given:
        return given["precision"][0]
    if not has_fp8_switch:
        return next((name for name in _SIXTEEN_BITS if name in given), None)
    is_msamp = "msamp" in given or "msamp_opt_level" in given
    if given.get("transformer_impl") == ("transformer_engine",) and not is_msamp:
        return "te"
    return "te" if of_files == "te" and not is_msamp else "fp8"


def _contradiction(given: Mapping[str, tuple[str, ...]], base: PrecisionConfig, fp8_flags: list[str]) -> str | None:
    """The contradiction between --precision, or a file's precision, and the switches; None if there is none."""
    if "msamp_opt_level" in given and "opt_level" in given and given["msamp_opt_level"] != given["opt_level"]:
        return (
            f"--msamp-opt-level {given['msamp_opt_level'][0]} contradicts --opt-level {given['opt_level'][0]}; "
            f"give one of them"
        )
    if "precision" not in given:
        if fp8_flags and base.precision in _SIXTEEN_BITS:
            return f"{fp8_flags[0]} contradicts precision({base.precision}) of the --config files; give --precision fp8"
        return None
    precision = given["precision"][0]
    for alias in _SIXTEEN_BITS:
        if alias in given and precision in _SIXTEEN_BITS and precision != alias:
            return f"--{alias} contradicts --precision {precision}; give one of them"
    if precision in _SIXTEEN_BITS and fp8_flags:
        return f"{fp8_flags[0]} contradicts --precision {precision}; give one of them"
    if precision == "te" and ("msamp" in given or "msamp_opt_level" in given):
        return "--msamp contradicts --precision te; give one of them"
    return None


def _problem(line: str) -> Chosen:
    return Chosen(problems=(line,))
