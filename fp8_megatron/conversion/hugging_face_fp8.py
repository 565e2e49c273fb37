"""Linear weights in FP8, in the two layouts that inference engines read: quantisation and dequantisation.

Both layouts have ``<layer>.weight`` in E4M3 and an FP32 scale that dequantises (x ≈ payload · scale):

- ``compressed-tensors``: format float-quantized, ``<layer>.weight_scale`` of shape [1]. Q, K and V share a scale, and
  so do gate and up, as in training's fused weights. The payload is bitwise equal to the FP8 weight that training on one
  tensor-parallel rank derives from the same master, and an engine that fuses the weights keeps it. This does not hold
  for split masters (``--main-params-dtype split``), whose FP8 weight is a half of the master.
- ``fp8``: blocks of 128 × 128 with ``<layer>.weight_scale_inv`` [⌈out/128⌉, ⌈in/128⌉], as in the published
  DeepSeek-V3. Despite "inv" in its name, the scale dequantises.

The engine quantises activations at run time, per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.files import CheckpointError
from ..dtypes import E4M3
from ..kernels import ops
from .safetensors_files import TensorSpec

BLOCK = 128
_MXFP4 = "mxfp4"


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
            "weight_block_size": [BLOCK, BLOCK],
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


def specs(layout: FP8Layout, name: str, shape: tuple[int, ...]) -> list[TensorSpec]:
    """The tensors that a linear weight [out, in] becomes.

    Raises:
        CheckpointError: blocks do not divide a width evenly; readers would refuse or misread such a weight.
    """
    if layout is FP8Layout.COMPRESSED_TENSORS:
        scale_shape: tuple[int, ...] = (1,)
    else:
        for size in shape:
            if size % BLOCK and size > BLOCK:
                raise CheckpointError(
                    f"{name} of shape {tuple(shape)} does not divide into blocks of {BLOCK} × {BLOCK}; "
                    f"export with --fp8 {FP8Layout.COMPRESSED_TENSORS.value}"
                )
        scale_shape = tuple(-(-size // BLOCK) for size in shape)
    return [TensorSpec(name, E4M3, shape), TensorSpec(name + layout.scale_suffix, torch.float32, scale_shape)]


def quantize_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise with one scale, as training does from the master: (payload E4M3, scale FP32 [1])."""
    payload, _, scale = ops.quantize_current(weight, E4M3)
    return payload, scale


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise with one scale per 128 × 128 block: (payload E4M3 [out, in], scales FP32 [⌈out/128⌉, ⌈in/128⌉]).

    Each dimension must be a multiple of 128, or smaller than 128.
    """
    out, width = (min(size, BLOCK) for size in weight.shape)
    blocks = weight.unflatten(1, (-1, width)).unflatten(0, (-1, out))
    scales = ops.scale_from_amax(blocks.abs().amax((1, 3)), E4M3, power_of_two=False)
    return ops.encode(blocks, scales[:, None, :, None], E4M3).reshape(weight.shape), scales


def dequantize(payload: Tensor, scale: Tensor) -> Tensor:
    """Dequantise a payload to FP32. The scales' shape tells if there is one scale, one per row, or one per block."""
    values = payload.float()
    if scale.numel() == 1:
        return values * scale.float().reshape(())
    if tuple(scale.shape) == (payload.shape[0], 1):
        return values * scale.float()
    spread = scale.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return values * spread[: payload.shape[0], : payload.shape[1]]


def can_dequantize(payload: tuple[int, ...], scale: tuple[int, ...]) -> bool:
    """Whether scales of this shape are those of a payload of that shape."""
    if len(payload) != 2:
        return False
    return prod(scale) == 1 or scale in ((payload[0], 1), tuple(-(-size // BLOCK) for size in payload))


def check_readable(quantization: Mapping[str, Any]) -> None:
    """Refuse a ``quantization_config`` whose weights `dequantize` cannot read.

    Raises:
        CheckpointError: names the setting that cannot be read.
    """
    method = quantization.get("quant_method")
    if method == FP8Layout.BLOCKS.value:
        block = quantization.get("weight_block_size")
        if block is not None and block != [BLOCK, BLOCK]:
            raise CheckpointError(f"config.json: weight_block_size({block}) is not supported; only {[BLOCK, BLOCK]}")
    elif method == FP8Layout.COMPRESSED_TENSORS.value:
        if quantization.get("format") != "float-quantized":
            raise CheckpointError(
                f"config.json: compressed-tensors format {quantization.get('format')!r} is not supported; "
                f"only float-quantized"
            )
        if quantization.get("transform_config"):
            raise CheckpointError(
                "config.json: compressed-tensors' transform_config is not supported (it rotates activations); convert "
                "the model that it was made of"
            )
    elif method == _MXFP4:
        return  # gpt-oss's, which its rules unpack
    else:
        raise CheckpointError(
            f"config.json: quant_method {method!r} is not supported; only "
            f"{' and '.join(layout.value for layout in FP8Layout)}: load it and save it in 16 bits first"
        )
