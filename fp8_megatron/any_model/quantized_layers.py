"""Layers of other libraries that hold FP8 weights with scales beside them, made for inference.

`initialize` takes such a model to train it: weights start from payload · scale, and scales are no parameters any more.
They are known by the names of their classes (`Kind.stored_as`) and parameters. Linear layers are transformers'
``FP8Linear`` (DeepSeek-V3's and Qwen3's folders), ``FbgemmFp8Linear`` and ``CompressedTensorsFP8Linear``, and
compressed-tensors' own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..dtypes import E4M3
from ..errors import UserError
from ..nn.scaled_module import ScaledModule
from ..quantization.stored_scales import TILE, dequantize
from .kinds import KINDS
from .module_swap import WEIGHT_DTYPES, keep_notes
from .te_modules import plain_value

#: Name of a class → the kind whose weights its modules hold.
_KIND_OF = {name: kind for kind in KINDS for name in kind.stored_as}
_SCALE_SUFFIXES = ("_scale_inv", "_scale")
#: Parameters and buffers of such layers that scale what they cast in their forward.
_OF_ACTIVATIONS = ("activation_scale", "input_scale", "output_scale", "input_scale_ub")


@dataclass
class QuantizedLayers:
    """The FP8 weights that a model's layers hold with scales.

    Attributes:
        scales: weight → its scale, in a shape that `dequantize` takes.
        layers: the layers that hold them, with the names of weights and of what is no parameter of a plain layer.
        dtype: of the model's other parameters, which plain weights have.
    """

    scales: dict[torch.nn.Parameter, Tensor] = field(default_factory=dict)
    layers: list[tuple[torch.nn.Module, list[str], list[str]]] = field(default_factory=list)
    dtype: torch.dtype = torch.bfloat16

    @property
    def left_out(self) -> set[Tensor]:
        """Parameters that a plain layer does not have."""
        named = ((layer, name) for layer, _, others in self.layers for name in others)
        return {own for layer, name in named if (own := layer._parameters.get(name)) is not None}

    def value(self, weight: torch.nn.Parameter) -> Tensor:
        """The value of a weight, in FP32 if it is one of these."""
        scale = self.scales.get(weight)
        return plain_value(weight) if scale is None else dequantize(weight.detach(), scale.detach())

    def strip(self, model: torch.nn.Module) -> None:
        """Leave of each layer what a plain one has, with the FP8 weight in its place. The model is not to be called
        until each has another weight."""
        for layer, weights, others in self.layers:
            for name in others:
                layer._parameters.pop(name, None)
                layer._buffers.pop(name, None)
            _KIND_OF[type(layer).__name__].make_plain(layer, weights)
        for module in model.modules() if self.layers else ():
            if (hook := module.__dict__.pop("ct_decompress_hook", None)) is not None:
                hook.remove()
            if (quantizer := module.__dict__.get("hf_quantizer")) is not None:
                quantizer.remove_quantization_config(module)  # save_pretrained writes plain weights from now on

    def make_plain(self, replaced: dict[torch.nn.Parameter, torch.nn.Parameter]) -> None:
        """Give layers that have one of these weights still a plain one, and note it in `replaced`."""
        for layer, weights, _ in self.layers:
            for name in weights:
                old = layer._parameters[name]
                if old is not None and old in self.scales:
                    if old not in replaced:
                        replaced[old] = torch.nn.Parameter(self.value(old).to(self.dtype), old.requires_grad)
                        keep_notes(old, replaced[old])
                    layer._parameters[name] = replaced[old]


def find_quantized(model: torch.nn.Module) -> QuantizedLayers:
    """The FP8 weights with scales that layers of `model` hold. Nothing is changed.

    Raises:
        UserError: a layer holds a quantised weight that is not understood, with its name, its class and the fix.
    """
    found = QuantizedLayers()
    for name, module in model.named_modules():
        if isinstance(module, ScaledModule):
            continue
        weights = [key for key, param in module._parameters.items() if param is not None and param.dtype is E4M3]
        _check_known(name, module, weights)
        if type(module).__name__ not in _KIND_OF or not weights:
            continue
        scales = dict(_scales(name, module, weights))
        others = [key for key in (*module._parameters, *module._buffers) if key.endswith(_OF_ACTIVATIONS)]
        others += [*scales.values(), *(key for key in module._parameters if key.endswith("zero_point"))]
        found.layers.append((module, weights, others))
        for key, scale_name in scales.items():
            weight: Any = module._parameters[key]
            scale = getattr(module, scale_name)
            found.scales[weight] = scale.t() if type(module).__name__ == "CompressedTensorsFP8Linear" else scale
    left_out = found.left_out
    params = (param for param in model.parameters() if param.dtype in WEIGHT_DTYPES and param not in left_out)
    if found.layers and (other := next(params, None)) is not None:
        found.dtype = other.dtype
    return found


def _check_known(name: str, module: torch.nn.Module, weights: list[str]) -> None:
    kind, block = type(module).__name__, getattr(module, "block_size", None)
    is_packed = "weight_packed" in module._parameters or (
        hasattr(module, "quantization_scheme") and not weights and "weight_scale" in module._parameters
    )
    is_trained = any(module._parameters[key].requires_grad for key in weights)  # type: ignore[union-attr]
    fix = "load the model with dequantize=True in its quantization_config, or take the model that it was made of"
    if is_packed or (is_trained and kind not in _KIND_OF):
        what = "packed" if is_packed else "FP8"
        raise UserError(f"{name} is a {kind} with {what} weights, which no FP8 layer replaces: {fix}")
    if weights and block is not None and list(block) != [TILE, TILE]:
        raise UserError(f"{name} is a {kind} with block_size({block}), not {(TILE, TILE)}: {fix}")


def _scales(name: str, module: torch.nn.Module, weights: list[str]) -> Iterator[tuple[str, str]]:
    """The name of each weight's scale."""
    for key in weights:
        scale = next((key + end for end in _SCALE_SUFFIXES if key + end in module._parameters | module._buffers), None)
        if scale is None:
            raise UserError(
                f"{name}.{key} of a {type(module).__name__} is FP8 without a scale beside it: give it a "
                f"{key}_scale that dequantises, or cast it to BF16"
            )
        yield key, scale
