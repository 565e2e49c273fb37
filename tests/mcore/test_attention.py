"""CoreAttention against softmax attention written out in float64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from fp8_megatron.device.device import UnsupportedDeviceError
from fp8_megatron.mcore import attention
from fp8_megatron.mcore.attention import AttentionBackend, CoreAttention
from fp8_megatron.quantization.stats import snr_db

SEQ, BATCH, HEADS, HEAD_DIM = 48, 2, 4, 32


def make_attention(mask: AttnMaskType = AttnMaskType.causal, backend: str = "auto") -> CoreAttention:
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, attention_dropout=0.0
    )
    return CoreAttention(config, 1, mask, "self", backend=backend)  # type: ignore[arg-type]


def naive_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[s, b, heads, d], [s, b, groups, d] twice → [s, b, heads · d], head by head."""
    seq, batch, heads, dim = query.shape
    heads_per_group = heads // key.shape[2]
    future = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    outputs = []
    for head in range(heads):
        group = head // heads_per_group
        scores = torch.einsum("ibd,jbd->bij", query[:, :, head], key[:, :, group]) / math.sqrt(dim)
        weights = torch.softmax(scores.masked_fill(future, -math.inf), dim=-1)
        outputs.append(torch.einsum("bij,jbd->ibd", weights, value[:, :, group]))
    return torch.stack(outputs, dim=2).reshape(seq, batch, heads * dim)


@pytest.mark.parametrize("groups", [HEADS, 2, 1])
@pytest.mark.parametrize("backend", ["auto", "math"])
@pytest.mark.parametrize(
    ("dtype", "least_db", "least_grad_db"),
    [
        # FP32: 2⁻²⁴ roundings in sums of tens of terms.
        (torch.float32, 115.0, 110.0),
        # BF16: 55.6 dB per rounding; forward rounds weights and output; a gradient passes through four roundings, and
        # the softmax's backward subtracts, which costs a few dB more.
        (torch.bfloat16, 50.0, 44.0),
    ],
    ids=["fp32", "bf16"],
)
def test_values_and_gradients_against_float64(
    groups: int, backend: str, dtype: torch.dtype, least_db: float, least_grad_db: float
) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    inputs = [normal(SEQ, BATCH, heads, HEAD_DIM) for heads in (HEADS, groups, groups)]
    cotangent = normal(SEQ, BATCH, HEADS * HEAD_DIM)
    ours = [tensor.clone().requires_grad_() for tensor in inputs]
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    context = make_attention(backend=backend)(*ours)
    truth = naive_attention(*exact)
    assert context.dtype == dtype and context.shape == truth.shape
    assert snr_db(context, truth) > least_db
    context.backward(cotangent)
    truth.backward(cotangent.double())
    for tensor, exact_tensor in zip(ours, exact, strict=True):
        assert tensor.grad is not None and exact_tensor.grad is not None
        assert snr_db(tensor.grad, exact_tensor.grad) > least_grad_db


def test_refuses_other_masks() -> None:
    with pytest.raises(ValueError, match="causal"):
        make_attention(AttnMaskType.padding)


def _backend_flags() -> tuple[object, ...]:
    cuda = torch.backends.cuda
    enabled = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled, cuda.cudnn_sdp_enabled)
    return *(is_enabled() for is_enabled in enabled), tuple(torch._C._get_sdp_priority_order())


def test_backends_are_said_once_for_a_run_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = [torch.randn(SEQ, BATCH, HEADS, HEAD_DIM) for _ in range(3)]
    said: list[object] = []
    spoken = attention.sdpa_kernel

    def spy(*args: object, **kwargs: object) -> object:
        said.append(args[0])
        return spoken(*args, **kwargs)

    monkeypatch.setattr(attention, "sdpa_kernel", spy)
    auto, math_only = make_attention(), make_attention(backend="math")
    before = _backend_flags()
    with pytest.raises(KeyboardInterrupt), attention.preferring_backends("auto"):
        inside = _backend_flags()
        values = [auto(*operands) for _ in range(3)]
        assert said == [auto.backends]
        other = math_only(*operands)
        assert said == [auto.backends, math_only.backends] and _backend_flags() == inside
        raise KeyboardInterrupt
    assert _backend_flags() == before
    assert torch.equal(auto(*operands), values[0]) and said[2:] == [auto.backends]
    torch.testing.assert_close(other, values[0])


def _without_cudnn(monkeypatch: pytest.MonkeyPatch, problem: str | None = None) -> None:
    """A cuDNN that is wrong in a CUDA graph for some sequences."""
    monkeypatch.setattr(attention.cudnn, "can_record", lambda seq_length: seq_length % 128 == 0)
    monkeypatch.setattr(attention.cudnn, "problem", lambda: problem)
    monkeypatch.setattr(attention.cudnn, "fix", lambda: "unset CUDNN_HOME(/opt/cudnn)")


@pytest.mark.parametrize(
    ("backend", "seq_length", "recorded", "device", "expected"),
    [
        ("auto", 1000, True, "cuda", False),
        ("auto", 1024, True, "cuda", True),
        ("auto", 1000, False, "cuda", True),
        ("auto", 1000, True, "cpu", True),
        ("flash", 1000, True, "cuda", True),
    ],
)
def test_cudnn_is_left_out_where_it_cannot_be_recorded(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    backend: AttentionBackend,
    seq_length: int,
    recorded: bool,
    device: str,
    expected: bool,
) -> None:
    _without_cudnn(monkeypatch)
    may = attention.may_use_cudnn(backend, seq_length, recorded=recorded, device=torch.device(device))
    assert may == expected
    warned = [
        "cuDNN is older than 9.15.1; attention runs PyTorch's flash kernels for --seq-length 1000; "
        "unset CUDNN_HOME(/opt/cudnn)"
    ]
    assert [record.getMessage() for record in caplog.records] == ([] if expected else warned)
    with attention.preferring_backends(backend, with_cudnn=may):
        assert torch.backends.cuda.cudnn_sdp_enabled() == (expected and backend == "auto")
        assert torch.backends.cuda.flash_sdp_enabled()


def test_cudnn_alone_is_refused_where_it_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_cudnn(monkeypatch)
    with pytest.raises(UnsupportedDeviceError, match=r"--seq-length 1000.*unset CUDNN_HOME\(/opt/cudnn\), or give"):
        attention.may_use_cudnn("cudnn", 1000, recorded=True, device=torch.device("cuda"))
    assert attention.may_use_cudnn("cudnn", 1000, recorded=False, device=torch.device("cuda"))
    with pytest.raises(UnsupportedDeviceError, match="--attention-backend cudnn needs a GPU, and there is none here"):
        attention.may_use_cudnn("cudnn", 1024, recorded=False, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("backend", "width", "deterministic", "kernel"),
    [
        ("auto", 128, False, "cudnn"),
        ("cudnn", 64, False, "cudnn"),
        ("auto", 256, False, "flash"),
        ("flash", 64, False, "flash"),
        ("auto", 128, True, "flash"),
        ("math", 64, False, "dense"),
    ],
)
def test_blocks_of_shared_sequences_have_a_kernel(
    backend: str, width: int, deterministic: bool, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU; a CPU runs the dense specification."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    of_layer = SimpleNamespace(backends=attention._BACKENDS[backend])
    choose: Any = CoreAttention._block_kernel
    on_gpu = SimpleNamespace(device=torch.device("cuda"), shape=(8, 1, 4, width))
    assert choose(of_layer, on_gpu) == kernel
    assert choose(of_layer, torch.empty(8, 1, 4, width)) == "dense"
