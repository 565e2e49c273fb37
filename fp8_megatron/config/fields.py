"""Types of the configuration's fields. Each states its limits, which `limits` enforces, and how --help shows it."""

from __future__ import annotations

from typing import Annotated

import tyro
from annotated_types import Ge, Gt, Le, Lt


def _default_hint(default: str) -> str:
    """The note on a flag's default; empty if there is no default or the flag's form shows it."""
    return "" if default in ("", "none", "True", "False") else f"(default: {default})"


#: Marks fields that have no default, or whose help text or form of flag names it.
UNSET = tyro.conf.arg(help_behavior_hint=_default_hint)

Switch = Annotated[bool, UNSET]
Words = Annotated[tuple[str, ...], UNSET]
Text = Annotated[str | None, UNSET]

Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
UpToOne = Annotated[float, Gt(0), Le(1)]

OptionalCount = Annotated[Count | None, UNSET]
OptionalPositive = Annotated[Positive | None, UNSET]
OptionalFraction = Annotated[BelowOne | None, UNSET]
