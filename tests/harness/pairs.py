"""Whether tests run whole products of their cases, or as many that each value of a list meets each of another."""

import os
from collections.abc import Sequence
from typing import TypeVar

Value = TypeVar("Value")

#: EVERY_PAIR=1 in the environment: whole products.
EVERY_PAIR = os.environ.get("EVERY_PAIR") == "1"


def by_turns(values: Sequence[Value], turn: int) -> Sequence[Value]:
    """One of `values`, another each turn; with EVERY_PAIR=1 all."""
    return values if EVERY_PAIR else [values[turn % len(values)]]
