"""Where the launchers of a job meet, one a node.

torchrun's own rendezvous listens at every interface and un-pickles what it reads there. This one listens at the address
that is named, on a single node at the loopback interface, and reads no more than whether a key is there. A launch of
one rank keeps its store in memory.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta

from torch.distributed import DistError, HashStore, PrefixStore, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from ..device.rendezvous import LOOPBACK, listening_store, reached_store

logger = logging.getLogger(__name__)

#: The name under which torch finds `NodeRendezvous`.
BACKEND = "fp8_megatron"
#: How long a launcher waits for the others.
_TIMEOUT = timedelta(minutes=15)
_POLL_SECONDS = 0.2
#: Seconds until a launcher says whom it waits for.
_QUIET_SECONDS = 30.0
#: The port that a launch of one rank names. It opens none.
_UNUSED_PORT = 29500
_CLOSED = "closed"


class NodeRendezvous(RendezvousHandler):
    """Nodes have fixed numbers and meet in rounds: one at the start, and one after each fault of any of them.

    Args:
        run: name of the launch, the same on all nodes.
        node, num_nodes: this node's number, and how many there are.
        store: of the first node's launcher; ranks use it too.
        place: the address and the port where ranks reach it.
        restarts: whether a node that asks for a new round gets it.
    """

    def __init__(
        self, run: str, node: int, num_nodes: int, store: Store, place: RendezvousStoreInfo, *, restarts: bool
    ) -> None:
        self._run = run
        self._node = node
        self._num_nodes = num_nodes
        self._store = PrefixStore(f"fp8_megatron/launch/{run}", store)
        self._place = place
        self._restarts = restarts
        self._round = 0

    def get_backend(self) -> str:
        """The name of this rendezvous in torch's registry."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Ranks open no store of their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until every node has come to the next round.

        Raises:
            RendezvousTimeoutError: it names the nodes that have not come.
            RendezvousClosedError: another node has ended for good.
        """
        self._round = int(self._store.add("round", 0)) + 1
        self._store.set(f"{self._round}/asked", "")
        self._store.set(f"{self._round}/{self._node}", "")
        start = time.monotonic()
        told = False
        while not self._store.check([f"{self._round}/{node}" for node in range(self._num_nodes)]):
            if self.is_closed():
                raise RendezvousClosedError("another node has ended for good")
            waited = time.monotonic() - start
            if waited > _TIMEOUT.total_seconds():
                raise RendezvousTimeoutError(f"no sign of node {self._absent()} within {_TIMEOUT}")
            if waited > _QUIET_SECONDS and not told:
                told = True
                logger.warning("waiting for node %s, for at most %s", self._absent(), _TIMEOUT)
            time.sleep(_POLL_SECONDS)
        # Every node writes the same number: none begins another round before all have come to this one.
        self._store.set("round", str(self._round))
        store = PrefixStore(f"round/{self._round}", self._store)
        return RendezvousInfo(store, self._node, self._num_nodes, self._place)

    def _absent(self) -> str:
        absent = [node for node in range(self._num_nodes) if not self._store.check([f"{self._round}/{node}"])]
        return ", ".join(map(str, absent))

    def is_closed(self) -> bool:
        """Whether a node has ended for good."""
        return self._store.check([_CLOSED])

    def set_closed(self) -> None:
        """Tell the other nodes that this one starts no ranks again."""
        self._store.set(_CLOSED, "")

    def num_nodes_waiting(self) -> int:
        """1 if a node asks for a new round: this node's ranks are then started again too."""
        return int(self._restarts and self._num_nodes > 1 and self._store.check([f"{self._round + 1}/asked"]))

    def get_run_id(self) -> str:
        """The name of the launch."""
        return self._run

    def shutdown(self) -> bool:
        """Tell the other nodes, where the first one still answers."""
        try:
            self.set_closed()
        except DistError:
            return False
        return True


def create(parameters: RendezvousParameters) -> NodeRendezvous:
    """Make the rendezvous of a launch. torch calls it with `NodeRanks.launch_config`'s settings.

    Raises:
        OSError: the first node cannot listen at the named address.
        DistError: another node does not reach it.
    """
    settings = parameters.config
    node, num_nodes, restarts = settings["node"], parameters.max_nodes, settings["restarts"]
    address, port = settings["address"] or LOOPBACK, settings["port"]
    store: Store
    if settings["world_size"] == 1:
        store, port = HashStore(), _UNUSED_PORT
    elif node == 0:
        store = listening_store(address, port, _TIMEOUT)
        port = store.port
    else:
        store = reached_store(address, port, _TIMEOUT)
    place = RendezvousStoreInfo(address, port)
    return NodeRendezvous(parameters.run_id, node, num_nodes, store, place, restarts=restarts)
