"""Scale blocks of state as they were saved, for a part of a parameter whose scale blocks lie as the saved ones do.

State is read as FP32 and rounded to its storage dtype again, which takes the scale from the block's largest value. A
step need not have stored that value with the largest code, because it rounds stochastically. The block then gets
another scale, and its other values are rounded. So a block that was saved whole is copied instead. Where only its
values were saved, the scale that gives them all is looked for.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..dtypes import STATE_BLOCK, StorageDtype
from ..kernels import ops
from ..optimizer.state import StateTensor
from .encoding import Encoded


class SavedBlocks:
    """What was saved of a flat part of one state. It takes memory from the first `take` to `put`.

    Args:
        length: elements of the part, a multiple of 256.
        numel: its elements before the parameter's padding.
    """

    def __init__(self, length: int, numel: int) -> None:
        assert length % STATE_BLOCK == 0, length
        self._shape = (length // STATE_BLOCK, STATE_BLOCK)
        self._numel = numel
        self._form: StorageDtype | None = None
        self._codes = self._lowest = self._highest = self._counts = torch.empty(0)

    def take(self, encoded: Encoded, source: int, numel: int, start: int) -> None:
        """Elements [source, source + numel) of a rectangle are the part's [start, start + numel).

        They are left out if their scale blocks lie otherwise.
        """
        first = start - source - encoded.first
        if encoded.scales is None or encoded.form is StorageDtype.SPLIT or first % STATE_BLOCK:
            return
        if self._form is None:
            self._begin(encoded)
        if self._form is not encoded.form:
            return
        stop = start + numel
        self._codes[start:stop] = encoded.payload[source : source + numel]
        blocks = slice(start // STATE_BLOCK, math.ceil(stop / STATE_BLOCK))
        shift = first // STATE_BLOCK
        scales = encoded.scales[blocks.start - shift : blocks.stop - shift]
        self._lowest[blocks] = torch.minimum(self._lowest[blocks], scales)
        self._highest[blocks] = torch.maximum(self._highest[blocks], scales)
        self._counts[blocks] += STATE_BLOCK
        self._counts[blocks.start] -= start % STATE_BLOCK
        self._counts[blocks.stop - 1] -= -stop % STATE_BLOCK

    def put(self, stored: StateTensor, value: Tensor) -> None:
        """Copy each block all of whose elements were saved in one block of this dtype to `stored` [length].

        Args:
            value: FP32 [length], what `stored` was rounded from.
        """
        if self._form is None:
            ops.restore_state_(value, stored.payload, stored.scales)
            return
        if self._form.torch_dtype is stored.payload.dtype:
            assert stored.scales is not None
            counts = self._numel - STATE_BLOCK * torch.arange(self._shape[0], device=self._counts.device)
            is_whole = (self._lowest == self._highest) & (self._counts == counts.clamp(0, STATE_BLOCK))
            bits = torch.int16 if stored.payload.itemsize == 2 else torch.uint8
            codes, own = (tensor.view(bits).view(self._shape) for tensor in (self._codes, stored.payload))
            own.copy_(torch.where(is_whole[:, None], codes, own))
            stored.scales.copy_(torch.where(is_whole, self._lowest, stored.scales))
        self._form = None
        self._codes = self._lowest = self._highest = self._counts = torch.empty(0)

    def _begin(self, encoded: Encoded) -> None:
        device = encoded.payload.device
        self._form = encoded.form
        self._codes = torch.zeros(math.prod(self._shape), dtype=encoded.payload.dtype, device=device)
        self._lowest = torch.full(self._shape[:1], math.inf, device=device)
        self._highest = torch.full(self._shape[:1], -math.inf, device=device)
        self._counts = torch.zeros(self._shape[0], dtype=torch.int64, device=device)
