"""The dynamic loss scale: when it halves and doubles, and that it never shows in an update."""

from __future__ import annotations

import pytest
import torch

from fp8_megatron.config.schema import Config, PrecisionConfig
from fp8_megatron.optimizer.loss_scale import LossScale
from fp8_megatron.training.build import build_loss_scale
from tests.harness.tiny_gpt import tiny_optimizer

CPU = torch.device("cpu")
FP16 = PrecisionConfig(precision="fp16")


def after(scale: LossScale, steps: str) -> float:
    """The scale after steps that were good (.) or overflowed (x)."""
    for step in steps:
        scale.update(torch.tensor([step == "x"]))
    return scale.scale.item()


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("", 16.0),
        ("x", 16.0),  # forgiven
        ("xx", 8.0),
        ("xxx", 4.0),
        ("x..", 16.0),
        ("x..x", 8.0),  # only doubling forgets
        ("...", 16.0),
        ("....", 32.0),
        ("........", 64.0),
        ("...x....", 32.0),  # the window starts again
        ("xx....x", 16.0),  # doubled after two, so one is forgiven again
        ("xx....xx", 8.0),
        ("x" * 20, 2.0),  # the minimum
    ],
)
def test_halves_and_doubles(steps: str, expected: float) -> None:
    assert after(LossScale(16.0, CPU, window=4, hysteresis=2, minimum=2.0), steps) == expected


def test_constant_scale_stays() -> None:
    scale = build_loss_scale(Config(precision=FP16, optimizer=tiny_optimizer(loss_scale=8.0)), CPU)
    assert scale is not None and after(scale, "xxxx" + "." * 2000) == 8.0
    assert scale.scale_loss(torch.tensor(3.0)).item() == 24.0


def test_only_fp16_has_one() -> None:
    assert build_loss_scale(Config(), CPU) is None
    assert build_loss_scale(Config(precision=PrecisionConfig(precision="bf16")), CPU) is None
    dynamic = build_loss_scale(Config(precision=FP16), CPU)
    assert dynamic is not None and dynamic.scale.item() == 65536.0


def test_goes_on_from_its_state() -> None:
    first = LossScale(16.0, CPU, window=4, hysteresis=2)
    after(first, "x..")
    second = LossScale(1.0, CPU, window=4, hysteresis=2)
    second.load_state_dict({name: tensor.clone() for name, tensor in first.state_dict().items()})
    assert after(second, "..x") == after(first, "..x") == 32.0
