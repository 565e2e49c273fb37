"""Norm against torch's norms in float64."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from fp8_megatron.mcore.norm import BranchingNorm, Norm
from fp8_megatron.quantization.stats import snr_db

HIDDEN = 192


def make_norm(normalization: str, kind: type[Norm] = Norm, *, sequence_parallel: bool = False) -> Norm:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        normalization=normalization,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
    )
    config.sequence_parallel = sequence_parallel
    return kind(config, HIDDEN, eps=1e-3)


@pytest.mark.parametrize("kind", [Norm, BranchingNorm])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_values_and_gradients_against_float64(normalization: Literal["LayerNorm", "RMSNorm"], kind: type[Norm]) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = make_norm(normalization, kind)
    with torch.no_grad():
        for param in norm.parameters():
            param.copy_(1.0 + 0.3 * torch.randn(HIDDEN, generator=generator))
    # Rows of very different size: eps, the mean and the statistics' precision all matter.
    sizes = 10.0 ** torch.linspace(-2, 2, 32).view(8, 4, 1)
    x = ((torch.randn(8, 4, HIDDEN, generator=generator) + 0.5) * sizes).bfloat16().requires_grad_()
    cotangent = torch.randn(8, 4, HIDDEN, generator=generator).bfloat16()
    # The other reader's gradient differs from row to row as the norm's does, so that neither hides the other.
    branch_cotangent = (torch.randn(8, 4, HIDDEN, generator=generator) / sizes).bfloat16()
    if kind is BranchingNorm:
        y, branch = norm(x)
        torch.autograd.backward([y, branch], [cotangent, branch_cotangent])
    else:
        y = norm(x)
        y.backward(cotangent)

    exact_x = x.detach().double().requires_grad_()
    exact = [param.detach().double().requires_grad_() for param in norm.parameters()]
    if normalization == "LayerNorm":
        exact_y = torch.nn.functional.layer_norm(exact_x, (HIDDEN,), *exact, eps=1e-3)
    else:
        exact_y = torch.nn.functional.rms_norm(exact_x, (HIDDEN,), *exact, eps=1e-3)
    exact_y.backward(cotangent.double())
    if kind is BranchingNorm:
        assert exact_x.grad is not None
        exact_x.grad += branch_cotangent.double()

    assert y.dtype == torch.bfloat16
    # One rounding to BF16 is 55.6 dB; a second one inside (torch's RMSNorm rounds before its weight) leaves 52.6; less
    # 1.
    assert snr_db(y, exact_y) > (54.6 if kind is BranchingNorm else 51.5)
    assert x.grad is not None and exact_x.grad is not None
    for row, exact_row in zip(x.grad.view(-1, HIDDEN), exact_x.grad.view(-1, HIDDEN), strict=True):
        # Row by row, because small rows have the large gradients. Terms cancel in the gradient, so 10 dB less; not
        # where all is FP32 up to the sum with the branch's.
        assert snr_db(row, exact_row) > (54.0 if kind is BranchingNorm else 41.5)
    for param, exact_param in zip(norm.parameters(), exact, strict=True):
        assert param.grad is not None and exact_param.grad is not None
        assert snr_db(param.grad, exact_param.grad) > 41.5


def test_parameters_are_tagged_for_sequence_parallelism() -> None:
    assert all(param.sequence_parallel for param in make_norm("LayerNorm", sequence_parallel=True).parameters())
    assert not any(param.sequence_parallel for param in make_norm("RMSNorm").parameters())
    assert [name for name, _ in make_norm("RMSNorm").named_parameters()] == ["weight"]
