"""Which linear layers of a model become `FP8Linear`, which experts `FP8Experts`, and how."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from typing import get_args

import torch
from torch.nn.utils import parametrize

from ..dtypes import StorageDtype
from ..errors import UserError
from ..formats.recipes import RecipeName
from ..moe.any_model import experts
from ..moe.any_model.experts import FP8Experts, convert_experts
from ..moe.any_model.forms import expert_names
from ..nn.conv1d import FP8Conv1D
from ..nn.derived import fp8_class, multiplies_as_linear
from ..nn.module import NO_TENSOR_PARALLELISM, FP8Linear
from ..nn.recomputed import Recomputations
from ..quantization.amax_history import AmaxHistory
from ..quantization.recipe import Recipe
from ..quantization.weight_shards import stored_part
from . import attention, te_modules
from .attention import FP8MultiheadAttention, convert_attention
from .heads import language_heads
from .module_swap import Swap, has_hooks
from .optimizer import is_sharded
from .quantized_layers import QuantizedLayers, find_quantized
from .report import STAYS, report
from .te_layers import FP8LayerNormMLP
from .te_modules import check_stays, convert_te, te_kind, te_weights

logger = logging.getLogger(__name__)

#: (the layer's name in the model, the layer) → whether it becomes FP8.
LinearFilter = Callable[[str, torch.nn.Module], bool]

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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

    `torch.nn.Linear` and transformers' ``Conv1D`` are linear layers. `torch.nn.MultiheadAttention` (`attention`) and
    three modules of Transformer Engine (`te_modules`) hold linear layers. A layer keeps its identity: its name, its
    hooks, and its bias, which stays the same parameter. Its weight is a new parameter, of shape
    [out_features, in_features], with the old one's hooks. Layers that share a weight share the new one. Weights that
    Transformer Engine splits by rows become one. Experts whose weights have three dimensions become `FP8Experts`.

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
            pass. Not under `torch.compile`. Experts compute the first projection's output again.
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
        if is_fp8(module) or not is_linear(module):
            continue
        if name in stays:
            setattr(module, STAYS, stays[name])
            continue
        names = expert_names(module)
        if names is not None:
            own = convert_experts(name, module, names, swap)
            slots[name] = [slot for quantizers in own.quantizers for slot in quantizers.slots()]
            continue
        layers: Mapping[str, FP8Linear]
        if te_kind(module) is not None:
            layers = convert_te(name, module, swap)
        elif isinstance(module, torch.nn.MultiheadAttention):
            layers = convert_attention(name, module, swap)
        else:
            layers = {name: _convert(name, module, swap)}
        for own_name, layer in layers.items():
            slots[own_name] = list(layer.quantizers.slots())
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


def is_linear(module: torch.nn.Module) -> bool:
    """Whether `module` is a linear layer: `torch.nn.Linear`, a class derived from it, transformers' ``Conv1D``, or a
    module with linear weights of its own: `torch.nn.MultiheadAttention`, Transformer Engine's, or experts."""
    kinds = (torch.nn.Linear, torch.nn.MultiheadAttention)
    is_known = isinstance(module, kinds) or _is_conv1d(module) or te_kind(module) is not None
    return is_known or expert_names(module) is not None


def is_fp8(module: torch.nn.Module) -> bool:
    """Whether `module` is a layer with FP8 weights, or a module that holds such layers as its own parts."""
    if isinstance(module, (FP8LayerNormMLP, FP8MultiheadAttention)):
        return any(is_fp8(child) for child in module.children())
    return isinstance(module, (FP8Linear, FP8Experts)) and not _is_plain_again(module)


def _is_plain_again(module: torch.nn.Module) -> bool:
    """Whether `module` is a copy of an FP8 layer that kept its class, with a plain weight (`FP8Linear.plain_class`)."""
    weight = module._parameters.get("weight")
    return isinstance(module, FP8Linear) and weight is not None and stored_part(weight) is None


def _is_conv1d(module: torch.nn.Module) -> bool:
    # By name, because transformers need not be installed.
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def _reasons_to_stay(
    model: torch.nn.Module,
    recipe: Recipe,
    filter: LinearFilter | None,
    optimized: Container[torch.Tensor] | None,
    scaled: Container[torch.Tensor],
) -> dict[str, str]:
    """Name → reason of every linear layer that does not become FP8.

    Args:
        scaled: weights in FP8 whose scales are known.
    """
    adapters = _adapters(model)
    stays: dict[str, str] = {}
    willing: dict[str, torch.nn.Module] = {}
    holders: dict[torch.nn.Parameter, dict[str, torch.nn.Module]] = defaultdict(dict)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders[parameter][name] = module
        if is_fp8(module) or not is_linear(module):
            continue
        reason = "it is an adapter" if module in adapters else _reason(name, module, recipe, filter, scaled)
        if reason is None and optimized is not None and not _is_optimized(module, optimized):
            reason = "its weight is trained, and not by this optimizer"
        if reason is None:
            willing[name] = module
        else:
            stays[name] = reason
    for name, module in willing.items():
        for parameter in _weights(module):
            for other, holder in holders[parameter].items():
                if holder is module or holder is module._modules.get("out_proj"):
                    continue
                alike = type(holder) is type(module) and "weight" in module._parameters
                if not alike or (other in stays and other not in willing):
                    stays[name] = f"its weight is also that of {other or 'the model'}"
    for name in [name for name in stays if isinstance(model.get_submodule(name), torch.nn.MultiheadAttention)]:
        out_proj = f"{name}.out_proj".removeprefix(".")
        if out_proj in stays:  # it is a part of the attention, which reads its weight
            stays[out_proj] = stays[name]
    for name, reason in stays.items():
        check_stays(name, model.get_submodule(name), reason)
    return stays


def _is_optimized(module: torch.nn.Module, optimized: Container[torch.Tensor]) -> bool:
    return all(weight in optimized or not weight.requires_grad for weight in _weights(module))


def _weights(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The weights of a linear layer that is to become FP8."""
    expert_weights = expert_names(module)
    names = ["weight"] if expert_weights is None else list(expert_weights)
    if te_kind(module) is not None:
        names = [one for parts in te_weights(module) for one in parts]
    elif isinstance(module, torch.nn.MultiheadAttention):
        return [weight for weight in attention.linear_weights(module).values() if weight is not None]
    return [parameter for name in names if (parameter := module._parameters[name]) is not None]


def _adapters(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Modules beside the ``base_layer`` of a PEFT layer: small, and trained while the base is frozen."""
    found: set[torch.nn.Module] = set()
    for module in model.modules():
        base = dict(module.named_children()).get("base_layer")
        if base is not None:
            found |= set(module.modules()) - set(base.modules()) - {module}
    return found


def _reason(
    name: str, module: torch.nn.Module, recipe: Recipe, filter: LinearFilter | None, scaled: Container[torch.Tensor]
) -> str | None:
    """Why this layer stays as it is; None if nothing speaks against FP8."""
    if parametrize.is_parametrized(module):
        return "it is parametrised"
    names = expert_names(module)
    if names is not None:
        if filter is not None and not filter(name, module):
            return "the filter refuses it"
        return experts.reason_to_stay(module, names, recipe, scaled)
    if te_kind(module) is not None or isinstance(module, torch.nn.MultiheadAttention):
        if filter is not None and not filter(name, module):
            return "the filter refuses it"
        if te_kind(module) is not None:
            return te_modules.reason_to_stay(name, module, recipe)
        assert isinstance(module, torch.nn.MultiheadAttention)
        reason = attention.reason_to_stay(module, recipe)
        if reason is None:
            for key, weight in attention.linear_weights(module).items():
                if weight is not None and weight.is_complex():
                    return "its weight is complex"
                _check_dtype(f"{name}.{key}", weight)
        return reason
    if not multiplies_as_linear(module) and not _is_conv1d(module) and not _is_plain_again(module):
        return f"the forward of {type(module).__name__} is not F.linear(x, weight, bias), even without its casts"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed by a hook"
    if "forward" in module.__dict__:
        return "its forward is patched"
    if filter is not None and not filter(name, module):
        return "the filter refuses it"
    if is_sharded(weight):
        raise UserError(
            f"{name}.weight is a DTensor already: call replace_linears before fully_shard (docs/fsdp2.md). "
            f"{NO_TENSOR_PARALLELISM}"
        )
    if weight.is_complex():
        return "its weight is complex"
    if _is_conv1d(module) and has_hooks(weight):
        return "a hook waits for its weight's gradient, which FP8 has transposed"
    if weight not in scaled:
        _check_dtype(name, weight)
    for size in weight.shape:
        if size % recipe.size_multiple or not size:
            return f"its size {size} is not a multiple of {recipe.size_multiple}"
    return None


def _check_dtype(name: str, weight: torch.Tensor | None) -> None:
    if weight is not None and weight.dtype not in _WEIGHT_DTYPES:
        raise ValueError(f"{name}.weight is {weight.dtype}; FP8 layers take FP32, BF16 or FP16 weights: cast the model")


def _convert(name: str, module: torch.nn.Module, swap: Swap) -> FP8Linear:
    """Turn `module` into an FP8 layer."""
    old, bias = module._parameters.pop("weight"), module._parameters.pop("bias", None)
    assert old is not None
    is_conv1d = _is_conv1d(module)
    if not isinstance(module, FP8Linear):
        module.__class__ = FP8Conv1D if is_conv1d else fp8_class(type(module))
        assert isinstance(module, FP8Linear)
    shared = swap.replaced.get(old)
    swap.give_weight(module, name, old, bias, old.detach().t() if is_conv1d else None)
    if shared is not None:
        module.hold(shared)
        swap.replaced[old] = shared
    return module


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
    """Let the FP8 layers of `model` compute their inputs again in backward, where they can; experts what is in front of
    their activation."""
    recomputations = Recomputations()
    layers = [module for module in model.modules() if isinstance(module, (FP8Linear, FP8Experts))]
    for layer in layers:
        layer.recomputations = recomputations
    if not layers:
        logger.warning("recompute_activations does nothing: the model has no FP8Linear; leave it out")
