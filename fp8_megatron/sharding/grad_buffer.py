"""Gradient storage of one flat space: `main_grad` of every parameter in it, and its reduction over replicas.

The owner of the storage decides its form. Layers only write (`main_grad.accumulate_`).

- `LocalGradBuffer`, one replica: all of the space. FP8 holds the gradient of one micro-batch, quantised once in wgrad.
  Several micro-batches are added in BF16 or FP32, never in FP8 (256 gradients added in E4M3 keep 10.6 dB). The default
  is FP32 from 33 micro-batches on (`storage.MAX_BF16_MICRO_BATCHES`).
- `ShardedGradBuffer`, several replicas: wgrad is quantised straight into the send buffer of its bucket. The last
  gradient of a bucket starts its reduction, during backward. Every micro-batch's mean is added to this rank's shard, in
  FP32 or BF16. Alternatively, gradients are added locally and reduced once a step.
- `released_grads.ReleasedGradBuffer`, one replica: no storage, the optimizer takes each gradient as it is written.
- `NoGradBuffer`: no storage, of a model that is evaluated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from ..collectives.autoscale import AutoScale
from ..collectives.gradient_reduction import GradReducer
from ..collectives.wire import WireTensor
from ..dtypes import GRAD_BLOCK, StorageDtype
from ..kernels import ops
from ..quantization.cast_health import CastProbe
from ..quantization.weight_grad import WeightGrad, write_wide_
from .partition import Bucket, ParamSpace, Slot, Span
from .staging import Staging, StagingPool


class _MainGrad:
    """A parameter's `main_grad`: its slot of the buffer."""

    def __init__(self, buffer: GradBuffer, slot: Slot) -> None:
        self._buffer = buffer
        self._slot = slot

    def accumulate_(self, grad: Tensor | WeightGrad) -> None:
        """Add one micro-batch's gradient (any float dtype, the parameter's shape)."""
        self._buffer.accumulate_(self._slot, grad)


class GradBuffer(ABC):
    """Gradients of a space on their way to the optimizer.

    After `finish`, `payload` [space.shard_numel], with `scales` [shard_numel / 128] if it is FP8, holds this rank's
    shard of the mean over replicas.
    """

    payload: Tensor
    scales: Tensor | None = None

    def __init__(self, space: ParamSpace) -> None:
        self.space = space
        #: int64 [2] while underflow is measured: non-zero elements before the cast, and how many of them became zero.
        self.underflow: Tensor | None = None
        #: int64 [2] while underflow is measured: elements of gradients that GEMMs wrote in FP8, and how many of them
        #: were clamped.
        self.clamped: Tensor | None = None
        #: The probes of casts to FP8, by the slot's offset; they measure a slot's first cast of a sampled step.
        self.probes: dict[int, CastProbe] = {}

    def become_main_grad(self) -> None:
        """Make this the storage that the parameters' gradients are written to."""
        for slot in self.space.slots:
            slot.param.main_grad = _MainGrad(self, slot)  # type: ignore[attr-defined]

    def accumulate_(self, slot: Slot, grad: Tensor | WeightGrad) -> None:
        """Write or add one micro-batch's gradient of `slot`."""
        assert grad.shape == slot.param.shape, f"{slot.name}: gradient {grad.shape}, parameter {slot.param.shape}"
        if isinstance(grad, WeightGrad) and not self._takes(slot, grad):
            grad = grad.wide()
        self._write(slot, grad if isinstance(grad, WeightGrad) else slot.flattened(grad))

    def _takes(self, slot: Slot, grad: WeightGrad) -> bool:
        """Whether the next gradient of `slot` goes to one place, in a form that `grad` can write there itself."""
        return False

    @abstractmethod
    def _write(self, slot: Slot, grad: Tensor | WeightGrad) -> None:
        """Write or add a flat gradient. One that `_takes` allows writes itself."""

    @abstractmethod
    def reset(self, *, measures_underflow: bool = False, num_micro_batches: int | None = None) -> None:
        """Drop the gradients. The next ones overwrite them, so nothing is zeroed.

        Args:
            measures_underflow: count the elements of the next step's gradients that the FP8 cast makes zero.
            num_micro_batches: gradients that each parameter receives in the next step; None: as many as it was built
                for. Fewer are right too; more than one need storage that was built for more than one.
        """

    @abstractmethod
    def finish(self) -> None:
        """After a step's last backward: zero the slots without a gradient, and reduce the remaining buckets."""

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, ops.FlatState]]:
        """After `finish`: the gradients of elements [start, stop) of this rank's shard, in runs that lie together in
        memory: (first, last, gradients). All borders are multiples of the blocks."""
        scales = None if self.scales is None else self.scales[start // GRAD_BLOCK : stop // GRAD_BLOCK]
        yield start, stop, ops.FlatState(self.payload[start:stop], scales)

    def squared_norm(self) -> Tensor:
        """After `finish`: Σ x² of this rank's shard, FP32 [1]; NaN or inf if any element is."""
        return ops.squared_norm(self.payload, self.scales)

    @property
    def autoscales(self) -> list[AutoScale]:
        """The auto-scaling state of each bucket, in mode nccl; otherwise none."""
        return []

    def end_step(self, is_taken: Tensor) -> None:
        """Close a step whose gradients are known everywhere (`AutoScale.end_step`)."""
        for autoscale in self.autoscales:
            autoscale.end_step(is_taken)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of payloads that last for the step."""

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales that last for the step."""
        return 0 if self.scales is None else self.scales.nbytes

    @abstractmethod
    def non_finite_slots(self) -> list[str]:
        """Names of the parameters whose gradient holds a NaN or an inf on this rank; waits for the device."""

    def _start_underflow(self, measures: bool) -> None:
        self.underflow = torch.zeros(2, dtype=torch.int64, device=self.space.device) if measures else None
        self.clamped = None if self.underflow is None else torch.zeros_like(self.underflow)

    def _quantize(self, slot: Slot, grad: Tensor | WeightGrad, payload: Tensor, scales: Tensor) -> None:
        """Write flat `grad`, of `slot` or a part of it, to FP8 storage. The storage may be longer: its rest becomes
        zero."""
        if isinstance(grad, WeightGrad):
            grad.write_fp8_(payload, scales)
        else:
            ops.quantize_blockwise_(grad, payload, scales)
        if self.underflow is not None:
            self._measure(slot, grad, payload, scales)

    def _measure(self, slot: Slot, grad: Tensor | WeightGrad, payload: Tensor, scales: Tensor) -> None:
        """Count what the cast of `grad` to `payload` made zero or clamped. A probe that is due measures all of it."""
        assert self.underflow is not None and self.clamped is not None
        probe = self.probes.get(slot.offset)
        if probe is not None and not probe.is_due:
            probe = None
        wide: Tensor | None
        if isinstance(grad, WeightGrad):
            # A gradient that wrote itself is nowhere in 16 bits: a second GEMM makes all of it, or a sample of rows.
            wide = None if probe is None else grad.wide()
            rows, written = grad.sample(payload, wide)
            ops.count_underflow_(rows.view(-1), written.view(-1), self.underflow, is_sample=True)
            self.clamped += grad.count_clamped(rows)
        else:
            wide = grad
            ops.count_underflow_(grad, payload[: grad.numel()], self.underflow)
        if probe is not None and wide is not None:
            probe.measure_blocks(wide.view(-1), payload, scales)


class LocalGradBuffer(GradBuffer):
    """All gradients of a space on one rank: payload [space.numel], and scales [space.numel / 128] under FP8.

    Args:
        dtype: storage; FP8 takes exactly one gradient per parameter and step.
    """

    def __init__(self, space: ParamSpace, dtype: StorageDtype) -> None:
        super().__init__(space)
        self.dtype = dtype
        self.payload = torch.zeros(space.numel, dtype=dtype.torch_dtype, device=space.device)
        if dtype is StorageDtype.FP8:
            self.scales = torch.ones(space.numel // GRAD_BLOCK, device=space.device)
        self._flat = {slot.offset: self.payload[slot.offset : slot.offset + slot.numel] for slot in space.slots}
        #: By the slot's offset, its payload with padding and its scales, under FP8. A view costs the host microseconds.
        self._padded = {} if self.scales is None else {slot.offset: self._padded_parts(slot) for slot in space.slots}
        self._written: set[int] = set()

    def _padded_parts(self, slot: Slot) -> tuple[Tensor, Tensor]:
        assert self.scales is not None
        return slot.padded_slice(self.payload), slot.padded_slice(self.scales, GRAD_BLOCK)

    def _takes(self, slot: Slot, grad: WeightGrad) -> bool:
        return self.scales is None or grad.writes_fp8

    def flat(self, slot: Slot) -> Tensor:
        """The gradient of `slot` [slot.numel], as it is stored (a view)."""
        return self._flat[slot.offset]

    def _write(self, slot: Slot, grad: Tensor | WeightGrad) -> None:
        first = slot.offset not in self._written
        self._written.add(slot.offset)
        if self.scales is not None:
            assert first, f"{slot.name}: a second micro-batch cannot be added to a gradient stored in FP8"
            self._quantize(slot, grad, *self._padded[slot.offset])
            return
        write_wide_(self.flat(slot), grad, adds=not first)

    def reset(self, *, measures_underflow: bool = False, num_micro_batches: int | None = None) -> None:
        self._written.clear()
        self._start_underflow(measures_underflow and self.scales is not None)

    def finish(self) -> None:
        for slot in self.space.slots:
            self.zero_if_unwritten(slot)

    def is_written(self, slot: Slot) -> bool:
        """Whether the slot holds a gradient."""
        return slot.offset in self._written

    def pin(self) -> None:
        """Have all memory from now on, where it is: others know the addresses."""

    @property
    def addresses(self) -> list[int]:
        """Of the payload."""
        return [self.payload.data_ptr()]

    def count(self, slot: Slot) -> int:
        """How many gradients the slot holds the sum of; 0: the next one overwrites it. Where their number does not
        decide how they are stored, 1 stands for any."""
        return int(slot.offset in self._written)

    def mark(self, slot: Slot, count: int) -> None:
        """The slot holds the sum of `count` gradients that are written without `accumulate_`, and fit (`fits`)."""
        if count:
            self._written.add(slot.offset)
        else:
            self._written.discard(slot.offset)

    def fits(self, num_gradients: int) -> bool:
        """Whether the storage is wide enough for `num_gradients` of one parameter."""
        return self.scales is None or num_gradients <= 1

    def forget(self, slot: Slot) -> None:
        """Drop the gradient of `slot`. The next one overwrites it."""
        self._written.discard(slot.offset)

    def zero_if_unwritten(self, slot: Slot) -> None:
        """Zero a slot that no gradient reached in this step."""
        if slot.offset not in self._written:
            slot.padded_slice(self.payload).zero_()
            if self.scales is not None:
                slot.padded_slice(self.scales, GRAD_BLOCK).fill_(1.0)

    @property
    def nbytes(self) -> int:
        return self.payload.nbytes

    def non_finite_slots(self) -> list[str]:
        marks = self.payload if self.scales is None else self.scales  # a bad block has the scale NaN
        block = 1 if self.scales is None else GRAD_BLOCK
        return [
            slot.name for slot in self.space.slots if not torch.isfinite(slot.padded_slice(marks, block)).all().item()
        ]


class NoGradBuffer(GradBuffer):
    """Of a space that is evaluated and not trained: no storage, and no gradient may come."""

    def __init__(self, space: ParamSpace) -> None:
        super().__init__(space)
        self.payload = torch.empty(0, device=space.device)

    def _write(self, slot: Slot, grad: Tensor | WeightGrad) -> None:
        raise AssertionError(f"{slot.name}: a gradient of a model that was built for evaluation")

    def reset(self, *, measures_underflow: bool = False, num_micro_batches: int | None = None) -> None:
        raise AssertionError("a training step of a model that was built for evaluation")

    def finish(self) -> None:
        self.reset()

    @property
    def nbytes(self) -> int:
        return 0

    def non_finite_slots(self) -> list[str]:
        return []


def _zero(wire: WireTensor) -> None:
    wire.payload.view(torch.uint8).zero_()
    if wire.scales is not None:
        wire.scales.fill_(1.0)


class _BucketState:
    """State of one bucket during a step."""

    def __init__(self, bucket: Bucket, spans: list[Span], accumulator: Tensor, autoscale: AutoScale | None) -> None:
        self.bucket = bucket
        self.spans = spans
        self.accumulator = accumulator
        self.autoscale = autoscale
        self.staging: Staging | None = None
        #: Offsets of the slots written since the last reduction; with local accumulation, a count of gradients.
        self.written: set[int] = set()
        self.num_local = 0
        self.reduced = False

    @property
    def used(self) -> int:
        """Elements before the padding at the end of the space."""
        return self.spans[-1].bucket_start + self.spans[-1].length if self.spans else 0


class ShardedGradBuffer(GradBuffer):
    """This rank's shard of the mean gradients, [space.shard_numel], reduced bucket by bucket during backward.

    Args:
        dtype: of the shard, FP32 or BF16; sums over ranks are FP32, and rounded once a micro-batch.
        reducer: the collective.
        pool: buffers in the reducer's wire dtype; for gradients that are not reduced in FP8, any wider dtype.
        local: adds up the micro-batches on this rank before one reduction a step. None reduces each micro-batch.
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
        local: LocalGradBuffer | None = None,
        num_micro_batches: int = 1,
        overlap: bool = True,
    ) -> None:
        super().__init__(space)
        self.payload = torch.zeros(space.shard_numel, dtype=dtype.torch_dtype, device=space.device)
        self.local = local
        self._reducer = reducer
        self._pool = pool
        self._num_micro_batches = self._expected = num_micro_batches
        self._overlap = overlap
        pool.reserve(max(bucket.numel for bucket in space.buckets))
        self._spans_of = {slot.offset: space.spans(slot) for slot in space.slots}
        spans = [span for of_slot in self._spans_of.values() for span in of_slot]
        self._buckets = [
            _BucketState(
                bucket,
                [span for span in spans if span.bucket is bucket],
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
                assert state.autoscale.num_tensors == len(state.spans)
                for index, span in enumerate(state.spans):
                    yield span.slot.name, state.autoscale, index

    def _takes(self, slot: Slot, grad: WeightGrad) -> bool:
        if self.local is not None:
            return self.local._takes(slot, grad)
        is_fp8 = self._pool.dtype is StorageDtype.FP8
        return len(self._spans_of[slot.offset]) == 1 and (grad.writes_fp8 or not is_fp8)

    def _write(self, slot: Slot, grad: Tensor | WeightGrad) -> None:
        if self.local is not None:
            self.local._write(slot, grad)
        for span in self._spans_of[slot.offset]:
            state = self._buckets[span.bucket.index]
            if self.local is not None:
                state.num_local += 1
                if state.num_local == len(state.spans) * self._expected:
                    self._reduce_local(state)
                continue
            if slot.offset in state.written:  # some slot got no gradient in the last micro-batch
                self._reduce(state)
            self._stage(state, span, grad)
            if len(state.written) == len(state.spans):
                self._reduce(state)

    def _stage(self, state: _BucketState, span: Span, grad: Tensor | WeightGrad | None) -> None:
        """Write a span of `grad` [slot.numel], or zeros, to the send buffer."""
        if state.staging is None:
            state.staging = self._pool.take()
        state.written.add(span.slot.offset)
        sent = state.staging.sent.slice(span.bucket_start, span.bucket_start + span.length)
        if grad is None:
            _zero(sent)
            return
        values = grad if isinstance(grad, WeightGrad) else grad[span.slot_start : span.slot_start + span.length]
        if sent.scales is not None:
            self._quantize(span.slot, values, sent.payload, sent.scales)
            return
        numel = values.shape.numel()
        write_wide_(sent.payload[:numel], values, adds=False)
        sent.payload[numel:].zero_()

    def _reduce_local(self, state: _BucketState) -> None:
        """Stage and reduce the locally added gradients."""
        assert self.local is not None
        for span in state.spans:
            self.local.zero_if_unwritten(span.slot)
            self._stage(state, span, self.local.flat(span.slot))
        self._reduce(state)

    def _reduce(self, state: _BucketState) -> None:
        """Start the reduction of a bucket whose send buffer is complete."""
        for span in state.spans:
            if span.slot.offset not in state.written:
                self._stage(state, span, None)
        staging, state.staging = state.staging, None
        assert staging is not None
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

    @property
    def nbytes(self) -> int:
        return self.payload.nbytes + (0 if self.local is None else self.local.nbytes)

    def non_finite_slots(self) -> list[str]:
        bad = ~torch.isfinite(self.payload)
        return [
            slot.name
            for slot in self.space.slots
            if any(bad[own.shard_start : own.shard_start + own.length].any() for own in self.space.fragments(slot))
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
