"""One torchrun of a chaos run (`chaos.py`): its command, its ranks, and what they print."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
#: Steps between checkpoints.
SAVE_INTERVAL = 10
#: Restarts that torchrun may make before the driver starts it again.
MAX_RESTARTS = 5

MODEL = """--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --vocab-size 128
--make-vocab-size-divisible-by 32 --micro-batch-size 2 --mock-data --num-workers 0 --eval-interval 0 --lr 1e-3
--attention-dropout 0 --hidden-dropout 0 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95
--fp8-recipe delayed --log-interval 1 --no-tensorboard --progress off --max-skipped-steps 3 --keep-last 3
--check-weight-hash-across-dp-replicas-interval 1""".split()
LAYOUTS = {2: [], 4: ["--tensor-model-parallel-size", "2", "--sequence-parallel"]}

_STEP = re.compile(r"iter +(\d+)/\d+ \| loss")
_BEGIN = re.compile(r"training (?:starts from scratch|resumes after iteration (\d+)) on ")
_SAVED = re.compile(r"^saved \S*iter_0*(\d+) ")
_NOT_SAVED = re.compile(r"was not saved: ")


class Failed(RuntimeError):
    """A promise was broken."""


class Job:
    """One torchrun and its ranks. A thread reads what they print, also after torchrun has ended."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.lines: list[str] = []
        self.iteration = 0
        self.begins: list[int] = []
        self.saved: list[int] = []
        self.num_failed_saves = 0
        self._log = log
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ranks(self) -> dict[int, int]:
        """Rank → process, of the ranks that run."""
        found = {}
        try:
            for child in psutil.Process(self.process.pid).children():
                rank = child.environ().get("RANK")
                if rank is not None and child.status() != psutil.STATUS_ZOMBIE:
                    found[int(rank)] = child.pid
        except psutil.Error:
            pass
        return found

    def end(self) -> None:
        """Kill torchrun and its ranks."""
        for process in [*self.ranks().values(), self.process.pid]:
            send_signal(process, signal.SIGKILL)
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self._log.open("a") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                self.lines.append(line.rstrip())
                if match := _STEP.search(line):
                    self.iteration = int(match[1])
                elif match := _BEGIN.search(line):
                    self.iteration = int(match[1] or 0)
                    self.begins.append(self.iteration)
                elif match := _SAVED.search(line):
                    self.saved.append(int(match[1]))
                elif _NOT_SAVED.search(line):
                    self.num_failed_saves += 1


def send_signal(process: int, number: signal.Signals) -> None:
    """Send a signal; a process that is gone needs none."""
    with suppress(ProcessLookupError):
        os.kill(process, number)


def run_command(num_ranks: int, save: Path, train_iters: int, max_restarts: int = MAX_RESTARTS) -> list[str]:
    """The job's command; it resumes from what it finds."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    folders = ["--save", str(save), "--load", str(save), "--save-interval", str(SAVE_INTERVAL)]
    return [
        *torchrun,
        *("--max-restarts", str(max_restarts), str(Path(__file__).with_name("chaos_rank.py"))),
        *(*MODEL, *LAYOUTS[num_ranks], *folders, "--train-iters", str(train_iters)),
        *("--distributed-timeout-minutes", "0.5"),
    ]


def rank_environment(orders: Path) -> dict[str, str]:
    """The environment of the ranks: on the CPU, a thread each."""
    own = {"CHAOS_ORDERS": str(orders), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, **own, "PYTHONPATH": path}
