"""`msamp.te` and `use_te` over stand-ins for Transformer Engine's modules."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from fp8_megatron.any_model import report
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from tests.any_model.te_stand_ins import LayerNormLinear, LayerNormMLP, Linear


@pytest.fixture(autouse=True)
def names(msamp: ModuleType) -> None:
    """The module is importable."""


def build() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(LayerNormLinear(32, 64), Linear(64, 32), LayerNormMLP(32, 64), torch.nn.Linear(32, 32))


@pytest.mark.parametrize("storage", ["kfloat16", "kfloat8_e4m3"])
def test_the_weights_of_their_modules_are_replaced(storage: str) -> None:
    """As MS-AMP's own test looks at them, less its class of weights; an optimizer of its names trains them."""
    from msamp.common.dtype import Dtypes
    from msamp.optim import LBAdamW
    from msamp.te import TeReplacer

    qtype = getattr(Dtypes, storage)
    model = TeReplacer.replace(build(), qtype)
    weights = [
        getattr(module, name) for module in model for name in TeReplacer.module_weight_names.get(type(module), ())
    ]
    assert len(weights) == 4 and all(isinstance(weight, ScaledTensor) for weight in weights)
    assert {weight.payload.dtype for weight in weights} == {
        torch.float16 if storage == "kfloat16" else torch.float8_e4m3fn
    }
    assert type(model[3]) is torch.nn.Linear
    optimizer, x = LBAdamW(model.parameters(), lr=1e-2), torch.randn(64, 32)
    losses = []
    for _ in range(20):
        loss = (model(x) - x.sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("use_te", [False, True])
def test_use_te_chooses_the_kind(use_te: bool) -> None:
    import msamp

    model = build()
    model, _ = msamp.initialize(model, torch.optim.AdamW(model.parameters()), "O2", use_te=use_te)
    expected = {"0", "1", "2.fc1", "2.fc2"} if use_te else {"3"}
    assert set(report(model).fp8) == expected


def test_a_model_without_their_modules_is_refused() -> None:
    from msamp.te import TeReplacer

    with pytest.raises(ValueError, match=r"the model has no te\.Linear"):
        TeReplacer.replace(torch.nn.Sequential(torch.nn.Linear(32, 32)))
