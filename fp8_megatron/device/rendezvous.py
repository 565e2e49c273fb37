"""A rendezvous store that no earlier attempt has written to.

torchrun keeps one store for all its restarts. A rank that is started again may read the address or the NCCL id that its
peer of the last attempt left there, and waits for a process that is gone. Numbers of restarts do not tell attempts
apart: with several nodes each torchrun counts its own.
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta
from typing import Any

import torch

_PREFIX = "fp8_megatron/attempt"
_POLL_SECONDS = 0.05


def process_group_arguments(timeout: timedelta) -> dict[str, Any]:
    """Arguments of `torch.distributed.init_process_group` that say where ranks meet; none where nothing is restarted.

    Collective over all ranks where torchrun may restart them.

    Args:
        timeout: what the slowest rank may take.

    Raises:
        torch.distributed.DistError: a rank has not come.
    """
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return {}
    store, rank, world_size = next(torch.distributed.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return {"store": fresh_store(store, rank, world_size, timeout), "rank": rank, "world_size": world_size}


def fresh_store(
    store: torch.distributed.Store, rank: int, world_size: int, timeout: timedelta
) -> torch.distributed.Store:
    """A part of `store` that is new to this attempt. Every rank gets the same.

    Rank 0 names the attempt. Another rank may read the name of the last one, so it signs with a word of its own and
    waits until rank 0 repeats that word under the same name.

    Raises:
        torch.distributed.DistError: a rank has not come within `timeout`.
    """
    store = torch.distributed.PrefixStore(_PREFIX, store)
    if world_size == 1:
        return torch.distributed.PrefixStore(secrets.token_hex(8), store)
    if rank == 0:
        name = secrets.token_hex(8)
        store.set("name", name)
        others = range(1, world_size)
        store.wait([f"{name}/signed/{other}" for other in others], timeout)
        for other in others:
            store.set(f"{name}/seen/{other}", store.get(f"{name}/signed/{other}").decode())
    else:
        name = _sign(store, rank, timeout)
    return torch.distributed.PrefixStore(name, store)


def _sign(store: torch.distributed.Store, rank: int, timeout: timedelta) -> str:
    """The name of this attempt, on a rank that does not choose it."""
    word = secrets.token_hex(8)
    signed = ""
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        name = store.get("name").decode()
        if name != signed:
            store.set(f"{name}/signed/{rank}", word)
            signed = name
        seen = f"{name}/seen/{rank}"
        if store.check([seen]) and store.get(seen).decode() == word:
            return name
        time.sleep(_POLL_SECONDS)
    raise torch.distributed.DistStoreError(
        f"rank {rank} has not met rank 0 within --distributed-timeout-minutes ({timeout})"
    )
