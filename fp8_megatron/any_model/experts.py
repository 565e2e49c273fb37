"""Experts of a mixture of experts whose weights are parameters with three dimensions, as in transformers 5, in FP8.

Such a module holds W1 [E, Z, H] and W2 [E, H, F] and computes Σ_e p_e · W2_e · activation(W1_e · x) over each token's
experts. It is known by what it holds and computes: `activation_of` calls it once with small weights. So neither
transformers nor the names of its classes are needed.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from ..activation_functions import KINDS, Activation
from ..dtypes import StorageDtype
from ..errors import UserError
from ..nn.experts import fp8_experts, grouped_by_expert
from ..nn.gemms import LinearParams, note_forward
from ..nn.operands import as_rows
from ..nn.scaled_module import ScaledModule, stored
from ..quantization import unfused
from ..quantization.recipe import LinearQuantizers, Recipe
from ..quantization.scaled_tensor import ScaledTensor
from ..quantization.untraced import leaves_graph
from ..quantization.weight_shards import stored_part
from ..quantization.weight_views import Home
from ..sharding.partition import CHUNK
from .module_swap import Swap, keep_notes


class FP8Experts(ScaledModule):
    """Experts in FP8; `fp8_class` makes classes that are also of the module's own class.

    The parameters keep their names and shapes, and the module takes the same arguments.

    Attributes:
        derived_from: the module's own class. Plain copies have it.
        fp8_activation: between both projections.
        fp8_arguments: the names of what `forward` takes: tokens [T, H], their experts int64 [T, k], where the number of
            experts stands for none, and the probabilities [T, k].
        quantizers: of both projections.
    """

    fp8_attributes: ClassVar = ScaledModule.fp8_attributes | {"fp8_activation", "fp8_arguments"}
    derived_from: ClassVar[type[torch.nn.Module]]
    fp8_activation: Activation
    fp8_arguments: tuple[str, ...]
    quantizers: tuple[LinearQuantizers, LinearQuantizers]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """[T, H] in the dtype of the tokens. With plain weights (``functional_call``) nothing is in FP8."""
        weights = [self._parameters.get(name) for name in self.scaled_names]
        if not any(isinstance(weight, ScaledTensor) for weight in weights):
            if self.home is not None and None in weights:
                raise UserError(
                    f"{self.name}: a weight is no parameter since initialize, and would be multiplied in 16 bits: "
                    f"parametrise or prune before initialize, and the experts stay as they are"
                )
            output: Tensor = super().forward(*args, **kwargs)
            return output
        given = dict(zip(self.fp8_arguments, args, strict=False)) | kwargs
        return _multiply(self, *(given[name] for name in self.fp8_arguments))

    def all_quantizers(self) -> tuple[LinearQuantizers, ...]:
        """See `ScaledModule.all_quantizers`."""
        return self.quantizers

    def plain_class(self) -> type[torch.nn.Module]:
        """See `ScaledModule.plain_class`."""
        return self.derived_from

    def linear_params(self) -> tuple[LinearParams, ...]:
        """Both projections, for the function that computes them."""
        quantizers = [one.evaluating() for one in self.quantizers] if self.evaluates else self.quantizers
        weights: list[Any] = [self._parameters[name] for name in self.scaled_names]
        return tuple(LinearParams(weight, None, own) for weight, own in zip(weights, quantizers, strict=True))

    def __reduce_ex__(self, protocol: Any) -> Any:
        state: Any = super().__reduce_ex__(2)[2:]
        return (_new, (self.derived_from, self.scaled_names), *state)  # pickle finds a class by its name

    def extra_repr(self) -> str:
        """Sizes and casts."""
        shapes = ", ".join(f"{name}={tuple(self._parameters[name].shape)}" for name in self.scaled_names)  # type: ignore[union-attr]
        return f"{shapes}, {self.fp8_activation.kind}, {self.quantizers[0]}"


@leaves_graph
def _multiply(module: FP8Experts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    fc1, fc2 = module.linear_params()
    if torch.is_grad_enabled():
        note_forward(fc1)
        note_forward(fc2)
    num_experts, (num_tokens, top_k) = len(fc1.weight), index.shape
    rows = as_rows(x.to(torch.bfloat16), fc1.quantizers.input.format.size_multiple)
    # One more expert: that of choices that count for nothing.
    probs = torch.zeros(len(rows), num_experts + 1, device=x.device)
    probs = probs.scatter_add(1, index, weights.float())[:, :num_experts]
    chosen = torch.zeros(len(rows), num_experts + 1, dtype=torch.bool, device=x.device).scatter_(1, index, True)
    groups = grouped_by_expert(chosen[:, :num_experts].contiguous(), top_k)
    y = fp8_experts(rows, probs, groups, fc1, fc2, module.fp8_activation)
    return y[:num_tokens].to(x.dtype)


class ExpertNames(NamedTuple):
    """The parameters of experts: the first and the second projection."""

    fc1: str
    fc2: str


def expert_names(module: torch.nn.Module) -> ExpertNames | None:
    """The names of both weights if `module` looks like experts, else None: its only parameters with three dimensions
    are [E, Z, H] and [E, H, F], or the transposes of such, with E above 1 and Z either F or 2F."""
    matrices = [(name, param) for name, param in module._parameters.items() if param is not None and param.ndim == 3]
    if len(matrices) != 2:
        return None
    (fc1, first), (fc2, second) = matrices
    (count, *shape1), (other_count, *shape2) = first.shape, second.shape
    is_like = any(z in (f, 2 * f) and h == h2 for (z, h), (h2, f) in ((shape1, shape2), (shape1[::-1], shape2[::-1])))
    return ExpertNames(fc1, fc2) if is_like and count == other_count > 1 else None


def reason_to_stay(module: torch.nn.Module, names: ExpertNames, recipe: Recipe) -> str | None:
    """Why experts stay as they are; None if nothing speaks against FP8."""
    weights = [module._parameters[name] for name in names]
    first, second = weights
    assert first is not None and second is not None
    others = [name for name, _ in module.named_parameters() if name not in names]
    if parametrize.is_parametrized(module):
        return "it is parametrised"
    if "forward" in module.__dict__:
        return "its forward is patched"
    if getattr(module, "_is_expert_parallel", False) or any(hasattr(one, "_local_tensor") for one in weights):
        return "ranks share its experts"
    if any(stored_part(one) is not None for one in (first, second)):
        return "its weights are in FP8 already"
    if others:
        return f"it has {others[0]} beside two weights"
    if first.dtype not in _DTYPES or first.dtype != second.dtype:
        return f"its weights are {first.dtype} and {second.dtype}"
    num_hidden, width = second.shape[1:]
    if first.shape[2] != num_hidden or first.shape[1] not in (width, 2 * width):
        return f"its weights {tuple(first.shape)} and {tuple(second.shape)} are not [E, Z, H] and [E, H, F]"
    if not recipe.roles.input.takes_groups:
        return f"recipe {recipe.name!r} has no products of experts"
    for size in (*first.shape[1:], *second.shape[1:]):
        if size % recipe.size_multiple:
            return f"its size {size} is not a multiple of {recipe.size_multiple}"
    for weight in (first, second):
        if weight[0].numel() % CHUNK:
            return f"a matrix of {weight.shape[1]} x {weight.shape[2]} elements is no multiple of {CHUNK:,}"
    if activation_of(module, names) is None:
        return "its forward is not that of experts with a known activation function"
    return None


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def convert_experts(name: str, module: torch.nn.Module, names: ExpertNames, swap: Swap) -> FP8Experts:
    """Turn `module` into FP8 experts, in place."""
    activation = activation_of(module, names)
    assert activation is not None
    arguments = tuple(_arguments(type(module)))
    module.__class__ = fp8_class(type(module), tuple(names))
    assert isinstance(module, FP8Experts)
    module.fp8_activation, module.fp8_arguments, module.name = activation, arguments, name
    module.home = Home(name)
    module.quantizers = (swap.recipe.expert_quantizers(), swap.recipe.expert_quantizers())
    for key in names:
        old: Any = module._parameters[key]
        module.weight_dtype = old.dtype
        storage = swap.weight if old.requires_grad else StorageDtype.FP8
        new: Any = torch.nn.Parameter(stored(old.detach(), storage), old.requires_grad)
        new.home = module.home
        keep_notes(old, new)
        module._parameters[key] = new
        swap.replaced[old] = new
    return module


def activation_of(module: torch.nn.Module, names: ExpertNames) -> Activation | None:
    """The activation function with which `module` computes what `FP8Experts` does; None: it computes something else.

    It is called with small weights on the CPU, and compared with the function of each kind. Some tokens are large, so
    that limits of an activation are seen.
    """
    if len(_arguments(type(module))) != 3:
        return None
    first, second = (module._parameters[name] for name in names)
    assert first is not None and second is not None
    count, (num_hidden, width) = len(first), second.shape[1:]
    is_gated = first.shape[1] == 2 * width
    hidden = 32
    small = hidden if width == num_hidden else 16 if first.shape[1] == num_hidden else 24
    sizes = {num_hidden: hidden, width: small, first.shape[1]: small * (2 if is_gated else 1)}
    random = torch.Generator("cpu").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, device="cpu")

    weight1, weight2 = draw(count, sizes[first.shape[1]], hidden) / hidden**0.5, draw(count, hidden, small)
    x = draw(8, hidden) * torch.tensor([0.5, 1.0, 4.0, 16.0], device="cpu").repeat(2)[:, None]
    index = torch.rand(8, count, generator=random, device="cpu").topk(min(2, count)).indices
    probs = torch.rand(index.shape, generator=random, device="cpu") + 0.1
    tried = _with_weights(module, {names.fc1: weight1, names.fc2: weight2}, sizes)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            found = tried(x, index, probs)
    except Exception:  # whatever it needs, it is no such module
        return None
    if not isinstance(found, Tensor) or found.shape != x.shape:
        return None
    z = torch.einsum("th,tkzh->tkz", x, weight1[index])
    for kind, row in KINDS.items():
        own = {key: getattr(module, key, None) for key in row.parameters}
        known = {key: float(value) for key, value in own.items() if isinstance(value, (int, float))}
        activation = Activation(kind).with_parameters(known)
        if row.is_gated == is_gated:
            activated = unfused.activated(z.flatten(0, 1), activation).view(*index.shape, small)
            wanted = torch.einsum("tkf,tkhf,tk->th", activated, weight2[index], probs)
            if ((found - wanted).norm(dim=1) <= _TOLERANCE * wanted.norm(dim=1)).all():
                return activation
    return None


#: How much of its norm a token's output may differ. Sums of FP32 in another order differ by 10⁻⁶, the two forms of GELU
#: by 10⁻³.
_TOLERANCE = 1e-5


def _with_weights(
    module: torch.nn.Module, weights: Mapping[str, Tensor], sizes: Mapping[int, int]
) -> Callable[..., Any]:
    """The forward of a copy of `module` with other weights; numbers that it keeps of their sizes follow.

    A copy of transformers' experts is told to take none of its kernels.
    """
    tried = copy.copy(module)
    tried._parameters = {name: torch.nn.Parameter(value, requires_grad=False) for name, value in weights.items()}
    count = len(next(iter(weights.values())))
    for key, value in module.__dict__.items():
        if type(value) is int and value in sizes and value != count:
            tried.__dict__[key] = sizes[value]
    if hasattr(module, "config"):
        tried.__dict__["config"] = _Eager(module.config)
    forward: Callable[..., Any] = tried.forward
    return forward


class _Eager:
    """A configuration of transformers that asks for no kernel of experts."""

    _experts_implementation = "eager"

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _arguments(kind: type[torch.nn.Module]) -> list[str]:
    """The names of what a class's forward takes behind ``self``."""
    return list(inspect.signature(kind.forward).parameters)[1:]


def fp8_class(kind: type[torch.nn.Module], names: tuple[str, ...]) -> type[FP8Experts]:
    """The class of FP8 experts of a class whose weights have these names; always the same one."""
    key = kind, names
    if key not in _CLASSES:
        own = {"derived_from": kind, "scaled_names": names, "__module__": kind.__module__, "__doc__": kind.__doc__}
        _CLASSES[key] = types.new_class(
            f"FP8{kind.__name__}", (FP8Experts, kind), exec_body=lambda namespace: namespace.update(own)
        )
    return _CLASSES[key]


_CLASSES: dict[Any, type[FP8Experts]] = {}


def _new(kind: type[torch.nn.Module], names: tuple[str, ...]) -> FP8Experts:
    made = fp8_class(kind, names)
    return made.__new__(made)
