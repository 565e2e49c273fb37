"""CoreAttention against softmax attention written out in float64."""

from __future__ import annotations

import math
from types import SimpleNamespace

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
    ("is_masked", "cudnn_is_on", "expected"),
    [
        (False, True, "cudnn"),
        (True, True, "flash"),
        (False, False, "flash"),
    ],
)
def test_the_kernel_of_rows_with_their_log_sum_exp(is_masked: bool, cudnn_is_on: bool, expected: str) -> None:
    """A run that leaves cuDNN out leaves it out here, too; no GPU is needed to choose."""
    query = torch.empty(SEQ, BATCH, HEADS, HEAD_DIM, device="meta")
    query_on_gpu = SimpleNamespace(device=torch.device("cuda"), shape=query.shape)
    core = make_attention()
    with attention.preferring_backends("auto", with_cudnn=cudnn_is_on):
        assert core._block_kernel(query_on_gpu, is_masked=is_masked) == expected  # type: ignore[arg-type]
    assert core._block_kernel(torch.empty(query.shape)) == "dense"


def test_a_sink_of_zero_is_one_more_column() -> None:
    inputs = [
        torch.randn(SEQ, BATCH, heads, HEAD_DIM, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2)
    ]
    config = TransformerConfig(
        num_layers=1, hidden_size=128, num_attention_heads=HEADS, attention_dropout=0.0, softmax_type="off-by-one",
        use_cpu_initialization=True,
    )  # fmt: skip
    core = CoreAttention(config, 1, AttnMaskType.causal, "self")
    assert not [*core.parameters()] and not core.state_dict()
    # A first key and value of zeros: its score is 0.
    leading = [torch.cat([torch.zeros_like(x[:1]), x]) for x in inputs]
    torch.testing.assert_close(core(*inputs), make_attention()(*leading)[1:], rtol=0.0, atol=1e-5)
