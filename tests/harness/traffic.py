"""Bytes on the wire, counted at torch's collectives.

A collective says what its rank sends to other ranks. Bytes that stay on the rank do not count. The figures are those of
the bandwidth-optimal algorithms; NCCL and gloo use them for large messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor


def _parted(sent: Tensor, num_ranks: int) -> int:
    """All but the rank's own part."""
    return sent.nbytes * (num_ranks - 1) // num_ranks


#: Function → (what its bytes are for, the argument that is sent, what of it leaves the rank).
_COLLECTIVES: dict[str, tuple[str, int, Callable[[Tensor, int], int]]] = {
    "all_to_all_single": ("reduce_scatter", 1, _parted),
    "reduce_scatter_tensor": ("reduce_scatter", 1, _parted),
    "all_gather_into_tensor": ("all_gather", 1, lambda sent, num_ranks: sent.nbytes * (num_ranks - 1)),
    "all_reduce": ("all_reduce", 0, lambda sent, num_ranks: 2 * sent.nbytes * (num_ranks - 1) // num_ranks),
}


@contextmanager
def counted_traffic() -> Iterator[Counter[str]]:
    """Count the bytes that this process sends in the block, on every thread, by what they are for."""
    sent: Counter[str] = Counter()
    with ExitStack() as stack:
        for name, (kind, place, leaving) in _COLLECTIVES.items():
            function = getattr(torch.distributed, name)

            def counted(
                *args: Any,
                function: Callable[..., Any] = function,
                kind: str = kind,
                place: int = place,
                leaving: Callable[[Tensor, int], int] = leaving,
                **settings: Any,
            ) -> Any:
                tensors = [value for value in (*args, *settings.values()) if isinstance(value, Tensor)]
                group, rows_by_rank = settings.get("group"), args[3:4]
                if rows_by_rank:  # of an all-to-all whose parts have several sizes
                    (rows,) = rows_by_rank
                    own = rows[torch.distributed.get_rank(group)]
                    sent["all_to_all"] += tensors[place][: sum(rows) - own].nbytes
                else:
                    sent[kind] += leaving(tensors[place], torch.distributed.get_world_size(group))
                return function(*args, **settings)

            stack.enter_context(mock.patch.object(torch.distributed, name, counted))
        yield sent
