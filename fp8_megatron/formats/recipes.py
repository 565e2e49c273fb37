"""The recipes by name: which format each operand of a linear layer has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import get_args

from ..storage import RecipeName
from . import blockwise, mxfp8, nvfp4, tensorwise
from .format import Format, Roles

_ROLES: dict[RecipeName, Callable[[bool], Roles]] = {
    "tensorwise": tensorwise.roles,
    "delayed": tensorwise.roles,
    "blockwise": blockwise.roles,
    "mxfp8": mxfp8.roles,
    "nvfp4": nvfp4.roles,
}


@functools.cache
def roles_of(name: RecipeName, power_of_two: bool) -> Roles:
    """The formats of a recipe. `power_of_two`: see ``roles`` of its module."""
    return _ROLES[name](power_of_two)


@functools.cache
def input_format(text: str) -> Format:
    """The format of a recipe's inputs that `text` names, as ``str`` of it does."""
    formats = (roles_of(name, rounds).input for name in get_args(RecipeName) for rounds in (False, True))
    return next(format for format in formats if str(format) == text)
