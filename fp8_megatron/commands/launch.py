"""Start several ranks on this node. torchrun runs in this process, so the exit status is the job's."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UserError
from .program import share_import_path


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a job run.

    Attributes:
        ranks_per_node: ranks on each node.
        on_cpu: ranks see no GPU and communicate over gloo.
        num_nodes, node_rank, master_addr, master_port: as for torchrun.
    """

    ranks_per_node: int
    on_cpu: bool = False
    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int = 29500

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.ranks_per_node * self.num_nodes

    def torchrun_arguments(self) -> list[str]:
        """torchrun's own arguments for this node."""
        ranks = ["--nproc-per-node", str(self.ranks_per_node)]
        if self.num_nodes == 1:
            return ["--standalone", *ranks]
        assert self.master_addr is not None
        master = ["--master-addr", self.master_addr, "--master-port", str(self.master_port)]
        return ["--nnodes", str(self.num_nodes), "--node-rank", str(self.node_rank), *master, *ranks]


def check_gpus(placement: Placement) -> None:
    """Raise `UserError` if this node has fewer GPUs than ranks. Does not start CUDA."""
    if placement.on_cpu:
        return
    import torch

    count = torch.cuda.device_count()
    if placement.ranks_per_node > count:
        fix = f"give --gpus {count}" if count else "give --cpu-ranks instead"
        raise UserError(f"--gpus {placement.ranks_per_node}, but this node has {count}; {fix}")


def hide_gpus() -> None:
    """Hide GPUs from ranks on a CPU. Ranks share the cores, so each gets one thread unless the user chose otherwise."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def run_ranks(module: str, words: Sequence[str], placement: Placement) -> int:
    """Run ``python -m module words`` on every rank of this node.

    Returns:
        0, or the exit status of the rank that failed first (128 + the signal that ended it).
    """
    if placement.on_cpu:
        hide_gpus()
    share_import_path()
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # torchrun logs over forty lines about a failed rank. The rank itself says why it failed.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun sets this too, and warns
    arguments = [*placement.torchrun_arguments(), "-m", module, *words]
    try:
        torchrun.run(torchrun.parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        print(f"rank {rank} ended with exit status {status}, and the job with it", file=sys.stderr, flush=True)
        return status
    except SignalException as error:
        return 128 + error.sigval
    return 0
