"""The transports that a configuration selects, between replicas and between tensor-parallel ranks."""

from __future__ import annotations

import os
from typing import Literal

import torch

from ..config.schema import ParallelConfig
from ..device.device import node_size
from ..device.group import Group
from ..sharding import transport
from ..sharding.transport import TransportChoice

#: The most tensor-parallel ranks for which `auto` uses copy engines, by whether steps are recorded.
_MOST_RANKS_BY_AUTO = {False: 2, True: 4}


def transport_choice(option: Literal["dp_transport", "tp_transport"], parallel: ParallelConfig) -> TransportChoice:
    """The choice of --dp-transport or --tp-transport, in an environment that is prepared for CUDA."""
    has_one_queue = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    return TransportChoice(
        getattr(parallel, option), option, launches_in_order=has_one_queue and parallel.tensor_model_parallel_size > 1
    )


def share_rows(parallel: ParallelConfig, group: Group, device: torch.device, *, records_graphs: bool = False) -> None:
    """Let copy engines carry activations between the ranks of a tensor-parallel `group`, if --tp-transport allows it.

    Args:
        records_graphs: whether steps are to become CUDA graphs.

    Raises:
        TransportError: copy_engine was requested and does not work here; the text has the reason.
    """
    if _may_copy_rows(parallel, records_graphs):
        transport.share_rows(transport_choice("tp_transport", parallel), group, device)


def needs_launch_order(parallel: ParallelConfig, *, has_fp8_layers: bool, records_graphs: bool = False) -> bool:
    """Whether collectives must start in the order of their launch. This is so under tensor parallelism over NCCL.

    Args:
        records_graphs: see `share_rows`.
    """
    size = parallel.tensor_model_parallel_size
    copies_rows = has_fp8_layers and _may_copy_rows(parallel, records_graphs)
    return size > 1 and not (copies_rows and node_size() % size == 0)


def _may_copy_rows(parallel: ParallelConfig, records_graphs: bool) -> bool:
    """Whether rows are exchanged and --tp-transport allows copy engines.

    `auto` does not allow them for more than two ranks: a layer then has so many parts that the host limits the speed
    (docs/performance.md). If steps are recorded, the host does not matter, and `auto` allows four ranks: GPT-7B takes
    450 ms a step with copy engines and 502 over NCCL. More ranks have not been measured.
    """
    few_ranks = parallel.tensor_model_parallel_size <= _MOST_RANKS_BY_AUTO[records_graphs]
    allows = parallel.tp_transport == "copy_engine" or (parallel.tp_transport == "auto" and few_ranks)
    return parallel.sequence_parallel and allows
