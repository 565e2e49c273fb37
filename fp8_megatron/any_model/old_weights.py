"""A warning where somebody still holds weights that FP8 weights have replaced."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping

import torch

from .torch_optimizers import look_before_steps

logger = logging.getLogger(__name__)


def warn_of_old_weights(
    names: Mapping[torch.nn.Parameter, str],
    replaced: Iterable[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Warn at the first step if weights of `replaced` are still alive.

    A list of parameters that was made before is the usual reason. Clipping that list leaves out the weights of the
    model, which have no gradient there, and the old weights keep their memory.
    """
    weights = {names[param]: weakref.ref(param) for param in replaced if param in names}

    def look(_: torch.optim.Optimizer) -> bool:
        alive = [name for name, weight in weights.items() if weight() is not None]
        if alive:
            logger.warning(
                "%d weights are still held as they were before FP8 (%s): the model has others now, so clipping or logs "
                "that go through a list of the old ones leave them out, and the old ones keep their memory. Take "
                "model.parameters() after initialize",
                len(alive),
                ", ".join(alive[:3]) + (", …" if len(alive) > 3 else ""),
            )
        return True

    look_before_steps(optimizer, look)
