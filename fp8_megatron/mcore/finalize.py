"""The function that megatron-core's schedules call between backward and the optimizer."""

from __future__ import annotations

from ..sharding.data_parallel import finish_gradients
from .data_parallel import FP8DataParallel


def finalize_model_grads(model: list[FP8DataParallel], num_tokens: object = None, **unused: object) -> None:
    """Finish the gradients of this rank's model chunks, after the last backward of a step.

    Args:
        num_tokens: unused, like megatron-core's groups and ``force_all_reduce``; it is for losses per token.
    """
    finish_gradients([chunk.data_parallel for chunk in model])
