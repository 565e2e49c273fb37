"""Ranks meet at the interface that is named, on one node at the loopback; who does not come is named."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from fp8_megatron.data.splits import process_group
from fp8_megatron.device.rendezvous import fresh_store, is_loopback, listening_store, process_group_arguments
from fp8_megatron.errors import UserError
from tests.harness.listening import listening

TIMEOUT = timedelta(seconds=20)
SOON = timedelta(seconds=0.3)


def _attempt(store: torch.distributed.Store, late: int | None, world_size: int = 3) -> list[str]:
    """All ranks meet, rank `late` half a second after the others, and exchange keys; what each rank reads."""
    read = [""] * world_size

    def run(rank: int) -> None:
        if rank == late:
            time.sleep(0.5)
        own = fresh_store(store, rank, world_size, TIMEOUT)
        if rank == 0:
            own.set("address", f"{time.monotonic()}")
        read[rank] = own.get("address").decode()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return read


@pytest.mark.parametrize("late", [None, 0, 2])
def test_a_restarted_rank_reads_nothing_old(late: int | None) -> None:
    store = torch.distributed.HashStore()
    store.set_timeout(TIMEOUT)
    seen = set()
    for _ in range(3):
        read = _attempt(store, late)
        assert len(set(read)) == 1 and read[0] and read[0] not in seen
        seen.add(read[0])


def test_ranks_that_do_not_come_are_named() -> None:
    store = torch.distributed.HashStore()
    with pytest.raises(UserError, match="no sign of ranks 1, 2 of WORLD_SIZE=3 within --distributed-timeout-minutes"):
        fresh_store(store, 0, 3, SOON)
    store.set("fp8_megatron/attempt/name", "old")
    store.set("fp8_megatron/attempt/old/seen/1", "another word")
    store.set("fp8_megatron/attempt/old/signed/2", "word")
    with pytest.raises(UserError, match="no sign of rank 0 of WORLD_SIZE=3"):
        fresh_store(store, 1, 3, SOON)
    with pytest.raises(UserError, match="no sign of rank 0 of WORLD_SIZE=2"):
        fresh_store(torch.distributed.HashStore(), 1, 2, SOON)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables of rank 0 of two that were started by hand; tests change them through `monkeypatch`."""
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    for name in ("LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # remembered, so that what the code sets is undone
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return variables


def _meet(timeout: timedelta) -> dict[str, Any]:
    """What rank 0 of the environment is given, while another one signs."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    def sign() -> None:
        client = torch.distributed.TCPStore(address, port, is_master=False, timeout=timeout)
        fresh_store(client, 1, 2, timeout)

    thread = threading.Thread(target=sign)
    thread.start()
    arguments = process_group_arguments(timeout)
    thread.join()
    return arguments


def test_ranks_of_this_machine_meet_at_the_loopback_interface(place: dict[str, str]) -> None:
    before = listening()
    arguments = _meet(TIMEOUT)
    assert listening() - before == {("127.0.0.1", int(place["MASTER_PORT"]))}
    assert (arguments["rank"], arguments["world_size"]) == (0, 2)
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")


def test_a_single_rank_opens_no_store(place: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in place:
        monkeypatch.delenv(name)
    before = listening()
    arguments = process_group_arguments(TIMEOUT)
    assert isinstance(arguments["store"], torch.distributed.HashStore) and listening() == before
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_name_of_no_interface_listens_at_all_of_them_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a service's address in front of the first node, or a name that /etc/hosts sends to the loopback."""
    known = {"service": "192.0.2.77", "node0": "127.0.1.1"}
    entry = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    look_up = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, port, **more: [(*entry, (known[host], port))] if host in known else look_up(host, port, **more),
    )
    for host in known:
        before = listening()
        with caplog.at_level(logging.WARNING):
            store = listening_store(host, 0, TIMEOUT)
        ((address, port),) = listening() - before
        assert address in ("::", "0.0.0.0") and port == store.port
        assert f"{host} is no interface of this machine: the store listens at all; name" in caplog.text


def test_a_group_that_data_alone_ask_for_listens_at_the_loopback_interface(
    place: dict[str, str],
) -> None:
    before = listening()
    with process_group():
        torch.distributed.barrier()
        opened = listening() - before
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo" and {address for address, _ in opened} == {"127.0.0.1"}


def test_what_means_the_loopback_interface_by_itself() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.3.2.1", "::1")))
    assert not any(map(is_loopback, ("node0", "10.0.0.1", "0.0.0.0", "::", "")))
