"""Models of transformers in FP8: saved and loaded, generating, with gradient checkpointing, GPT-2's linear layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fp8_megatron
from fp8_megatron.any_model import report
from fp8_megatron.nn.conv1d import FP8Conv1D
from fp8_megatron.quantization.stats import snr_db
from tests.any_model.architectures import ARCHITECTURES, next_token

transformers = pytest.importorskip("transformers")


def build(name: str, level: str = "O3") -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = ARCHITECTURES[name].build()
    return fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), level)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    loss = next_token(model, torch.Generator().manual_seed(seed))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_trained_model_is_saved_and_generates(name: str, tmp_path: Path) -> None:
    model, optimizer = build(name)
    kept = report(model)
    if name == "gpt2":
        assert len(kept.fp8) == 8 and kept.stays == {"lm_head": "its weight is also that of transformer.wte"}
        assert all(isinstance(model.get_submodule(layer), FP8Conv1D) for layer in kept.fp8)
    for seed in range(3):
        step(model, optimizer, seed)
    model.eval()
    tokens = torch.randint(96, (2, 5))
    generated = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert generated.shape == (2, 9)
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path).eval()
    assert not report(plain).fp8
    with torch.no_grad():
        # A product of two FP8 operands keeps 28.5 dB (tests/nn/test_linear.py). The branches lose as much as the
        # head: 25.5 dB together, less 1 dB for the sample.
        assert snr_db(model(tokens).logits, plain(tokens).logits) > 24.5
    for key, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key


def test_gradient_checkpointing_keeps_the_bits() -> None:
    losses = []
    for checkpoints in (False, True):
        model, optimizer = build("llama", "O2")
        if checkpoints:
            model.gradient_checkpointing_enable()
        model.train()
        losses.append([step(model, optimizer, seed) for seed in range(3)])
    assert losses[0] == losses[1]
