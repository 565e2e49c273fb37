"""Linear weights in FP8 in the two layouts that inference engines read, and back.

Both hold ``<layer>.weight`` in E4M3 and an FP32 scale that dequantises (x ≈ payload · scale):

- ``compressed-tensors``: format float-quantized, ``<layer>.weight_scale`` of shape [1], one for the weight. QKV, and
  gate with up, share the scale of the weight that training holds: the payload is then, bit for bit, the FP8 weight
  that training on one tensor-parallel rank derives from the same master, and an engine that fuses them keeps it.
  Excepted are split masters (``--main-params-dtype split``), whose FP8 weight is a half of the master.
- ``fp8``: blocks of 128 × 128 with ``<layer>.weight_scale_inv`` [⌈out/128⌉, ⌈in/128⌉], as DeepSeek-V3 was published
  ("inv" notwithstanding, it dequantises).

Activations are quantised by the engine as it runs, per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.files import CheckpointError
from ..formats import E4M3
from ..kernels import ops
from .safetensors_files import TensorSpec

BLOCK = 128


class FP8Layout(str, Enum):
    """How FP8 weights are laid out in an exported folder, by the ``quant_method`` of its config.json."""

    COMPRESSED_TENSORS = "compressed-tensors"
    BLOCKS = "fp8"

    @property
    def scale_suffix(self) -> str:
        """What a scale's name adds to its weight's."""
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
    """What a linear weight [out, in] becomes.

    Raises:
        CheckpointError: a width that blocks do not cut evenly, which readers refuse or misread.
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
    """One scale for the weight: (payload E4M3, scale FP32 [1]), as training derives it from the master."""
    payload, _, scale = ops.quantize_current(weight, E4M3)
    return payload, scale


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A scale for each 128 × 128: (payload E4M3 [out, in], scales FP32 [⌈out/128⌉, ⌈in/128⌉]).

    Each dimension is a multiple of 128 or below it.
    """
    out, width = (min(size, BLOCK) for size in weight.shape)
    blocks = weight.unflatten(1, (-1, width)).unflatten(0, (-1, out))
    scales = ops.scale_from_amax(blocks.abs().amax((1, 3)), E4M3, power_of_two=False)
    return ops.encode(blocks, scales[:, None, :, None], E4M3).reshape(weight.shape), scales


def dequantize(payload: Tensor, scale: Tensor) -> Tensor:
    """FP32 of a payload with one scale, a scale a row, or a scale a block, told apart by the scales' shape."""
    values = payload.float()
    if scale.numel() == 1:
        return values * scale.float().reshape(())
    if tuple(scale.shape) == (payload.shape[0], 1):
        return values * scale.float()
    spread = scale.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return values * spread[: payload.shape[0], : payload.shape[1]]


def check_readable(quantization: Mapping[str, Any]) -> None:
    """Refuse a ``quantization_config`` whose weights `dequantize` cannot read.

    Raises:
        CheckpointError: with the setting.
    """
    method = quantization.get("quant_method")
    if method == FP8Layout.BLOCKS.value:
        block = quantization.get("weight_block_size")
        if block is not None and list(block) != [BLOCK, BLOCK]:
            raise CheckpointError(f"config.json: weight_block_size({block}) is not supported; only {[BLOCK, BLOCK]}")
    elif method == FP8Layout.COMPRESSED_TENSORS.value:
        if quantization.get("format") != "float-quantized":
            raise CheckpointError(
                f"config.json: compressed-tensors format {quantization.get('format')!r} is not supported; "
                f"only float-quantized"
            )
    else:
        raise CheckpointError(
            f"config.json: quant_method {method!r} is not supported; only "
            f"{' and '.join(layout.value for layout in FP8Layout)}: load it and save it in 16 bits first"
        )
