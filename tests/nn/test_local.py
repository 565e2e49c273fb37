"""A layer's launch lists: a key holds every decision of Python, because a list repeats what Python did for it.

On a CPU no list is made. Here lists keep the operators that ran for a key, and compare.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fp8_megatron
from fp8_megatron.formats import StorageDtype
from fp8_megatron.kernels import launch_list
from fp8_megatron.nn import local
from fp8_megatron.nn.gemms import LinearParams
from fp8_megatron.nn.module import FP8Linear
from fp8_megatron.quantization.operand import Quantized
from fp8_megatron.quantization.recipe import RecipeName
from fp8_megatron.quantization.scaled_tensor import ScaledTensor


class Operators(TorchDispatchMode):
    """Names of operators with shapes and dtypes, as they run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fp8_megatron":
            shown = [(one.dtype, *one.shape) if isinstance(one, Tensor) else one for one in args]
            self.seen.append(f"{func} {shown}")
        return func(*args, **(kwargs or {}))


class Lists:
    """In the place of `LaunchLists`."""

    def __init__(self) -> None:
        self.known: dict[Hashable, list[str]] = {}

    take = staticmethod(launch_list.LaunchLists.take)

    def run(self, key: Hashable, inputs: Any, function: Callable[[], Any]) -> Any:
        with Operators() as operators:
            outputs = function()
        assert operators.seen == self.known.setdefault(key, operators.seen), "a list would repeat something else"
        return outputs


class Seen(NamedTuple):
    forwards: Lists
    products: Lists
    backwards: Lists

    @property
    def num_keys(self) -> int:
        return sum(len(lists.known) for lists in self)


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    seen = Seen(Lists(), Lists(), Lists())
    monkeypatch.setattr(launch_list, "first_device", -1)
    monkeypatch.setattr(local, "_forwards", seen.forwards)
    monkeypatch.setattr(local, "_products", seen.products)
    monkeypatch.setattr(local, "_backwards", seen.backwards)
    yield seen


def use(
    weight: ScaledTensor, layer: FP8Linear, dtype: torch.dtype = torch.bfloat16, bias: Tensor | None = None
) -> None:
    """A forward and a backward of every kind with this weight."""
    linear = LinearParams(weight, bias, layer.quantizers)
    rows, columns = weight.shape
    for keeps_columns in (False, True):
        x = torch.randn(32, columns, dtype=dtype)
        y, operand = local.forward(x, linear, dtype, keeps_columns=keeps_columns)
        again, whole = local.forward(x, linear, dtype, keeps_columns=keeps_columns, keeps_rows=True)
        assert torch.equal(again, y)
        assert torch.equal(local.forward_of_cast(whole, linear, dtype), y)
        x_t = operand.t if keeps_columns else None
        assert x_t is None or isinstance(x_t, Quantized)
        for needs_grad_input in (False, True):
            local.backward(torch.randn_like(y), x_t, linear, needs_grad_input=needs_grad_input)
    assert y.shape[1] == rows


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_key_holds_every_decision(lists: Seen, level: str, recipe: RecipeName) -> None:
    """Weights of one shape: before and after a step, written to, without an owner, and rows of a larger one."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 256), torch.nn.Linear(128, 128))
    model[2].requires_grad_(False)
    model, optimizer = fp8_megatron.initialize(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), opt_level=level, recipe=recipe
    )
    trained, larger, frozen = model
    for _ in range(2):
        (trained(torch.randn(32, 128)).square().mean() + larger(torch.randn(32, 128)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            rows = larger.weight.detach()[:128]
            weights = [trained.weight, rows, frozen.weight, trained.weight.detach().clone(), rows.clone()]
            for weight in weights:
                for dtype in (torch.bfloat16, torch.float16):
                    for bias in (None, torch.zeros(128, dtype=dtype), torch.zeros(128)):
                        use(weight, trained, dtype, bias)
    assert (lists.num_keys > 20) is (recipe != "blockwise")


def test_a_weight_that_is_not_contiguous_has_no_list(lists: Seen) -> None:
    layer = FP8Linear(64, 128, weight=StorageDtype.FP8)
    use(layer.weight, layer)
    num_keys = lists.num_keys
    columns: Any = layer.weight.detach()[:, :32]
    with pytest.raises(ValueError, match="contiguous"):
        use(columns, layer)
    assert lists.num_keys == num_keys
