"""Start several ranks on this node. torch's launcher runs in this process, so the exit status is the job's.

At SIGTERM, or SIGHUP of a terminal that closes, ranks save and end, however long that takes. torchrun by itself passes
the signal on and kills ranks that still run 30 s later. A large model takes longer to save.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from ..device.variables import check_variables
from ..errors import UserError
from ..outputs import drop_closed_streams
from .environment import followed, without_launcher
from .program import share_import_path

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

#: The signals that torchrun handles itself, in the form of its --signals-to-handle.
TORCHRUN_SIGNALS = "SIGINT,SIGQUIT"
_POLL_SECONDS = 0.5
#: Ranks on a CPU share cores only in tests. More than this many for each start for minutes and then exhaust memory.
_RANKS_PER_CORE = 16


@contextmanager
def passing_on_stops() -> Iterator[Sequence[signal.Signals]]:
    """After SIGTERM or SIGHUP, send SIGTERM to each child of this process, once. For the main thread.

    Ranks that train save after their step and end. A rank that has not begun ends at once. So does a rank that torchrun
    starts in its place. A second signal ends torchrun: it kills ranks that still run 30 s later. A SIGHUP that this
    process was told to ignore, as nohup does, stays ignored.

    Yields:
        The signal that has come, if any.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    received: list[signal.Signals] = []
    ended = threading.Event()
    told: set[psutil.Process] = set()

    def handle(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number)
        if received:
            raise SignalException(f"{name.name} after {received[0].name} ended the launcher", name)
        received.append(name)

    def pass_on() -> None:
        while not ended.wait(_POLL_SECONDS):
            if received and not told:
                with suppress(OSError):  # the terminal is gone
                    print(f"{received[0].name} received: the ranks save and end", file=sys.stderr, flush=True)
            for child in psutil.Process().children() if received else ():
                if child not in told:
                    told.add(child)
                    with suppress(psutil.NoSuchProcess):
                        child.terminate()

    previous = {
        number: signal.signal(number, handle)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    thread = threading.Thread(target=pass_on, name="passes signals on", daemon=True)
    thread.start()
    try:
        yield received
    finally:
        ended.set()
        thread.join()
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@dataclass(frozen=True)
class NodeRanks:
    """Where the ranks of a job run.

    Attributes:
        ranks_per_node: ranks on each node.
        on_cpu: ranks see no GPU and communicate over gloo.
        num_nodes, node_rank: nodes of the job, and the number of this one.
        master_addr, master_port: where the first of several nodes listens.
        max_restarts: how often all ranks start again after one failed.
        launch: name of this launch, the same on all nodes; None: it has none.
    """

    ranks_per_node: int
    on_cpu: bool = False
    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int = 29500
    max_restarts: int = 0
    launch: str | None = None

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.ranks_per_node * self.num_nodes

    def launch_config(self) -> LaunchConfig:
        """What torch's launcher is told on this node. Nothing of it comes from the environment."""
        from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
        from torch.distributed.launcher.api import LaunchConfig

        from . import node_rendezvous

        rendezvous_handler_registry.register(node_rendezvous.BACKEND, node_rendezvous.create)
        return LaunchConfig(
            min_nodes=self.num_nodes,
            max_nodes=self.num_nodes,
            nproc_per_node=self.ranks_per_node,
            run_id=self.launch or ("none" if self.num_nodes > 1 else uuid.uuid4().hex),
            rdzv_backend=node_rendezvous.BACKEND,
            rdzv_configs={
                "node": self.node_rank,
                "world_size": self.world_size,
                "address": self.master_addr,
                "port": self.master_port if self.num_nodes > 1 else 0,
                "restarts": self.max_restarts > 0,
            },
            max_restarts=self.max_restarts,
            signals_to_handle=TORCHRUN_SIGNALS,
        )


def slurm_launch() -> str | None:
    """The name of this start of a Slurm job; another start after a requeue has another. None outside of Slurm."""
    job = os.environ.get("SLURM_JOB_ID")
    return None if job is None else f"{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"


def check_cpu_ranks(num_ranks: int, flag: str) -> None:
    """Raise `UserError`, which names `flag`, for more ranks than the cores of this node can run."""
    most = _RANKS_PER_CORE * (os.cpu_count() or 1)
    if num_ranks > most:
        raise UserError(f"{flag} {num_ranks} is more than this node's cores can run; give at most {most}")


def gpus_for_ranks(num_ranks: int, flag: str) -> int:
    """The number of GPUs of this node; 0: its cores run the ranks. Does not start CUDA.

    Raises:
        UserError: it names `flag`. There are fewer GPUs than ranks, or too few cores.
    """
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        check_cpu_ranks(num_ranks, flag)
    elif num_ranks > count:
        raise UserError(f"{flag} {num_ranks}, but this machine has {count} GPUs; give at most {count}")
    return count


def check_gpus(placement: NodeRanks) -> None:
    """Raise `UserError` if this node has fewer GPUs than ranks. Does not start CUDA."""
    if placement.on_cpu:
        return
    import torch

    count = torch.cuda.device_count()
    if placement.ranks_per_node > count:
        fix = f"give --gpus {count}" if count else "give --cpu-ranks instead"
        raise UserError(f"--gpus {placement.ranks_per_node}, but this node has {count}; {fix}")


def hide_gpus() -> None:
    """Hide GPUs from ranks on a CPU, and set what makes a step there faster, where the user has not.

    Ranks share the cores, so each gets one thread. The C library keeps the memory of freed tensors: if it gave it back,
    the system would clear pages for the next ones, which takes about a tenth of a step.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 << 20))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 30))


def run_ranks(module: str, words: Sequence[str], placement: NodeRanks, *, folder: Path | None = None) -> int:
    """Run ``python -m module words`` on every rank of this node.

    Args:
        folder: of the run's log, for the report of a job that was restarted; None: there is no report.

    Returns:
        0, or the exit status of the rank that failed first (128 + the signal that ended it). After SIGTERM or SIGHUP
        to this process 128 + the signal; its ranks have saved and ended by then.
    """
    check_variables(without_launcher(os.environ))
    if placement.on_cpu:
        hide_gpus()
    share_import_path()
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    # torch logs over forty lines about a failed rank. The rank itself says why it failed.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    if placement.ranks_per_node > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    start = elastic_launch(placement.launch_config(), sys.executable)
    started = datetime.now(UTC)
    try:
        with passing_on_stops() as stops, followed():
            start("-u", "-m", module, *words)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        text = f"rank {rank} ended with exit status {status}, and the job with it"
        drop_closed_streams()
        print(text, file=sys.stderr, flush=True)
        if placement.max_restarts > 0 and folder is not None and placement.node_rank == 0:
            _report_restarts(folder, started, text, placement)
        return status
    except SignalException as error:
        return 128 + error.sigval
    except (OSError, DistError, RendezvousError) as error:
        # Ranks are other processes. In this one only the launchers' rendezvous can fail.
        if placement.num_nodes == 1:
            raise
        raise UserError(_about_rendezvous(placement, error)) from error
    return 128 + stops[0] if stops else 0


def _about_rendezvous(placement: NodeRanks, error: Exception) -> str:
    """Why the nodes' launchers did not meet, and what to do."""
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"--master-port {placement.master_port} is in use on this node; give another one, the same on every node"
    return (
        f"the nodes did not meet at --master-addr {placement.master_addr}, port {placement.master_port} "
        f"({str(error).splitlines()[0]}); start all {placement.num_nodes} of them, and check that this node reaches "
        f"that address"
    )


def _report_restarts(folder: Path, started: datetime, text: str, placement: NodeRanks) -> None:
    """Print the faults of a job that failed in spite of restarts, and write its end to the run's log.

    Args:
        started: when the job began; events before it are another job's.
        text: how it ended.
    """
    from ..reporting.run_log import EVENTS_FILE, EventKind, add_event, read_events
    from ..watch.restarts import report

    events = [found for found in read_events(folder / EVENTS_FILE) if found["time"] >= started.isoformat()]
    iteration = events[-1]["iteration"] if events else 0
    add_event(folder, EventKind.GIVE_UP, f"{text}; no restart is left or it is useless", iteration=iteration)
    faults = report(events, placement.num_nodes)
    if faults:
        print(f"faults of this job, from {folder / EVENTS_FILE}:\n{faults}", file=sys.stderr, flush=True)
