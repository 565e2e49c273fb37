"""A real Slurm of one node for tests: munged, slurmctld and slurmd (Debian: slurm-wlm), in one folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_DAEMONS = ("munged", "slurmctld", "slurmd")
_SECONDS = 60
#: Two partitions of one node: a job of `urgent` preempts those of `main`, which have `GraceTime` to save.
#: cred_expire limits how long a requeued job waits before it may start; Slurm's default is 120 s.
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
OverTimeLimit=0
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=1000 State=UNKNOWN
NodeName=other NodeAddr=127.0.0.1 NodeHostname=other CPUs=1 RealMemory=1000 State=DOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes={host} MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


class Slurm:
    """Commands of a running cluster. `host` is its one node; a second one, ``other``, is down."""

    def __init__(self, folder: Path, host: str) -> None:
        self.host = host
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))
        } | {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *words: str | Path, cwd: Path | None = None, **variables: str) -> str:
        """Run a command of Slurm; its stdout."""
        done = subprocess.run(
            [str(word) for word in words],
            cwd=cwd,
            env=self._environment | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, *words: str | Path, cwd: Path, **variables: str) -> str:
        """``sbatch words``; the job's number."""
        return self.run("sbatch", "--parsable", *words, cwd=cwd, **variables)

    def field(self, job: str, name: str) -> str:
        """One field of ``scontrol show job``."""
        text = self.run("scontrol", "show", "job", job)
        return next(word.partition("=")[2] for word in text.split() if word.startswith(f"{name}="))

    def wait_for_end(self, job: str, seconds: float) -> str:
        """Wait until the job has ended for good; its state. A job that is requeued has not ended."""
        end = time.monotonic() + seconds
        while (state := self.field(job, "JobState")) in ("PENDING", "RUNNING", "COMPLETING", "PREEMPTED"):
            assert time.monotonic() < end, f"job {job} is {state} after {seconds} s"
            time.sleep(0.5)
        return state


@contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    """A cluster in `folder` (a short path: it holds a socket). Skips the test where Slurm is not installed."""
    missing = [name for name in (*_DAEMONS, "sbatch") if _program(name) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here: apt-get install slurm-wlm munge")
    host = socket.gethostname().partition(".")[0]
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    ports = _free_ports(2)
    (folder / "slurm.conf").write_text(
        _CONFIGURATION.format(
            folder=folder, host=host, user=user, controller_port=ports[0], node_port=ports[1], cpus=os.cpu_count()
        )
    )
    slurm = Slurm(folder, host)
    flags = {"key-file": key, "socket": folder / "munge.sock", "pid-file": folder / "munged.pid"}
    flags |= {"log-file": folder / "munged.log", "seed-file": folder / "munge.seed"}
    munge = [_program("munged"), "--foreground", "--force", *(f"--{name}={path}" for name, path in flags.items())]
    configured = ["-f", str(folder / "slurm.conf")]
    commands = [munge, [_program("slurmctld"), "-D", *configured], [_program("slurmd"), "-D", *configured]]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with open(folder / "daemons.log", "ab") as log:
                daemons.append(subprocess.Popen(command, stdout=log, stderr=log))
            if command is munge:
                _wait_until(lambda: flags["socket"].exists(), folder)
        _wait_until(lambda: "idle" in slurm.run("sinfo", "--noheader", "--nodes", host, "--format=%T"), folder)
        yield slurm
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _program(name: str) -> str | None:
    """The daemon's path; daemons are in sbin, which users' PATH may lack."""
    return shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/usr/local/sbin")


def _wait_until(condition: object, folder: Path) -> None:
    end = time.monotonic() + _SECONDS
    while True:
        try:
            if condition():  # type: ignore[operator]
                return
        except AssertionError:  # the controller does not answer yet
            pass
        assert time.monotonic() < end, (folder / "daemons.log").read_text(errors="replace")[-2000:]
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
