"""Sliding windows of attention, as Megatron writes them on a command line."""

from __future__ import annotations

import ast

from .words import whole_number

#: Layers that a pattern may describe: `fields.Layers`' limit.
_MOST_LAYERS = 100_000


def window_sizes(text: str) -> tuple[int, int]:
    """``128,0`` or ``(128,0)``: tokens to the left and to the right of a token, which it attends to beside itself.

    Raises:
        ValueError: it is not two whole numbers.
    """
    words = text.strip().removeprefix("(").removesuffix(")").split(",")
    if len(words) != 2:
        raise ValueError(text)
    return whole_number(words[0].strip()), whole_number(words[1].strip())


def layer_pattern(text: str) -> int | list[int]:
    """``4``, or a Python expression of lists such as ``[1]*3+[0]``: which layers have a window.

    A number N leaves every N-th layer without. A list has a 1 for each layer with a window and a 0 for each other.

    Raises:
        ValueError: it is neither.
    """
    try:
        return whole_number(text.strip())
    except ValueError:
        pass
    try:
        pattern = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(text) from error
    if not isinstance(pattern, list) or not all(value in (0, 1) for value in pattern):
        raise ValueError(text)
    return pattern


def has_window(pattern: int | list[int] | None, layer: int) -> bool:
    """Whether a layer has a window; 0 is the first layer. `pattern` None: all do."""
    if pattern is None:
        return True
    return bool(pattern[layer]) if isinstance(pattern, list) else (layer + 1) % pattern != 0


def _value(node: ast.expr) -> int | list[int]:
    """Lists of numbers, sums of lists, products of a list and a number."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        items = [_value(item) for item in node.elts]
        if all(isinstance(item, int) for item in items):
            return [item for item in items if isinstance(item, int)]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, int) and isinstance(right, list):
            left, right = right, left
        if not isinstance(node.op, ast.Mult) or not isinstance(left, list) or not isinstance(right, int):
            raise ValueError(ast.dump(node))
        if len(left) * right <= _MOST_LAYERS:
            return left * right
    raise ValueError(ast.dump(node))
