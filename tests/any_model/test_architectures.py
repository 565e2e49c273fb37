"""`initialize` over models of other libraries: the loss of FP32 AdamW within 2%.

The loss of a run is its mean over the last 20 of 100 steps. All runs of an architecture see the same batches and start
from the same values. O3 differs from O2 by what ranks send: one process has the same bits.
"""

from __future__ import annotations

import pytest
import torch

import fp8_megatron
from fp8_megatron.any_model import report
from tests.any_model.architectures import ARCHITECTURES, Architecture

#: O1 has the user's own optimizer; these are a kind each.
WITH_O1 = ("mlp", "cnn", "gpt2", "vit")
NUM_STEPS, NUM_LAST = 100, 20

CASES = [
    pytest.param(name, marks=[pytest.mark.slow] if architecture.is_slow else [])
    for name, architecture in ARCHITECTURES.items()
]


def losses(architecture: Architecture, level: str | None, num_steps: int = NUM_STEPS) -> list[float]:
    """A run at `level`; None: FP32 with torch's AdamW."""
    torch.manual_seed(0)
    model = architecture.build()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        model.parameters(), lr=architecture.learning_rate, weight_decay=0.01
    )
    if level is not None:
        model, optimizer = fp8_megatron.initialize(model, optimizer, level)
        assert len(report(model).fp8) >= 2
    generator = torch.Generator().manual_seed(1)
    result = []
    model.train()
    for _ in range(num_steps):
        loss = architecture.loss(model, generator)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        result.append(loss.item())
    return result


@pytest.mark.parametrize("name", CASES)
def test_loss_of_fp32_within_two_percent(name: str) -> None:
    architecture = ARCHITECTURES[name]
    expected = losses(architecture, None)
    last = sum(expected[-NUM_LAST:]) / NUM_LAST
    assert last < 0.95 * expected[0], f"FP32 has learnt too little: {expected[0]} → {last}"
    runs = {level: losses(architecture, level) for level in (("O1", "O2") if name in WITH_O1 else ("O2",))}
    ratios = {level: sum(run[-NUM_LAST:]) / NUM_LAST / last for level, run in runs.items()}
    print(f"{name}: {expected[0]:.3f} → {last:.3f}; " + ", ".join(f"{k} {v:.4f}" for k, v in ratios.items()))
    assert all(abs(ratio - 1.0) < 0.02 for ratio in ratios.values()), (last, ratios)
    assert losses(architecture, "O3", 10) == runs["O2"][:10]
