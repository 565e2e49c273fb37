"""LayerNorm and RMSNorm in 16 bits. They work under sequence parallelism, which megatron-core's torch norm refuses."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..nn.normed import NormParams, norm_branch
from ..quantization.early_cast import EarlyCast


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm over the last dimension, chosen by `config.normalization`; statistics in FP32.

    Under sequence parallelism each rank normalises its part of the sequence. The parameters are then tagged
    ``sequence_parallel``, so that their gradients are summed over the tensor-parallel group.

    Args:
        receiver: the early cast of the linear layer whose output only this norm reads, or None. The backward that
            includes this norm then casts the gradient of the norm's input for that layer.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, receiver: EarlyCast | None = None
    ) -> None:
        super().__init__()
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        self.eps = eps
        self.shape = (hidden_size,)
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype, device=device))
            self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        else:
            self.register_parameter("bias", None)
        self.is_rms = config.normalization == "RMSNorm"
        self._receiver = receiver

    def norm_params(self) -> NormParams:
        """The norm's parameters, for the linear layer that computes it."""
        return NormParams(self.weight, self.bias, self.eps, self.is_rms, self._receiver)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] → [..., hidden] in the dtype of `x`."""
        if self.is_rms:
            return torch.nn.functional.rms_norm(x, self.shape, self.weight, self.eps)
        return torch.nn.functional.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


class DeferredNorm(Norm):
    """A norm that the next module computes, from `norm_params`. Calling it returns its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`: the layer behind computes the norm."""
        return x


class BranchingNorm(Norm):
    """A norm before readers in 16 bits in an FP8 layer. Its backward adds the residual branch's gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """[..., hidden] → [..., hidden] in the dtype of `x`, and `x` for the residual branch."""
        return norm_branch(x, self.norm_params())


class HeadNorm(Norm):
    """The norm of every query head, or of every key head, over the head's columns (``q_layernorm``, ``k_layernorm``).

    Tensor-parallel ranks share its parameters, and each has the gradient of its own heads. The parameters are therefore
    tagged ``sequence_parallel`` with and without sequence parallelism: their gradients are summed over that group.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        for param in self.parameters():
            param.sequence_parallel = config.tensor_model_parallel_size > 1  # type: ignore[attr-defined]
