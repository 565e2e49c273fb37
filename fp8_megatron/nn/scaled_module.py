"""`ScaledModule`: a module whose weights are at rest in FP8, or in FP16 with block scales."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..dtypes import STATE_BLOCK, StorageDtype
from ..errors import UserError
from ..kernels import ops
from ..quantization.recipe import LinearQuantizers
from ..quantization.scaled_tensor import ScaledTensor, notes_of
from ..quantization.weight_shards import plain_copy, stored_part
from ..quantization.weight_views import Home


class Layout(NamedTuple):
    """How a weight lies that the model has in another shape.

    Attributes:
        to_stored: from the model's shape to the parameter's, for a GEMM.
        to_plain: back.
    """

    to_stored: Callable[[Tensor], Tensor]
    to_plain: Callable[[Tensor], Tensor]


class ScaledModule(torch.nn.Module):
    """A module with `ScaledTensor`s as parameters.

    ``state_dict`` holds them as plain tensors in `weight_dtype`, and takes plain tensors. The module follows
    ``.to(device)``. A cast such as ``.half()`` changes other parameters and `weight_dtype`, not how weights are stored.

    Attributes:
        scaled_names: the names of these parameters.
        fp8_attributes: attributes that a plain module does not have.
        name: in the model, for errors.
        weight_dtype: of the weights in a state dict.
        home: mark that its own weights have, too; None if the module is a copy with plain weights.
    """

    scaled_names: ClassVar[tuple[str, ...]] = ("weight",)
    fp8_attributes: ClassVar[frozenset[str]] = frozenset(("quantizers", "weight_dtype", "name", "home"))
    name: str
    weight_dtype: torch.dtype
    home: Home | None = None

    def plain_class(self) -> type[torch.nn.Module]:
        """The class of copies whose weights are plain."""
        raise NotImplementedError

    def layout(self, name: str) -> Layout | None:
        """How a weight lies; None: as the model has it, in state dicts too."""
        return None

    def all_quantizers(self) -> tuple[LinearQuantizers, ...]:
        """The quantisers of its linear layers."""
        raise NotImplementedError

    @property
    def evaluates(self) -> bool:
        """Whether a forward now does not train the module: after ``eval()``, without gradients or with frozen weights.
        It and its backward leave no amax behind.
        """
        if self.training:
            return False
        weights = [self._parameters.get(name) for name in self.scaled_names]
        return not torch.is_grad_enabled() or not any(weight is None or weight.requires_grad for weight in weights)

    def plain_weight(self, name: str = "weight", *, here: bool = False) -> Tensor:
        """A weight as a plain tensor of `weight_dtype`, in the model's layout; a new copy. Under ``fully_shard`` this
        rank's rows, as a ``DTensor``.

        Args:
            name: of the parameter.
            here: no other rank is asked (`WeightOwner.value_here`). Otherwise every replica calls it.
        """
        weight = self._parameters[name]
        assert weight is not None
        plain, layout = plain_copy(weight, self.weight_dtype, here=here), self.layout(name)
        return plain if layout is None else layout.to_plain(plain).contiguous()

    def copy_as_plain(self, memo: dict[int, Any], *, here: bool = True) -> None:
        """Make a `copy.deepcopy` with this memo put plain weights, with the masters' values, into the module's copy.

        Args:
            here: see `plain_weight`.
        """
        for name in self.scaled_names:
            weight: Any = self._parameters[name]
            if id(weight) not in memo:
                plain = torch.nn.Parameter(self.plain_weight(name, here=here), weight.requires_grad)
                memo[id(weight)] = plain
                if not hasattr(weight, "_local_tensor"):
                    plain.__dict__.update(copy.deepcopy(notes_of(weight, for_plain=True), memo))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """A module of its own. That of one in training is plain: no optimizer would keep its master weights."""
        weights = [weight for name in self.scaled_names if (weight := self._parameters.get(name)) is not None]
        if any(isinstance(weight, ScaledTensor) and weight.owner is not None for weight in weights):
            self.copy_as_plain(memo)
        kind: type[torch.nn.Module] = type(self)
        state = self.__dict__
        if any(stored_part(memo.get(id(weight), weight)) is None for weight in weights):
            kind = self.plain_class()
            state = {key: value for key, value in state.items() if key != "home"}
        if not issubclass(kind, ScaledModule):
            state = {key: value for key, value in state.items() if key not in self.fp8_attributes}
        copied = kind.__new__(kind)
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(state, memo))
        return copied

    def __prepare_scriptable__(self) -> torch.nn.Module:
        """What ``torch.jit.script`` asks for in place of the module.

        Raises:
            UserError: always.
        """
        raise UserError(
            f"{self.name}: torch.jit.script takes no FP8 layer: script fp8_megatron.any_model.plain_model(model)"
        )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if keep_vars:
            return
        for name in self.scaled_names:
            if stored_part(getattr(self, name)) is not None:
                destination[prefix + name] = self.plain_weight(name)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *others: Any
    ) -> None:
        for name in self.scaled_names:
            layout, key = self.layout(name), prefix + name
            if layout is not None and key in state_dict:
                state_dict = {**state_dict, key: layout.to_stored(state_dict[key])}
        # `assign` would put plain weights in place of these, so their values are copied. On the meta device there is
        # no memory for them yet.
        values, assigns = state_dict.get(prefix + self.scaled_names[0]), local_metadata.get("assign_to_params_buffers")
        is_meta = getattr(self, self.scaled_names[0]).is_meta
        if assigns and isinstance(values, Tensor) and is_meta and not values.is_meta:
            self.to_empty(device=values.device, recurse=False)
        with nullcontext() if self.home is None else self.home.loading():
            super()._load_from_state_dict(
                state_dict, prefix, {**local_metadata, "assign_to_params_buffers": False}, *others
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ScaledModule:
        weights: dict[str, Any] = {name: self._parameters[name] for name in self.scaled_names}
        parts = {name: stored_part(weight) for name, weight in weights.items()}
        if None in parts.values():
            super()._apply(fn, recurse)
            return self
        first = weights[self.scaled_names[0]]
        with torch.no_grad():
            example = fn(torch.empty(0, dtype=self.weight_dtype, device=first.device))
        self.weight_dtype = example.dtype
        if parts[self.scaled_names[0]] is not first and example.device != first.device:
            super()._apply(fn, recurse)  # torch moves a DTensor's part
            return self
        names = list(self._parameters)
        for name in weights:
            del self._parameters[name]
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters = {name: weights.get(name, self._parameters.get(name)) for name in names}
        for weight in weights.values():
            if example.device != weight.device:
                self._move(weight, example.device)
        return self

    def _move(self, weight: ScaledTensor, device: torch.device) -> None:
        """Move a weight; it stays the same parameter."""
        histories = [quantizers.input.history for quantizers in self.all_quantizers()]
        if hasattr(weight, "main_grad") or any(one is not None and one.record is not None for one in histories):
            raise RuntimeError(
                f"{self.name}: its optimizer or its delayed scales are on {weight.device}; move the model to "
                f"{device} before its layers become FP8"
            )
        value = weight.detach()
        value = torch.empty_like(value, device=device) if value.is_meta else value.to(device)
        moved = torch.nn.Parameter(value, weight.requires_grad)
        moved.home = self.home  # type: ignore[attr-defined]
        torch.utils.swap_tensors(weight, moved)  # optimizers and tied layers know this parameter


def stored(value: Tensor, storage: StorageDtype, dtype: torch.dtype) -> ScaledTensor:
    """A weight [N, K], or of several matrices [M, N, K], at rest: E4M3 with a scale a matrix, or FP16 with a scale
    for each `STATE_BLOCK` elements.

    It advertises `dtype`.
    """
    value = value.detach().contiguous()
    if storage is StorageDtype.FP8:
        return ScaledTensor.quantize(value, dtype=dtype)
    assert storage is StorageDtype.FP16, storage
    payload = torch.empty(value.numel(), dtype=torch.float16, device=value.device)
    scales = torch.empty(value.numel() // STATE_BLOCK, device=value.device)
    ops.quantize_blockwise_(value.reshape(-1), payload, scales)
    return ScaledTensor(payload.view(value.shape), scales, dtype=dtype)
