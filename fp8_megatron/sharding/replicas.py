"""Which ranks share a parameter: its replicas, its duplicates, and ranks that hold parts of its gradient.

The core knows nothing else of a run's layout. Reduction, clipping, update and gather ask a parameter's space for
its groups. Parameters of one model may have different groups: a weight whose matrices ranks share has fewer
replicas than the layers around it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..collectives.hierarchical import NodeGroups
from ..device.group import Group
from .transport import SendMemory


@dataclass(frozen=True)
class Replicas:
    """Ranks that hold the same parameters, each with an even share of their gradients and optimizer state.

    Attributes:
        size: number of ranks.
        rank: this rank's number among them.
        grad_memory: where gradients are sent from.
        weight_memory: where weights are gathered to.
        group: the ranks; None for one rank without a process group.
        nodes: the same ranks by node, for reductions in two stages.
    """

    size: int
    rank: int
    grad_memory: SendMemory
    weight_memory: SendMemory
    group: Group | None = None
    nodes: NodeGroups | None = None

    @classmethod
    def of(cls, group: Group | None, device: torch.device) -> Replicas:
        """The ranks of `group` with plain memory: NCCL or gloo carries what they send.

        Args:
            group: None for one rank without a process group.
        """
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        return cls(size, rank, SendMemory(device), SendMemory(device), group)


@dataclass(frozen=True)
class Sharing:
    """How ranks share a parameter. Parameters with equal `Sharing` and storage form one flat space.

    All ranks of each group give a parameter an equal `Sharing`, so that all of them lay its space out alike.

    Attributes:
        replicas: ranks that hold the same parameter and average its gradients.
        duplicates: ranks outside `replicas` that hold the same parameter; the first one counts it in the gradient norm.
            None: no such ranks.
        summed_over: ranks outside `replicas` that each hold a summand of the gradient; every rank gets the sum.
        scaled_with: ranks that each hold other rows of the same weights, under one scale. Each has an optimizer for its
            own rows. None: this rank has whole weights.
        parts_with: ranks that each hold another part of the same matrices. None: this rank has whole matrices.
        grad_factor: mean over `replicas` times this factor = gradient of the batch's mean loss. It is replicas / batch
            ranks for a parameter that takes the tokens of more ranks than replicate it.
    """

    replicas: Replicas
    duplicates: Group | None = None
    summed_over: Group | None = None
    scaled_with: Group | None = None
    parts_with: Group | None = None
    grad_factor: float = 1.0

    @property
    def counts_in_norm(self) -> bool:
        """Whether this rank adds the parameter's gradient to the norm of the model."""
        return self.duplicates is None or self.duplicates.rank() == 0
