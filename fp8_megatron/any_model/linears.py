"""Which modules of a model become FP8 layers."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Container
from typing import Any, get_args

import torch
from torch.nn.utils import parametrize

from ..dtypes import StorageDtype
from ..errors import UserError
from ..formats.recipes import RecipeName
from ..nn.module import FP8Linear
from ..nn.recomputed import Recomputations
from ..nn.scaled_module import ScaledModule
from ..quantization.amax_history import AmaxHistory
from ..quantization.recipe import Recipe
from .heads import language_heads
from .kinds import kind_of
from .module_swap import Kind, Swap
from .quantized_layers import QuantizedLayers, find_quantized
from .report import MATRICES_STAY, STAYS, report
from .te_modules import check_stays

logger = logging.getLogger(__name__)

#: (the layer's name in the model, the layer) → whether it becomes FP8.
LinearFilter = Callable[[str, torch.nn.Module], bool]


def replace_linears(
    model: torch.nn.Module,
    *,
    recipe: Recipe | RecipeName = "tensorwise",
    weight: StorageDtype = StorageDtype.FP8,
    filter: LinearFilter | None = None,
    recompute_activations: bool = False,
    optimized: Container[torch.Tensor] | None = None,
    quantized: QuantizedLayers | None = None,
) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
    """Turn the linear layers of `model` into `FP8Linear`, in place. Returns old weight → new weight.

    `torch.nn.Linear` and transformers' ``Conv1D`` are linear layers. Other modules hold linear layers, or weights of
    several matrices; `kinds` says which. A layer keeps its identity: its name, its hooks, and its bias, which stays the
    same parameter. Its weight is a new parameter, of shape [out_features, in_features], with the old one's hooks.
    Layers that share a weight share the new one. Weights that Transformer Engine splits by rows become one.

    A layer stays as it is if the filter refuses it, an FP8 GEMM does not take its sizes, it is complex, another kind of
    module has its weight too, a hook waits for a gradient that would have another shape, it is parametrised or patched,
    or its class has another forward (`derived`). One line in the log says what stayed, a warning if that is the most of
    the model; `report` gives the reasons.

    Args:
        recipe: how operands are scaled. With ``delayed`` the model is on its device already.
        weight: how trained weights are stored, fp8 or fp16. Frozen weights are FP8.
        filter: which layers may become FP8; None: all.
        recompute_activations: a layer keeps nothing for its weight's gradient if GELU, SiLU or a product of two tensors
            has made its input; backward computes the input again. It saves one byte an element and costs an elementwise
            pass. Not under `torch.compile`.
        optimized: the parameters of the optimizer that is to have FP8 state; None: all. A layer stays if its weight is
            trained and not among them: another optimizer may hold it, and would not find the new one.
        quantized: what `find_quantized` finds; None: it is asked.

    Raises:
        ValueError: a weight is float64; an unknown recipe, or another model's delayed one.
        UserError: a weight is a ``DTensor``, of ``fully_shard`` or of tensor parallelism; a module of Transformer
            Engine cannot be used, with its name; TorchScript has compiled a part of the model; torch's default dtype is
            not FP32.
    """
    _check_not_scripted(model)
    if torch.get_default_dtype() is not torch.float32:
        raise UserError(
            f"torch's default dtype is {torch.get_default_dtype()}: call torch.set_default_dtype(torch.float32) when "
            f"the model is built, because scales and other small tensors are FP32"
        )
    recipe = build_recipe(recipe)
    if recipe.history is not None and recipe.history.record is not None:
        raise ValueError("the recipe's amax history belongs to another model: give each model a recipe of its own")
    quantized = quantized or find_quantized(model)
    quantized.strip(model)
    stays = _reasons_to_stay(model, recipe, filter, optimized, quantized.scales)
    heads = language_heads(model) if recipe.roles.grad_output.takes_row_scales else set()
    swap = Swap(recipe, weight, quantized)
    slots: dict[str, list[int]] = {}
    for name, module in list(model.named_modules()):
        kind = kind_of(module)
        if kind is None:
            continue
        if name in stays:
            setattr(module, STAYS if kind.is_layer else MATRICES_STAY, stays[name])
            continue
        for own_name, layer in kind.convert(name, module, swap).items():
            slots[own_name] = [slot for quantizers in layer.all_quantizers() for slot in quantizers.slots()]
            if isinstance(layer, FP8Linear):
                layer.scales_grad_rows = layer in heads
    quantized.make_plain(swap.replaced)
    _close_fast_paths(model)
    if recompute_activations:
        _recompute_inputs(model)
    if recipe.history is not None and slots:
        recipe.history.name_layers(slots)
        recipe.history.allocate(next(iter(swap.replaced.values())).device)
    reported = report(model)
    logger.log(logging.WARNING if reported.is_vain else logging.INFO, "%s", reported)
    return swap.replaced


def _check_not_scripted(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise UserError(
                f"{name or 'the model'} is a {type(module).__name__}, whose code and weights TorchScript keeps: give "
                f"the module that torch.jit.script or torch.jit.trace was called with"
            )


def build_recipe(recipe: Recipe | RecipeName) -> Recipe:
    """The recipe of a name; a recipe as it is. ``delayed`` takes the largest amax of 16 steps.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in get_args(RecipeName):
        raise ValueError(f"recipe({recipe!r}) is not one of {', '.join(get_args(RecipeName))}")
    history = AmaxHistory(16, "max", power_of_two=False) if recipe == "delayed" else None
    return Recipe(recipe, False, history)


def _reasons_to_stay(
    model: torch.nn.Module,
    recipe: Recipe,
    filter: LinearFilter | None,
    optimized: Container[torch.Tensor] | None,
    scaled: Container[torch.Tensor],
) -> dict[str, str]:
    """Name → reason of every module of one of `KINDS` that does not become FP8.

    Args:
        scaled: weights in FP8 whose scales are known.
    """
    adapters = _adapters(model)
    stays: dict[str, str] = {}
    kinds: dict[str, Kind] = {}
    willing: dict[str, torch.nn.Module] = {}
    holders: dict[torch.nn.Parameter, dict[str, torch.nn.Module]] = defaultdict(dict)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders[parameter][name] = module
        kind = kind_of(module)
        if kind is None:
            continue
        kinds[name] = kind
        reason = "it is an adapter" if module in adapters else _reason(kind, name, module, recipe, filter, scaled)
        if reason is None and optimized is not None and not _is_optimized(kind, module, optimized):
            reason = "its weight is trained, and not by this optimizer"
        if reason is None:
            willing[name] = module
        else:
            stays[name] = reason
    for name, module in willing.items():
        own = [module, *(module._modules.get(part) for part in kinds[name].part_names)]
        for parameter in kinds[name].weights(module):
            for other, holder in holders[parameter].items():
                if any(holder is one for one in own):
                    continue
                alike = type(holder) is type(module) and "weight" in module._parameters
                if not alike or (other in stays and other not in willing):
                    stays[name] = f"its weight is also that of {other or 'the model'}"
    for name in list(stays):
        for part in (f"{name}.{part}".removeprefix(".") for part in kinds[name].part_names):
            if part in stays:
                stays[part] = stays[name]
    for name, reason in stays.items():
        check_stays(name, model.get_submodule(name), reason)
    return stays


def _is_optimized(kind: Kind, module: torch.nn.Module, optimized: Container[torch.Tensor]) -> bool:
    return all(weight in optimized or not weight.requires_grad for weight in kind.weights(module))


def _adapters(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Modules beside the ``base_layer`` of a PEFT layer: small, and trained while the base is frozen."""
    found: set[torch.nn.Module] = set()
    for module in model.modules():
        base = dict(module.named_children()).get("base_layer")
        if base is not None:
            found |= set(module.modules()) - set(base.modules()) - {module}
    return found


def _reason(
    kind: Kind,
    name: str,
    module: torch.nn.Module,
    recipe: Recipe,
    filter: LinearFilter | None,
    scaled: Container[torch.Tensor],
) -> str | None:
    """Why this module stays as it is; None if nothing speaks against FP8."""
    if parametrize.is_parametrized(module):
        return "it is parametrised"
    other = kind.why_other(module)
    if other is not None:
        return other
    if filter is not None and not filter(name, module):
        return "the filter refuses it"
    return kind.why_stays(name, module, recipe, scaled)


def _close_fast_paths(model: torch.nn.Module) -> None:
    """Keep torch's transformer layers from the kernels that read their linear layers' weights in evaluation."""
    for module in model.modules():
        if isinstance(module, torch.nn.TransformerEncoderLayer) and _holds_fp8(module):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, torch.nn.TransformerEncoder) and _holds_fp8(module):
            module.use_nested_tensor = False  # only those kernels take nested tensors


def _holds_fp8(module: torch.nn.Module) -> bool:
    return any(isinstance(child, FP8Linear) for child in module.modules())


def _recompute_inputs(model: torch.nn.Module) -> None:
    """Let the FP8 layers of `model` compute again in backward what they can: a linear layer its input."""
    recomputations = Recomputations()
    layers: list[Any] = [module for module in model.modules() if isinstance(module, ScaledModule)]
    for layer in layers:
        layer.recomputations = recomputations
    if not layers:
        logger.warning("recompute_activations does nothing: the model has no FP8Linear; leave it out")
