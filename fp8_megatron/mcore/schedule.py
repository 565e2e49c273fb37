"""The order of a step's forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.schedules import forward_step
from megatron.core.utils import get_model_config
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..config.schema import ParallelConfig
from .data_parallel import FP8DataParallel


def forward_backward_func(parallel: ParallelConfig, *, forward_only: bool) -> Callable[..., list[Any]]:
    """megatron-core's schedule, or `overlapped` with its arguments."""
    overlaps = parallel.overlaps_micro_batches and not forward_only
    schedule: Callable[..., list[Any]] = overlapped if overlaps else get_forward_backward_func()
    return schedule


def overlapped(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Iterator[Any],
    model: Sequence[FP8DataParallel],
    num_microbatches: int,
    **unused: Any,
) -> list[Any]:
    """megatron-core's schedule of one stage, but a backward takes turns with the next micro-batch's forward.

    Forwards keep their order, and so do backwards: gradients are added, random numbers drawn and numbers of
    a step counted in the order of a schedule without overlap, and have its bits. Neither reads what the other changes:
    gradients, early casts and kept transposes are backwards', residual branches, numbers of a step and random states
    forwards', and amaxes are maxima.
    """
    (chunk,) = model
    config, losses = get_model_config(chunk), list[Any]()
    size = parallel_state.get_context_parallel_world_size()

    def forward(index: int) -> torch.Tensor:
        step = (forward_step_func, data_iterator, chunk, num_microbatches, None, losses, config, size)
        output: torch.Tensor = forward_step(*step, current_microbatch=index)[0]
        return output

    output = forward(0)
    for index in range(1, num_microbatches):
        backward = _as_here(partial(torch.autograd.backward, output))
        output = chunk.turns.alternate(partial(forward, index), backward)
    torch.autograd.backward(output)
    config.finalize_model_grads_func(model)
    return losses


def _as_here(function: Callable[[], None]) -> Callable[[], None]:
    """`function` for another thread, with the modes of torch and the CUDA stream of this one."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run() -> None:
        if stream is not None:  # and its device; a block would end by going back to the first device of the node
            torch.cuda.set_stream(stream)
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            function()

    return run
