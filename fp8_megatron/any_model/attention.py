"""`FP8MultiheadAttention`: `torch.nn.MultiheadAttention` with its projections in FP8.

The projections are `FP8Linear` children, so that optimizers, reports and copies see linear layers like any other.
State dicts and attributes have torch's names: ``in_proj_weight`` is the weight of ``in_proj``. Where keys or values
have sizes of their own, ``q_proj_weight`` is that of ``q_proj``. Scores, softmax and dropout are torch's. The class has
a forward of its own, so torch's fused kernels, which read the weights, are never taken.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..nn.gemms import LinearParams
from ..nn.module import FP8Linear, compute_dtype
from ..nn.split_linear import fp8_split_linear
from ..quantization.recipe import Recipe
from ..quantization.scaled_tensor import ScaledTensor
from .module_swap import ChildNames, Kind, Swap, check_dtype

_Three = tuple[Tensor, Tensor, Tensor]


class PackedProjection(FP8Linear):
    """The projection of query, key and value with one weight [3 · embed_dim, embed_dim]."""

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> _Three:
        """The projections [..., embed_dim] of query, key and value. Neighbours that are one tensor take one GEMM."""
        groups: list[tuple[Tensor, int]] = []
        for x in (query, key, value):
            if groups and groups[-1][0] is x:
                groups[-1] = x, groups[-1][1] + self.in_features
            else:
                groups.append((x, self.in_features))
        outputs = [self(query)] if len(groups) == 1 else self._apart(groups)
        q, k, v = (part for y in outputs for part in y.split(self.in_features, dim=-1))
        return q, k, v

    def _apart(self, groups: list[tuple[Tensor, int]]) -> list[Tensor]:
        """The outputs [..., size] of inputs [..., embed_dim], in the order of the weight's rows.

        A compiled layer knows its whole weight alone: there each input goes through all of it.
        """
        for x, _ in groups:
            self._check(x)
        inputs, sizes = [x for x, _ in groups], [size for _, size in groups]
        weight: Tensor | None = self._parameters.get("weight")
        if torch.compiler.is_compiling() or not isinstance(weight, ScaledTensor):
            starts = [sum(sizes[:index]) for index in range(len(sizes))]
            return [self(x).narrow(-1, start, size) for x, start, size in zip(inputs, starts, sizes, strict=True)]
        dtype = compute_dtype(inputs[0])
        linear = LinearParams(weight, self.added_bias, self.quantizers_now)
        outputs = fp8_split_linear(inputs, sizes, linear, dtype=torch.bfloat16 if dtype is torch.float32 else dtype)
        return [y.to(dtype) for y in outputs]


class FP8MultiheadAttention(ChildNames, torch.nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` whose projections are `FP8Linear`: ``in_proj`` of query, key and value, and
    ``out_proj``. A state dict has torch's names.
    """

    original_names: ClassVar = {"in_proj_weight": "in_proj.weight", "in_proj_bias": "in_proj.bias"}
    in_proj: PackedProjection

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.MultiheadAttention:
        """A module of its own, and plain if a projection is (`FP8Linear.__deepcopy__`)."""
        layers = [child for child in self.children() if isinstance(child, FP8Linear)]
        weights = [layer.weight for layer in layers]
        is_plain = any(id(weight) in memo or getattr(weight, "owner", None) is not None for weight in weights)
        if is_plain:
            for layer in layers:
                layer.copy_as_plain(memo)
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        if is_plain:
            become_plain_attention(copied)
        return copied

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
            ValueError: inputs or masks of other shapes or dtypes.
            RuntimeError: `is_causal` without `attn_mask`.
        """
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal=True is a hint about attn_mask: give attn_mask, too")
        self._check_inputs(query, key, value)
        q, k, v = (self._heads(part) for part in self._project(query, key, value))
        mask = _added(attn_mask, key_padding_mask, q, k)
        adds_keys = self.bias_k is not None or self.add_zero_attn
        if adds_keys:
            k, v, mask = self._with_added_keys(k, v, mask)
        # A causal kernel would hide added keys, which come last.
        hints_causal = is_causal and key_padding_mask is None and not need_weights and not adds_keys
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, dim=-1), dropout)
            y = weights.to(v.dtype) @ v
            weights = weights.mean(dim=1) if average_attn_weights else weights
            weights = weights if query.dim() == 3 else weights.squeeze(0)
        else:
            y = F.scaled_dot_product_attention(q, k, v, None if hints_causal else mask, dropout, is_causal=hints_causal)
        return self.out_proj(self._joined(y, is_batched=query.dim() == 3)), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> _Three:
        """Projections of inputs as `forward` takes them, in their layout."""
        return self.in_proj.project(query, key, value)

    def _heads(self, x: Tensor) -> Tensor:
        """A projection, in the layout of `forward`, as [N, heads, L, head_dim]."""
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        if x.dim() == 3:
            return x.transpose(0, 1).unsqueeze(0)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _joined(self, y: Tensor, *, is_batched: bool) -> Tensor:
        """The inverse of `_heads`."""
        if not is_batched:
            return y.squeeze(0).transpose(0, 1).flatten(1)
        return (y.transpose(1, 2) if self.batch_first else y.permute(2, 0, 1, 3)).flatten(2)

    def _with_added_keys(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values [N, heads, S, head_dim] and their mask, with keys behind them that every query sees:
        ``bias_k`` with the value ``bias_v``, and zeros under ``add_zero_attn``.
        """
        one = (1, self.num_heads, 1, self.head_dim)
        added = []
        if self.bias_k is not None and self.bias_v is not None:
            added.append((self.bias_k.view(one), self.bias_v.view(one)))
        if self.add_zero_attn:
            added.append((k.new_zeros(one), v.new_zeros(one)))
        for key, value in added:
            k, v = (torch.cat([x, y.to(x.dtype).expand(len(x), -1, -1, -1)], dim=2) for x, y in ((k, key), (v, value)))
        return k, v, None if mask is None else F.pad(mask, (0, len(added)))

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        batch = 0 if self.batch_first else 1
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            wrong = "give three matrices, or three batches of them"
        elif (query.shape[-1], key.shape[-1], value.shape[-1]) != (self.embed_dim, self.kdim, self.vdim):
            wrong = f"the last sizes are not {self.embed_dim}, {self.kdim} and {self.vdim}"
        elif key.shape[:-1] != value.shape[:-1]:
            wrong = "key and value have different lengths or batches"
        elif query.dim() == 3 and query.shape[batch] != key.shape[batch]:
            wrong = f"query and key have different batches, their sizes {batch} (batch_first={self.batch_first})"
        else:
            return
        shapes = (tuple(query.shape), tuple(key.shape), tuple(value.shape))
        raise ValueError(f"query, key and value have the shapes {shapes}: {wrong}")


class FP8SeparateAttention(FP8MultiheadAttention):
    """`FP8MultiheadAttention` whose keys or values have sizes of their own: ``q_proj``, ``k_proj`` and ``v_proj`` in
    place of ``in_proj``. Their one bias is added behind the GEMMs.
    """

    original_names: ClassVar = {f"{name}_proj_weight": f"{name}_proj.weight" for name in "qkv"}
    q_proj: FP8Linear
    k_proj: FP8Linear
    v_proj: FP8Linear

    in_proj_weight = None  # type: ignore[assignment]

    @property
    def in_proj_bias(self) -> Tensor | None:  # type: ignore[override]
        """The bias [3 · embed_dim] of query, key and value."""
        return self._parameters["in_proj_bias"]

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> _Three:
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        if self.in_proj_bias is None:
            return q, k, v
        of_query, of_key, of_value = self.in_proj_bias.to(q.dtype).chunk(3)
        return q + of_query, k + of_key, v + of_value


def _added(attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """What is added to the scores [N, heads, L, S], broadcast; None: nothing.

    Args:
        attn_mask: [L, S] or [N · heads, L, S]; True, or −inf, where a query must not see a key.
        key_padding_mask: [N, S], unbatched [S]; True, or −inf, for keys that nobody sees.
    """
    (num, heads, length, _), num_keys = q.shape, k.shape[2]
    masks = []
    if attn_mask is not None:
        shape = (1, 1) if attn_mask.dim() == 2 else (num, heads)
        _check_mask("attn_mask", attn_mask, [(length, num_keys), (num * heads, length, num_keys)])
        masks.append(attn_mask.reshape(*shape, length, num_keys))
    if key_padding_mask is not None:
        shapes: list[tuple[int, ...]] = [(num, num_keys)]
        _check_mask("key_padding_mask", key_padding_mask, shapes if num > 1 else [(num_keys,), *shapes])
        masks.append(key_padding_mask.reshape(num, 1, 1, num_keys))
    added = [
        torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(mask, float("-inf"))
        if mask.dtype is torch.bool
        else mask.to(q.dtype)
        for mask in masks
    ]
    return sum(added[1:], added[0]) if added else None


def _check_mask(name: str, mask: Tensor, shapes: list[tuple[int, ...]]) -> None:
    if mask.dtype is not torch.bool and not mask.dtype.is_floating_point:
        raise ValueError(f"{name} is {mask.dtype}: give a bool mask (True hides a key), or a float mask that is added")
    if tuple(mask.shape) not in shapes:
        raise ValueError(f"{name} has the shape {tuple(mask.shape)}, not {' or '.join(map(str, shapes))}")


def linear_weights(module: torch.nn.MultiheadAttention) -> dict[str, torch.nn.Parameter | None]:
    """The weights of a module's projections, by the names of their layers in FP8; None: a hook makes it."""
    params = module._parameters
    is_packed = module._qkv_same_embed_dim
    weights = {name: params.get(f"{name}_weight") for name in (["in_proj"] if is_packed else _SEPARATE)}
    return {**weights, "out_proj": module.out_proj._parameters.get("weight")}


_SEPARATE = ("q_proj", "k_proj", "v_proj")


class TorchAttention(Kind):
    """`torch.nn.MultiheadAttention`."""

    part_names = ("out_proj",)

    def finds(self, module: torch.nn.Module) -> bool:
        """See `Kind.finds`."""
        return isinstance(module, torch.nn.MultiheadAttention)

    def weights(self, module: torch.nn.Module) -> Sequence[torch.nn.Parameter]:
        """See `Kind.weights`."""
        assert isinstance(module, torch.nn.MultiheadAttention)
        return [weight for weight in linear_weights(module).values() if weight is not None]

    def why_stays(self, name: str, module: torch.nn.Module, recipe: Recipe, scaled: Container[Tensor]) -> str | None:
        """See `Kind.why_stays`."""
        if type(module) is not torch.nn.MultiheadAttention:
            return f"{type(module).__name__} is a class of its own"
        if "forward" in module.__dict__:
            return "its forward is patched"
        if type(module.out_proj) is not NonDynamicallyQuantizableLinear:
            return "its out_proj is a class of its own"
        weights = linear_weights(module)
        for key, weight in weights.items():
            if weight is None:
                return f"the weight of its {key} is computed by a hook"
        for size in (module.embed_dim, module.kdim, module.vdim):
            if size % recipe.size_multiple:
                return f"its size {size} is not a multiple of {recipe.size_multiple}"
        for key, weight in weights.items():
            assert weight is not None
            if weight.is_complex():
                return "its weight is complex"
            check_dtype(f"{name}.{key}.weight", weight)
        return None

    def convert(self, name: str, module: torch.nn.Module, swap: Swap) -> dict[str, FP8Linear]:
        """See `Kind.convert`: it becomes an `FP8MultiheadAttention`."""
        assert isinstance(module, torch.nn.MultiheadAttention)
        weights, params, out_proj = linear_weights(module), module._parameters, module.out_proj
        made: dict[str, FP8Linear] = {}
        for key, old in weights.items():
            assert old is not None
            bias = None
            if key == "out_proj":
                layer: FP8Linear = out_proj  # type: ignore[assignment]
                bias = out_proj._parameters.pop("bias", None)
                del out_proj._parameters["weight"]
                out_proj.__class__ = FP8Linear  # type: ignore[assignment]
            else:
                kind = PackedProjection if key == "in_proj" else FP8Linear
                layer = kind.__new__(kind)
                torch.nn.Module.__init__(layer)
                layer.training = module.training
                bias = params.pop("in_proj_bias", None) if key == "in_proj" else None
                del params[f"{key}_weight"]
            swap.give_weight(layer, f"{name}.{key}".removeprefix("."), old, bias)
            made[key] = layer
        module.__class__ = FP8MultiheadAttention if "in_proj" in made else FP8SeparateAttention
        del module._modules["out_proj"]  # it follows the others, as in torch's order of parameters
        module._modules.update(made)
        return {layer.name: layer for layer in made.values()}


def become_plain_attention(module: FP8MultiheadAttention) -> None:
    """Turn a module whose projections are plain linear layers into a `torch.nn.MultiheadAttention`, in place."""
    params, names = {}, module.original_names
    for theirs, ours in names.items():
        child, kind = ours.split(".")
        params[theirs] = module._modules[child]._parameters[kind]  # type: ignore[union-attr]
    for child in {ours.split(".")[0] for ours in names.values()}:
        del module._modules[child]
    module._parameters = {**params, **module._parameters}
    module.__class__ = torch.nn.MultiheadAttention  # type: ignore[assignment]
    module.out_proj.__class__ = NonDynamicallyQuantizableLinear
