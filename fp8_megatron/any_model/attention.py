"""`FP8MultiheadAttention`: `torch.nn.MultiheadAttention` with its projections in FP8."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..formats import StorageDtype
from ..nn.module import FP8Linear
from ..quantization.recipe import Recipe
from .child_names import ChildNames
from .notes import keep_notes


class FP8MultiheadAttention(ChildNames, torch.nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` whose projections are `FP8Linear`: ``in_proj`` of query, key and value, and
    ``out_proj``. A state dict has torch's names. Scores, softmax and dropout are torch's.

    Query, key and value that are one tensor take one GEMM. If they are several tensors, each goes through the whole
    ``in_proj``, and the columns that are not needed are dropped.
    """

    original_names: ClassVar = {"in_proj_weight": "in_proj.weight", "in_proj_bias": "in_proj.bias"}
    in_proj: FP8Linear

    @property
    def in_proj_weight(self) -> Tensor:  # type: ignore[override]
        """The weight [3 · embed_dim, embed_dim] of query, key and value."""
        return self.in_proj.weight

    @property
    def in_proj_bias(self) -> Tensor | None:  # type: ignore[override]
        """The bias [3 · embed_dim] of query, key and value."""
        return self.in_proj.bias

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See `torch.nn.MultiheadAttention.forward`.

        Raises:
            RuntimeError: `is_causal` without `attn_mask`.
        """
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal=True is a hint about attn_mask: give attn_mask, too")
        is_batched = query.dim() == 3
        q, k, v = self._projected(query, key, value)
        hints_causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if hints_causal else _added(attn_mask, key_padding_mask, q, k)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, dim=-1), dropout)
            y = weights.to(v.dtype) @ v
            weights = weights.mean(dim=1) if average_attn_weights else weights
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=hints_causal)
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        if not is_batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y if self.batch_first else y.transpose(0, 1), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [N, heads, L, head_dim] of inputs as `forward` takes them."""
        # Comparisons in place of a dict by identity, which torch 2.11 does not trace.
        of_query = self._parts(query)
        of_key = of_query if key is query else self._parts(key)
        of_value = of_key if value is key else of_query if value is query else self._parts(value)
        return of_query[0], of_key[1], of_value[2]

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """The three parts [N, heads, L, head_dim] of the projection of one input."""
        if x.dim() != 3:
            x = x.unsqueeze(0)
        elif not self.batch_first:
            x = x.transpose(0, 1)
        parts = self.in_proj(x).chunk(3, dim=-1)
        return tuple(part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)


def _added(attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """What is added to the scores [N, heads, L, S], broadcast; None: nothing.

    Args:
        attn_mask: [L, S] or [N · heads, L, S]; True, or −inf, where a query must not see a key.
        key_padding_mask: [N, S]; True, or −inf, for keys that nobody sees.
    """
    masks = []
    if attn_mask is not None:
        shape = (1, 1) if attn_mask.dim() == 2 else q.shape[:2]
        masks.append(attn_mask.reshape(*shape, q.shape[2], k.shape[2]))
    if key_padding_mask is not None:
        masks.append(key_padding_mask.reshape(k.shape[0], 1, 1, k.shape[2]))
    added = [
        torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(mask, float("-inf"))
        if mask.dtype is torch.bool
        else mask.to(q.dtype)
        for mask in masks
    ]
    return sum(added[1:], added[0]) if added else None


def reason_to_stay(module: torch.nn.Module, recipe: Recipe) -> str | None:
    """Why a `torch.nn.MultiheadAttention` stays as it is; None if nothing speaks against FP8."""
    assert isinstance(module, torch.nn.MultiheadAttention)
    if type(module) is not torch.nn.MultiheadAttention:
        return f"{type(module).__name__} is a class of its own"
    if "forward" in module.__dict__:
        return "its forward is patched"
    if module._parameters.get("in_proj_weight") is None:
        return "its projections have different sizes"
    if module.bias_k is not None or module.add_zero_attn:
        return "it adds keys"
    if module.embed_dim % recipe.size_multiple:
        return f"its size {module.embed_dim} is not a multiple of {recipe.size_multiple}"
    if type(module.out_proj).__name__ != "NonDynamicallyQuantizableLinear":
        return "its out_proj is a class of its own"
    return None


def convert_attention(
    name: str,
    module: torch.nn.Module,
    replaced: dict[torch.nn.Parameter, torch.nn.Parameter],
    recipe: Recipe,
    weight: StorageDtype,
) -> dict[str, FP8Linear]:
    """Turn `module` into an `FP8MultiheadAttention`, in place. Returns its linear layers by name in the model."""
    params = module._parameters
    in_weight, in_bias = params.pop("in_proj_weight"), params.pop("in_proj_bias", None)
    out_proj = module._modules["out_proj"]
    assert in_weight is not None and out_proj is not None
    in_proj = FP8Linear.__new__(FP8Linear)
    torch.nn.Module.__init__(in_proj)
    out_weight, out_bias = out_proj._parameters.pop("weight"), out_proj._parameters.pop("bias", None)
    assert out_weight is not None
    out_proj.__class__ = FP8Linear
    assert isinstance(out_proj, FP8Linear)
    made = {"in_proj": (in_proj, in_weight, in_bias), "out_proj": (out_proj, out_weight, out_bias)}
    for key, (layer, old, bias) in made.items():
        storage = weight if old.requires_grad else StorageDtype.FP8
        value = old.detach().requires_grad_(old.requires_grad)
        layer.take(value, bias, recipe=recipe, weight=storage, name=f"{name}.{key}")
        new = layer._parameters["weight"]
        assert new is not None
        keep_notes(old, new)
        replaced[old] = new
    module.__class__ = FP8MultiheadAttention
    module.add_module("in_proj", in_proj)
    return {f"{name}.{key}": layer for key, (layer, _, _) in made.items()}
