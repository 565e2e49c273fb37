"""Skipped steps of an `FP8Optimizer`: it counts them on the device, and says so when they do not end.

The host reads the counts of a step while the next one is queued, so it never waits for the step that it has just
queued. All replicas skip the same steps, so all of them warn and raise at the same one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..device.memory import HostCopy
from ..kernels import ops
from ..quantization.amax_history import MOST_SATURATED, AmaxHistory
from ..quantization.cast_report import CastReport
from .torch_optimizers import OptimizerError

logger = logging.getLogger(__name__)

#: After so many skipped steps in a row there is a warning.
WARN_AFTER = 3
#: The same under torch's GradScaler, which begins with 2^16 and halves it at each skipped step until gradients fit.
WARN_AFTER_SCALED = 20
#: After so many there is an error.
RAISE_AFTER = 100


class SkippedSteps:
    """Counts the skipped steps of one optimizer.

    Args:
        histories: delayed scales of the model's casts, which report what was wrong with them.
        bad_gradients: names of this rank's gradients that are not finite; may wait for the device.

    Attributes:
        num: FP32 [1], all skipped steps (a view).
    """

    def __init__(
        self, device: torch.device, histories: Sequence[AmaxHistory], bad_gradients: Callable[[], list[str]]
    ) -> None:
        self._histories = histories
        self._bad_gradients = bad_gradients
        self._counts = torch.zeros(2 + ops.REPORT_HEAD * len(histories), device=device)
        self.num, self._in_a_row, heads = self._counts.split([1, 1, len(self._counts) - 2])
        #: What the casts of each history reported in the last skipped step.
        self._heads = heads.split(ops.REPORT_HEAD) if histories else ()
        self._last: HostCopy | None = None

    @property
    def cause(self) -> str | None:
        """The first cast that was bad in the last skipped step; None if there is none. Waits for the device."""
        return self._suspect(self._counts.tolist())

    def count(self, moved: Tensor) -> None:
        """Count a step. `moved`: FP32 [1], 0 if it is skipped, otherwise 1."""
        skipped = 1.0 - moved
        self.num.add_(skipped)
        self._in_a_row.add_(1.0).mul_(skipped)
        for head, history in zip(self._heads, self._histories, strict=True):
            if history.report is not None:
                torch.where(moved > 0.0, head, history.report[: ops.REPORT_HEAD], out=head)

    def end_row(self) -> None:
        """The next step is the first of a row: a state was loaded."""
        self._in_a_row.zero_()
        self._last = None

    def tell(self, *, is_scaled: bool) -> None:
        """Look at the step before the one that was just counted.

        Args:
            is_scaled: GradScaler scales the loss.

        Raises:
            OptimizerError: it is the `RAISE_AFTER`-th skipped step in a row, or a later one.
        """
        last, self._last = self._last, HostCopy(self._counts)
        counts = [0.0, 0.0] if last is None else last.read()
        in_a_row = round(counts[1])
        if in_a_row >= RAISE_AFTER:
            raise OptimizerError(
                f"optimizer.step() has skipped {in_a_row} steps in a row: {self._blamed(counts)}. Load a state from "
                f"before them, and train on with a lower learning rate or loss"
            )
        if in_a_row == (WARN_AFTER_SCALED if is_scaled else WARN_AFTER):
            logger.warning(
                "optimizer.step() has skipped %d steps in a row, and weights stay as they are: %s. After %d it raises "
                "an error",
                in_a_row,
                self._blamed(counts),
                RAISE_AFTER,
            )

    def _blamed(self, counts: Sequence[float]) -> str:
        """What was wrong. It waits for the device, because the gradients are looked at: nothing is being learned."""
        suspect = self._suspect(counts)
        if suspect is not None:
            return suspect
        bad = self._bad_gradients()
        if not bad:
            return "a gradient of another rank, the sum of squares of all gradients or GradScaler's found_inf is inf"
        return f"not finite: gradient of {bad[0]}" + (f" and of {len(bad) - 1} more" if bad[1:] else "")

    def _suspect(self, counts: Sequence[float]) -> str | None:
        if not self._heads:
            return None
        heads = [list(counts[first : first + ops.REPORT_HEAD]) for first in range(2, len(counts), ops.REPORT_HEAD)]
        found = CastReport([], [heads]).suspect(
            lambda _, chunk: self._histories[chunk].suspects, most_saturated=MOST_SATURATED
        )
        return None if found is None else f"{found.reason}: {found.tensor}"
