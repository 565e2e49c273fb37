"""MS-AMP's qtypes. A qtype names a number format; FP8 payloads are bytes (torch.uint8) that hold its bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8_megatron.dtypes import E4M3, E5M2, StorageDtype


@dataclass(frozen=True)
class QType:
    """A number format: its name and MS-AMP's number for it."""

    name: str
    value: int

    def __int__(self) -> int:
        return self.value


class Dtypes:
    """The qtypes, and what torch calls them.

    Attributes:
        dtype_to_qtype, qtype_to_dtype: MS-AMP stands torch.uint8 for E4M3 and torch.int8 for E5M2.
        dtype_to_size: bytes per element.
    """

    kbyte = QType("kByte", 0)
    kint32 = QType("kInt32", 1)
    kfloat32 = QType("kFloat32", 2)
    kfloat16 = QType("kFloat16", 3)
    kbfloat16 = QType("kBFloat16", 4)
    kfloat8_e4m3 = QType("kFloat8E4M3", 5)
    kfloat8_e5m2 = QType("kFloat8E5M2", 6)

    qtype_to_dtype = {  # noqa: RUF012
        kfloat16: torch.float16,
        kbfloat16: torch.bfloat16,
        kfloat32: torch.float32,
        kfloat8_e4m3: torch.uint8,
        kfloat8_e5m2: torch.int8,
    }
    dtype_to_qtype = {dtype: qtype for qtype, dtype in qtype_to_dtype.items()} | {
        E4M3: kfloat8_e4m3,
        E5M2: kfloat8_e5m2,
    }
    dtype_to_size = {  # noqa: RUF012
        dtype: dtype.itemsize
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int64, torch.int32)
    }

    @classmethod
    def is_fp8_qtype(cls, qtype: QType) -> bool:
        """Whether `qtype` is E4M3 or E5M2."""
        return qtype in (cls.kfloat8_e4m3, cls.kfloat8_e5m2)

    @classmethod
    def get_dtype_from_qtype(cls, qtype: QType) -> torch.dtype:
        """The dtype of a payload in `qtype`; both FP8 formats are torch.uint8."""
        return torch.uint8 if cls.is_fp8_qtype(qtype) else cls.qtype_to_dtype[qtype]


#: torch's dtype of an FP8 payload's bits.
FP8_BITS = {Dtypes.kfloat8_e4m3: E4M3, Dtypes.kfloat8_e5m2: E5M2}
#: The format in which a weight of a qtype rests.
WEIGHT_STORAGE = {
    Dtypes.kfloat8_e4m3: StorageDtype.FP8,
    Dtypes.kfloat16: StorageDtype.FP16,
    Dtypes.kbfloat16: StorageDtype.BF16,
    Dtypes.kfloat32: StorageDtype.FP32,
}
