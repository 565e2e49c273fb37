"""The process groups of the tensor-, context-, pipeline- and data-parallel layout, and this rank's place in them.

Also the transports that a configuration selects, between replicas and between tensor-parallel ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from ..collectives.hierarchical import NodeGroups, new_node_groups
from ..config.parallel import LayerShares
from ..config.pipeline_layout import PipelineLayout, pipeline_layout
from ..config.schema import ParallelConfig
from ..data.document_bounds import SequencePart
from ..device.device import distributed_backend, node_size
from ..device.group import Group
from ..device.rendezvous import process_group_arguments
from ..device.variables import check_variables, number
from ..dtypes import GradReduceMode
from ..sharding import transport
from ..sharding.partition import RowSplit
from ..sharding.region import Region, counts_matrices
from ..sharding.replicas import Replicas, Sharing
from ..sharding.transport import SendMemory, TransportChoice, send_memory

#: The most tensor-parallel ranks for which `auto` uses copy engines, by whether steps are recorded.
_MOST_RANKS_BY_AUTO = {False: 2, True: 4}


@dataclass(frozen=True)
class Topology:
    """This rank's place and its groups.

    Attributes:
        groups: megatron-core's collection (tp, cp, pp, dp, dp_cp, mp, embd, ep, expt_tp, …).
        stage_group: all ranks of this pipeline stage, tensor × context × data parallel; they run the same layers.
        replicas: the ranks that hold the same parameters, context × data parallel.
        replicas_of_matrices: the ranks that hold the same matrices of weights [M, N, K], such as experts.
        layout: the layers of every stage.
    """

    rank: int
    world_size: int
    groups: ProcessGroupCollection
    stage_group: Group
    replicas: Replicas
    replicas_of_matrices: Replicas
    layout: PipelineLayout

    @property
    def virtual_pipeline_size(self) -> int | None:
        """Virtual stages per rank; None for the plain 1F1B schedule."""
        return self.layout.virtual_size

    @property
    def tp(self) -> Group:
        """Ranks that share each layer."""
        return self.groups.tp

    @property
    def pp(self) -> Group:
        """Ranks that hold the stages of one replica."""
        return self.groups.pp

    @property
    def ep(self) -> Group:
        """Ranks that share the matrices of each weight [M, N, K]: Megatron's expert-parallel group."""
        return self.groups.ep

    @property
    def layer_shares(self) -> LayerShares:
        """How many ranks share a layer."""
        return LayerShares(self.tp.size(), self.ep.size(), self.groups.expt_tp.size())

    @property
    def cp(self) -> Group:
        """Ranks that share each sequence. They hold the same parameters."""
        return self.groups.cp

    @property
    def dp(self) -> Group:
        """Ranks that read different samples. They hold the same parameters."""
        return self.groups.dp

    @property
    def sequence_part(self) -> SequencePart:
        """Which tokens of each sequence this rank has."""
        return SequencePart(self.cp.rank(), self.cp.size())

    @property
    def embedding(self) -> Group | None:
        """The first and last stages, which share a tied embedding. None on other stages and with a single stage."""
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
        """Whether this rank reports the loss: it is on the last stage and the first tensor-parallel rank."""
        return self.is_last_stage and self.tp.rank() == 0

    @property
    def world(self) -> Group | None:
        """All ranks of the run."""
        return torch.distributed.group.WORLD

    def sharing_of(self, param: torch.nn.Parameter) -> Sharing:
        """How ranks share a parameter, by the attributes that megatron-core and its layers set.

        Parameters that are not split have duplicates on the tensor-parallel ranks; under sequence parallelism each
        duplicate has the gradient of its part of the sequence. The first and last stages both hold a tied embedding;
        each has the gradient of its own use. Matrices of a weight [M, N, K] (`counts_matrices`) take the tokens of all
        ranks that share them.
        """
        is_split = getattr(param, "tensor_model_parallel", False)
        if counts_matrices(param):
            return Sharing(
                self.replicas_of_matrices,
                parts_with=_several(self.groups.expt_tp) if is_split else None,
                grad_factor=self.replicas_of_matrices.size / self.replicas.size,
            )
        if getattr(param, "shared_embedding", False):
            return Sharing(self.replicas, duplicates=self.embedding, summed_over=self.embedding)
        is_partial = getattr(param, "sequence_parallel", False)
        return Sharing(
            self.replicas,
            duplicates=None if is_split else self.tp,
            summed_over=self.tp if is_partial else None,
            parts_with=_several(self.tp) if is_split else None,
        )

    def region_of(self, param: torch.Tensor) -> Region:
        """Where this rank's part of a parameter lies in the whole parameter."""
        if not counts_matrices(param):
            return region_of(param, self.tp.rank(), self.tp.size())
        shared = self.groups.expt_tp
        return region_of(param, shared.rank(), shared.size(), matrices=(self.ep.rank(), self.ep.size()))


def region_of(param: torch.Tensor, rank: int, size: int, *, matrices: tuple[int, int] = (0, 1)) -> Region:
    """Where a tensor-parallel rank's part of a parameter lies, by the attributes that megatron-core sets.

    Args:
        matrices: see `Region.matrices`.
    """
    shape = tuple(param.shape)
    if not getattr(param, "tensor_model_parallel", False):
        return Region(shape, rank=rank, matrices=matrices)
    return Region(
        shape,
        axis=param.partition_dim,  # type: ignore[attr-defined]
        pieces=param.partition_stride,  # type: ignore[attr-defined]
        rank=rank,
        size=size,
        matrices=matrices,
    )


def _several(group: Group) -> Group | None:
    return group if group.size() > 1 else None


def is_embedding_or_output(param: torch.nn.Parameter) -> bool:
    """Whether megatron-core counts a parameter to the embedding or the output layer, as its --decoupled-lr does."""
    return getattr(param, "is_embedding_or_output_parameter", False)


def is_linear_weight(name: str, param: torch.nn.Parameter) -> bool:
    """Whether a parameter is the weight [N, K] or [M, N, K] of a linear layer; the output layer is none."""
    *_, module, attribute = name.split(".")
    return attribute == "weight" and module.startswith("linear_") and param.ndim > 1


def row_split_of(param: torch.nn.Parameter) -> RowSplit | None:
    """The matrices that a rank's weight has: query, key and value (``row_split``), gate and up, or one (None)."""
    split: RowSplit | None = getattr(param, "row_split", None)
    pieces = getattr(param, "partition_stride", 1) if param.ndim > 1 else 1  # a bias is no matrix
    return split if split is not None or pieces == 1 else RowSplit(1, (param.shape[-2] // pieces,) * pieces)


@contextmanager
def initialized(
    parallel: ParallelConfig,
    num_layers: int,
    device: torch.device,
    *,
    records_graphs: bool = False,
    join: Callable[[timedelta], None] | None = None,
) -> Iterator[Topology]:
    """Join the process group that torchrun describes (or a world of one) and lay the ranks out.

    The groups are destroyed at the end of the block, also after an error, so that no rank waits for one that has left.

    Args:
        records_graphs: see `transports.share_rows`.
        join: makes the process group of all ranks, given the time limit of its collectives; None: as torchrun says.
    """
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    if join is None:
        _join_launched(device, timeout)
    else:
        join(timeout)
    _make_communicators_when_used()
    try:
        layout = pipeline_layout(parallel, num_layers)
        parallel_state.initialize_model_parallel(
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            layout.virtual_size,
            context_parallel_size=parallel.context_parallel_size,
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            expert_tensor_parallel_size=_expert_tensor_size(parallel),
            order=parallel.rank_order,
            create_gloo_process_groups=False,
            nccl_communicator_config_path=parallel.nccl_communicator_config_path if device.type == "cuda" else None,
            distributed_timeout_minutes=parallel.distributed_timeout_minutes,
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        replicas = _replicas(groups.dp_cp, parallel, device, timeout)
        have_same_ranks = _ranks(groups.expt_dp) == _ranks(groups.dp_cp)
        replicas_of_matrices = replicas if have_same_ranks else _replicas(groups.expt_dp, parallel, device, timeout)
        share_rows(parallel, groups.tp, device, records_graphs=records_graphs)
        yield Topology(
            rank=torch.distributed.get_rank(),
            world_size=torch.distributed.get_world_size(),
            groups=groups,
            stage_group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
            replicas=replicas,
            replicas_of_matrices=replicas_of_matrices,
            layout=layout,
        )
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _expert_tensor_size(parallel: ParallelConfig) -> int:
    """Ranks that share an expert. Where stages are neighbours, megatron-core wants experts to have as many replicas as
    the rest has, also in a model without experts."""
    neighbours = parallel.use_tp_pp_dp_mapping and parallel.pipeline_model_parallel_size > 1
    if neighbours and parallel.expert_model_parallel_size == 1:
        return parallel.tensor_model_parallel_size * parallel.context_parallel_size
    return parallel.expert_tensor_size


def _join_launched(device: torch.device, timeout: timedelta) -> None:
    """Join the process group that torchrun describes, or make a world of one.

    Raises:
        UserError: a variable of the environment is wrong, or a rank has not come.
    """
    check_variables(os.environ, on_gpu=device.type == "cuda")
    torch.distributed.init_process_group(
        distributed_backend(device),
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
        **process_group_arguments(timeout),
    )


def _make_communicators_when_used() -> None:
    """Create NCCL communicators for megatron-core's groups only when a collective needs them.

    A world bound to its devices splits off a communicator for each new group at once. megatron-core makes eighteen
    groups, and a run never uses most of them. A communicator costs host time when it is made and destroyed, and GPU
    memory. None may be made while a step is recorded; the steps before it have already used the same communicators.
    """
    torch.distributed.group.WORLD.bound_device_id = None  # type: ignore[union-attr]


def _replicas(group: Group, parallel: ParallelConfig, device: torch.device, timeout: timedelta) -> Replicas:
    """The ranks of a group as replicas. All ranks call this, each with its own group."""
    hierarchical = parallel.fp8_grad_reduce is GradReduceMode.HIERARCHICAL
    nodes = _node_groups(group, timeout) if hierarchical else None
    weight_memory = send_memory(transport_choice("dp_transport", parallel), group, device)
    return Replicas(
        group.size(),
        group.rank(),
        grad_memory=_grad_memory(parallel, nodes, weight_memory),
        weight_memory=weight_memory,
        group=group,
        nodes=nodes,
    )


def _ranks(group: Group) -> list[int]:
    return torch.distributed.get_process_group_ranks(group)


def _grad_memory(parallel: ParallelConfig, nodes: NodeGroups | None, weight_memory: SendMemory) -> SendMemory:
    """The memory that gradients are sent from. With two stages they go to the node's ranks first; NCCL's own sum reads
    any memory."""
    if parallel.fp8_grad_reduce is GradReduceMode.NCCL:
        return SendMemory(weight_memory.device)
    if nodes is None:
        return weight_memory
    return send_memory(transport_choice("dp_transport", parallel), nodes.intra, weight_memory.device)


def _node_groups(group: Group, timeout: timedelta) -> NodeGroups:
    """Cut every rank's group by the nodes that torchrun started (LOCAL_WORLD_SIZE ranks each). All ranks call this.

    Raises:
        ValueError: nodes hold different numbers of a group's ranks.
    """
    world_size = torch.distributed.get_world_size()
    mine = _ranks(group)
    everyones: list[list[int]] = [[] for _ in range(world_size)]
    torch.distributed.all_gather_object(everyones, mine)
    groups = sorted(set(map(tuple, everyones)))
    node_size = number("LOCAL_WORLD_SIZE", world_size)
    return new_node_groups(groups, sum(rank // node_size == mine[0] // node_size for rank in mine), timeout=timeout)


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
