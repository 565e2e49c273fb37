"""A warning where somebody still holds weights that FP8 weights have replaced."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

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
    _Search({names[param]: weakref.ref(param) for param in replaced if param in names}, optimizer)


class _Search:
    """Hook in front of an optimizer's step, which looks once. It stays: torch iterates over the hooks that it calls, so
    none may remove itself."""

    def __init__(
        self, weights: Mapping[str, weakref.ref[torch.nn.Parameter]], optimizer: torch.optim.Optimizer
    ) -> None:
        self._weights = weights
        optimizer.register_step_pre_hook(self)

    def __call__(self, *unused: Any) -> None:
        alive = [name for name, weight in self._weights.items() if weight() is not None]
        self._weights = {}
        if alive:
            logger.warning(
                "%d weights are still held as they were before FP8 (%s): the model has others now, so clipping or logs "
                "that go through a list of the old ones leave them out, and the old ones keep their memory. Take "
                "model.parameters() after initialize",
                len(alive),
                ", ".join(alive[:3]) + (", …" if len(alive) > 3 else ""),
            )
