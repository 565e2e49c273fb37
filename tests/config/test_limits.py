"""Every field states its limits, and a value outside them is one line with the flag and the fix."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from annotated_types import Ge, Gt, Le, Lt

from fp8_megatron.config.checks import ConfigError, check_config
from fp8_megatron.config.fields import Bound, FieldType, field_types, limit_problems
from fp8_megatron.config.io import load_config, parse_config
from fp8_megatron.config.schema import Config

FIELDS: dict[str, tuple[str, FieldType]] = {
    name: (section.name, kind)
    for section in dataclasses.fields(Config)
    for name, kind in field_types(type(getattr(Config(), section.name))).items()
}
NUMBERS = [name for name, (_, kind) in FIELDS.items() if kind.base in (int, float)]
CHOICES = [name for name, (_, kind) in FIELDS.items() if kind.choices]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def with_values(values: dict[str, Any]) -> Config:
    """The defaults with `values` replaced."""
    changes: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in values.items():
        changes[FIELDS[name][0]][name] = value
    sections = {section: dataclasses.replace(getattr(Config(), section), **given) for section, given in changes.items()}
    return dataclasses.replace(Config(), **sections)


def outside(bound: Bound, kind: type) -> float:
    """The nearest value that breaks a bound."""
    match bound:
        case Ge():
            return bound.ge - 1 if kind is int else math.nextafter(bound.ge, -math.inf)
        case Gt():
            return bound.gt
        case Le():
            return bound.le + 1 if kind is int else math.nextafter(bound.le, math.inf)
        case Lt():
            return bound.lt


def inside(bound: Bound, kind: type) -> float:
    """The nearest value that keeps it."""
    match bound:
        case Ge():
            return bound.ge
        case Gt():
            return bound.gt + 1 if kind is int else math.nextafter(bound.gt, math.inf)
        case Le():
            return bound.le
        case Lt():
            return bound.lt - 1 if kind is int else math.nextafter(bound.lt, -math.inf)


def test_the_defaults_are_inside() -> None:
    assert list(limit_problems(Config())) == []


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_has_a_least_and_a_largest_value(name: str) -> None:
    assert {isinstance(bound, Ge | Gt) for bound in FIELDS[name][1].bounds} == {True, False}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_outside_its_limits_is_one_line_with_flag_and_fix(name: str) -> None:
    kind = FIELDS[name][1]
    for bound in kind.bounds:
        value = kind.base(inside(bound, kind.base))
        assert list(limit_problems(with_values({name: value}))) == []
        value = kind.base(outside(bound, kind.base))
        (problem,) = limit_problems(with_values({name: value}))
        assert problem.startswith(f"{name}({value}) is out of range; give {flag(name)} a ")


def test_flags_and_files_are_held_to_the_limits(tmp_path: Path) -> None:
    """All numbers out of range together give as many lines, and no other check runs."""
    values = {name: FIELDS[name][1].base(outside(FIELDS[name][1].bounds[0], FIELDS[name][1].base)) for name in NUMBERS}
    path = tmp_path / "x.yaml"
    path.write_text("".join(f"{name}: {value!r}\n" for name, value in values.items()))
    expected = with_values(values)
    assert parse_config([f"{flag(name)}={value!r}" for name, value in values.items()]) == expected
    assert load_config(path) == expected
    with pytest.raises(ConfigError) as error:
        check_config(expected, 1)
    lines = str(error.value).splitlines()
    assert all(
        any(line.startswith(f"{name}({value}) is out of range") for line in lines) for name, value in values.items()
    )


@pytest.mark.parametrize("name", [name for name in NUMBERS if FIELDS[name][1].base is float])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_float_is_finite(name: str, value: float) -> None:
    (problem,) = limit_problems(with_values({name: value}))
    assert f"{name}({value}) is out of range; give {flag(name)} a finite number" in problem


def test_every_choice_is_taken(tmp_path: Path) -> None:
    """The last of each field's; the first ones are mostly the defaults."""
    last = {name: FIELDS[name][1].choices[-1] for name in CHOICES}
    (tmp_path / "x.yaml").write_text("".join(f"{name}: {FIELDS[name][1].choice_names[-1]}\n" for name in CHOICES))
    assert load_config(tmp_path / "x.yaml") == with_values(last)


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_is_one_of_those_that_are_listed(name: str, tmp_path: Path) -> None:
    kind = FIELDS[name][1]
    names = ", ".join(kind.choice_names)
    others = kind.base if issubclass(kind.base, Enum) else ()
    for refused in [*(other for other in others if other not in kind.choices), "nonsense"]:
        (problem,) = limit_problems(with_values({name: refused}))
        shown = refused.value if isinstance(refused, Enum) else refused
        assert problem == f"{name}({shown}) is out of range; give {flag(name)} one of {names}"
        (tmp_path / "x.yaml").write_text(f"{name}: {shown}")
        with pytest.raises(ConfigError, match=f"is not one of {names}"):
            load_config(tmp_path / "x.yaml")


@pytest.mark.parametrize("value", [10**400, -(10**400)])
def test_a_whole_number_may_be_of_any_length(value: int) -> None:
    (problem,) = limit_problems(with_values({"seed": value}))
    assert problem.startswith(f"seed({str(value)[:77]}...) is out of range; give --seed a whole number")


TEXTS = [name for name, (_, kind) in FIELDS.items() if kind.base in (str, tuple) and not kind.choices]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty (an unset shell variable?)"),
        (" ", "is empty (an unset shell variable?)"),
        ("a\0b", "holds a character that cannot be printed"),
        ("a\nb", "holds a character that cannot be printed"),
        ("a" * 4096, "has more than 4,095 characters"),
        ("\udc80", "holds bytes that are not UTF-8"),
    ],
)
def test_a_text_is_a_path_or_a_name(name: str, text: str, said: str) -> None:
    (problem,) = limit_problems(with_values({name: ("a", text) if FIELDS[name][1].base is tuple else text}))
    assert problem.startswith(f"{name}({repr(text) if len(text) < 80 else repr(text[:77] + '...')}) {said}; give ")
