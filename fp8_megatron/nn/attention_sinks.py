"""Causal attention whose heads have a sink: one more logit in the softmax's denominator, with no value (gpt-oss;
`SoftmaxOne` of arXiv 2309.17453 has the logit 0).

With L = log Σ exp of a row's scores and its head's sink s, the row's denominator is exp(L'), L' = log(exp(L) + exp(s)).
So the output is that without a sink times exp(L - L'). Attention's backward kernels read a row's probabilities from its
log-sum-exp, P = exp(Q·Kᵀ·c - L): with the new output and L' they give the gradients of query, key and value. The sink's
own is -Σ exp(s - L') · (grad · output) over the rows, as its probability has the value 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import ops
from .first_order import once_differentiable
from .masked_attention import allowed_keys, flash_backward, flash_forward


class SinkAttention(NamedTuple):
    """How the scores are computed.

    Attributes:
        scale: their factor.
        kernel: what computes them. `cudnn` takes neither documents nor a window.
        cu_seqlens, window: as `flash_attention` takes them.
    """

    scale: float
    kernel: ops.BlockKernel
    cu_seqlens: Tensor | None = None
    window: int | None = None

    @property
    def is_masked(self) -> bool:
        """Whether documents or a window hide keys."""
        return self.cu_seqlens is not None or self.window is not None

    def limits(self) -> dict[str, Any]:
        """Documents, window and scale, as FlashAttention takes them."""
        return {"cu_seqlens": self.cu_seqlens, "window": self.window, "scale": self.scale}

    def block(self, query: Tensor) -> dict[str, Any]:
        """The arguments of a block that is the whole sequence."""
        allowed = None
        if self.is_masked:
            assert self.kernel == "dense", self
            allowed = allowed_keys(
                *query.shape[:2], cu_seqlens=self.cu_seqlens, window=self.window, device=query.device
            )
        return {"causal": True, "scale": self.scale, "kernel": self.kernel, "allowed": allowed}


def sink_attention(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, attention: SinkAttention) -> Tensor:
    """exp(scale · QKᵀ)·V / (Σ exp(scale · QKᵀ) + exp(sink)) under the causal mask.

    Args:
        query: [s, b, heads, d]. key, value: [s, b, groups, d].
        sinks: [heads].

    Returns:
        [s, b, heads · d], contiguous.
    """
    output: Tensor = _SinkAttention.apply(query, key, value, sinks, attention)
    return output


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, attention: SinkAttention) -> Tensor:
        if attention.kernel == "flash" and attention.is_masked:
            out, log_sum_exp = flash_forward(query, key, value, **attention.limits())
        else:
            out, log_sum_exp = ops.attention_block(query, key, value, **attention.block(query))
        out, log_sum_exp = with_sinks(out, log_sum_exp, sinks)
        ctx.save_for_backward(query, key, value, sinks, out, log_sum_exp)
        ctx.attention = attention
        return out.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, sinks, out, log_sum_exp = ctx.saved_tensors
        attention: SinkAttention = ctx.attention
        grad_out = grad_output.contiguous().view(out.shape)
        operands = (grad_out, *inputs, out, log_sum_exp)
        if attention.kernel == "flash" and attention.is_masked:
            grads = flash_backward(*operands, **attention.limits())
        else:
            grads = [*ops.attention_block_backward(*operands, **attention.block(inputs[0]))]
        return *grads, sink_gradient(grad_out, out, log_sum_exp, sinks), None


def with_sinks(out: Tensor, log_sum_exp: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output [s, b, heads, d] and log Σ exp [b, heads, s] without sinks → both with sinks [heads], contiguous."""
    total = torch.logaddexp(log_sum_exp, sinks.to(log_sum_exp.dtype)[:, None]).contiguous()
    factor = torch.exp(log_sum_exp - total).permute(2, 0, 1)[..., None]
    return (out * factor).to(out.dtype).contiguous(), total


def sink_gradient(grad_out: Tensor, out: Tensor, log_sum_exp: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of sinks [heads] from that of the output [s, b, heads, d], given what `with_sinks` returned."""
    dtype = log_sum_exp.dtype
    inner = (grad_out.to(dtype) * out).sum(dim=-1).permute(1, 2, 0)
    probability = torch.exp(sinks.to(dtype)[:, None] - log_sum_exp)
    return -(probability * inner).sum(dim=(0, 2)).to(sinks.dtype)
