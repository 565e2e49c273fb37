"""Where ranks meet: which interface of this machine listens, and a store that no earlier attempt has written to.

Ranks of one node talk over the loopback interface, and a single rank needs no store. Over several nodes the store
listens at the address that is named.

A launcher keeps one store for all its restarts. A rank that is started again may read the address or the NCCL id that
its peer of the last attempt left there, and waits for a process that is gone. Numbers of restarts do not tell attempts
apart: with several nodes each launcher counts its own.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import secrets
import socket
import time
from datetime import timedelta
from typing import Any

import torch

from ..errors import UserError
from .device import node_size, world_size
from .variables import number

logger = logging.getLogger(__name__)

#: The address of a launch on one node.
LOOPBACK = "127.0.0.1"
_LOOPBACK_INTERFACE = "lo"
_PREFIX = "fp8_megatron/attempt"
_POLL_SECONDS = 0.05
#: Seconds until rank 0 says whom it waits for.
_QUIET_SECONDS = 30.0


def process_group_arguments(timeout: timedelta) -> dict[str, Any]:
    """Arguments of `torch.distributed.init_process_group` that say where the ranks of the environment meet.

    Collective over all ranks. Ranks of one node get gloo's and NCCL's sockets on the loopback interface, unless
    ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` names another.

    Args:
        timeout: what the slowest rank may take.

    Raises:
        UserError: a rank has not come, or the place to meet cannot be used.
    """
    rank, world = number("RANK", 0), world_size()
    address, port = os.environ.get("MASTER_ADDR", LOOPBACK), number("MASTER_PORT", 0)
    if world in (1, node_size()) or is_loopback(address):
        talk_over_loopback()
    if world == 1:
        return {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeps_store = rank == 0 and not of_launcher
    try:
        if keeps_store:
            store = listening_store(address, port, timeout)
        else:
            # A launcher listens before it starts ranks. If it does not, it has gone.
            reachable_within = timedelta(seconds=_QUIET_SECONDS) if of_launcher else timeout
            store = reached_store(address, port, min(reachable_within, timeout))
            store.set_timeout(timeout)
        return {"store": fresh_store(store, rank, world, timeout), "rank": rank, "world_size": world}
    except (OSError, torch.distributed.DistError) as error:
        raise UserError(_about(error, rank, address, port, keeps_store=keeps_store)) from error


def _about(error: Exception, rank: int, address: str, port: int, *, keeps_store: bool) -> str:
    """Why ranks do not meet, with the variable that says where."""
    place = f"the environment variables MASTER_ADDR={address} and MASTER_PORT={port}"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"{place}: another process has this port; give another MASTER_PORT, the same to every rank"
    if keeps_store and isinstance(error, OSError):
        return f"{place}: rank 0 cannot listen there ({error}); give an address of rank 0's machine and a free port"
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return f"{place}: rank {rank} lost or never reached the store there ({reason}); see why rank 0 ended"


def reached_store(address: str, port: int, timeout: timedelta) -> torch.distributed.TCPStore:
    """The store that another process keeps. After half a minute without it a line says so.

    Raises:
        OSError: nobody listens there within `timeout`.
    """
    start = time.monotonic()
    told = False
    while True:
        # torch's own attempts print a native stack for each second that nobody listens.
        try:
            socket.create_connection((address, port), timeout=_QUIET_SECONDS).close()
            break
        except OSError:
            waited = time.monotonic() - start
            if waited >= timeout.total_seconds():
                raise
            if waited >= _QUIET_SECONDS and not told:
                told = True
                logger.warning("nobody listens at %s, port %d; waiting for at most %s", address, port, timeout)
            time.sleep(_POLL_SECONDS)
    return torch.distributed.TCPStore(address, port, is_master=False, timeout=timeout)


def is_loopback(host: str) -> bool:
    """Whether a name or an address by itself means the loopback interface."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def talk_over_loopback() -> None:
    """Let gloo and NCCL of this process listen at the loopback interface, where the user names no other one.

    Gloo takes the interface of the host's name by itself, and NCCL any interface but this one.
    """
    if _LOOPBACK_INTERFACE in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK_INTERFACE)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={_LOOPBACK_INTERFACE}")


def listening_store(host: str, port: int, timeout: timedelta) -> torch.distributed.TCPStore:
    """A store that listens at the addresses of `host` alone, where torch's own listens at every interface.

    Args:
        host: of this machine.
        port: 0: a free one.

    Raises:
        OSError: the name is unknown, or the port is taken.
    """
    listener = _listener(host, port)
    address, port = listener.getsockname()[:2]
    reached = LOOPBACK if address in ("::", "0.0.0.0") else address  # it compares
    return torch.distributed.TCPStore(
        reached, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def _listener(host: str, port: int) -> socket.socket:
    """A socket that listens at `host`. A name that is another machine's, or loopback's by this machine's table of hosts
    alone, reaches this machine from others by a way that is not known here: then it listens at every interface."""
    for family, *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        address = str(place[0])
        if is_loopback(address) and not is_loopback(host):
            continue
        try:
            return socket.create_server((address, port), family=family)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    logger.warning("%s is no interface of this machine: the store listens at all; name the address of one", host)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def fresh_store(
    store: torch.distributed.Store, rank: int, world_size: int, timeout: timedelta
) -> torch.distributed.Store:
    """A part of `store` that is new to this attempt. Every rank gets the same, once all have come.

    Rank 0 names the attempt. Another rank may read the name of the last one, so it signs with a word of its own and
    waits until rank 0 repeats that word under the same name.

    Raises:
        UserError: ranks have not come within `timeout`; it names them.
    """
    store = torch.distributed.PrefixStore(_PREFIX, store)
    if rank == 0:
        name = secrets.token_hex(8)
        store.set("name", name)
        others = range(1, world_size)
        _wait_for_signatures(store, name, world_size, timeout)
        for other in others:
            store.set(f"{name}/seen/{other}", store.get(f"{name}/signed/{other}").decode())
    else:
        name = _sign(store, rank, world_size, timeout)
    return torch.distributed.PrefixStore(name, store)


def _wait_for_signatures(store: torch.distributed.Store, name: str, world_size: int, timeout: timedelta) -> None:
    """On rank 0: return when every other rank has signed. After half a minute a line says who is missing."""
    start = time.monotonic()
    told = False
    keys = [f"{name}/signed/{other}" for other in range(1, world_size)]
    while not store.check(keys):
        waited = time.monotonic() - start
        if waited >= timeout.total_seconds():
            raise _too_late(_absent(store, name, world_size), timeout)
        if waited >= _QUIET_SECONDS and not told:
            told = True
            logger.warning("waiting for %s, for at most %s", _absent(store, name, world_size), timeout)
        time.sleep(_POLL_SECONDS)


def _sign(store: torch.distributed.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """The name of this attempt, on a rank that does not choose it."""
    word = secrets.token_hex(8)
    name = signed = ""
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        if store.check(["name"]):
            name = store.get("name").decode()
        if name != signed:
            store.set(f"{name}/signed/{rank}", word)
            signed = name
        seen = f"{name}/seen/{rank}"
        if name and store.check([seen]) and store.get(seen).decode() == word:
            return name
        time.sleep(_POLL_SECONDS)
    raise _too_late(_absent(store, name, world_size), timeout)


def _absent(store: torch.distributed.Store, name: str, world_size: int) -> str:
    """Which ranks have not come. Rank 0 does not sign: it is the one if all others have, or if it named no attempt."""
    ranks = [rank for rank in range(1, world_size) if name and not store.check([f"{name}/signed/{rank}"])] or [0]
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown} of WORLD_SIZE={world_size}"


def _too_late(absent: str, timeout: timedelta) -> UserError:
    return UserError(
        f"no sign of {absent} within --distributed-timeout-minutes ({timeout}); start every rank, or see why it ended"
    )
