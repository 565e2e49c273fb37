"""Linear weights in FP8, in the two layouts that inference engines read; and which layouts of others can be read.

Both layouts have ``<layer>.weight`` in E4M3 and an FP32 scale that dequantises (x ≈ payload · scale):

- ``compressed-tensors``: format float-quantized, ``<layer>.weight_scale`` of shape [1]. Q, K and V share a scale, and
  so do gate and up, as in training's fused weights. The payload is bitwise equal to the FP8 weight that training on one
  tensor-parallel rank derives from the same master, and an engine that fuses the weights keeps it. This does not hold
  for split masters (``--main-params-dtype split``), whose FP8 weight is a half of the master.
- ``fp8``: blocks of 128 × 128 with ``<layer>.weight_scale_inv`` [⌈out/128⌉, ⌈in/128⌉], as in the published
  DeepSeek-V3. Despite "inv" in its name, the scale dequantises. If training on one tensor-parallel rank held the weight
  in FP8, all blocks have its one scale, and the payload is training's.

The engine quantises activations at run time, per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoint.files import CheckpointError
from ..dtypes import E4M3
from ..kernels import ops
from ..quantization.stored_scales import TILE
from .safetensors_files import TensorSpec


class FP8Layout(str, Enum):
    """Layouts of FP8 weights in an exported folder, by the ``quant_method`` of its config.json."""

    COMPRESSED_TENSORS = "compressed-tensors"
    BLOCKS = "fp8"

    @property
    def scale_suffix(self) -> str:
        """Suffix that makes a scale's name from its weight's."""
        return "_scale" if self is FP8Layout.COMPRESSED_TENSORS else "_scale_inv"


def quantization_config(layout: FP8Layout, unquantized: Sequence[str]) -> dict[str, Any]:
    """The ``quantization_config`` of config.json.

    Args:
        unquantized: names of linear modules in 16 bits.
    """
    if layout is FP8Layout.BLOCKS:
        return {
            "quant_method": layout.value,
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [TILE, TILE],
            "modules_to_not_convert": list(unquantized),
        }
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": layout.value,
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**number, "strategy": "tensor", "dynamic": False},
                "input_activations": {**number, "strategy": "token", "dynamic": True},
                "output_activations": None,
            }
        },
        "ignore": list(unquantized),
        "kv_cache_scheme": None,
    }


def scale_shape(layout: FP8Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a linear weight [out, in]."""
    return (1,) if layout is FP8Layout.COMPRESSED_TENSORS else tuple(-(-size // TILE) for size in shape)


def specs(layout: FP8Layout, name: str, shape: tuple[int, ...]) -> list[TensorSpec]:
    """The tensors that a linear weight [out, in] becomes.

    Raises:
        CheckpointError: blocks do not divide a width evenly; readers would refuse or misread such a weight.
    """
    if layout is FP8Layout.BLOCKS and any(size % TILE and size > TILE for size in shape):
        raise CheckpointError(
            f"{name} of shape {tuple(shape)} does not divide into blocks of {TILE} × {TILE}; "
            f"export with --fp8 {FP8Layout.COMPRESSED_TENSORS.value}"
        )
    scales = TensorSpec(name + layout.scale_suffix, torch.float32, scale_shape(layout, shape))
    return [TensorSpec(name, E4M3, shape), scales]


def quantize_blocks(weight: Tensor, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise with one scale per 128 × 128 block: (payload E4M3 [out, in], scales FP32 [⌈out/128⌉, ⌈in/128⌉]).

    Each dimension must be a multiple of 128, or smaller than 128.
    """
    out, width = (min(size, TILE) for size in weight.shape)
    blocks = weight.unflatten(1, (-1, width)).unflatten(0, (-1, out))
    scales = ops.scale_from_amax(blocks.abs().amax((1, 3)), E4M3, power_of_two=power_of_two)
    return ops.encode(blocks, scales[:, None, :, None], E4M3).reshape(weight.shape), scales


def check_readable(quantization: Mapping[str, Any]) -> None:
    """Refuse a ``quantization_config`` whose weights `dequantize` does not read.

    Scales of activations and of caches of keys and values are not asked for: no weight depends on them.

    Raises:
        CheckpointError: names the setting that cannot be read, and what to do.
    """
    method = str(quantization.get("quant_method")).replace("_", "-")
    if method not in _REFUSALS:
        raise CheckpointError(
            f"config.json: quant_method {quantization.get('quant_method')!r} is not supported; only "
            f"{', '.join(_REFUSALS)}: {_IN_16_BITS}"
        )
    reason = _REFUSALS[method](quantization)
    if reason is not None:
        raise CheckpointError(f"config.json: {reason}")


#: What to do with weights that cannot be read.
_IN_16_BITS = "load it with the library that made it, and save it in 16 bits first; or take the model it was made of"


def _refusal_of_blocks(quantization: Mapping[str, Any]) -> str | None:
    block, form = quantization.get("weight_block_size"), quantization.get("fmt", "e4m3")
    if block is not None and list(np.atleast_1d(block)) != [TILE, TILE]:
        return f"weight_block_size({block}) is not supported; only {[TILE, TILE]}: {_IN_16_BITS}"
    return None if form == "e4m3" else f"fmt({form!r}) is not supported; only 'e4m3': {_IN_16_BITS}"


def _refusal_of_compressed_tensors(quantization: Mapping[str, Any]) -> str | None:
    if quantization.get("transform_config"):
        return "compressed-tensors' transform_config is not supported (it rotates activations): take the model before"
    sparsity = (quantization.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        return f"compressed-tensors' sparsity_config has format {sparsity!r}; only 'dense': {_IN_16_BITS}"
    whole = quantization.get("format")
    for name, group in (quantization.get("config_groups") or {"": {"weights": _WEIGHTS}}).items():
        form = group.get("format") or whole
        if form not in ("float-quantized", "naive-quantized"):
            return f"compressed-tensors format {form!r} is not supported; only float-quantized: {_IN_16_BITS}"
        weights = group.get("weights")
        if weights is None:
            return (
                f"{name} of config_groups quantises activations alone, which is not supported: its weights are in 16 "
                f"bits, so remove quantization_config from config.json"
            )
        given = {key: weights.get(key, value) for key, value in _WEIGHTS.items()}
        block = weights.get("block_structure") or [TILE, TILE]
        is_known = weights.get("strategy") in (None, "tensor", "channel") or (
            weights["strategy"] == "block" and block in ([TILE, TILE], f"{TILE}x{TILE}")
        )
        if given != _WEIGHTS or not is_known:
            found = ", ".join(f"{key} {value!r}" for key, value in weights.items() if value is not None)
            return (
                f"weights of {name} of config_groups ({found}) are not supported; only 8 bits, float, symmetric, per "
                f"tensor, channel or block of {TILE} x {TILE}: {_IN_16_BITS}"
            )
    return None


_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True}


def _refusal_of_modelopt(quantization: Mapping[str, Any]) -> str | None:
    algorithm, known = quantization.get("quant_algo"), ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
    if algorithm in known:
        return None
    return f"quant_algo {algorithm!r} of modelopt is not supported; only {', '.join(known)}: {_IN_16_BITS}"


#: quant_method → why a configuration of it cannot be read; None if it can.
_REFUSALS: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    FP8Layout.COMPRESSED_TENSORS.value: _refusal_of_compressed_tensors,
    FP8Layout.BLOCKS.value: _refusal_of_blocks,
    "fbgemm-fp8": lambda _: None,
    "modelopt": _refusal_of_modelopt,
    "mxfp4": lambda _: None,  # gpt-oss's, which its rules unpack
}


def quantization_of(config: Mapping[str, Any], modelopt: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The ``quantization_config`` of a model; None if it has none.

    Args:
        config: contents of config.json.
        modelopt: contents of hf_quant_config.json, where ModelOpt has it for itself; None: there is no such file.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if found is None and modelopt is not None:
        found = modelopt
    if not found:
        return None
    if "quant_method" not in found and (found.get("producer") or {}).get("name") == "modelopt":
        found = {"quant_method": "modelopt", **found, **found.get("quantization", {})}
    return found
