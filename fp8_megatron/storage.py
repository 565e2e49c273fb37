"""Storage formats as a user names them: dtypes, the levels of the optimizer, block sizes. Imports no torch.

`dtypes` has the numerical limits of these dtypes; it re-exports every name of this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

#: Elements that share one FP32 scale in a block-scaled gradient (and on the wire).
GRAD_BLOCK = 128
#: Elements that share one FP32 scale in block-scaled optimizer state.
STATE_BLOCK = 256
#: Elements of a chunk, the unit in which the amaxes of FP8 weights are taken.
CHUNK = 4096
#: Elements along K that share one FP32 scale in an operand of the block-scaled GEMM; a weight's tile has as many rows.
GEMM_BLOCK = 128
#: Elements along K that share one E8M0 scale in an operand of the MX GEMM.
MX_BLOCK = 32
#: Elements along K that share one E4M3 scale in an operand of the NVFP4 GEMM.
NV_BLOCK = 16

#: Hopper's FP8 tensor cores take operand sizes in multiples of this.
FP8_GEMM_MULTIPLE = 16
#: The rows of each expert start at a multiple of this. The rows between are padding.
GROUP_ROWS = 128

#: The recipes of FP8 layers; `formats.recipes` says which formats each one has.
RecipeName = Literal["tensorwise", "delayed", "blockwise", "mxfp8", "nvfp4"]


class StorageDtype(str, Enum):
    """A storage dtype as a user names it on the command line: Megatron's names, and fp8, int8, uint8 and split."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    INT8 = "int8"
    """Companded, signed; for averages of gradients."""
    UINT8 = "uint8"
    """Companded, not negative; for averages of squares."""
    SPLIT = "split"
    """One byte of correction beside an FP8 weight; for main_params only."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of the payload; ``fp8`` is E4M3."""
        return _torch_dtype(self)

    @property
    def itemsize(self) -> int:
        """Bytes per element, without scales."""
        return _ITEMSIZES[self]

    @property
    def is_scaled(self) -> bool:
        """Whether the payload has FP32 scales. fp32 and bf16 have the range without them; split uses its weight's."""
        return self not in (StorageDtype.FP32, StorageDtype.BF16, StorageDtype.SPLIT)


_TORCH_NAMES = {
    StorageDtype.FP32: "float32",
    StorageDtype.BF16: "bfloat16",
    StorageDtype.FP16: "float16",
    StorageDtype.FP8: "float8_e4m3fn",
    StorageDtype.INT8: "int8",
    StorageDtype.UINT8: "uint8",
    StorageDtype.SPLIT: "int8",
}
_ITEMSIZES = {
    StorageDtype.FP32: 4,
    StorageDtype.BF16: 2,
    StorageDtype.FP16: 2,
    StorageDtype.FP8: 1,
    StorageDtype.INT8: 1,
    StorageDtype.UINT8: 1,
    StorageDtype.SPLIT: 1,
}


@cache
def _torch_dtype(dtype: StorageDtype) -> torch.dtype:
    import torch

    return getattr(torch, _TORCH_NAMES[dtype])


class GradReduceMode(str, Enum):
    """How the mean of a gradient over the data-parallel ranks is taken (docs/collectives.md)."""

    #: E4M3 blocks cross the wire once, straight to the rank that keeps them; the sum is FP32.
    ALL_TO_ALL = "all_to_all"
    #: The same in two stages, inside a node and then across nodes, with the node's sum rounded to E4M3 between them.
    HIERARCHICAL = "hierarchical"
    #: NCCL's own FP8 sum with auto-scaling (FP8-LM, arXiv 2310.18313, section 2.1): partial sums are rounded to E4M3.
    NCCL = "nccl"


@dataclass(frozen=True)
class StorageFormats:
    """Storage dtypes of one linear weight and of everything an optimizer may keep for it.

    Attributes:
        master_weight: None: the weight itself is the master (levels O1 and O2).
        average: of state that averages gradients. square: of state that averages their squares.
    """

    weight: StorageDtype
    main_grad: StorageDtype
    master_weight: StorageDtype | None
    average: StorageDtype
    square: StorageDtype


@dataclass(frozen=True)
class StateSpec:
    """One tensor that an update rule stores beside each weight, in blocks of `STATE_BLOCK` elements.

    Attributes:
        name: in state dicts and checkpoints. title: in tables.
        holds_squares: it averages squares, so it is never negative and its rounding never gives 0. Other state is
            signed, and is rounded so that it is exact on average.
    """

    name: str
    title: str
    holds_squares: bool = False

    def dtype(self, formats: StorageFormats) -> StorageDtype:
        """Its storage dtype."""
        return formats.square if self.holds_squares else formats.average


_F = StorageDtype
#: The levels (README, "Precision levels"). With AdamW bf16 holds 18 bytes a parameter, O1 11, O2 6, O3 7.
LEVELS: dict[str, StorageFormats] = {
    "bf16": StorageFormats(_F.BF16, _F.FP32, _F.FP32, _F.FP32, _F.FP32),
    "fp16": StorageFormats(_F.FP16, _F.FP32, _F.FP32, _F.FP32, _F.FP32),
    "te": StorageFormats(_F.BF16, _F.FP32, _F.FP32, _F.FP32, _F.FP32),
    "O1": StorageFormats(_F.FP16, _F.FP8, None, _F.FP32, _F.FP32),
    "O2": StorageFormats(_F.FP16, _F.FP8, None, _F.FP8, _F.FP16),
    "O3": StorageFormats(_F.FP8, _F.FP8, _F.FP16, _F.FP8, _F.FP16),
}
