"""The block-scaled GEMM in CUDA C++ (csrc/block_scaled_gemm.cu) on Hopper. `cublaslt` times it beside cuBLASLt's own;
`grouped.gemm_cuda` launches it for experts.

It promotes the sum of each block of 128 to FP32, reads scales where `quantize.blocks` puts them, and adds bias and
addend before it rounds once.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from ...dtypes import E5M2, GEMM_BLOCK
from ..extension import ExtensionError, Kernel, TensorMap, by_value, compile_source, tensor_map
from ..shapes import cdiv

logger = logging.getLogger(__name__)

_SOURCE, _FUNCTION = "block_scaled_gemm.cu", "block_scaled_gemm"
_PARAMETERS: list[Callable[[Any], Any]] = [*[by_value] * 2, *[ctypes.c_void_p] * 5, *[ctypes.c_int] * 3]
_EXPERTS_PARAMETERS = [ctypes.c_void_p, *[ctypes.c_int] * 4]
_CAPABILITY = (9, 0)
#: Columns of a tile, rows of a wgmma, and threads of a warpgroup. A block has one warpgroup more, which loads.
_TILE_N, WAVE_ROWS, _WARPGROUP_THREADS = 128, 64, 128
#: What b's rows and the result's columns are a multiple of, and addresses.
_COLUMNS_MULTIPLE, ALIGNMENT = 32, 16
#: Shared memory of a block on Hopper.
_SHARED_BYTES = 232_448
_BARRIER_BYTES = 16
_MOST_STAGES = 8
_MOST_MAPS = 1024


@dataclass(frozen=True)
class Tiling:
    """How the result is cut.

    Attributes:
        warpgroups: that compute a tile of 128 columns; 2 or 3.
        waves: of 64 rows that each of them computes, one after another; 1 or 2.
        slowness: of a row of tiles, beside the other tiling on an H200; where b has tiles, and where it has not.
    """

    warpgroups: int
    waves: int
    slowness: tuple[float, float] = (1.0, 1.0)

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.warpgroups * self.waves * WAVE_ROWS

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.warpgroups + 1) * _WARPGROUP_THREADS

    def tiles(self, m: int, n: int) -> int:
        """Tiles of a result [m, n]."""
        return cdiv(m, self.rows) * cdiv(n, _TILE_N)

    def cost(self, m: int, n: int, b_has_tiles: bool, num_sms: int) -> float:
        """What a result [m, n] takes, for each block along K and in no unit."""
        return cdiv(self.tiles(m, n), num_sms) * self.rows * self.slowness[not b_has_tiles]

    def stages(self, b_has_tiles: bool) -> int:
        """Blocks along K that fit in shared memory."""
        return min(_SHARED_BYTES // self._stage_bytes(b_has_tiles), _MOST_STAGES)

    def shared_bytes(self, b_has_tiles: bool) -> int:
        """Shared memory of a block."""
        return self.stages(b_has_tiles) * self._stage_bytes(b_has_tiles)

    def _stage_bytes(self, b_has_tiles: bool) -> int:
        # Four scales of tiles; of experts' rows, instead, what a tile is.
        scales = 4 * self.rows + (16 if b_has_tiles else 4 * _TILE_N)
        return (self.rows + _TILE_N) * GEMM_BLOCK + scales + _BARRIER_BYTES


#: Two warpgroups leave tensor cores idle where one waits and the other promotes.
TILINGS = (Tiling(3, 1), Tiling(2, 2, slowness=(1.08, 1.02)))


def tiling_of(m: int, n: int, b_has_tiles: bool, num_sms: int) -> Tiling:
    """The tiling that costs least for a result [m, n]."""
    return min(TILINGS, key=lambda tiling: tiling.cost(m, n, b_has_tiles, num_sms))


@dataclass(frozen=True)
class BlockScaledGemm:
    """The kernel for one problem: a [m, k] with scales of blocks, b [n, k] with scales of blocks or tiles.

    Attributes:
        num_blocks: of the grid.
    """

    m: int
    n: int
    k: int
    tiling: Tiling
    kernel: Kernel
    num_blocks: int
    device: torch.device

    def launch(self, a: int, b: int, scales_a: int, scales_b: int, bias: int, addend: int, out: int) -> None:
        """Queue it on the current stream. Arguments are addresses; `bias` and `addend` may be 0.

        All but `bias` are multiples of 16.

        Raises:
            ExtensionError: scales at another address, or the driver refuses.
        """
        if (scales_a | scales_b) % ALIGNMENT:
            raise ExtensionError(f"scales at {scales_a:#x} and {scales_b:#x}, not at multiples of {ALIGNMENT} bytes")
        map_a = map_of_a(a, self.m, self.k, self.tiling.rows)
        sizes = self.m, self.n, self.k
        operands = map_a, map_of_b(b, self.n, self.k), scales_a, scales_b, bias, addend, out
        self.kernel.launch(self.num_blocks, self.device, *operands, *sizes)


def block_scaled_gemm(
    a_shape: torch.Size,
    b_shape: torch.Size,
    *,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    b_has_tiles: bool,
    alignment: int,
    device: int,
    tiling: Tiling | None = None,
) -> BlockScaledGemm | None:
    """The kernel for a problem whose `a` has scales of blocks, compiled; None if there is none for it here.

    Args:
        a_shape, b_shape: [M, K] and [N, K].
        dtypes: of a, of b, and of the result.
        alignment: that all addresses have.
        tiling: instead of `tiling_of`'s.
    """
    (m, k), n, (a_dtype, b_dtype, out_dtype) = a_shape, b_shape[0], dtypes
    takes = out_dtype in (torch.bfloat16, torch.float32) and n % _COLUMNS_MULTIPLE == 0 and alignment >= ALIGNMENT
    if not takes:
        return None
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    if tiling is None:
        tiling = tiling_of(m, n, b_has_tiles, num_sms)
    kernel = compiled_kernel(device, tiling, a_dtype, b_dtype, out_dtype, b_has_tiles)
    if kernel is None:
        return None
    num_blocks = min(tiling.tiles(m, n), num_sms)
    return BlockScaledGemm(m, n, k, tiling, kernel, num_blocks, torch.device("cuda", device))


def macros(
    tiling: Tiling,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    out_dtype: torch.dtype,
    b_has_tiles: bool,
    is_grouped: bool = False,
) -> dict[str, int]:
    """The kernel's macros."""
    return {
        "WARPGROUPS": tiling.warpgroups,
        "WAVES": tiling.waves,
        "STAGES": tiling.stages(b_has_tiles),
        "A_IS_E5M2": a_dtype == E5M2,
        "B_IS_E5M2": b_dtype == E5M2,
        "B_HAS_TILES": b_has_tiles,
        "OUT_IS_FP32": out_dtype == torch.float32,
        "GROUPED": is_grouped,
    }


@cache
def compiled_kernel(
    device: int,
    tiling: Tiling,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    out_dtype: torch.dtype,
    b_has_tiles: bool,
    is_grouped: bool = False,
) -> Kernel | None:
    """The kernel compiled and loaded; None, with a warning, if it cannot be, and on a GPU that is not Hopper."""
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) != _CAPABILITY:
        return None
    given = macros(tiling, a_dtype, b_dtype, out_dtype, b_has_tiles, is_grouped)
    try:
        with torch.cuda.device(device):
            return Kernel(
                compile_source(_SOURCE, given, _CAPABILITY),
                _FUNCTION,
                threads=tiling.threads,
                shared_bytes=tiling.shared_bytes(b_has_tiles),
                parameters=[*_PARAMETERS, *(_EXPERTS_PARAMETERS if is_grouped else [])],
            )
    except ExtensionError as error:
        others = "Triton's where rows are of experts" if is_grouped else "cuBLASLt's alone"
        logger.warning("GEMMs with scales of blocks are %s: %s", others, error)
        return None


@lru_cache(_MOST_MAPS)
def map_of_a(address: int, rows: int, columns: int, box_rows: int) -> TensorMap:
    """Of a [rows, columns], in boxes of `box_rows` rows."""
    return tensor_map(address, (columns, rows), (columns,), (GEMM_BLOCK, box_rows))


@lru_cache(_MOST_MAPS)
def map_of_b(address: int, rows: int, columns: int) -> TensorMap:
    """Of b [rows, columns], in the order of csrc's `column_of`: of 32 rows, 8 q + 2 p + e lies at 8 p + 2 q + e in
    shared memory."""
    sizes, box = (columns, 2, 4, 4, rows // 32), (GEMM_BLOCK, 2, 4, 4, _TILE_N // 32)
    return tensor_map(address, sizes, (columns, 8 * columns, 2 * columns, 32 * columns), box)
