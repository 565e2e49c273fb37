"""Checkpoint folders on disk: written under a temporary name, synced and renamed. A kill at any time loses no saved
data.

``<save>/iter_0000100/`` is a checkpoint; it has this name only when it is complete.
``<save>/latest_checkpointed_iteration.txt`` names the newest one and is replaced last. Other folders carry the token of
the session that made them: ``iter_0000100.<token>.tmp`` is being written, ``.replaced`` and ``.removed`` are on their
way out. After a kill they are leftovers, and the next save clears them.

A folder may hold more than one run: if a run resumed from an older checkpoint, the later ones belong to an abandoned
branch. Every checkpoint names the earlier ones of its own run (`ancestors`). Fall-back, counting and removal consider
only these.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from ..errors import CheckpointError
from ..outputs import replace_file, sync
from ..reporting.run_log import EventKind, event

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
META = "checkpoint.json"
CONFIG = "config.yaml"
#: Key in `META`: iterations that the run had saved before.
ANCESTORS = "ancestors"
#: Key in `META`: the iterations at which this checkpoint was due; training may have had to wait with it.
DUE = "due"

logger = logging.getLogger(__name__)

#: More digits than any run takes steps.
_ITERATION = re.compile(r"[0-9]{1,15}")
_FOLDER = re.compile(r"iter_(\d{7,})")
#: A folder between the two renames of `publish`. Tools write no token.
_REPLACED = re.compile(r"(iter_\d{7,})(\.[0-9a-f]{16})?\.replaced")
_LEFT_BEHIND = (".tmp", ".replaced", ".removed")
#: A file is read again so often if its handle is stale, after so many seconds.
_STALE_ATTEMPTS = 3
_STALE_WAIT_SECONDS = 0.1


class RunLockError(CheckpointError):
    """The folder belongs to another run. This one cannot save and must stop."""


_T = TypeVar("_T")


def reread(read: Callable[[], _T]) -> _T:
    """The result of `read`, which opens a file by its name.

    NFS answers ESTALE if another machine replaced the file in between. Opened anew, the new one is there.
    """
    for _ in range(_STALE_ATTEMPTS):
        try:
            return read()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        time.sleep(_STALE_WAIT_SECONDS)
    return read()


def opened(path: Path) -> BinaryIO:
    """An ordinary file, open for reading.

    Raises:
        OSError: there is none. A pipe in its place would wait for ever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not an ordinary file", str(path))
    return os.fdopen(descriptor, "rb")


def read_file(path: Path) -> bytes:
    """The content of an ordinary file, also if its handle was stale. Raises as `opened`."""

    def read() -> bytes:
        with opened(path) as file:
            return file.read()

    return reread(read)


def iteration_folder(root: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration lives."""
    return root / f"iter_{iteration:07d}"


def no_checkpoint(setting: str, root: Path) -> str:
    """The error of a setting that names a folder without a checkpoint."""
    if (root / "config.json").is_file():
        return (
            f"{setting}({root}) is a Hugging Face model; give what "
            f"fp8-megatron convert --input {root} --output FOLDER --to ours makes of it"
        )
    return f"{setting}({root}) holds no checkpoint; give the folder that --save named, or its iter_* folder"


def temporary_folder(folder: Path, token: str = "") -> Path:
    """The folder where a checkpoint is written before it gets its name.

    Args:
        token: of the session that writes it; empty for a tool that has the folder above for itself.
    """
    return _temporary(folder, token, ".tmp")


def _temporary(folder: Path, token: str, suffix: str) -> Path:
    return folder.with_name(f"{folder.name}.{token}{suffix}" if token else folder.name + suffix)


def iteration_of(folder: Path) -> int | None:
    """The iteration that a checkpoint's folder is named after; None if it has another name."""
    match = _FOLDER.fullmatch(folder.name)
    return None if match is None else int(match[1])


def rank_file(tensor_rank: int, pipeline_rank: int, data_rank: int) -> str:
    """Name of the file with the state of one rank alone: generators, amax histories, scales."""
    return f"rank_tp{tensor_rank:02d}_pp{pipeline_rank:03d}_dp{data_rank:04d}.safetensors"


def saved_iterations(root: Path) -> list[int]:
    """Iterations that have a complete checkpoint under `root`, ascending."""
    found = []
    for path in root.glob("iter_*"):
        match = _FOLDER.fullmatch(path.name)
        if match is not None and (path / MANIFEST).exists():
            found.append(int(match[1]))
    return sorted(found)


def ancestors(root: Path, iteration: int) -> list[int]:
    """Checkpoints under `root` that the run of the given checkpoint had saved before it, ascending.

    All lower ones if it does not name them, since it is damaged.
    """
    lower = [number for number in saved_iterations(root) if number < iteration]
    try:
        own = set(json.loads(read_file(iteration_folder(root, iteration) / META))[ANCESTORS])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return lower
    return [number for number in lower if number in own]


def megatron_rank_folder(folder: Path, tensor_rank: int, stage: int, stages: int) -> Path:
    """The folder of one model-parallel rank in a ``torch`` checkpoint of Megatron-LM."""
    return folder / (f"mp_rank_{tensor_rank:02d}" + (f"_{stage:03d}" if stages > 1 else ""))


def is_torch_files(folder: Path) -> bool:
    """Whether a folder is a ``torch`` checkpoint of Megatron-LM."""
    return any((folder / name / "model_optim_rng.pt").is_file() for name in ("mp_rank_00", "mp_rank_00_000"))


def is_megatron_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint that Megatron-LM wrote."""
    if (folder / META).is_file() or (folder / MANIFEST).is_file():
        return False
    has_common = any((folder / name).is_file() for name in ("common.pt", "metadata.json"))
    return is_torch_files(folder) or (has_common and (folder / ".metadata").is_file())


def megatron_iterations(root: Path) -> list[int]:
    """Iterations that have a checkpoint of Megatron-LM under `root`, ascending."""
    matches = ((_FOLDER.fullmatch(path.name), path) for path in root.glob("iter_*"))
    return sorted(int(match[1]) for match, path in matches if match is not None and is_megatron_checkpoint(path))


def unfinished_folders(root: Path) -> list[str]:
    """Names of folders that were being written when a run ended."""
    return sorted(path.name for path in root.glob("iter_*.tmp"))


def named_checkpoint(path: Path, iteration: int | None = None) -> tuple[Path, int | None]:
    """(folder of checkpoints, iteration) that --load and --ckpt-step name; None: the newest one.

    The path may be that of one checkpoint, or of a link to one.

    Raises:
        CheckpointError: path and iteration contradict each other, or a checkpoint was renamed.
    """
    number = iteration_of(path)
    if number is None and (path / MANIFEST).is_file():
        path = path.resolve()
        number = iteration_of(path)
        if number is None:
            raise CheckpointError(
                f"{path} is one checkpoint under another name; give it the name of its iteration, such as iter_0000100"
            )
    if number is None or saved_iterations(path) or megatron_iterations(path):
        return path, iteration
    if iteration not in (None, number):
        raise CheckpointError(f"ckpt_step({iteration}) is not the checkpoint that load({path}) names; drop one of them")
    return path.parent, number


def candidates(root: Path, iteration: int | None = None) -> list[int]:
    """Iterations to resume from, best first: the one that the tracker names, then the older ones of its run.

    The tracked one is not opened here: `loading` reports what it lacks.

    Args:
        iteration: take this one alone (--ckpt-step).

    Raises:
        CheckpointError: `root` is a file, `iteration` does not exist, or the tracker is unreadable.
    """
    if root.exists() and not root.is_dir():
        raise CheckpointError(f"{root} is a file; give the folder that --save named")
    _finish_replacing(root)
    saved = saved_iterations(root)
    tracked = _tracked_iteration(root)
    wanted = iteration if iteration is not None else tracked
    if wanted is None:
        return saved[::-1]
    folder = iteration_folder(root, wanted)
    if iteration is None or is_megatron_checkpoint(folder):
        return [wanted, *([] if is_megatron_checkpoint(folder) else ancestors(root, wanted)[::-1])]
    if iteration not in saved:
        names = ", ".join(map(str, saved)) or "none"
        raise CheckpointError(f"iteration {iteration} is no whole checkpoint under {root}; there are: {names}")
    return [iteration]


def start_writing(folder: Path, token: str = "") -> Path:
    """Make an empty temporary folder for a checkpoint, after clearing leftovers.

    The caller holds the lock of the folder above: leftovers are of runs that have ended, or that may no longer save.
    """
    temporary = temporary_folder(folder, token)
    folder.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(folder.parent)
    temporary.mkdir()
    return temporary


def clear_leftovers(root: Path) -> None:
    """Remove what kills have left under `root`, where possible; restore a checkpoint that was being replaced."""
    _finish_replacing(root)
    for path in list(root.glob("iter_*")):
        if path.suffix in _LEFT_BEHIND:
            _clear(path)


def publish(temporary: Path, folder: Path, token: str = "", check: Callable[[], None] = lambda: None) -> None:
    """Give a fully written folder its name, then point the tracker at it.

    An older folder of that iteration is moved aside first and removed last, so that one of the two always exists.

    Args:
        token: as for `temporary_folder`.
        check: called when the folder has its name. If it raises, the folder goes back to `temporary` and the older one
            to its place; after `RunLockError` nothing is touched.
    """
    sync(temporary)
    replaced = _temporary(folder, token, ".replaced")
    for attempts_left in (2, 1, 0):
        if folder.exists():
            os.replace(folder, replaced)
        try:
            os.replace(temporary, folder)
            break
        except OSError as error:
            # A reader took `replaced` for a kill's leftover and put it back (`candidates`).
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not attempts_left:
                raise
    sync(folder.parent)
    try:
        check()
    except RunLockError:
        raise
    except Exception:
        os.replace(folder, temporary)
        _finish_replacing(folder.parent)
        raise
    match = _FOLDER.fullmatch(folder.name)
    assert match is not None, folder
    write_text(folder.parent / TRACKER, str(int(match[1])))
    shutil.rmtree(replaced, ignore_errors=True)


def remove_old(root: Path, own: Iterable[int], *, keep_last: int, retain_interval: int | None, token: str = "") -> None:
    """Remove all but the newest `keep_last` of a run's own checkpoints. Other checkpoints are kept and not counted.

    Args:
        own: iterations of the run's own checkpoints.
        retain_interval: also keep iterations that are multiples of this, or that were due at one.
        token: as for `temporary_folder`.
    """
    for iteration in sorted(set(own).intersection(saved_iterations(root)))[:-keep_last]:
        folder = iteration_folder(root, iteration)
        if retain_interval is not None and any(number % retain_interval == 0 for number in (iteration, *_due(folder))):
            continue
        removed = _temporary(folder, token, ".removed")
        try:
            os.replace(folder, removed)  # a partly removed folder never has a checkpoint's name
        except OSError as error:
            logger.warning("old checkpoint %s was not removed: %s", folder, error)
        else:
            _clear(removed)
            logger.info("removed %s", folder, extra=event(EventKind.REMOVE, iteration=iteration))


def _due(folder: Path) -> list[int]:
    """The iterations at which a checkpoint was due; none if it does not say."""
    try:
        due = json.loads(read_file(folder / META))[DUE]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return [number for number in due if isinstance(number, int)] if isinstance(due, list) else []


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    replace_file(path, text.encode(), temporary=path.with_name(path.name + ".tmp"))


def _clear(path: Path) -> None:
    """Remove a folder that is not a checkpoint. A file that cannot be removed (on NFS, while it is open) stays."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        try:
            shutil.rmtree(path)
        except OSError as error:
            logger.warning("%s cannot be removed: %s; saving goes on, remove it by hand", path, error)


def _tracked_iteration(root: Path) -> int | None:
    tracker = root / TRACKER
    try:
        text = read_file(tracker).decode().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{tracker} cannot be read ({error}); write the number of a folder iter_* into it"
        ) from None
    if text == "release":  # of Megatron-LM's converters
        raise CheckpointError(
            f"{tracker} names the folder release, which has no iteration; rename it to "
            f"{iteration_folder(root, 1).name} and write 1 into the file"
        )
    if not _ITERATION.fullmatch(text):
        raise CheckpointError(
            f"{tracker} holds {text[:60]!r}, not an iteration; write the number of a folder iter_* into it"
        )
    return int(text)


def _finish_replacing(root: Path) -> None:
    """Restore a folder that a kill between the two renames of `publish` left aside."""
    for replaced in root.glob("iter_*.replaced"):
        match = _REPLACED.fullmatch(replaced.name)
        if match is None or (folder := replaced.with_name(match[1])).exists():
            continue
        with suppress(FileNotFoundError):  # another process did it
            os.replace(replaced, folder)
