"""How modules of a kind become FP8, and what a model keeps then: names in state dicts, attributes and hooks of
parameters."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..dtypes import StorageDtype
from ..nn.module import FP8Linear
from ..nn.scaled_module import ScaledModule
from ..quantization.recipe import Recipe

if TYPE_CHECKING:
    from .quantized_layers import QuantizedLayers

#: What FP8 layers are made of.
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Hooks of gradients: ``register_hook`` and ``register_post_accumulate_grad_hook``.
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def keep_notes(old: torch.nn.Parameter, new: torch.nn.Parameter) -> None:
    """Give the parameter `new` the attributes and the hooks of the one that it replaces."""
    new.__dict__.update({key: value for key, value in old.__dict__.items() if key not in new.__dict__})
    for hooks in _HOOKS:
        if getattr(old, hooks):
            setattr(new, hooks, getattr(old, hooks))  # the same dict, from which handles remove their hook


def has_hooks(param: torch.Tensor) -> bool:
    """Whether hooks wait for the gradient of `param`."""
    return any(getattr(param, hooks) for hooks in _HOOKS)


@dataclass
class Swap:
    """What the new layers of a model have in common.

    Attributes:
        recipe: how operands are scaled.
        weight: how trained weights are stored. Frozen weights are FP8.
        quantized: FP8 weights with scales that the model had.
        replaced: old parameter → the one in its place.
    """

    recipe: Recipe
    weight: StorageDtype
    quantized: QuantizedLayers
    replaced: dict[torch.nn.Parameter, torch.nn.Parameter] = field(default_factory=dict)

    def value(self, old: torch.nn.Parameter) -> tuple[Tensor, torch.dtype]:
        """The value of a weight, and the dtype that its layer shows: FP8 shows that of the model's other parameters."""
        is_scaled = old in self.quantized.scales
        return (self.quantized.value(old), self.quantized.dtype) if is_scaled else (old.detach(), old.dtype)

    def give_weight(
        self,
        layer: FP8Linear,
        name: str,
        old: torch.nn.Parameter,
        bias: torch.nn.Parameter | None,
        value: Tensor | None = None,
        *,
        keeps_notes: bool = True,
    ) -> torch.nn.Parameter:
        """Give `layer` a weight in the place of `old`, and its bias.

        Args:
            name: of the layer in the model.
            value: of the weight; None: that of `old`.
            keeps_notes: see `keep_notes`.
        """
        own, dtype = self.value(old) if value is None else (value, value.dtype)
        own = own.requires_grad_(old.requires_grad)
        storage = self.weight if old.requires_grad else StorageDtype.FP8
        layer.take(own, bias, recipe=self.recipe, weight=storage, name=name, dtype=dtype)
        new = layer._parameters["weight"]
        assert new is not None
        if keeps_notes:
            keep_notes(old, new)
        self.replaced[old] = new
        return new


class Kind:
    """A kind of modules that become FP8, and how they do. `kinds.KINDS` is the table.

    Attributes:
        is_layer: whether reports count a module that stays among the linear layers.
        part_names: children whose weights the module reads itself. They stay if it stays.
        stored_as: names of libraries' classes that hold this kind's weights in FP8 with scales (`quantized_layers`).
    """

    is_layer: bool = True
    part_names: tuple[str, ...] = ()
    stored_as: frozenset[str] = frozenset()

    def finds(self, module: torch.nn.Module) -> bool:
        """Whether `module` is of this kind."""
        raise NotImplementedError

    def weights(self, module: torch.nn.Module) -> Sequence[torch.nn.Parameter]:
        """The weights of a module that is to become FP8."""
        raise NotImplementedError

    def why_other(self, module: torch.nn.Module) -> str | None:
        """Why `module` computes something else than the kind; None: it does not, or `why_stays` says so. It is asked
        before the filter."""
        return None

    def why_stays(self, name: str, module: torch.nn.Module, recipe: Recipe, scaled: Container[Tensor]) -> str | None:
        """Why `module` stays as it is; None if nothing speaks against FP8.

        Args:
            name: of the module in the model.
            scaled: weights in FP8 whose scales are known.

        Raises:
            ValueError, UserError: it can neither stay nor become FP8.
        """
        raise NotImplementedError

    def convert(self, name: str, module: torch.nn.Module, swap: Swap) -> Mapping[str, ScaledModule]:
        """Turn `module` into its FP8 form, in place. Returns the FP8 layers that it is or holds, by name in the model.
        Old weights and new ones are in ``swap.replaced``."""
        raise NotImplementedError

    def make_plain(self, module: torch.nn.Module, weights: Sequence[str]) -> None:
        """Give a module of a class in `stored_as` what a plain one has beside its parameters.

        Args:
            weights: the names of those that were in FP8.
        """
        raise NotImplementedError


def check_dtype(name: str, weight: Tensor) -> None:
    """Check that a layer with this weight may become FP8.

    Raises:
        ValueError: it is not FP32, BF16 or FP16.
    """
    if weight.dtype not in WEIGHT_DTYPES:
        raise ValueError(f"{name} is {weight.dtype}; FP8 layers take FP32, BF16 or FP16 weights: cast the model")


class ChildNames(torch.nn.Module):
    """Gives parameters of children the original's names: as attributes, and in state dicts."""

    #: The original's name of a parameter → its name here.
    original_names: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls) -> None:
        for theirs, ours in cls.original_names.items():
            setattr(cls, theirs, property(attrgetter(ours)))

    def state_dict(self, *args: Any, prefix: str = "", keep_vars: bool = False, **kwargs: Any) -> Any:
        """torch's, with the original's names, in its order: its own parameters, then those of its children."""
        destination = super().state_dict(*args, prefix=prefix, keep_vars=keep_vars, **kwargs)
        for theirs, ours in self.original_names.items():
            if prefix + ours in destination:
                destination[prefix + theirs] = destination.pop(prefix + ours)
        others = [
            key for key in destination if key.startswith(prefix) and key[len(prefix) :] not in self.original_names
        ]
        for key in others:
            destination[key] = destination.pop(key)
        return destination

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        # In place: torch loads the children from this dict afterwards.
        for theirs, ours in self.original_names.items():
            if prefix + theirs in state_dict:
                state_dict[prefix + ours] = state_dict.pop(prefix + theirs)
        super()._load_from_state_dict(state_dict, prefix, *others)
