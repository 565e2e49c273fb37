"""Triton's interpreter with the numbers of a GPU: what it lacks or rounds differently is added here.

`TRITON_INTERPRET=1` must be set before the first kernel is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

Array = np.ndarray[Any, np.dtype[Any]]

_FLOATS = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _converted(values: Array, source: tl.dtype, target: tl.dtype, _rounding: Any) -> Array:
    """The bits of `values` in another float format: to nearest even; FP8 saturates, as in a GPU's conversion.

    (The interpreter cuts the mantissa off.)
    """
    before, after = _FLOATS[source], _FLOATS[target]
    floats = torch.from_numpy(np.array(values)).view(_BITS[before.itemsize]).view(before).float()
    if after.itemsize == 1:
        largest = torch.finfo(after).max
        floats = floats.clamp(-largest, largest)
    return floats.to(after).view(_BITS[after.itemsize]).numpy().view(f"u{after.itemsize}")


def _sum_rounded_down(a: Array, b: Array) -> Array:
    """FP32 a + b, rounded towards -∞."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    total = a + b
    part = total - a
    lost = (a - (total - part)) + (b - part)  # exact: Knuth's two-sum
    rounded = total.astype(np.float32)
    above = (rounded > total) | ((rounded == total) & (lost < 0.0))
    return np.where(above, np.nextafter(rounded, np.float32(-np.inf)), rounded)


def _on_arrays(function: Callable[..., Array]) -> Callable[..., tl.tensor]:
    """A function of the device library, from one of arrays."""

    def call(*given: Any, _semantic: Any = None) -> tl.tensor:
        operands = [operand.value if isinstance(operand, tl.constexpr) else operand for operand in given]
        arrays = [o.handle.data if isinstance(o, tl.tensor) else np.float32(o) for o in operands]
        result = function(*arrays)
        shape = next(o.type for o in operands if isinstance(o, tl.tensor) and o.handle.data.shape == result.shape)
        return tl.tensor(TensorHandle(result, tl.float32), shape)

    return call


_LIBRARY: dict[str, Callable[..., Array]] = {"add_rd": _sum_rounded_down, "fast_dividef": np.divide, "expm1": np.expm1}


def _assembly(
    _builder: Any, source: str, _constraints: str, operands: Sequence[TensorHandle], *_others: Any
) -> SimpleNamespace:
    """The kernels' two pieces of inline assembly."""
    values = [operand.data for operand in operands]
    if source.startswith("rcp.approx"):
        result = TensorHandle(np.float32(1.0) / values[0], tl.float32)
    else:
        assert source.count("prmt") == 8, source  # the bytes of four rows as a word for each column
        rows = [value.view(np.uint8).astype(np.uint32) << 8 * row for row, value in enumerate(values)]
        result = TensorHandle(np.bitwise_or.reduce(rows).view(np.int32), tl.int32)
    return SimpleNamespace(get_result=lambda _: result)


def _to_tensor(semantic: TritonSemantic, operand: Any, check_type: bool = True) -> Any:
    """A constant of a module times a tensor comes as a constant."""
    value = operand.value if isinstance(operand, tl.constexpr) else operand
    return value if isinstance(value, tl.tensor) else _PLAIN_TO_TENSOR(semantic, value, check_type)


def _masked_store(builder: InterpreterBuilder, pointers: Any, value: Any, mask: TensorHandle, policy: Any) -> Any:
    """A condition of a number and a tensor comes as integers."""
    return _PLAIN_STORE(builder, pointers, value, TensorHandle(mask.data.astype(np.bool_), tl.int1), policy)


def _binary(builder: InterpreterBuilder, left: TensorHandle, right: TensorHandle, operation: Any) -> TensorHandle:
    """BF16 numbers are integers to NumPy."""
    if left.dtype.scalar != tl.bfloat16:
        return _PLAIN_BINARY(builder, left, right, operation)
    floats = (_converted(operand.data, tl.bfloat16, tl.float32, None).view(np.float32) for operand in (left, right))
    result = operation(*floats)
    if result.dtype == np.bool_:
        return TensorHandle(result, tl.int1)
    return TensorHandle(_converted(result, tl.float32, tl.bfloat16, None), tl.bfloat16)


def _dot(builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle, total: TensorHandle, *others: Any) -> Any:
    """As `_binary`, of matrices."""
    if a.dtype.scalar == tl.bfloat16:
        floats = (_converted(x.data, tl.bfloat16, tl.float32, None).view(np.float32) for x in (a, b))
        a, b = (TensorHandle(array, tl.float32) for array in floats)
    return _PLAIN_DOT(builder, a, b, total, *others)


_PLAIN_BINARY, _PLAIN_DOT = InterpreterBuilder.binary_op, InterpreterBuilder.create_dot
_PLAIN_TO_TENSOR, _PLAIN_STORE = TritonSemantic.to_tensor, InterpreterBuilder.create_masked_store


def install() -> None:
    """For the whole process: what the interpreter lacks, and a GPU for the launches' own questions, a Hopper."""
    assert knobs.runtime.interpret, "set TRITON_INTERPRET=1"
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(interpreter, "_convert_float", _converted)
    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", _assembly)
    for name, function in _LIBRARY.items():
        monkeypatch.setattr(libdevice, name, _on_arrays(function))
    monkeypatch.setattr(InterpreterBuilder, "binary_op", _binary)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", _dot)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", _masked_store)
    monkeypatch.setattr(TritonSemantic, "to_tensor", _to_tensor)
    monkeypatch.setattr(tl.constexpr, "__rlshift__", lambda self, other: other << self.value, raising=False)
    properties = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
