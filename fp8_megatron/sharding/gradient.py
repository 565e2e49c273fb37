"""One parameter's gradient, from backward to the optimizer.

A `Gradient` is its parameter's `main_grad`. Its `GradState` says what is stored. The `GradBuffer` of its space decides
in which form, where, and what happens when a gradient is complete:

- `whole_grads.WholeGradBuffer`, one replica: all of the space is on this rank.
- `sharded_grads.ShardedGradBuffer`, several replicas: gradients leave during backward, and this rank keeps its shard of
  the mean.
- `released_grads.ReleasedGradBuffer`, one replica: no storage, the optimizer takes each gradient as it is written. A
  model that is evaluated has one from which nobody takes any.
- `any_model.fsdp.DTensorGradBuffer`: torch's ``fully_shard`` stores them in ``p.grad``.

A layer asks for the place of a weight's gradient, its GEMM writes there, and the layer says so: `Gradient.place`,
`Gradient.written`. Where there is no one place, and for all other parameters, it gives the values: `accumulate_`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from enum import Enum

import torch
from torch import Tensor

from ..collectives.autoscale import AutoScale
from ..dtypes import GRAD_BLOCK
from ..kernels import ops
from ..quantization.cast_health import CastProbe
from ..quantization.weight_grad import GradPlace, WeightGrad
from .partition import ParamSpace, Slot


class GradState(Enum):
    """What is stored of a parameter's gradient."""

    EMPTY = "empty"
    """Nothing that counts. The next gradient overwrites the storage."""
    ONE = "one"
    """The gradient of one backward pass."""
    SUM = "sum"
    """The sum of several, or the mean over replicas."""
    IN_FLIGHT = "in flight"
    """On its way to the replicas' shards. `GradBuffer.finish` makes it a mean."""


class Gradient:
    """One parameter's gradient.

    Attributes:
        buffer: decides where and how it is stored.
        count: gradients whose sum this rank stores.
        num_sent: gradients that have left for the shards and are not known to have arrived.
        in_shard: the replicas' shards may hold a part of it, or soon will.
        is_stale: the storage holds values that no longer count.
        probe: measures the first cast of a sampled step to FP8.
    """

    buffer: GradBuffer

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.param: Tensor = slot.param
        self.count = self.num_sent = 0
        self.in_shard = self.is_stale = False
        self.probe: CastProbe | None = None

    @property
    def state(self) -> GradState:
        """What is stored."""
        if self.num_sent:
            return GradState.IN_FLIGHT
        if self.count + self.in_shard == 0:
            return GradState.EMPTY
        return GradState.ONE if self.count == 1 and not self.in_shard else GradState.SUM

    @property
    def is_wanted(self) -> bool:
        """Whether the backward that runs is to give the parameter a gradient."""
        return True

    def note_forward(self) -> None:
        """A forward begins whose backward will give a gradient: until then, memory of gradients that nobody holds is
        free."""
        self.buffer.note_forward(self)

    def place(self, *, fp8: bool) -> GradPlace | None:
        """Where the weight's next gradient is written, before `written`. None: its values go to `accumulate_`.

        Args:
            fp8: the writer can write E4M3 (`WeightGrad.writes_fp8`).
        """
        return self.buffer.place(self, fp8=fp8)

    def written(self, grad: WeightGrad) -> None:
        """The place holds a gradient; `grad` is what wrote it, to measure the cast."""
        self.buffer.written(self, grad)

    def accumulate_(self, grad: Tensor) -> None:
        """Add one micro-batch's gradient (any float dtype, the parameter's shape)."""
        slot = self.slot
        assert grad.shape == slot.param.shape, f"{slot.name}: gradient {grad.shape}, parameter {slot.param.shape}"
        self.buffer.add(self, slot.flattened(grad))

    def drop(self) -> None:
        """The next gradient overwrites what is stored."""
        self.buffer.drop(self)

    def zero_(self) -> None:
        """Make it zero. Nothing happens where it is zero already."""
        self.buffer.zero_(self)

    def values(self) -> Tensor:
        """The gradient in FP32, in the parameter's shape (a copy)."""
        return self.buffer.values(self)

    def squared_norm(self) -> Tensor:
        """Σ x², FP32 [1]; NaN or inf if any element is."""
        return self.buffer.squared_norm_of(self)

    def scale_(self, factor: Tensor | float) -> None:
        """Multiply it by a number."""
        self.buffer.scale_(factor, [self])

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copied or pickled parameter has no gradient: this becomes None."""
        return type(None), ()


class GradBuffer(ABC):
    """The gradients of a space, on their way to the optimizer.

    After `finish`, `payload` [space.shard_numel], with `scales` [shard_numel / 128] if it is FP8, holds this rank's
    shard of the mean over replicas.

    Args:
        gradients: of the space's slots, in order; None: new ones.
    """

    payload: Tensor
    scales: Tensor | None = None

    def __init__(self, space: ParamSpace, gradients: Sequence[Gradient] | None = None) -> None:
        self.space = space
        self.gradients = [Gradient(slot) for slot in space.slots] if gradients is None else gradients
        #: int64 [2] while underflow is measured: non-zero elements before the cast, and how many of them became zero.
        self.underflow: Tensor | None = None
        #: int64 [2] while underflow is measured: elements of gradients that GEMMs wrote in FP8, and how many of them
        #: were clamped.
        self.clamped: Tensor | None = None

    def become_main_grad(self) -> None:
        """Make this the storage that the parameters' gradients are written to."""
        for gradient in self.gradients:
            gradient.buffer = self
            gradient.param.main_grad = gradient  # type: ignore[attr-defined]

    def place(self, gradient: Gradient, *, fp8: bool) -> GradPlace | None:
        """See `Gradient.place`. A second call before `written` gives the same place."""
        del gradient, fp8
        return None

    def written(self, gradient: Gradient, grad: Tensor | WeightGrad) -> None:
        """See `Gradient.written`."""
        raise AssertionError(f"{gradient.slot.name} has no place")

    @abstractmethod
    def add(self, gradient: Gradient, grad: Tensor) -> None:
        """Write or add a gradient [slot.numel] of any float dtype."""

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

    @property
    def most_gradients(self) -> int:
        """How many gradients of one parameter and step the storage has room for at its full precision, where their
        number decides how they are stored."""
        return 1

    def expect(self, num_gradients: int) -> None:
        """Make room for `num_gradients` of one parameter and step."""
        del num_gradients

    def note_forward(self, gradient: Gradient) -> None:
        """See `Gradient.note_forward`."""
        del gradient

    def drop(self, gradient: Gradient) -> None:
        """See `Gradient.drop`."""
        raise NotImplementedError

    def zero_(self, gradient: Gradient) -> None:
        """See `Gradient.zero_`."""
        raise NotImplementedError

    def values(self, gradient: Gradient) -> Tensor:
        """See `Gradient.values`."""
        raise NotImplementedError

    def squared_norm_of(self, gradient: Gradient) -> Tensor:
        """See `Gradient.squared_norm`."""
        raise NotImplementedError

    def scale_(self, factor: Tensor | float, gradients: Sequence[Gradient] | None = None) -> None:
        """Multiply some or all gradients by a number.

        Padding, and slots without a gradient, stay zero: nothing would overwrite a NaN there.
        """
        raise NotImplementedError

    def check_is_there(self, gradient: Gradient) -> None:
        """Raises:
        RuntimeError: what was the gradient's memory was given back.
        """
        del gradient

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
    def nbytes(self) -> int:
        """Bytes of payloads that last for the step."""
        return self.payload.nbytes

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

    def _measure(self, gradient: Gradient, grad: Tensor | WeightGrad, payload: Tensor, scales: Tensor) -> None:
        """While underflow is measured, count what the cast of `grad`, or a part of it, to `payload` made zero or
        clamped. A probe that is due measures all of it."""
        if self.underflow is None:
            return
        assert self.clamped is not None
        probe = gradient.probe
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
