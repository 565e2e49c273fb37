"""Outputs of metrics besides the console and metrics.jsonl: TensorBoard, W&B and a progress bar."""

from __future__ import annotations

import io
import logging
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..config.schema import LoggingConfig
from .report import AppendedFile, Output, write_report

logger = logging.getLogger(__name__)


class ScalarSink(Protocol):
    """Takes named scalars per iteration. Its errors do not end the run."""

    @property
    def destination(self) -> str | None:
        """Where to look at them; None if nothing is there."""

    def log(self, scalars: Mapping[str, float], iteration: int) -> None:
        """Write the scalars of one iteration."""

    def close(self) -> None:
        """Write what is buffered and release everything."""


def open_sinks(
    config: LoggingConfig, output_dir: Path, *, resume_iteration: int, run_config: Mapping[str, Any] | None
) -> list[ScalarSink]:
    """The sinks that `config` asks for. A sink that cannot start is left out with a warning; the run continues."""
    sinks: list[ScalarSink] = []
    if config.tensorboard:
        try:
            folder = output_dir / "tensorboard" if config.tensorboard_dir is None else Path(config.tensorboard_dir)
            sinks.append(TensorBoardSink(folder, resume_iteration=resume_iteration))
        except ImportError as error:
            logger.warning("no TensorBoard events: %s (pip install tensorboard, or --no-tensorboard)", error)
    if config.wandb_project is not None:
        try:
            sinks.append(WandbSink(config, output_dir, resume_iteration=resume_iteration, run_config=run_config))
        except Exception as error:  # wandb raises its own types, ImportError, OSError and others
            logger.warning(
                "no W&B: starting a run of project %s failed with %s: %s (WANDB_MODE=offline needs neither login nor "
                "network; training goes on without)",
                config.wandb_project,
                type(error).__name__,
                error,
            )
    return sinks


class TensorBoardSink:
    """TensorBoard events. On resume, TensorBoard hides events of an earlier session after the resume iteration.

    They are written at once: TensorBoard's own writer is a thread, and ends with a traceback on a full disk.
    """

    def __init__(self, log_dir: Path, *, resume_iteration: int) -> None:
        # Imported here because only the writing rank needs it.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # TensorBoard reads the files of a folder in the order of their names.
        path = log_dir / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        version = Event(wall_time=time.time(), file_version="brain.Event:2")
        start = Event(wall_time=time.time(), step=resume_iteration + 1, session_log=SessionLog(status=SessionLog.START))
        self._log_dir = log_dir
        self._file = AppendedFile(path, header=_tensorboard_record(version) + _tensorboard_record(start))

    @property
    def destination(self) -> str | None:
        """The folder of the events."""
        return str(self._log_dir) if self._file.path.exists() else None

    def log(self, scalars: Mapping[str, float], iteration: int) -> None:
        """Add one event with a value per scalar."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        event = Event(wall_time=time.time(), step=iteration, summary=Summary(value=values))
        self._file.append(_tensorboard_record(event))

    def close(self) -> None:
        """Close the event file."""
        self._file.close()


def _tensorboard_record(event: Any) -> bytes:
    """An event as event files hold it: with its size and checksums."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    stream = io.BytesIO()
    RecordWriter(stream).write(event.SerializeToString())
    return stream.getvalue()


class WandbSink:
    """A W&B run. On resume it continues under the same id."""

    def __init__(
        self,
        config: LoggingConfig,
        output_dir: Path,
        *,
        resume_iteration: int,
        run_config: Mapping[str, Any] | None,
    ) -> None:
        import wandb

        id_file = output_dir / "wandb_run_id.txt"
        run_id = id_file.read_text().strip() if resume_iteration > 0 and id_file.exists() else None
        folder = Path(config.wandb_save_dir) if config.wandb_save_dir is not None else output_dir
        folder.mkdir(parents=True, exist_ok=True)
        self._report = Output("W&B")
        self._run = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name,
            entity=config.wandb_entity,
            dir=str(folder),
            config=dict(run_config) if run_config is not None else None,
            id=run_id,
            resume="allow" if run_id is not None else None,
        )
        write_report(id_file, f"{self._run.id}\n".encode())
        # W&B's own step can only grow, but a resumed run goes back to its checkpoint. So our iteration is the axis.
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    @property
    def destination(self) -> str | None:
        """The run's page, or its folder."""
        folder = Path(self._run.dir).parent
        return self._run.url or (str(folder) if folder.exists() else None)

    def log(self, scalars: Mapping[str, float], iteration: int) -> None:
        """Log one row."""
        with self._report.writing():
            self._run.log({**scalars, "iteration": iteration})

    def close(self) -> None:
        """Finish the run."""
        with self._report.writing():
            self._run.finish()
        self._report.end()


class _TerminalThatMayClose(io.TextIOBase):
    """Stderr. What the terminal does not take, since it has closed, is dropped: a bar ends no run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


class ProgressBar:
    """A bar with the remaining time on stderr's last line. Log lines are printed above it."""

    def __init__(self, *, total: int, completed: int) -> None:
        """Show the bar, with `completed` of `total` steps already done."""
        # soft_wrap: the terminal wraps a long log line, so that it stays one line when copied.
        stderr = cast("TextIO", _TerminalThatMayClose(sys.stderr))
        console = Console(file=stderr, force_terminal=True, soft_wrap=True)
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=2,
            speed_estimate_period=600,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task = self._progress.add_task("training", total=total, completed=completed, loss="-")
        before = (sys.stdout, sys.stderr)
        self._progress.start()
        self._redirected = _redirect_log_handlers(dict(zip(before, (sys.stdout, sys.stderr), strict=True)))

    def update(self, completed: int, loss: float) -> None:
        """Move the bar to `completed` steps."""
        self._progress.update(self._task, completed=completed, loss=f"{loss:.4f}")

    def close(self) -> None:
        """Remove the bar and restore the log handlers' streams. Further calls do nothing."""
        for handler, stream in self._redirected:
            handler.setStream(stream)
        self._redirected = []
        self._progress.stop()


def wants_progress_bar(config: LoggingConfig) -> bool:
    """``--progress on``, or ``auto`` with stderr on a terminal."""
    return config.progress == "on" or (config.progress == "auto" and sys.stderr.isatty())


def _redirect_log_handlers(replacement: dict[Any, Any]) -> list[tuple[logging.StreamHandler, Any]]:
    """Point this logger's stream handlers at the streams that print above the bar; returns what to restore.

    A handler keeps the stream that it was created with. Replacing ``sys.stderr`` alone would print log lines into the
    bar.
    """
    redirected = []
    current: logging.Logger | None = logger
    while current is not None:
        for handler in current.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in replacement:
                redirected.append((handler, handler.stream))
                handler.setStream(replacement[handler.stream])
        current = current.parent if current.propagate else None
    return redirected
