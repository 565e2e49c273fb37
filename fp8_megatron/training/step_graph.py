"""Forward and backward of a step as one CUDA graph: the host makes one launch instead of thousands.

A small model, or a layer split over tensor-parallel ranks, has kernels so short that a slow processor core cannot
launch them in time. A graph does not wait for the host. The graph reads and writes the addresses that were recorded:

- micro-batches are copied into fixed buffers;
- delayed scales are updated in place (`AmaxHistory.keep_addresses`);
- weights are gathered into fixed buffers (`WeightGather.before_recording`);
- exchanges by copy engines have recorded counters (`graphs.exchanges`).

The graph does not contain the optimizer, validation or checkpoints.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ..collectives.transport import copy_engine
from ..config.schema import MIN_CUDA_GRAPH_WARMUP_STEPS
from ..device import memory as device_memory
from ..graphs import exchanges
from ..graphs.recorder import Recorder
from .batches import Batch, take_step

logger = logging.getLogger(__name__)


class ComputeGradients(Protocol):
    """Forward, backward and the reduction of gradients; returns the figures that are known by then."""

    def __call__(self, batches: list[Batch], *, measures_underflow: bool, samples_casts: bool) -> Tensor: ...


class StepGraph:
    """Runs `compute` on each step's micro-batches: directly during the warm-up, then as a recording.

    Steps that measure underflow and steps that sample casts have recordings of their own, which share the memory of the
    first. All ranks call this for the same steps with the same arguments. A launch runs no Python: Python state that
    `compute` sets keeps the value that the recording gave it.

    Args:
        compute: must not wait for the device.
        recorder: of this step alone.
        before_recording: called before each recording.
        can_measure: called after a step that measured underflow; returns whether there was anything to measure.
        can_sample: whether casts can be sampled.
        has_memory: called once, after the warm-up; returns the same on all ranks. If False, no step is recorded.
        is_ready: called before the last step of the warm-up; returns the same on all ranks. The warm-up goes on until
            it is True.
        casts: what the recorded kernels depend on, on the host. If it changes, steps run directly until they are
            recorded again.
        may_go_on: if a recording fails, log the error and train without; False if ranks communicate in `compute`.
        warmup_steps: steps before the recordings, at least `MIN_CUDA_GRAPH_WARMUP_STEPS`.
    """

    def __init__(
        self,
        compute: ComputeGradients,
        recorder: Recorder,
        before_recording: Callable[[], None],
        *,
        can_measure: Callable[[], bool],
        can_sample: bool = False,
        has_memory: Callable[[], bool],
        is_ready: Callable[[], bool] = lambda: True,
        casts: Callable[[], list[int]] = list,
        may_go_on: bool = False,
        num_micro_batches: int,
        device: torch.device,
        warmup_steps: int,
    ) -> None:
        assert warmup_steps >= MIN_CUDA_GRAPH_WARMUP_STEPS, warmup_steps
        self._compute, self._recorder = compute, recorder
        self._before_recording = before_recording
        self._can_measure = can_measure
        self._can_sample = can_sample
        self._has_memory = has_memory
        self._is_ready = is_ready
        self._casts = casts
        self._recorded_casts: list[int] = []
        self._may_go_on = may_go_on
        self._num_micro_batches = num_micro_batches
        self._device = device
        self._warmup_left = warmup_steps
        #: Whether steps are recorded; None during the warm-up.
        self._records: bool | None = None
        self._batches: list[Batch] = []
        #: What launches a recording, and its result. By whether it measures underflow, and whether it samples casts.
        self._recorded: dict[tuple[bool, bool], tuple[Callable[[], None], Tensor]] = {}

    def __call__(
        self,
        loader: Iterator[Batch],
        num_micro_batches: int | None = None,
        *,
        measures_underflow: bool,
        samples_casts: bool = False,
    ) -> Tensor:
        """The result of `compute` for the next step of `loader`. The next call overwrites it.

        Args:
            num_micro_batches: of this step; None: as many as are recorded. A step with fewer runs directly, and does
                not count to the warm-up. No such step may follow a recorded one.
            samples_casts: only on steps that measure underflow.
        """
        assert measures_underflow or not samples_casts
        measured = {"measures_underflow": measures_underflow, "samples_casts": samples_casts}
        if num_micro_batches not in (None, self._num_micro_batches):
            assert not self._recorded, f"{num_micro_batches} micro-batches after {self._num_micro_batches}"
            return self._compute(take_step(loader, num_micro_batches, self._device), **measured)
        if self._recorded and self._casts() != self._recorded_casts:
            logger.info("casts take other scales: steps are recorded anew")
            self.release()
            self._records, self._warmup_left = None, 1
        if self._warmup_left > 0:
            self._warmup_left -= 1 if self._warmup_left > 1 or self._is_ready() else 0
            # The last warm-up step always measures, so that the kernels are compiled before they are recorded.
            if self._warmup_left == 0:
                measured = {"measures_underflow": True, "samples_casts": self._can_sample}
        elif self._records is None:
            self._records = self._has_memory()
        if not self._records:
            batches = take_step(loader, self._num_micro_batches, self._device)
            return self._compute(batches, **measured)
        self._take_in_place(loader)
        if not self._recorded and not self._try_to_record():
            return self._compute(self._batches, **measured)
        launch, figures = self._recorded[measures_underflow, samples_casts]
        exchanges.launch(launch)
        self._remember_launch()
        return figures

    def release(self) -> None:
        """Free the recordings. Call this before the process groups that they use are destroyed."""
        self._recorded.clear()
        device_memory.count_memory_beside_allocator(-self._recorder.kept_bytes)
        self._recorder.forget()

    def _take_in_place(self, loader: Iterator[Batch]) -> None:
        if not self._batches:
            self._batches = take_step(loader, self._num_micro_batches, self._device)
            return
        for place in self._batches:
            for key, tensor in next(loader).items():
                place[key].copy_(tensor, non_blocking=True)

    def _try_to_record(self) -> bool:
        """Record and return whether it worked. Raises if it failed and `may_go_on` is False."""
        try:
            self._record()
            return True
        except Exception as error:
            if not self._may_go_on:
                raise
            logger.warning("steps go on as Python launches them: recording one failed (%s)", error)
        self._records = False  # below, the error no longer refers to the graph's memory
        with suppress(RuntimeError):  # torch does not always free memory behind a broken recording
            self._recorder.release()
        return False

    def _record(self) -> None:
        """Record every kind of step at once. A later recording would disturb timings."""
        started = time.monotonic()
        self._recorded_casts = self._casts()
        kinds = [(False, False), *[(True, False)] * self._can_measure(), *[(True, True)] * self._can_sample]
        computes = [partial(self._compute_in_place, *kind) for kind in kinds]
        try:
            recordings = self._recorder.record(*computes, before=self._before_recording)
        except Exception as error:
            if not self._may_go_on:
                # Logged at once: destroying process groups with collectives in a broken recording may hang.
                logger.error("recording a step failed; give --cuda-graph-impl none to train without", exc_info=error)
            raise
        self._recorded = dict(zip(kinds, recordings, strict=True))
        self._recorded.setdefault((True, False), recordings[0])
        device_memory.begin_another_peak(self._device)
        device_memory.count_memory_beside_allocator(self._recorder.kept_bytes)
        seconds, kept = time.monotonic() - started, self._recorder.kept_bytes / 2**30
        logger.info("recorded a step as a CUDA graph in %.1f s; %.2f GiB are kept for it", seconds, kept)

    def _compute_in_place(self, measures_underflow: bool, samples_casts: bool) -> Tensor:
        with exchanges.recording():
            return self._compute(self._batches, measures_underflow=measures_underflow, samples_casts=samples_casts)

    def _remember_launch(self) -> None:
        """Report the launch to the watch over ranks, which cannot see the collectives inside a graph."""
        if torch.distributed.get_world_size() == 1:
            return
        event = torch.cuda.Event()
        event.record()
        world = torch.distributed.group.WORLD
        assert world is not None
        work = copy_engine.CopyWork("forward and backward", world, event, time.monotonic(), by="a CUDA graph")
        copy_engine.remember(work, "launch")
