"""The events of a run that the training loop knows: where it starts, which steps it skips, why it stops."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Any

from ..checkpoint.run_state import Progress
from ..config.schema import Config
from ..quantization.cast_report import Suspect
from ..reporting.run_log import EventKind, RunLog, event
from ..watch.restarts import Launch
from .loss_spikes import Spike
from .step_results import StepResult
from .stopping import StopReason

logger = logging.getLogger(__name__)

#: The roles of sampled casts, as messages name them.
_ROLES = {"input": "input", "weight": "weight", "grad_output": "output gradient", "weight_grad": "weight gradient"}


class RunEvents:
    """Logs a run's events on the first rank. On other ranks, every call does nothing.

    Args:
        log: the open log, which learns the step that the run stands at; None on other ranks.

    Attributes:
        total_iterations: the step at which the run ends.
    """

    def __init__(self, config: Config, log: RunLog | None, *, is_writer: bool, world_size: int) -> None:
        self.total_iterations = config.train_iters(world_size)
        self._log = log
        self._may_roll_back = config.training.rollback_on_loss_spike
        self._is_writer = is_writer
        self._world_size = world_size

    def at(self, iteration: int) -> None:
        """Note the step that the run stands at, for events that name none."""
        if self._log is not None:
            self._log.iteration = iteration

    def started(self, iteration: int, *, skipped_steps: int, weights_of: Path | None = None) -> None:
        """Training is about to begin after `iteration`.

        Args:
            iteration: 0: at the start of a run.
            weights_of: what the first weights were loaded from; None: they were drawn.
        """
        self.at(iteration)
        if not self._is_writer:
            return
        kind = EventKind.START if iteration == 0 else EventKind.RESUME
        where = f"{self._world_size} rank{'s' * (self._world_size > 1)}, first host {socket.gethostname()}"
        if iteration > 0:
            begins = f"training resumes after iteration {iteration}"
        else:
            begins = f"training starts {'from scratch' if weights_of is None else f'with the weights of {weights_of}'}"
        launch = Launch.of_environment().name
        mark = event(kind, iteration=iteration, world_size=self._world_size, skipped_steps=skipped_steps, launch=launch)
        logger.info("%s on %s, to iteration %d", begins, where, self.total_iterations, extra=mark)

    def skipped(self, result: StepResult, suspect: Suspect | None) -> None:
        """The optimizer skipped a step.

        Args:
            suspect: the tensor that its casts blame, if any. If there is none and the step was sampled, the sample's
                first cast of a value that is not finite is blamed.
        """
        if self._is_writer:
            loss, norm = result.figures.loss, result.figures.grad_norm
            blamed = _blamed(result, suspect)
            place = f", on rank {blamed['rank']}" if "rank" in blamed else ""
            where = f"; {blamed['reason']}: {blamed['tensor']}{place}" if blamed else ""
            mark = event(EventKind.SKIP, iteration=result.iteration, loss=str(loss), grad_norm=str(norm), **blamed)
            logger.warning(
                "iteration %d skipped: loss %g, gradient norm %g%s", result.iteration, loss, norm, where, extra=mark
            )

    def spiked(self, progress: Progress, spike: Spike, suspects: list[str], *, rolls_back: bool) -> str:
        """The loss of a step is a spike; returns the text, on every rank.

        Args:
            progress: with the step.
            suspects: casts that changed before it.
            rolls_back: whether the run goes back to a checkpoint.
        """
        text = (
            f"iteration {progress.iteration}: loss {spike.loss:.4f} is a spike, {spike.deviations:.0f} robust "
            f"deviations above {spike.usual:.4f}; casts that changed before: "
            + (", ".join(suspects) or "none in the samples")
        )
        if self._may_roll_back and not rolls_back:
            text += "; training goes on, as there is no checkpoint of this run to go back to yet"
        if self._is_writer:
            fields = {"loss": spike.loss, "suspects": suspects, "consumed_samples": progress.consumed_samples}
            mark = event(EventKind.SPIKE, iteration=progress.iteration, rollback=rolls_back, **fields)
            logger.warning("%s", text, extra=mark)
        return text

    def save_postponed(self, iteration: int) -> None:
        """A checkpoint is due at a skipped step."""
        if self._is_writer:
            logger.warning("iteration %d was skipped: the checkpoint waits for a finite step", iteration)

    def stopped(self, iteration: int, reason: StopReason) -> None:
        """Training ended as asked, and everything is saved."""
        if self._is_writer:
            mark = event(EventKind.STOP, iteration=iteration, reason=reason.name.lower())
            logger.info(
                "training ends at iteration %d of %d: %s", iteration, self.total_iterations, reason.value, extra=mark
            )


def _blamed(result: StepResult, suspect: Suspect | None) -> dict[str, Any]:
    """The fields of a skip's event that say which tensor it is blamed on; empty if that is not known."""
    if suspect is not None:
        return {"tensor": str(suspect.tensor), "rank": suspect.rank, "reason": suspect.reason}
    name = None if result.health is None else result.health.first_non_finite()
    return {} if name is None else {"tensor": f"{_ROLES[name.role]} of {name.layer}", "reason": "not finite"}
