"""What replaces a weight's values or its memory: it is taken, or refused by the layer's name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8_megatron
from fp8_megatron.any_model import plain_model
from fp8_megatron.quantization.scaled_tensor import ScaledTensor

LEVELS = ("O1", "O2", "O3")


def build(level: str = "O3") -> tuple[Any, torch.optim.Optimizer]:
    """The first layer is trained, the last one is frozen."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 32))
    model[2].requires_grad_(False)
    trained = [param for param in model.parameters() if param.requires_grad]
    return fp8_megatron.initialize(model, torch.optim.AdamW(trained, lr=3e-3), level)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
    (model(x) - x.sin()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def bits(weight: Any) -> tuple[bytes, bytes]:
    return bytes(weight.payload.view(torch.uint8).flatten().tolist()), bytes(weight.scale.numpy().tobytes())


def _assign_data(weight: Any, change: Tensor) -> None:
    weight.data = weight.data.clone() + change


def _add_to_data(weight: Any, change: Tensor) -> None:
    weight.data += change


def _write_transpose(weight: Any, change: Tensor) -> None:
    weight.data.t().copy_((weight.data + change).t())


def _write_rows(weight: Any, change: Tensor) -> None:
    weight.data[:16].copy_(weight.data[:16] + change[:16])


#: As PEFT merges: LoRA with `safe_merge`, DoRA, IA3, LoHa and BOFT assign ``.data``; HiRA and OFT copy.
MERGES: dict[str, Callable[[Any, Tensor], object]] = {
    "data": _assign_data,
    "data_plus": _add_to_data,
    "data_copy_": lambda weight, change: weight.data.copy_(weight.data + change),
    "copy_": lambda weight, change: weight.copy_(weight + change),
    "add_": lambda weight, change: weight.add_(change),
    "transpose": _write_transpose,
    "rows": _write_rows,
    "foreach": lambda weight, change: torch._foreach_copy_([weight], [weight + change]),
    "out": lambda weight, change: torch.add(weight.detach().clone(), change, out=weight.data),
}


@pytest.mark.parametrize("merge", list(MERGES))
@pytest.mark.parametrize("is_sliced", [False, True], ids=["all", "one_row"])
def test_a_small_change_of_a_frozen_fp8_weight_is_refused(merge: str, is_sliced: bool) -> None:
    """FP8 would round most of it away. An adapter, or a step of an average."""
    model, _ = build()
    weight = model[2].weight
    change = 1e-3 * torch.randn(weight.shape)
    if is_sliced:
        change[1:] = 0.0
    before = bits(weight)
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"(?=.*2)(?=.*master).*(plain_model|filter=…)"):
        MERGES[merge](weight, change)
    assert bits(weight) == before


@pytest.mark.parametrize("kind", ["safe", "dora", "ia3"])
def test_peft_merges_in_the_plain_model_alone(kind: str) -> None:
    peft = pytest.importorskip("peft", reason="its adapters are merged")
    torch.manual_seed(0)
    settings = {
        "safe": lambda: peft.LoraConfig(r=4, target_modules=["0"]),
        "dora": lambda: peft.LoraConfig(r=4, target_modules=["0"], use_dora=True),
        "ia3": lambda: peft.IA3Config(target_modules=["0"], feedforward_modules=[]),
    }[kind]()
    model: Any = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(32, 32)), settings)
    trained = [param for param in model.parameters() if param.requires_grad]
    model, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(trained, lr=3e-3))
    for seed in range(2):
        step(model, optimizer, seed)
    x = torch.randn(8, 32)
    plain = plain_model(model).eval()
    expected = plain(x)
    torch.testing.assert_close(plain.merge_and_unload(safe_merge=True)(x), expected, rtol=1e-3, atol=1e-4)
    with pytest.raises(NotImplementedError, match=r"master.*plain_model"):
        model.merge_and_unload(safe_merge=kind == "safe")


@pytest.mark.parametrize("assigns", [False, True], ids=["copies", "assigns"])
@pytest.mark.parametrize("swaps", [False, True], ids=["", "torchs_future"])
@pytest.mark.parametrize("difference", [0.0, 1e-3, 0.5])
def test_a_state_dict_is_taken_whatever_is_lost(
    difference: float, swaps: bool, assigns: bool, torchs_future: Callable[[], None]
) -> None:
    """The same 16-bit weights again, those of a fine-tuned model, or others. The layer rounds each once."""
    source = torch.nn.Linear(64, 32)
    with torch.no_grad():
        other = {name: value + difference * torch.randn(value.shape) for name, value in source.state_dict().items()}
    model, _ = build()
    model[2].load_state_dict(source.state_dict())
    if swaps:
        torchs_future()
    model[2].load_state_dict(copy.deepcopy(other), assign=assigns)
    rounded = ScaledTensor.quantize(other["weight"])
    assert bits(model[2].weight) == bits(rounded)


@pytest.mark.parametrize("form", ["data", "copy_"])
def test_whole_new_values_of_a_frozen_weight_are_taken(form: str) -> None:
    """Random ones, those that it has, an average of these in FP32, zeros, and another FP8 weight's."""
    model, optimizer = build()
    weight = model[2].weight
    same = weight.detach().clone()
    others = [
        torch.randn(weight.shape),
        0.1 * torch.randn(weight.shape),
        torch.zeros(weight.shape),
        same,
        0.3 * same + 0.7 * same,
    ]
    for value in others:
        if form == "data":
            weight.data = value
        else:
            with torch.no_grad():
                weight.copy_(value)
        torch.testing.assert_close(weight.detach().clone(), value, rtol=2**-4, atol=1e-3)
    step(model, optimizer)
    with torch.no_grad():
        model[2].weight.copy_(model[2].weight)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("order", [1, -1])
def test_the_weight_of_an_optimizer_is_not_swapped(level: str, order: int) -> None:
    """torch keeps the parameter's identity, so its optimizer goes on; here nothing would move the new tensor."""
    model, optimizer = build(level)
    step(model, optimizer)
    twin, its_optimizer = build(level)
    step(twin, its_optimizer)
    pair = [model[0].weight, torch.nn.Parameter(torch.randn(64, 32))][::order]
    with pytest.raises(NotImplementedError, match=r"swap_tensors .*\(64, 32\) \(layer 0\).*p\.copy_"):
        torch.utils.swap_tensors(*pair)
    for own, its in ((model, optimizer), (twin, its_optimizer)):
        step(own, its, seed=1)
    for name, value in twin.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.fixture
def torchs_future() -> Iterator[Callable[[], None]]:
    """Switches on that modules swap parameters where they convert or load them."""
    yield lambda: torch.__future__.set_swap_module_params_on_conversion(True)
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_loads_and_moves_where_torch_swaps_parameters(level: str, torchs_future: Callable[[], None]) -> None:
    """The weight stays the optimizer's, and the next step has the same bits."""
    states = []
    for swaps in (False, True):
        model, optimizer = build(level)
        step(model, optimizer)
        if swaps:
            torchs_future()
        model.to("cpu").float()
        model.load_state_dict({name: 1.5 * value for name, value in model.state_dict().items()})
        for seed in (1, 2):
            step(model, optimizer, seed)
        states.append(model.state_dict())
    for name, value in states[0].items():
        assert torch.equal(states[1][name], value), name
