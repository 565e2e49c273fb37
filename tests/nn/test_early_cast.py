"""A norm's backward casts its gradient for the layer in front: the same bits as when that layer does it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from fp8_megatron.config.schema import Config, ParallelConfig, PrecisionConfig
from fp8_megatron.dtypes import E5M2
from fp8_megatron.formats.format import Quantized
from fp8_megatron.formats.tensorwise import Tensorwise
from fp8_megatron.quantization.early_cast import EarlyCast
from fp8_megatron.quantization.sources import CastGrad
from tests.harness.ranks import RankPool
from tests.harness.tiny_gpt import GPT3_STYLE, LLAMA_STYLE, TinyRun, random_batches, tiny_config, train_tiny_gpt

STEPS, MICRO_BATCHES = 3, 2
DELAYED = PrecisionConfig(fp8_recipe="delayed", fp8_amax_history_len=2)


def cast_of(grad: torch.Tensor) -> CastGrad:
    payload = grad.to(E5M2)
    return CastGrad(Quantized(payload, payload.t().contiguous(), torch.ones(1), Tensorwise(E5M2)), None)


@pytest.mark.parametrize("other", ["copy", "written", "part", "turned"])
def test_another_gradient_has_none(other: str) -> None:
    grad, early = torch.randn(4, 8), EarlyCast()
    early.put(grad, cast_of(grad))
    if other == "written":
        grad += 1.0
    arrived = {"copy": grad.clone(), "written": grad, "part": grad[:2], "turned": grad.t()}[other]
    assert early.take(arrived) is None


def test_memory_that_is_used_again_is_another_gradient() -> None:
    early, memory = EarlyCast(), bytearray(4 * 1024)
    grad = torch.frombuffer(memory, dtype=torch.float32).view(32, 32)
    early.put(grad, cast_of(grad))
    address = grad.data_ptr()
    del grad
    other = torch.frombuffer(memory, dtype=torch.float32).view(32, 32)
    assert other.data_ptr() == address
    assert early.take(other) is None


def _train(config: Config, has_receivers: bool) -> tuple[TinyRun, int]:
    """A run, and how often a layer found its gradient cast."""
    num_taken = 0
    take = EarlyCast.take

    def counting(self: EarlyCast, grad: torch.Tensor) -> Any:
        nonlocal num_taken
        taken = take(self, grad)
        num_taken += taken is not None
        return taken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EarlyCast, "take", counting)
        if not has_receivers:
            patch.setattr(EarlyCast, "known_scale", lambda self: None)
        return train_tiny_gpt(config, random_batches(STEPS, MICRO_BATCHES)), num_taken


STYLES = {
    "gpt3": GPT3_STYLE,
    "llama": LLAMA_STYLE,
    "experts": replace(LLAMA_STYLE, num_experts=4, moe_ffn_hidden_size=64, moe_router_dtype="fp32"),
}
#: (style, head, tensor-parallel ranks): each pair of values of dense models is in one of these.
FAST = [
    ("gpt3", "bf16_head", 1),
    ("llama", "fp8_head", 1),
    ("gpt3", "fp8_head", 2),
    ("llama", "bf16_head", 2),
    ("experts", "fp8_head", 1),
]


@pytest.mark.parametrize(
    ("style", "head", "num_ranks"),
    [
        *FAST,
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(("gpt3", "llama"), ("bf16_head", "fp8_head"), (1, 2))
            if case not in FAST
        ],
    ],
)
def test_the_same_bits_as_in_the_layer(ranks: RankPool, style: str, head: str, num_ranks: int) -> None:
    parallel = ParallelConfig(num_ranks, sequence_parallel=num_ranks > 1)
    model = STYLES[style]
    precision = replace(DELAYED, fp8_lm_head=head == "fp8_head")
    config = tiny_config(model, parallel=parallel, precision=precision)
    # From the second step on: of L layers 2L − 1 have a norm behind them, and the last one has the head's.
    expected = (STEPS - 1) * MICRO_BATCHES * (2 * model.num_layers - (head == "bf16_head"))
    for (early, num_taken), (late, none) in zip(
        ranks.run(_train, config, True, num_ranks=num_ranks),
        ranks.run(_train, config, False, num_ranks=num_ranks),
        strict=True,
    ):
        assert (num_taken, none) == (expected, 0)
        assert (early.losses, early.grad_norms) == (late.losses, late.grad_norms)
        assert all(torch.equal(early.weights[name], weight) for name, weight in late.weights.items())
