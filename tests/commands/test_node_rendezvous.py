"""Launchers of several nodes meet in rounds, without reading code from the network."""

from __future__ import annotations

import base64
import pickle
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from fp8_megatron.commands import node_rendezvous
from fp8_megatron.commands.launch import NodeRanks
from fp8_megatron.commands.node_rendezvous import NodeRendezvous, create
from tests.harness.listening import listening


def _node(store: torch.distributed.Store, node: int, num_nodes: int, *, restarts: bool = True) -> NodeRendezvous:
    return NodeRendezvous("run", node, num_nodes, store, RendezvousStoreInfo("127.0.0.1", 1), restarts=restarts)


def _nodes(num_nodes: int, *, restarts: bool = True) -> list[NodeRendezvous]:
    store = torch.distributed.HashStore()
    return [_node(store, node, num_nodes, restarts=restarts) for node in range(num_nodes)]


def _meet(*nodes: NodeRendezvous) -> list[RendezvousInfo]:
    """These nodes ask for a round; what each of them gets."""
    met: dict[NodeRendezvous, RendezvousInfo] = {}

    def ask(node: NodeRendezvous) -> None:
        met[node] = node.next_rendezvous()

    threads = [threading.Thread(target=ask, args=(node,), daemon=True) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [met[node] for node in nodes]


def test_nodes_have_their_own_numbers_and_share_a_store() -> None:
    infos = _meet(*_nodes(3))
    assert [(info.rank, info.world_size) for info in infos] == [(0, 3), (1, 3), (2, 3)]
    infos[0].store.set("key", "value")
    assert infos[2].store.get("key") == b"value"


def test_a_fault_of_one_node_calls_all_of_them_to_another_round() -> None:
    nodes = _nodes(3)
    infos = _meet(*nodes)
    for _ in range(2):
        assert [node.num_nodes_waiting() for node in nodes] == [0, 0, 0]
        infos[0].store.set("rank", "old")
        asking = threading.Thread(target=nodes[1].next_rendezvous, daemon=True)
        asking.start()
        end = time.monotonic() + 20
        while not nodes[0].num_nodes_waiting() and time.monotonic() < end:
            time.sleep(0.01)
        assert nodes[0].num_nodes_waiting() == nodes[2].num_nodes_waiting() == 1
        infos = _meet(nodes[0], nodes[2])
        asking.join(30)
        assert not infos[1].store.check(["rank"]), "a key of the round before"


def test_a_launcher_that_was_started_anew_joins_the_next_round() -> None:
    store = torch.distributed.HashStore()
    first = _node(store, 0, 2)
    _meet(first, _node(store, 1, 2))
    assert len(_meet(first, _node(store, 1, 2))) == 2


def test_without_restarts_nobody_is_asked_to_come_again() -> None:
    store = torch.distributed.HashStore()
    first = _node(store, 0, 2, restarts=False)
    _meet(first, _node(store, 1, 2, restarts=False))
    asking = threading.Thread(target=_meet, args=(_node(store, 1, 2),), daemon=True)
    asking.start()
    time.sleep(0.3)
    assert first.num_nodes_waiting() == 0
    _meet(first)  # ends the thread
    asking.join(30)


def test_nodes_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_rendezvous, "_TIMEOUT", timedelta(seconds=0.1))
    with pytest.raises(RendezvousTimeoutError, match="no sign of node 1, 2 within"):
        _nodes(3)[0].next_rendezvous()


def test_a_node_that_ended_for_good_is_not_waited_for() -> None:
    nodes = _nodes(2)
    assert nodes[1].shutdown() and nodes[0].is_closed()
    with pytest.raises(RendezvousClosedError):
        nodes[0].next_rendezvous()


def _created(placement: NodeRanks) -> NodeRendezvous:
    """What torch's launcher makes of a placement."""
    config = placement.launch_config()
    nodes = {"min_nodes": config.min_nodes, "max_nodes": config.max_nodes}
    return create(RendezvousParameters(config.rdzv_backend, "", config.run_id, **nodes, **config.rdzv_configs))


def test_one_node_listens_at_the_loopback_interface_and_one_rank_nowhere() -> None:
    before = listening()
    info = _created(NodeRanks(2)).next_rendezvous()
    assert info.bootstrap_store_info is not None
    assert listening() - before == {("127.0.0.1", info.bootstrap_store_info.master_port)}
    before = listening()
    alone = _created(NodeRanks(1, max_restarts=3)).next_rendezvous()
    assert (alone.rank, alone.world_size) == (0, 1) and listening() == before


def test_the_first_of_several_nodes_listens_at_the_address_that_is_named() -> None:
    before = listening()
    kept = _created(NodeRanks(1, num_nodes=2, master_addr="127.0.0.9", master_port=29533))
    assert listening() - before == {("127.0.0.9", 29533)}
    del kept


class _Hostile:
    """Un-pickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_a_hostile_store_runs_no_code_in_a_launcher(tmp_path: Path) -> None:
    """Whatever a neighbour puts under the keys that a launcher reads, it is no program."""
    mark = tmp_path / "ran"
    pickled = pickle.dumps(_Hostile(mark))
    pickle.loads(pickled)
    assert mark.exists(), "the object is not hostile"
    mark.unlink()
    for value in (pickled, base64.b64encode(pickled)):
        store = torch.distributed.HashStore()
        nodes = [_node(store, node, 2) for node in range(2)]
        keys = torch.distributed.PrefixStore("fp8_megatron/launch/run", store)
        for key in ("1/0", "1/1", "1/asked", "2/asked", node_rendezvous._CLOSED):
            keys.set(key, value)
        assert [node.num_nodes_waiting() for node in nodes] == [1, 1]
        assert all(node.is_closed() for node in nodes)
        keys.set("round", value)
        for node in nodes:
            with suppress(Exception):  # what is no number is an error
                node.next_rendezvous()
    assert not mark.exists()
