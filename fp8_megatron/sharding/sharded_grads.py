"""Gradients over several replicas: each rank keeps its shard of the mean.

A gradient is written into the send buffer of its bucket. The last one of a bucket starts its reduction, during
backward. Every micro-batch's mean is added to this rank's shard, in FP32 or BF16. Alternatively, gradients are added
locally and reduced once a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..collectives.autoscale import AutoScale
from ..collectives.gradient_reduction import GradReducer
from ..collectives.wire import WireTensor
from ..dtypes import GRAD_BLOCK, StorageDtype
from ..kernels import ops
from ..quantization.weight_grad import GradPlace, WeightGrad
from .gradient import GradBuffer, Gradient
from .partition import Bucket, ParamSpace, Span
from .staging import Staging, StagingPool
from .whole_grads import WholeGradBuffer


def _zero(wire: WireTensor) -> None:
    wire.payload.view(torch.uint8).zero_()
    if wire.scales is not None:
        wire.scales.fill_(1.0)


class _BucketState:
    """State of one bucket during a step."""

    def __init__(
        self, bucket: Bucket, parts: list[tuple[Gradient, Span]], accumulator: Tensor, autoscale: AutoScale | None
    ) -> None:
        self.bucket = bucket
        self.parts = parts
        self.accumulator = accumulator
        self.autoscale = autoscale
        self.staging: Staging | None = None
        #: The gradients written since the last reduction; with local accumulation, a count of gradients.
        self.written: set[Gradient] = set()
        self.num_local = 0
        self.reduced = False

    @property
    def used(self) -> int:
        """Elements before the padding at the end of the space."""
        if not self.parts:
            return 0
        _, span = self.parts[-1]
        return span.bucket_start + span.length

    @property
    def is_full(self) -> bool:
        """Whether every gradient is in the send buffer."""
        return len(self.written) == len(self.parts)

    def room(self, span: Span) -> WireTensor:
        """The span's part of the send buffer."""
        assert self.staging is not None
        return self.staging.sent.slice(span.bucket_start, span.bucket_start + span.length)


class ShardedGradBuffer(GradBuffer):
    """This rank's shard of the mean gradients, [space.shard_numel], reduced bucket by bucket during backward.

    Args:
        dtype: of the shard, FP32 or BF16; sums over ranks are FP32, and rounded once a micro-batch.
        reducer: the collective.
        pool: buffers in the reducer's wire dtype; for gradients that are not reduced in FP8, any wider dtype.
        local: storage in which this rank adds up the micro-batches before one reduction a step. None reduces each.
        num_micro_batches: gradients that each parameter receives per step, needed with `local`.
        overlap: False waits for each reduction after its start, for measurements.
    """

    def __init__(
        self,
        space: ParamSpace,
        reducer: GradReducer,
        pool: StagingPool,
        *,
        dtype: StorageDtype = StorageDtype.FP32,
        local: StorageDtype | None = None,
        num_micro_batches: int = 1,
        overlap: bool = True,
        gradients: Sequence[Gradient] | None = None,
    ) -> None:
        super().__init__(space, gradients)
        self.payload = torch.zeros(space.shard_numel, dtype=dtype.torch_dtype, device=space.device)
        self.local = None if local is None else WholeGradBuffer(space, local, self.gradients)
        self._reducer = reducer
        self._pool = pool
        self._num_micro_batches = self._expected = num_micro_batches
        self._overlap = overlap
        pool.reserve(max(bucket.numel for bucket in space.buckets))
        self._spans = {own: space.spans(own.slot) for own in self.gradients}
        parts = [(own, span) for own, spans in self._spans.items() for span in spans]
        self._buckets = [
            _BucketState(
                bucket,
                [(own, span) for own, span in parts if span.bucket is bucket],
                bucket.of_shard(self.payload),
                self._autoscale(bucket) if reducer.needs_autoscale else None,
            )
            for bucket in space.buckets
        ]

    @property
    def autoscales(self) -> list[AutoScale]:
        return [state.autoscale for state in self._buckets if state.autoscale is not None]

    def autoscaled_spans(self) -> Iterator[tuple[str, AutoScale, int]]:
        """In mode nccl, every span: its slot's name, its bucket's auto-scaling, its index there."""
        for state in self._buckets:
            if state.autoscale is not None:
                assert state.autoscale.num_tensors == len(state.parts)
                for index, (gradient, _) in enumerate(state.parts):
                    yield gradient.slot.name, state.autoscale, index

    def place(self, gradient: Gradient, *, fp8: bool) -> GradPlace | None:
        if self.local is not None:
            return self.local.place(gradient, fp8=fp8)
        spans = self._spans[gradient]
        if len(spans) > 1 or (self._pool.dtype is StorageDtype.FP8 and not fp8):
            return None
        room = self._opened(gradient, spans[0]).room(spans[0])
        if room.scales is not None:
            return GradPlace(room.payload, room.scales)
        slot = gradient.slot
        room.payload[slot.numel :].zero_()
        return GradPlace(room.payload[: slot.numel].view(slot.param.shape), None)

    def written(self, gradient: Gradient, grad: Tensor | WeightGrad) -> None:
        if self.local is not None:
            self.local.written(gradient, grad)
            self._count_local(gradient)
            return
        (span,) = self._spans[gradient]
        state = self._buckets[span.bucket.index]
        if self.underflow is not None:  # a view costs the host microseconds
            room = state.room(span)
            assert room.scales is not None
            self._measure(gradient, grad, room.payload, room.scales)
        self._note_sent(gradient)
        self._fill(state, gradient)

    def add(self, gradient: Gradient, grad: Tensor) -> None:
        if self.local is not None:
            self.local.add(gradient, grad)
            self._count_local(gradient)
        else:
            self._send(gradient, grad)

    def _send(self, gradient: Gradient, grad: Tensor) -> None:
        """Let a gradient [slot.numel] leave."""
        self._note_sent(gradient)
        for span in self._spans[gradient]:
            state = self._opened(gradient, span)
            self._stage(state, gradient, span, grad)
            self._fill(state, gradient)

    def _note_sent(self, gradient: Gradient) -> None:
        gradient.num_sent += 1
        gradient.in_shard = True

    def _count_local(self, gradient: Gradient) -> None:
        for span in self._spans[gradient]:
            state = self._buckets[span.bucket.index]
            state.num_local += 1
            if state.num_local == len(state.parts) * self._expected:
                self._reduce_local(state)

    def _opened(self, gradient: Gradient, span: Span) -> _BucketState:
        """The span's bucket, with a send buffer that does not have the gradient."""
        state = self._buckets[span.bucket.index]
        if gradient in state.written:  # some other one got no gradient in the last micro-batch
            self._reduce(state)
        if state.staging is None:
            state.staging = self._pool.take()
        return state

    def _stage(self, state: _BucketState, gradient: Gradient, span: Span, grad: Tensor) -> None:
        """Write a span of `grad` [slot.numel] to the send buffer."""
        room = state.room(span)
        values = grad[span.slot_start : span.slot_start + span.length]
        if room.scales is not None:
            ops.quantize_blockwise_(values, room.payload, room.scales)  # its rest becomes zero
            self._measure(gradient, values, room.payload, room.scales)
            return
        room.payload[: values.numel()].copy_(values)
        room.payload[values.numel() :].zero_()

    def _fill(self, state: _BucketState, gradient: Gradient) -> None:
        """A part of the send buffer is written. The last one starts the reduction."""
        state.written.add(gradient)
        if state.is_full:
            self._reduce(state)

    def _reduce_local(self, state: _BucketState) -> None:
        """Stage and reduce the locally added gradients."""
        assert self.local is not None
        for gradient, span in state.parts:
            self.local.zero_if_stale(gradient)
            self._stage(self._opened(gradient, span), gradient, span, self.local.flat(gradient))
            self._note_sent(gradient)
            state.written.add(gradient)
        self._reduce(state)

    def _reduce(self, state: _BucketState) -> None:
        """Start the reduction of a bucket. Gradients that are not in its send buffer count as zeros."""
        assert state.staging is not None
        for gradient, span in state.parts:
            if gradient not in state.written:
                _zero(state.room(span))
        staging, state.staging = state.staging, None
        numel = state.bucket.numel
        if state.used < numel:
            _zero(staging.sent.slice(state.used, numel))
        bucket = staging.narrowed(numel)
        work = self._reducer.start(bucket.sent, bucket.received, state.autoscale)
        self._pool.await_arrival(staging, work, state.accumulator, adds=state.reduced)
        if not self._overlap:
            self._pool.drain()
        state.written.clear()
        state.num_local = 0
        state.reduced = True

    def reset(self, *, measures_underflow: bool = False, num_micro_batches: int | None = None) -> None:
        self._expected = self._num_micro_batches if num_micro_batches is None else num_micro_batches
        if self.local is not None:
            self.local.reset()
        for state in self._buckets:
            assert state.staging is None, "a step ended without finish"
            state.reduced = False
            state.num_local = 0
        for gradient in self.gradients:
            gradient.in_shard = False
        for autoscale in self.autoscales:
            autoscale.begin_step()
        self._start_underflow(measures_underflow and self._pool.dtype is StorageDtype.FP8)

    def finish(self) -> None:
        for state in reversed(self._buckets):
            if self.local is not None and state.num_local > 0:
                self._reduce_local(state)
            elif state.written:
                self._reduce(state)
        self._pool.drain()
        for state in self._buckets:
            if not state.reduced:
                state.accumulator.zero_()
        for gradient in self.gradients:
            gradient.num_sent = 0

    def values(self, gradient: Gradient) -> Tensor:
        """See `Gradient.values`. Called by every replica."""
        return self.space.assemble(
            gradient.slot, lambda own: self.payload[own.shard_start : own.shard_start + own.length].float()
        )

    def shard_parts(self, gradient: Gradient) -> list[Tensor]:
        """This rank's parts of a mean (views)."""
        fragments = self.space.fragments(gradient.slot)
        return [self.payload[own.shard_start : own.shard_start + own.length] for own in fragments]

    @property
    def nbytes(self) -> int:
        return self.payload.nbytes + (0 if self.local is None else self.local.nbytes)

    def non_finite_slots(self) -> list[str]:
        return [
            own.slot.name
            for own in self.gradients
            if any(not torch.isfinite(part).all().item() for part in self.shard_parts(own))
        ]

    def _autoscale(self, bucket: Bucket) -> AutoScale:
        """One μ for each span of the bucket."""
        slots = self.space.block_slots(bucket, GRAD_BLOCK)
        first = slots[:1]
        return AutoScale(
            int(slots[-1] - first) + 1,
            slots - first,
            self.space.device,
            initial_mu=1 / self._reducer.group.size(),  # from 1, the first sums of N ranks saturate
            reductions_per_step=1 if self.local is not None else self._num_micro_batches,
        )
