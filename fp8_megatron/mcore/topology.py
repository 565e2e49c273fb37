"""Which rank does what: process groups of the tensor-, pipeline- and data-parallel layout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from ..collectives.hierarchical import NodeGroups, new_node_groups
from ..config.schema import ParallelConfig
from ..device.device import distributed_backend
from ..device.group import Group
from ..formats import GradReduceMode
from ..sharding.replicas import Replicas, Sharing
from ..sharding.transport import SendMemory, send_memory
from .transports import share_rows, transport_choice


@dataclass(frozen=True)
class Topology:
    """This rank's place and its groups.

    Attributes:
        groups: megatron-core's collection (tp, pp, dp_cp, mp, embd, …).
        stage_group: all ranks of this pipeline stage, tensor × data parallel; they run the same layers.
        replicas: the ranks that hold the same parameters.
    """

    rank: int
    world_size: int
    groups: ProcessGroupCollection
    stage_group: Group
    replicas: Replicas
    virtual_pipeline_size: int | None

    @property
    def tp(self) -> Group:
        """Ranks that share each layer."""
        return self.groups.tp

    @property
    def pp(self) -> Group:
        """Ranks that hold the stages of one replica."""
        return self.groups.pp

    @property
    def dp(self) -> Group:
        """Ranks that hold the same parameters."""
        return self.groups.dp_cp

    @property
    def embedding(self) -> Group | None:
        """The first and the last stage, which share a tied embedding; None elsewhere and with one stage."""
        group = self.groups.embd
        if self.pp.size() == 1 or not (self.is_first_stage or self.is_last_stage) or group is None:
            return None
        return group

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the first pipeline stage."""
        return self.pp.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last pipeline stage."""
        return self.pp.rank() == self.pp.size() - 1

    @property
    def reads_loss(self) -> bool:
        """Whether this rank's loss is the one to report: last stage, first tensor-parallel rank."""
        return self.is_last_stage and self.tp.rank() == 0

    @property
    def world(self) -> Group | None:
        """All ranks of the run."""
        return torch.distributed.group.WORLD

    def sharing_of(self, param: torch.nn.Parameter) -> Sharing:
        """How ranks share a parameter, by the attributes that megatron-core and its layers give it.

        Tensor-parallel ranks hold duplicates of what is not split over them. Under sequence parallelism each of them
        has the gradient of its part of the sequence. The first and the last stage hold a tied embedding, and each has
        the gradient of its own use of it.
        """
        if getattr(param, "shared_embedding", False):
            return Sharing(self.replicas, duplicates=self.embedding, summed_over=self.embedding)
        is_split = getattr(param, "tensor_model_parallel", False)
        is_partial = getattr(param, "sequence_parallel", False)
        return Sharing(
            self.replicas, duplicates=None if is_split else self.tp, summed_over=self.tp if is_partial else None
        )


@contextmanager
def initialized(
    parallel: ParallelConfig, num_layers: int, device: torch.device, *, records_graphs: bool = False
) -> Iterator[Topology]:
    """Join the process group that torchrun describes (or a world of one) and lay the ranks out.

    Groups are destroyed at the end of the block, also after an error, so that no rank waits for one that is gone.

    Args:
        records_graphs: as for `transports.share_rows`.
    """
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    torch.distributed.init_process_group(
        distributed_backend(device), timeout=timeout, device_id=device if device.type == "cuda" else None
    )
    _make_communicators_when_used()
    try:
        virtual = parallel.virtual_pipeline_model_parallel_size(num_layers)
        parallel_state.initialize_model_parallel(
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            virtual,
            create_gloo_process_groups=False,
            nccl_communicator_config_path=parallel.nccl_communicator_config_path if device.type == "cuda" else None,
            distributed_timeout_minutes=parallel.distributed_timeout_minutes,
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        hierarchical = parallel.fp8_grad_reduce is GradReduceMode.HIERARCHICAL
        nodes = _node_groups(timeout) if hierarchical else None
        weight_memory = send_memory(transport_choice("dp_transport", parallel), groups.dp_cp, device)
        share_rows(parallel, groups.tp, device, records_graphs=records_graphs)
        yield Topology(
            rank=torch.distributed.get_rank(),
            world_size=torch.distributed.get_world_size(),
            groups=groups,
            stage_group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
            replicas=Replicas(
                groups.dp_cp.size(),
                groups.dp_cp.rank(),
                grad_memory=_grad_memory(parallel, nodes, weight_memory),
                weight_memory=weight_memory,
                group=groups.dp_cp,
                nodes=nodes,
            ),
            virtual_pipeline_size=virtual,
        )
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _make_communicators_when_used() -> None:
    """Let the groups that megatron-core is about to make have NCCL communicators once a collective needs them.

    A world bound to its devices splits a communicator off for each new group at once, eighteen of them, most of which
    run never uses. Each takes the host time and the GPU memory, when it is made and when the run leaves. None may be
    made while a step is recorded: what that step sends, the steps before it have sent too.
    """
    torch.distributed.group.WORLD.bound_device_id = None  # type: ignore[union-attr]


def _grad_memory(parallel: ParallelConfig, nodes: NodeGroups | None, weight_memory: SendMemory) -> SendMemory:
    """Where gradients are sent from: to the node's ranks first where there are stages; NCCL's own sum reads any."""
    if parallel.fp8_grad_reduce is GradReduceMode.NCCL:
        return SendMemory(weight_memory.device)
    if nodes is None:
        return weight_memory
    return send_memory(transport_choice("dp_transport", parallel), nodes.intra, weight_memory.device)


def _node_groups(timeout: timedelta) -> NodeGroups:
    """Every data-parallel group cut by the nodes that torchrun started (LOCAL_WORLD_SIZE ranks each); called by all.

    Raises:
        ValueError: nodes hold different numbers of a group's ranks.
    """
    world_size = torch.distributed.get_world_size()
    mine = torch.distributed.get_process_group_ranks(parallel_state.get_data_parallel_group(with_context_parallel=True))
    everyones: list[list[int]] = [[] for _ in range(world_size)]
    torch.distributed.all_gather_object(everyones, mine)
    groups = sorted(set(map(tuple, everyones)))
    node_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    return new_node_groups(groups, sum(rank // node_size == mine[0] // node_size for rank in mine), timeout=timeout)
