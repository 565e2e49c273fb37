"""Every Triton kernel beside its specification on a CPU, by Triton's interpreter. `make test-triton` runs it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_megatron.kernels import registration
from tests.kernels import test_operators

pytest.importorskip("triton")

import triton

_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.skipif(_VERSION < (3, 9), reason="older interpreters fail in loops over tensors"),
]
OPERATORS = sorted(
    name
    for name, declared in registration.operators().items()
    if declared.gpu_module is not None and declared.gpu_module.endswith("triton")
)
#: Of FP32 numbers, which are sums in another order or functions with another last bit.
_LEAST_SNR_DB = 120.0
#: Of elements in 16 or 8 bits: those may fall on the other side of a rounding.
_MOST_DIFFERENT = 1e-3


@pytest.mark.parametrize(("rows", "columns"), [(32, 64), (96, 128)])
@pytest.mark.parametrize("name", OPERATORS)
def test_numbers(name: str, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for constant, size in (("T", rows), ("K", columns), ("N", rows * columns)):
        monkeypatch.setattr(test_operators, constant, size)
    torch.manual_seed(rows)
    declared = registration.operators()[name]
    for sample in test_operators.samples()[name]:
        expected = copy.deepcopy(sample)
        outputs = declared.gpu_variant()(*sample)
        wanted = declared.specification(*expected)
        for one, other in zip(_tensors(outputs, sample), _tensors(wanted, expected), strict=True):
            _assert_alike(one, other)


def _tensors(*trees: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(trees) if isinstance(leaf, Tensor)]


def _assert_alike(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    measured, exact = actual.double(), expected.double()
    different = ~((measured == exact) | (measured.isnan() & exact.isnan()))
    if expected.dtype in (torch.float32, torch.float64):
        measured, exact = measured[different], exact[different]
        noise = (measured - exact).square().sum().item()
        signal = expected.double().nan_to_num(0.0, 0.0, 0.0).square().sum().item()
        assert noise == 0.0 or 10.0 * math.log10(signal / noise) >= _LEAST_SNR_DB
    else:
        assert different.sum().item() <= _MOST_DIFFERENT * different.numel()
