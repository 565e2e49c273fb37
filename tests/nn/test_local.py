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
from fp8_megatron.dtypes import StorageDtype
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

    def run(self, key: Hashable, inputs: Any, function: Callable[[], Any], shape: tuple[int, ...] | None = None) -> Any:
        with Operators() as operators:
            outputs = function()
        assert operators.seen == self.known.setdefault(key, operators.seen), "a list would repeat something else"
        return launch_list._with_shape(outputs, shape)


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
        assert torch.equal(local.forward_of_cast(whole, linear, dtype, x.shape), y)
        x_t = operand.t if keeps_columns else None
        assert x_t is None or isinstance(x_t, Quantized)
        for needs_grad_input in (False, True):
            local.backward(torch.randn_like(y), x_t, linear, needs_grad_input=needs_grad_input)
    assert y.shape[1] == rows


def without_owner(weight: ScaledTensor) -> ScaledTensor:
    """A copy of the stored weight."""
    return ScaledTensor(weight.payload.clone(), weight.scale.clone(), dtype=weight.dtype)


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
            weights = [trained.weight, rows, frozen.weight, without_owner(trained.weight), without_owner(rows)]
            for weight in weights:
                for dtype in (torch.bfloat16, torch.float16):
                    for bias in (None, torch.zeros(128, dtype=dtype), torch.zeros(128)):
                        use(weight, trained, dtype, bias)
    assert (lists.num_keys > 20) is (recipe != "blockwise")


@pytest.mark.parametrize("rows", [(4, 16), (3, 11), (5,), ()], ids=str)
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_layer_with_lists_trains_as_one_without(
    monkeypatch: pytest.MonkeyPatch, lists: Seen, level: str, recipe: RecipeName, rows: tuple[int, ...]
) -> None:
    """Bit for bit, over steps of one and of two gradients, with rows of padding and without."""

    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64, bias=False)
        )
        model, optimizer = fp8_megatron.initialize(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), opt_level=level, recipe=recipe
        )
        seen = []
        for num_gradients in (1, 1, 2, 1):
            for _ in range(num_gradients):
                x = torch.randn(*rows, 64, requires_grad=True)
                y = model(x)
                assert y.shape == x.shape and not y._is_view()
                y.backward(torch.randn_like(y))
                assert x.grad is not None
                seen += [y.detach(), x.grad]
            seen += [param.grad.float().clone() for param in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            seen += [value.float() for value in model.state_dict().values()]
        return seen

    got = trained()
    assert lists.num_keys
    with monkeypatch.context() as patch:
        patch.setattr(launch_list, "first_device", 0)
        expected = trained()
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_a_first_gradient_is_written_by_the_list(lists: Seen) -> None:
    """What `accumulate_` would write later."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
    model, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), opt_level="O2")
    model(torch.randn(16, 64)).sum().backward()
    (written,) = lists.backwards.known.values()
    assert any("quantize_blockwise_" in operator for operator in written)
    model(torch.randn(16, 64)).sum().backward()
    assert len(lists.backwards.known) == 2, "the second gradient is added"
    optimizer.zero_grad()
    x = torch.randn(16, 64, requires_grad=True)
    model(x).sum().backward(inputs=[x])
    assert model[0].weight.grad is None, "nobody asked for it"


def test_a_weight_that_is_not_contiguous_has_no_list(lists: Seen) -> None:
    layer = FP8Linear(64, 128, weight=StorageDtype.FP8)
    use(layer.weight, layer)
    num_keys = lists.num_keys
    columns: Any = layer.weight.detach()[:, :32]
    with pytest.raises(ValueError, match="contiguous"):
        use(columns, layer)
    assert lists.num_keys == num_keys
