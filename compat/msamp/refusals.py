"""MS-AMP's names that are not provided: asking for one is an error with the reason and what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def not_provided(name: str, reason: str) -> ImportError:
    """The error for a name of MS-AMP that this distribution does not provide."""
    return ImportError(f"{name} is not provided: {reason}")


def refuse(module: str, reasons: dict[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__`` that raises `not_provided` for the names in `reasons`."""

    def __getattr__(name: str) -> Any:
        if name in reasons:
            raise not_provided(f"{module}.{name}", reasons[name])
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__
