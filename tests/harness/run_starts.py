"""Stand-ins for the start of a run: one rank, no signals, and folders that look like checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

from fp8_megatron.checkpoint.files import MANIFEST, META, TRACKER, iteration_folder
from fp8_megatron.checkpoint.run_lock import LAUNCH, RUN

#: The name of a run.
A_RUN = "a" * 16


class OneRank:
    """A topology of one rank, as far as a start needs it."""

    rank, world_size = 0, 1


def add_checkpoint(root: Path, iteration: int, run: str | None = A_RUN, launch: str | None = None) -> Path:
    folder = iteration_folder(root, iteration)
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text("{}")
    if run is not None:
        (folder / META).write_text(json.dumps({RUN: run, LAUNCH: launch, "ancestors": []}))
    (root / TRACKER).write_text(str(iteration))
    return folder
