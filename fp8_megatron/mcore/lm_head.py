"""megatron-core's output layer with the final norm and the loss inside, as one FP8 function (`nn.lm_head`)."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor

from ..dtypes import FP8_GEMM_MULTIPLE
from ..nn.lm_head import fp8_norm_head_logits, fp8_norm_head_loss
from ..nn.normed import NormParams
from ..quantization.recipe import Recipe
from ..storage import RecipeName
from .norm import DeferredNorm
from .tensor_parallel import column_parallelism


class FP8OutputLayer(ColumnParallelLinear):
    """megatron-core's output layer in FP8, with the final norm before it and, if labels are given, the loss after it.

    It replaces `plain` and holds its weight. A tied head gets its weight in each call.

    Args:
        norm: the final norm. It is computed here but not registered here: its parameters stay where they are.
        recipe: scaling of the norm's output and of the gradient.
        vocab_size: tokens of the vocabulary; later rows of the weight are padding. None: no padding.
        output_mult: multiplies the logits. The norm's parameters are multiplied in its place, in their dtype.

    Raises:
        ValueError: a rank's part of the vocabulary has a size that an FP8 GEMM does not take.
    """

    def __init__(
        self,
        plain: ColumnParallelLinear,
        norm: DeferredNorm,
        recipe: Recipe,
        vocab_size: int | None = None,
        output_mult: float = 1.0,
    ) -> None:
        rows = plain.output_size_per_partition
        if rows % FP8_GEMM_MULTIPLE:
            raise ValueError(
                f"--fp8-lm-head: {rows} rows of the vocabulary on each tensor-parallel rank are not a multiple of "
                f"{FP8_GEMM_MULTIPLE}; choose a --make-vocab-size-divisible-by that is one"
            )
        super().__init__(
            plain.input_size,
            plain.output_size,
            config=plain.config,
            init_method=torch.nn.init.zeros_,
            bias=False,
            gather_output=plain.gather_output,
            skip_weight_param_allocation=True,
            tp_group=plain.tp_group,
        )
        if plain.weight is not None:
            self.weight = plain.weight
        self.vocab_size, self.output_mult = vocab_size, output_mult
        self.reads_weights_of = (norm,)
        self.quantizers, self.parallelism = recipe.head_quantizers(), column_parallelism(self)

    def fall_back(self, _: RecipeName) -> None:
        """Leave delayed scaling, between two steps; a head keeps its formats."""
        self.quantizers = self.quantizers.fallen_back()

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        labels: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """input_ [s, b, h], before the norm → logits [s, b, V/tp], or with labels [s, b] the loss FP32 [s, b].

        Raises:
            RuntimeError: gradients are enabled and there are no labels.
        """
        weight = self.weight if weight is None else weight
        assert weight is not None, "a tied head is given its weight"
        (norm,) = self.reads_weights_of
        params, quantizers, parallelism = self._multiplied(norm.norm_params()), self.quantizers, self.parallelism
        if labels is not None:
            loss = fp8_norm_head_loss(input_, params, weight, labels, quantizers, parallelism, self.vocab_size)
            return loss, None
        if torch.is_grad_enabled() and input_.requires_grad:
            raise RuntimeError("--fp8-lm-head has no gradient of logits: pass labels, or call under torch.no_grad()")
        logits = fp8_norm_head_logits(input_, params, weight, quantizers, parallelism)
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            logits = gather_from_tensor_model_parallel_region(logits, group=self.tp_group)
        return logits, None

    def loss_params(self, weight: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """The parameters of `token_loss`: the head's weight, and the norm's weight and bias."""
        (norm,) = self.reads_weights_of
        return self.weight if weight is None else weight, norm.weight, norm.bias

    def token_loss(self, x: Tensor, labels: Tensor, *params: Tensor | None) -> Tensor:
        """The loss FP32 [s, b] of some tokens: x [s, b, h] before the norm, labels [s, b], and `loss_params`."""
        (norm,), (weight, norm_weight, norm_bias) = self.reads_weights_of, params
        assert weight is not None and norm_weight is not None
        # The layer before casts its output's gradient itself: it is whole when all chunks are done.
        own = self._multiplied(norm.norm_params()._replace(weight=norm_weight, bias=norm_bias, receiver=None))
        return fp8_norm_head_loss(x, own, weight, labels, self.quantizers, self.parallelism, self.vocab_size)

    def _multiplied(self, norm: NormParams) -> NormParams:
        """The norm whose output is multiplied. Its parameters' gradients go through autograd."""
        if self.output_mult == 1.0:
            return norm
        bias = None if norm.bias is None else norm.bias * self.output_mult
        return norm._replace(weight=norm.weight * self.output_mult, bias=bias)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {self.quantizers})"
