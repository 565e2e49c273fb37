"""Who saves a checkpoint: the run that it belongs to, the launch that wrote it, and the process."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from ..device.processes import launch_id
from ..device.variables import number
from .files import META, candidates, iteration_folder, read_file

#: Keys in `META`.
RUN, LAUNCH = "run", "launch"


@dataclass(frozen=True)
class RunIdentity:
    """Names of one session of a run.

    Attributes:
        run: 16 hexadecimal digits, drawn by a fresh run and kept by every run that resumes it.
        launch: of the job that started the ranks; equal after torchrun has restarted them. None without torchrun.
        token: 16 hexadecimal digits of this session alone, in its lock and its temporary folders.
    """

    run: str
    launch: str | None
    token: str

    @classmethod
    def drawn(cls, run: str | None = None) -> RunIdentity:
        """An identity with a new token, and a new run unless one is given. Ranks share rank 0's."""
        return cls(run or secrets.token_hex(8), launch_id(), secrets.token_hex(8))


def saved_by(folder: Path) -> tuple[str | None, str | None]:
    """(run, launch) of a checkpoint; None for each that it does not name: it is damaged, or of an earlier version."""
    try:
        about = json.loads(read_file(folder / META))
        values = [about.get(RUN), about.get(LAUNCH)]
    except (OSError, ValueError, AttributeError, RecursionError):
        return None, None
    run, launch = (value if isinstance(value, str) else None for value in values)
    return run, launch


def own_restart(root: Path) -> bool:
    """Whether an earlier start of this process's launch saved under `root`, and torchrun may have restarted it.

    torchrun's count of restarts alone does not tell: with several nodes each torchrun counts its own, and that of rank
    0's node stays 0 where another node failed.

    Raises:
        CheckpointError: the tracker under `root` is damaged.
    """
    launch = launch_id()
    counts = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    if launch is None or not any(number(name, 0) for name in counts):
        return False
    saved = (saved_by(iteration_folder(root, iteration)) for iteration in candidates(root))
    # The newest one may be damaged.
    return next((by for run, by in saved if run is not None), None) == launch
