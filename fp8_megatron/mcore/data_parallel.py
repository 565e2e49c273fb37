"""Adapts a data-parallel model chunk to megatron-core's schedules, and finishes its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.transformer.transformer_config import TransformerConfig

from ..collectives.turns import Turns
from ..sharding.data_parallel import DataParallelModule, finish_gradients
from ..sharding.gradient import GradBuffer
from .parts import ReportingPart


class FP8DataParallel(_BaseDataParallel):
    """A model chunk with its gradient buffers, behind the methods that megatron-core calls.

    Attributes:
        data_parallel: does the work.
        reporting: its modules that report numbers of a step.
        turns: of a forward and a backward, where its layers wait for an exchange.
    """

    def __init__(self, config: TransformerConfig, data_parallel: DataParallelModule) -> None:
        super().__init__(config=config, module=data_parallel.module)
        self.data_parallel = data_parallel
        self.turns, layers = Turns(), [*data_parallel.module.modules()]
        self.reporting = [child for child in layers if isinstance(child, ReportingPart)]
        for child in layers:
            if isinstance(getattr(child, "turns", None), Turns):
                child.turns = self.turns  # type: ignore[assignment]

    @property
    def grad_buffers(self) -> list[GradBuffer]:
        """One gradient buffer for each space of the chunk."""
        return self.data_parallel.grad_buffers

    def zero_grad_buffer(self, *, measures_underflow: bool = False, num_micro_batches: int | None = None) -> None:
        """Start a step: the next gradients overwrite the last step's."""
        for part in self.reporting:
            part.start_step()
        self.data_parallel.reset(measures_underflow=measures_underflow, num_micro_batches=num_micro_batches)

    def finish_grad_sync(self, *unused: Any, **unused_kwargs: Any) -> None:
        """Called after a step's last backward: each buffer then holds this rank's shard of the mean over replicas."""
        self.data_parallel.finish_reductions()

    def before_recording(self) -> None:
        """Called before a forward and backward that are recorded into a CUDA graph."""
        self.data_parallel.before_recording()

    def wait_for_weights(self) -> None:
        """Wait for all weights. Code that reads weights outside a forward pass calls this first."""
        self.data_parallel.wait_for_weights()


def finalize_model_grads(
    model: list[FP8DataParallel],
    num_tokens: object = None,
    *,
    then: Callable[[Sequence[ReportingPart]], None] | None = None,
    **unused: object,
) -> None:
    """Finish the gradients of this rank's model chunks, after the last backward of a step.

    Args:
        num_tokens: unused, like megatron-core's groups and ``force_all_reduce``; it is for losses per token.
        then: called with what the chunks have that reports (`parts.Parts.after_gradients`).
    """
    finish_gradients([chunk.data_parallel for chunk in model])
    if then is not None:
        then([part for chunk in model for part in chunk.reporting])
