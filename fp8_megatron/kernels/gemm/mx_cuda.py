"""The MX GEMM on Blackwell: torch's, which calls cuBLASLt."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ...device.device import UnsupportedDeviceError
from ..shapes import round_up

#: The first GPUs whose tensor cores take E8M0 scales.
_FIRST_CAPABILITY = (10, 0)
#: Rows and columns of a tile of scales that lies together in memory: 512 bytes.
_TILE_ROWS, _TILE_COLUMNS = 128, 4


def mx_mm_into_(
    out: Tensor, a: Tensor, b: Tensor, scales_a: Tensor, scales_b: Tensor, bias: Tensor | None, addend: Tensor | None
) -> None:
    """`reference.mx_mm_into_`. An addend is added to the product in FP32 by a launch of its own.

    Raises:
        UnsupportedDeviceError: the GPU has no MX GEMM.
    """
    check_device(a.get_device())
    operands = a, b.t(), swizzled(scales_a), swizzled(scales_b)
    if addend is None:
        torch._scaled_mm(*operands, bias=bias, out_dtype=out.dtype, out=out)
        return
    product = torch._scaled_mm(*operands, out_dtype=torch.float32)
    if bias is not None:
        product += bias.float()
    out.copy_(product.add_(addend))


def swizzled(scales: Tensor) -> Tensor:
    """Scales [R, C] in the order of cuBLASLt ("1D block scaling factors layout" of its manual), flat.

    Tiles of 128 rows and 4 columns follow each other along the columns, then along the rows. Row r and column c of a
    tile lie at byte ``16 (r mod 32) + 4 ⌊r / 32⌋ + c``. Rows and columns are padded to whole tiles with zeros.
    """
    rows, columns = scales.shape
    padding = (0, round_up(columns, _TILE_COLUMNS) - columns, 0, round_up(rows, _TILE_ROWS) - rows)
    padded = F.pad(scales.view(torch.uint8), padding)
    tiles = padded.view(-1, 4, 32, padded.shape[1] // _TILE_COLUMNS, _TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(-1).view(scales.dtype)


@cache
def check_device(device: int) -> None:
    """Refuse a GPU that has no MX GEMM.

    Raises:
        UnsupportedDeviceError: it is older than Blackwell.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability < _FIRST_CAPABILITY:
        raise UnsupportedDeviceError(
            f"--fp8-recipe mxfp8 needs compute capability 10.0 or newer (Blackwell), and this GPU has "
            f"{capability[0]}.{capability[1]}: choose --fp8-recipe blockwise"
        )
