"""Every field states its limits, and a value outside them is one line with the flag and the fix."""

from __future__ import annotations

import dataclasses
import math
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from annotated_types import Ge, Gt, Le, Lt

from fp8_megatron.config.checks import ConfigError, check_config
from fp8_megatron.config.io import load_config, parse_config
from fp8_megatron.config.limits import Bound, FieldType, field_types, limit_problems
from fp8_megatron.config.schema import Config

FIELDS: dict[str, tuple[str, FieldType]] = {
    name: (section.name, kind)
    for section in dataclasses.fields(Config)
    for name, kind in field_types(type(getattr(Config(), section.name))).items()
}
NUMBERS = [name for name, (_, kind) in FIELDS.items() if kind.base in (int, float)]
CHOICES = [name for name, (_, kind) in FIELDS.items() if kind.choices]


def with_value(name: str, value: Any) -> Config:
    section = FIELDS[name][0]
    return dataclasses.replace(Config(), **{section: dataclasses.replace(getattr(Config(), section), **{name: value})})


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
def test_a_number_has_a_least_value(name: str) -> None:
    assert any(isinstance(bound, Ge | Gt) for bound in FIELDS[name][1].bounds)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_outside_its_limits_is_one_line_with_flag_and_fix(name: str, tmp_path: Path) -> None:
    kind = FIELDS[name][1]
    flag = "--" + name.replace("_", "-")
    path = tmp_path / "x.yaml"
    for bound in kind.bounds:
        value = kind.base(inside(bound, kind.base))
        assert list(limit_problems(with_value(name, value))) == []
        value = kind.base(outside(bound, kind.base))
        (problem,) = limit_problems(with_value(name, value))
        assert problem.startswith(f"{name}({value}) is out of range; give {flag} a ")
    path.write_text(f"{name}: {value!r}")
    by_flag, by_file = parse_config([f"{flag}={value!r}"]), load_config(path)
    assert by_flag == by_file == with_value(name, value)
    with pytest.raises(ConfigError, match=f"give {flag} a "):
        check_config(by_flag, 1)


@pytest.mark.parametrize("name", [name for name in NUMBERS if FIELDS[name][1].base is float])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_float_is_finite(name: str, value: float) -> None:
    (problem,) = limit_problems(with_value(name, value))
    assert f"{name}({value}) is out of range; give --{name.replace('_', '-')} a finite number" in problem


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_is_one_of_those_that_are_listed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = FIELDS[name][1]
    flag, names = "--" + name.replace("_", "-"), ", ".join(kind.choice_names)
    assert parse_config([flag, kind.choice_names[-1]]) == with_value(name, kind.choices[-1])
    others = type(kind.choices[0]) if issubclass(kind.base, Enum) else ()
    for refused in [*(other for other in others if other not in kind.choices), "nonsense"]:
        (problem,) = limit_problems(with_value(name, refused))
        shown = refused.value if isinstance(refused, Enum) else refused
        assert problem == f"{name}({shown}) is out of range; give {flag} one of {names}"
    with pytest.raises(SystemExit):
        parse_config([flag, shown])
    assert shown in capsys.readouterr().err
    (tmp_path / "x.yaml").write_text(f"{name}: {shown}")
    with pytest.raises(ConfigError, match=f"is not one of {names}"):
        load_config(tmp_path / "x.yaml")
