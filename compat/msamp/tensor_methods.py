"""MS-AMP's methods of torch.Tensor, for code that calls them. Importing `msamp` adds nothing to torch."""

from __future__ import annotations

import torch

from .common.dtype import Dtypes
from .common.tensor.tensor import cast, fused_cast_transpose


def install() -> None:
    """Add ``tensor.cast``, ``tensor.fused_cast_transpose``, ``tensor.qtype``, ``torch.fp8e4m3`` and ``torch.fp8e5m2``.

    The names are new; nothing that torch has is replaced.
    """
    for owner, name, value in (
        (torch.Tensor, "cast", cast),
        (torch.Tensor, "fused_cast_transpose", fused_cast_transpose),
        (torch.Tensor, "qtype", property(lambda tensor: Dtypes.dtype_to_qtype[tensor.dtype])),
        (torch, "fp8e4m3", torch.uint8),
        (torch, "fp8e5m2", torch.int8),
    ):
        setattr(owner, name, value)
