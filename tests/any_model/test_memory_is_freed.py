"""A model and its optimizer leave memory when nobody holds them any more."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import fp8_megatron


def trained(level: str) -> list[weakref.ref[object]]:
    """References to a trained model, its optimizer and its weights, which nothing else holds."""
    layers = [torch.nn.Linear(32, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 32)]
    model = torch.nn.Sequential(*layers)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = fp8_megatron.initialize(model, optimizer, opt_level=level, recipe="delayed")
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
    return [weakref.ref(held) for held in (model, optimizer, *model.parameters())]


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_memory_is_freed(level: str) -> None:
    held = trained(level)
    gc.collect()
    assert [reference() for reference in held] == [None] * len(held)
