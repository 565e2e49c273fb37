"""Between a part of each sequence with all heads and whole sequences with a part of the heads (arXiv 2309.14509).

Rank r of n has chunks r and 2n - 1 - r of the sequence's 2n (`data.document_bounds`). After the exchange it has the
r-th of n runs of heads, in the order of the sequence. One all-to-all carries several tensors. FP8 values travel as they
are; the ranks then share their scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..device.group import Group
from ..dtypes import FP8_DTYPES


def gather_sequence(parts: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Whole sequences of this rank's heads. All ranks of `group` call this.

    Args:
        parts: [s / n, b, heads, d] each, of one dtype, with any strides; n divides the heads of each.

    Returns:
        [s, b, heads / n, d] each, views of one tensor.
    """
    size = group.size()
    dtype, parts = parts[0].dtype, _as_copied(parts)
    widths = [x.shape[2] // size for x in parts]
    rows, batch, _, columns = parts[0].shape
    sent = parts[0].new_empty((size, rows, batch, sum(widths), columns))
    for run, x in zip(sent.split(widths, dim=3), parts, strict=True):
        run.copy_(x.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4))
    first, second = _exchanged(sent, group).chunk(2, dim=1)
    whole = torch.cat([*first, *reversed(second.unbind())])
    return list(whole.view(dtype).split(widths, dim=2))


def scatter_sequence(wholes: Sequence[Tensor], group: Group) -> list[Tensor]:
    """The inverse of `gather_sequence`: all heads of this rank's chunks. All ranks of `group` call this.

    Args:
        wholes: [s, b, heads / n, d] each, of one dtype, with any strides.

    Returns:
        [s / n, b, heads, d] each, contiguous.
    """
    size = group.size()
    dtype, wholes = wholes[0].dtype, _as_copied(wholes)
    widths = [x.shape[2] for x in wholes]
    chunk = wholes[0].shape[0] // (2 * size)
    sent = wholes[0].new_empty((size, 2, chunk, *wholes[0].shape[1:2], sum(widths), wholes[0].shape[3]))
    for run, x in zip(sent.split(widths, dim=4), wholes, strict=True):
        chunks = x.unflatten(0, (2 * size, chunk))
        for rank in range(size):
            run[rank, 0], run[rank, 1] = chunks[rank], chunks[2 * size - 1 - rank]
    received = _exchanged(sent.flatten(1, 2), group)
    return [x.permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous().view(dtype) for x in received.split(widths, dim=3)]


def _as_copied(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """FP8 values as bytes, which every copy and every backend takes."""
    return [x.view(torch.uint8) if x.dtype in FP8_DTYPES else x for x in tensors]


def _exchanged(sent: Tensor, group: Group) -> Tensor:
    """The r-th run of every rank, in rank order, on rank r. `sent` is contiguous."""
    received = torch.empty_like(sent)
    torch.distributed.all_to_all_single(received, sent, group=group)
    return received
