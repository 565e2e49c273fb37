"""Types of the configuration's fields. Each states its limits, which `limit_problems` checks."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from .words import flag_name, shortened, text_problem

#: The largest count of steps or bytes' owners: it fits into every integer that counts are kept in.
MAX_COUNT = 2**31 - 1
#: The largest count of samples, which have 64 bits. 15 trillion tokens are 3.7 billion sequences of 4,096.
MAX_SAMPLES = 2**40
#: Kernels compute in FP32. Within these there is room for products with learning rates and scales: 1e-320 would be 0.
MIN_REAL, MAX_REAL = 1e-30, 1e30

Count = Annotated[int, Ge(1), Le(MAX_COUNT)]
CountOrZero = Annotated[int, Ge(0), Le(MAX_COUNT)]
Samples = Annotated[int, Ge(1), Le(MAX_SAMPLES)]
SamplesOrZero = Annotated[int, Ge(0), Le(MAX_SAMPLES)]
#: A dimension of the model. The largest published ones are vocabularies and contexts of some millions.
Size = Annotated[int, Ge(1), Le(2**24)]
#: Experts of a layer, as many as a router's kernel takes.
NumExperts = Annotated[int, Ge(1), Le(2**15 - 1)]
#: The most layers of a model.
MAX_LAYERS = 100_000
Layers = Annotated[int, Ge(1), Le(MAX_LAYERS)]
LayersOrZero = Annotated[int, Ge(0), Le(MAX_LAYERS)]
#: The largest number of ranks of a job.
MAX_RANKS = 1_000_000
#: Ranks that share something.
NumRanks = Annotated[int, Ge(1), Le(MAX_RANKS)]
#: Sequences in a step.
BatchSize = Annotated[int, Ge(1), Le(2**20)]
#: Processes that each rank starts.
Processes = Annotated[int, Ge(0), Le(256)]
#: Threads of one process.
Threads = Annotated[int, Ge(1), Le(1024)]
#: Steps whose values are kept.
History = Annotated[int, Ge(1), Le(65_536)]
#: Powers of two; E4M3 reaches 448.
Margin = Annotated[int, Ge(0), Le(8)]
#: torch's group timeouts are milliseconds; a collective between nodes takes some at least, and no job runs for years.
Minutes = Annotated[float, Ge(0.01), Le(1e6)]
Positive = Annotated[float, Ge(MIN_REAL), Le(MAX_REAL)]
NotNegative = Annotated[float, Ge(0), Le(MAX_REAL)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
UpToOne = Annotated[float, Gt(0), Le(1)]
Share = Annotated[float, Ge(0), Le(1)]
AtLeastOne = Annotated[float, Ge(1), Le(MAX_REAL)]
Bound = Ge | Gt | Le | Lt
#: Kind of bound → (its attribute, the comparison that a value must pass, the bound in words).
_BOUNDS = {
    Ge: ("ge", operator.ge, "of at least"),
    Gt: ("gt", operator.gt, "above"),
    Le: ("le", operator.le, "up to"),
    Lt: ("lt", operator.lt, "below"),
}


@dataclasses.dataclass(frozen=True)
class FieldType:
    """The values that a field of the configuration takes, from its annotation.

    Attributes:
        base: the type of a value that is not None.
        choices: the values that the field takes. If empty, it takes any `base` within `bounds`.
        optional: whether the value may be None.
    """

    base: type
    choices: tuple[Any, ...] = ()
    optional: bool = False
    bounds: tuple[Bound, ...] = ()

    @classmethod
    def of(cls, annotation: Any) -> FieldType:
        """The type of a field with this annotation."""
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            inner = cls.of(arguments[0])
            bounds = tuple(item for item in arguments[1:] if isinstance(item, Bound))
            return dataclasses.replace(inner, bounds=inner.bounds + bounds)
        if origin in (Union, UnionType):
            (inside,) = (argument for argument in arguments if argument is not NoneType)
            return dataclasses.replace(cls.of(inside), optional=True)
        if origin is Literal:
            return cls(type(arguments[0]), arguments)
        if origin in (tuple, list, dict):
            return cls(origin)
        if issubclass(annotation, Enum):
            return cls(annotation, tuple(annotation))
        return cls(annotation)

    @property
    def choice_names(self) -> tuple[str, ...]:
        """`choices` as a user writes them."""
        return tuple(choice.value if isinstance(choice, Enum) else choice for choice in self.choices)


@cache
def field_types(section: type) -> Mapping[str, FieldType]:
    """The fields of a section of the configuration by name."""
    annotations = get_type_hints(section, include_extras=True)
    return MappingProxyType({name: FieldType.of(annotation) for name, annotation in annotations.items()})


def limit_problems(config: Any) -> Iterator[str]:
    """One line for each value that is outside its field's limits: flag, value, fix."""
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        for name, field_type in field_types(type(values)).items():  # type: ignore[arg-type]
            fix = _fix(field_type, getattr(values, name))
            if fix is not None:
                shown = getattr(values, name)
                shown = shown.value if isinstance(shown, Enum) else shown
                yield f"{name}({shortened(str(shown))}) is out of range; give {flag_name(name)} {fix}"
            yield from _text_problems(name, getattr(values, name))


def _text_problems(name: str, value: Any) -> Iterator[str]:
    """One line for each string that can be neither a path nor a name."""
    for text in value if isinstance(value, tuple) else (value,):
        problem = text_problem(text) if isinstance(text, str) else None
        if problem is not None:
            yield f"{name}('{shortened(text)}') {problem}; give {flag_name(name)} another value, or leave it out"


def value_problem(field_type: FieldType, value: Any) -> str | None:
    """What a value that a file gives for a field has to be instead; None if the field takes it."""
    if value is None and field_type.optional:
        return None
    bases = (int, float) if field_type.base is float else field_type.base
    is_of_kind = isinstance(value, bases) and isinstance(value, bool) == (field_type.base is bool)
    if not is_of_kind or (isinstance(value, str) and not value.isprintable()):
        return _kind(field_type)
    return _fix(field_type, value)


def _kind(field_type: FieldType) -> str:
    """The values of a field in words."""
    if field_type.choices:
        return "one of " + ", ".join(map(str, field_type.choice_names))
    kinds = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text that can be printed"}
    kind = kinds.get(field_type.base, f"a {field_type.base.__name__}")
    return " ".join([kind, " and ".join(map(_words, field_type.bounds))]).strip()


def _fix(field_type: FieldType, value: Any) -> str | None:
    """What to give instead of `value`; None if it is within its limits."""
    if value is None and field_type.optional:
        return None
    if field_type.choices:
        return None if value in field_type.choices else _kind(field_type)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if (isinstance(value, int) or math.isfinite(value)) and all(_holds(bound, value) for bound in field_type.bounds):
        return None
    return _kind(field_type)


def _holds(bound: Bound, value: float) -> bool:
    attribute, comparison, _ = _BOUNDS[type(bound)]
    return bool(comparison(value, getattr(bound, attribute)))


def _words(bound: Bound) -> str:
    attribute, _, words = _BOUNDS[type(bound)]
    return f"{words} {getattr(bound, attribute)}"
