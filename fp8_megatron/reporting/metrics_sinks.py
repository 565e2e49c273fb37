"""Outputs of metrics besides the console and metrics.jsonl: TensorBoard, W&B and a progress bar."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..config.schema import LoggingConfig

logger = logging.getLogger(__name__)


class ScalarSink(Protocol):
    """Takes named scalars per iteration. ``destination`` says where to look at them."""

    destination: str

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
            events = TensorBoardSink(folder, resume_iteration=resume_iteration)
            sinks.append(GuardedSink(events, "TensorBoard"))
        except ImportError as error:
            logger.warning("no TensorBoard events: %s (pip install tensorboard, or --no-tensorboard)", error)
        except OSError as error:
            logger.warning("no TensorBoard events: %s; training goes on without", error)
    if config.wandb_project is not None:
        try:
            run = WandbSink(config, output_dir, resume_iteration=resume_iteration, run_config=run_config)
            sinks.append(GuardedSink(run, "W&B"))
        except Exception as error:  # wandb raises its own types, ImportError, OSError and others
            logger.warning(
                "no W&B: starting a run of project %s failed with %s: %s (WANDB_MODE=offline needs neither login nor "
                "network; training goes on without)",
                config.wandb_project,
                type(error).__name__,
                error,
            )
    return sinks


class GuardedSink:
    """A sink whose errors do not end the run. After the first error it warns once and logs nothing more."""

    def __init__(self, sink: ScalarSink, name: str) -> None:
        self.destination = sink.destination
        self._sink = sink
        self._name = name
        self._has_failed = False

    def log(self, scalars: Mapping[str, float], iteration: int) -> None:
        """Log, unless an earlier call failed."""
        if self._has_failed:
            return
        try:
            self._sink.log(scalars, iteration)
        except Exception as error:  # libraries raise any type; training must continue
            self._warn(f"logging stops at iteration {iteration}", error)

    def close(self) -> None:
        """Close the sink. An error is logged and not raised."""
        try:
            self._sink.close()
        except Exception as error:  # as in log
            self._warn("logging did not end well", error)

    def _warn(self, what: str, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.warning("%s %s: %s: %s", self._name, what, type(error).__name__, error)


class TensorBoardSink:
    """TensorBoard events. On resume, TensorBoard hides events of an earlier session after the resume iteration."""

    def __init__(self, log_dir: Path, *, resume_iteration: int) -> None:
        # Imported here because it takes a second, and only the writing rank needs it.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(log_dir), purge_step=resume_iteration + 1)
        self.destination = str(log_dir)

    def log(self, scalars: Mapping[str, float], iteration: int) -> None:
        """Add one event per scalar."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, iteration)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


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
        self._run = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name,
            entity=config.wandb_entity,
            dir=str(folder),
            config=dict(run_config) if run_config is not None else None,
            id=run_id,
            resume="allow" if run_id is not None else None,
        )
        id_file.write_text(f"{self._run.id}\n")
        # W&B's own step can only grow, but a resumed run goes back to its checkpoint. So our iteration is the axis.
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")
        self.destination = self._run.url or str(Path(self._run.dir).parent)

    def log(self, scalars: Mapping[str, float], iteration: int) -> None:
        """Log one row."""
        self._run.log({**scalars, "iteration": iteration})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


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
