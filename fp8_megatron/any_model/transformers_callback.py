"""Checkpoints of transformers' Trainer over several ranks.

Trainer asks rank 0 alone for the states that it saves. Masters and moments of a model over several ranks lie on all of
them, and every rank takes part in gathering them.
"""

from __future__ import annotations

from typing import Any

from .optimizer import FP8Optimizer


def gather_state_callback(optimizer: FP8Optimizer) -> Any:
    """A ``TrainerCallback`` that gathers the states on rank 0 before Trainer saves them there.

    It also gathers them at the end of training, for ``trainer.save_model()``. On one rank it does nothing.

    Example:
        >>> trainer.add_callback(gather_state_callback(optimizer))
    """
    import transformers

    class GatherState(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if control.should_save:
                optimizer.consolidate_state_dict()

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if control.should_save:
                optimizer.consolidate_state_dict()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            optimizer.consolidate_state_dict()

    return GatherState()
