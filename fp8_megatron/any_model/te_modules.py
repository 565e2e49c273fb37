"""Transformer Engine's modules become FP8 layers: ``te.Linear``, ``te.LayerNormLinear`` and ``te.LayerNormMLP``.

Modules are known by their class, so Transformer Engine need not be installed. They keep their identity, their hooks and
their state dict. ``te.LayerNorm``, ``te.RMSNorm`` and attention stay Transformer Engine's.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..quantization.recipe import Recipe
from .module_swap import Kind, Swap, has_hooks
from .te_layers import ACTIVATIONS, FP8LayerNormLinear, FP8LayerNormMLP, FP8TELinear, NormSettings

#: The modules that become FP8.
_KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP")
#: Modules with linear weights that do not.
_OTHER_KINDS = ("GroupedLinear", "BasicLinear")


def te_kind(module: torch.nn.Module) -> str | None:
    """The name of Transformer Engine's class with linear weights that `module` is of or is derived from; else None."""
    for base in type(module).__mro__:
        if base.__module__.split(".")[0] == "transformer_engine" and base.__name__ in _KINDS + _OTHER_KINDS:
            return base.__name__
    return None


def te_weights(module: torch.nn.Module) -> list[list[str]]:
    """The names of a module's linear weights; weights that are rows of one matrix stand together."""
    if te_kind(module) == "LayerNormMLP":
        return [["fc1_weight"], ["fc2_weight"]]
    return [list(getattr(module, "weight_names", ["weight"]))]


def _refuse(name: str, kind: str, module: torch.nn.Module) -> None:
    """Refuse what changes how gradients or weights are shared.

    Raises:
        UserError: with the module's name, the setting and the fix.
    """
    settings = {
        "tp_size": getattr(module, "tp_size", 1) > 1,
        "sequence_parallel": getattr(module, "sequence_parallel", False),
        "fuse_wgrad_accumulation": getattr(module, "fuse_wgrad_accumulation", False),
        "delay_wgrad_compute": _delays_wgrad(module),
    }
    for setting, is_set in settings.items():
        if is_set:
            value = getattr(module, setting, True)
            raise UserError(
                f"{name} is a {kind} with {setting}={value}: FP8 layers stand on one tensor-parallel rank and hold "
                f"their gradients themselves; build it without {setting}"
            )


def _delays_wgrad(module: torch.nn.Module) -> bool:
    delays = getattr(getattr(module, "wgrad_store", None), "delay_wgrad_compute", None)
    return bool(delays is not None and delays())


def check_stays(name: str, module: torch.nn.Module, reason: str) -> None:
    """Check that a module that stays Transformer Engine's has weights that the FP8 optimizer can train.

    Raises:
        UserError: they are in Transformer Engine's FP8.
    """
    if any(_is_quantized(param) for param in module.parameters(recurse=False)):
        raise UserError(
            f"{name} has weights in Transformer Engine's FP8 and stays as it is, because {reason}: "
            f"build it without fp8_model_init"
        )


def plain_value(param: Tensor) -> Tensor:
    """The value of a weight, also of one in Transformer Engine's FP8: what it was made from, if it is kept."""
    if not _is_quantized(param):
        return param.detach()
    kept = getattr(param, "get_high_precision_init_val", lambda: None)()
    return param.detach().dequantize() if kept is None else kept.to(param.device)


def _is_quantized(param: Tensor) -> bool:
    return any(base.__name__ == "QuantizedTensor" for base in type(param).__mro__)


class TransformerEngine(Kind):
    """The modules of Transformer Engine with linear weights."""

    def finds(self, module: torch.nn.Module) -> bool:
        """See `Kind.finds`."""
        return te_kind(module) is not None

    def weights(self, module: torch.nn.Module) -> Sequence[torch.nn.Parameter]:
        """See `Kind.weights`."""
        held = [module._parameters[one] for parts in te_weights(module) for one in parts]
        return [weight for weight in held if weight is not None]

    def why_stays(self, name: str, module: torch.nn.Module, recipe: Recipe, scaled: Container[Tensor]) -> str | None:
        """See `Kind.why_stays`."""
        kind = te_kind(module)
        _refuse(name, f"te.{kind}", module)
        if type(module).__name__ not in _KINDS or type(module).__module__.split(".")[0] != "transformer_engine":
            return f"{type(module).__name__} is a class of its own"
        if "forward" in module.__dict__:
            return "its forward is patched"
        activation = getattr(module, "activation", "gelu")
        if kind == "LayerNormMLP" and activation not in ACTIVATIONS:
            return f"its activation {activation!r} is unknown"
        for names in te_weights(module):
            parts = [module._parameters.get(one) for one in names]
            if any(part is None for part in parts):
                return "its weight is computed by a hook"
            shape = (sum(len(part) for part in parts if part is not None), parts[0].shape[1])  # type: ignore[union-attr]
            for size in shape:
                if size % recipe.size_multiple or not size:
                    return f"its size {size} is not a multiple of {recipe.size_multiple}"
            if len({part.requires_grad for part in parts if part is not None}) > 1:
                return "parts of its weight are frozen"
            if len(parts) > 1 and any(has_hooks(part) for part in parts if part is not None):
                return "a hook waits for the gradient of a part of its weight"
        return None

    def convert(self, name: str, module: torch.nn.Module, swap: Swap) -> dict[str, FP8TELinear]:
        """See `Kind.convert`. Parts of a bias that become one are in ``swap.replaced``, too."""
        kind, old = te_kind(module), dict(module.__dict__)
        params: dict[str, Any] = dict(module._parameters)
        params.update({key: None for key in old if key.endswith("bias") and isinstance(old[key], Tensor)})
        plain = torch.nn.Module()  # its attributes are those that every module has
        for key in set(module.__dict__) - set(plain.__dict__):
            del module.__dict__[key]
        module._parameters.clear()
        norm = NormSettings(
            old.get("eps", 1e-5), old.get("normalization") == "RMSNorm", old.get("zero_centered_gamma", False)
        )
        if kind != "Linear":
            module.register_parameter("layer_norm_weight", params["layer_norm_weight"])
            module.register_parameter("layer_norm_bias", params.get("layer_norm_bias"))
        if kind == "LayerNormMLP":
            module.__class__ = FP8LayerNormMLP
            assert isinstance(module, FP8LayerNormMLP)
            for fc in ("fc1", "fc2"):
                layer = FP8TELinear.__new__(FP8TELinear)
                torch.nn.Module.__init__(layer)
                layer.training = module.training
                _take(layer, f"{name}.{fc}", [params[f"{fc}_weight"]], [params.get(f"{fc}_bias")], swap)
                setattr(module, fc, layer)
            module.fc2.returns_bias = old.get("return_bias", False)
            module.norm, module.activation = norm, old["activation"]
            module.activation_params = dict(old.get("activation_params") or {})
            module.returns_norm = old.get("return_layernorm_output", False)
            module.recomputes = old.get("checkpoint", False)
            return {f"{name}.{fc}": getattr(module, fc) for fc in ("fc1", "fc2")}
        module.__class__ = FP8TELinear if kind == "Linear" else FP8LayerNormLinear
        assert isinstance(module, FP8TELinear)
        names = old.get("weight_names", ["weight"])
        if names != ["weight"]:
            sizes = [len(params[one]) for one in names]
            module.parts = tuple((one.removesuffix("_weight"), size) for one, size in zip(names, sizes, strict=True))
        biases = [params.get(one) for one in old.get("bias_names", ["bias"])]
        _take(module, name, [params[one] for one in names], biases, swap)
        module.returns_bias = old.get("return_bias", False)
        if isinstance(module, FP8LayerNormLinear):
            module.norm, module.returns_norm = norm, old.get("return_layernorm_output", False)
        return {name: module}


def _take(
    layer: FP8TELinear,
    name: str,
    weights: Sequence[torch.nn.Parameter],
    biases: Sequence[torch.nn.Parameter | None],
    swap: Swap,
) -> None:
    """Give `layer` its weight and its bias. Parts of them are joined."""
    value = torch.cat([plain_value(part) for part in weights]) if len(weights) > 1 else plain_value(weights[0])
    given = [bias for bias in biases if bias is not None]
    bias = given[0] if given else None
    if len(given) > 1:
        bias = torch.nn.Parameter(torch.cat([part.detach() for part in given]), given[0].requires_grad)
        swap.replaced.update(dict.fromkeys(given, bias))
    keeps_notes = not _is_quantized(weights[0])  # whose attributes are its storage
    new = swap.give_weight(layer, name, weights[0], bias, value.to(weights[0].dtype), keeps_notes=keeps_notes)
    swap.replaced.update(dict.fromkeys(weights, new))
