"""Flat spaces: how a model chunk's parameters are laid out for gradients and optimizer state, and cut over replicas.

Parameters that are stored and reduced alike form one flat space. The gradient norm and the optimizer step then take a
few kernels, independent of the number of layers. Every parameter starts on a boundary that is a multiple of all scale
blocks (linear weights: of a chunk), so no block crosses two parameters. A linear weight is one matrix, or several
[M, N, K]; a matrix is whole chunks, so no chunk crosses two matrices.

A space is cut into buckets of one size (or of whole parameters), and every bucket evenly over the space's replicas:

    space     | bucket 0 (the rest)   | bucket 1                      | bucket 2                      |
    owner     | rank 0    | rank 1    | rank 0        | rank 1        | rank 0        | rank 1        |
    shard of rank 1       [ bucket 0's | bucket 1's    | bucket 2's    ]   contiguous, space.numel / ranks

One reduce-scatter or all-gather carries one bucket. All boundaries are multiples of the blocks, so that every rank
owns equally many elements for any number of ranks and any shapes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

import torch

from ..dtypes import CHUNK, GRAD_BLOCK, STATE_BLOCK
from ..kernels import ops
from ..quantization.scaled_tensor import ScaledTensor
from ..update_rules import RUNS_RATE, Rate
from .region import Cut, Region, counts_matrices
from .replicas import Replicas, Sharing

assert CHUNK % GRAD_BLOCK == 0 and CHUNK % STATE_BLOCK == 0


#: Bytes of `ParamSpace.shard_places` for each unit of elements.
PLACE_BYTES = 20
#: The width of a row that does not end.
_ENDLESS = 1 << 30


class StorageClass(Enum):
    """How a parameter is stored."""

    LINEAR = "linear"
    """A linear weight under FP8: a `ScaledTensor`."""
    MATRIX = "matrix"
    """A matrix kept in 16 bits: embeddings, LM head; under bf16 every linear weight too."""
    VECTOR = "vector"
    """Norms and biases: 16 bits, with FP32 state, and no weight decay. Complex parameters of any shape, too."""

    @property
    def alignment(self) -> int:
        """Every parameter of the class, and every rank's part of a bucket, is a multiple of this many elements."""
        return {StorageClass.LINEAR: CHUNK, StorageClass.MATRIX: STATE_BLOCK, StorageClass.VECTOR: GRAD_BLOCK}[self]


@dataclass(frozen=True)
class RowSplit:
    """How the rows of a matrix belong to several matrices of the model: query, key and value, or gate and up.

    Attributes:
        groups: runs of rows that are divided alike.
        sizes: rows that each matrix has in a group, in order.
    """

    groups: int
    sizes: tuple[int, ...]

    def split(self, stored: torch.Tensor) -> Sequence[torch.Tensor]:
        """The matrices [b, groups, size, columns] of stored ones [b, rows, columns] (views)."""
        batch, _, columns = stored.shape
        return stored.view(batch, self.groups, sum(self.sizes), columns).split(self.sizes, dim=2)


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a space: elements [offset, offset + numel); padding follows up to the alignment.

    A complex parameter takes two elements for each of its own, as in `torch.view_as_real`.

    Attributes:
        name: in the whole model.
        region: where the elements lie in the whole parameter; None: the parameter is whole.
        order: the dimensions by which the elements lie one after another; None: as they are counted.
        first_matrix: the number of its first matrix among those of the space.
        row_split: matrices of the model that are stored as one; None: there is one.
    """

    name: str
    param: torch.nn.Parameter
    offset: int
    alignment: int
    region: Region | None = None
    order: tuple[int, ...] | None = None
    first_matrix: int = 0
    row_split: RowSplit | None = None

    @property
    def numel(self) -> int:
        """Elements of the parameter, as real numbers."""
        return self.param.numel() * (2 if self.param.is_complex() else 1)

    @property
    def num_matrices(self) -> int:
        """Matrices of the parameter that each have a scale: one, or those of a linear weight [M, N, K]."""
        return self.param.shape[0] if isinstance(self.param, ScaledTensor) and self.param.ndim == 3 else 1

    @property
    def matrices(self) -> slice:
        """Their numbers among the matrices of the space."""
        return slice(self.first_matrix, self.first_matrix + self.num_matrices)

    @property
    def padded_matrix(self) -> int:
        """Elements of a matrix, with the padding of a parameter that is one matrix."""
        return self.padded // self.num_matrices

    def scales_in(self, table: torch.Tensor) -> torch.Tensor:
        """The scales of its matrices in a table [matrices of the space, 4], whose first column they are (a view)."""
        # One scale has stride 1, so that it can be viewed as bytes.
        return table[self.first_matrix, :1] if self.num_matrices == 1 else table[self.matrices, 0]

    def chunk_matrices(self, device: torch.device) -> torch.Tensor:
        """int32 [padded / CHUNK]: which of the parameter's matrices each of its chunks belongs to."""
        numbers = torch.arange(self.num_matrices, dtype=torch.int32, device=device)
        return numbers.repeat_interleave(self.padded_matrix // CHUNK)

    @property
    def padded(self) -> int:
        """Elements up to the next slot."""
        return -(-self.numel // self.alignment) * self.alignment

    def slice(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter's elements of a flat tensor over the space, in its shape (a view)."""
        return self.shaped(flat[self.offset : self.offset + self.numel])

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter's elements [numel] in its shape (a view). Those of a complex one are FP32."""
        if self.param.is_complex():
            return torch.view_as_complex(flat.view(*self.param.shape, 2))
        if self.order is None:
            return flat.view(self.param.shape)
        shape = [self.param.shape[dim] for dim in self.order]
        return flat.view(shape).permute([self.order.index(dim) for dim in range(len(shape))])

    def flattened(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor of the parameter's shape as its elements lie, [numel]; a view if it lies so too."""
        if value.is_complex():
            return torch.view_as_real(value.resolve_conj()).reshape(-1)
        return value.reshape(-1) if self.order is None else value.permute(self.order).reshape(-1)

    def padded_slice(self, flat: torch.Tensor, block: int = 1) -> torch.Tensor:
        """The slot with its padding, from a tensor that holds one value for each `block` elements (a view)."""
        return flat[self.offset // block : (self.offset + self.padded) // block]


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of a space, reduced and gathered together; rank r owns the r-th of `num_shards` parts."""

    index: int
    start: int
    stop: int
    num_shards: int

    @property
    def numel(self) -> int:
        """Elements of the bucket."""
        return self.stop - self.start

    @property
    def shard_numel(self) -> int:
        """Elements that each rank owns."""
        return self.numel // self.num_shards

    @property
    def shard_start(self) -> int:
        """Where a rank's part of this bucket begins in its shard of the space."""
        return self.start // self.num_shards

    def of_shard(self, flat: torch.Tensor, block: int = 1) -> torch.Tensor:
        """A rank's part of this bucket, from its shard with one value for each `block` elements (a view)."""
        return flat[self.shard_start // block : (self.shard_start + self.shard_numel) // block]

    def of_space(self, flat: torch.Tensor, block: int = 1) -> torch.Tensor:
        """The bucket, from a tensor over the space that holds one value for each `block` elements (a view)."""
        return flat[self.start // block : self.stop // block]


@dataclass(frozen=True)
class Span:
    """The part of a slot that lies in one bucket: `length` elements from `slot_start`, padding counted."""

    slot: Slot
    bucket: Bucket
    bucket_start: int
    slot_start: int
    length: int


@dataclass(frozen=True)
class Fragment:
    """The part of a slot that one rank owns: `length` elements from `slot_start`, at `shard_start` of its shard."""

    shard_start: int
    slot_start: int
    length: int


@dataclass(frozen=True)
class ParamSpace:
    """Parameters that are stored and reduced alike, in one flat index space of `numel` elements.

    Attributes:
        sharing: the replicas that the space is cut over, and the other ranks that share it.
        rate: of its parameters' learning rate.
        has_matrices: its parameters are matrices of hidden layers, which an update rule may take whole.
        dtype: the dtype that its plain parameters keep; None: `ModelStorage` says how they are stored.
    """

    storage: StorageClass
    sharing: Sharing
    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]
    numel: int
    device: torch.device
    rate: Rate = RUNS_RATE
    has_matrices: bool = False
    dtype: torch.dtype | None = None

    @property
    def replicas(self) -> Replicas:
        """Ranks that hold the space; each owns a shard of its gradients and optimizer state."""
        return self.sharing.replicas

    @property
    def num_shards(self) -> int:
        """Shards that the space is cut into, one a replica."""
        return self.sharing.replicas.size

    @property
    def shard_index(self) -> int:
        """The shard that this rank owns."""
        return self.sharing.replicas.rank

    @property
    def num_params(self) -> int:
        """Parameters without padding."""
        return sum(slot.numel for slot in self.slots)

    @property
    def num_matrices(self) -> int:
        """Matrices of all parameters."""
        return sum(slot.num_matrices for slot in self.slots)

    @property
    def shard_numel(self) -> int:
        """Elements of the space that each rank owns."""
        return self.numel // self.num_shards

    def spans(self, slot: Slot) -> list[Span]:
        """The slot's spans, in order."""
        spans = []
        for bucket in self.buckets:
            start = max(slot.offset, bucket.start)
            stop = min(slot.offset + slot.padded, bucket.stop)
            if start < stop:
                spans.append(Span(slot, bucket, start - bucket.start, start - slot.offset, stop - start))
        return spans

    def fragments(self, slot: Slot) -> list[Fragment]:
        """The slot's parts that this rank owns, in order; empty if other ranks own all of it."""
        return self.parts_of(slot.offset, slot.offset + slot.padded, self.shard_index)

    @cached_property
    def _bucket_starts(self) -> list[int]:
        return [bucket.start for bucket in self.buckets]

    def parts_of(self, first: int, last: int, shard: int) -> list[Fragment]:
        """The parts of elements [first, last) that a shard has, in order, counted from `first`."""
        fragments = []
        starts = self._bucket_starts
        for bucket in self.buckets[bisect_right(starts, first) - 1 : bisect_left(starts, last)]:
            owned = bucket.start + shard * bucket.shard_numel
            start, stop = max(first, owned), min(last, owned + bucket.shard_numel)
            if start < stop:
                fragments.append(Fragment(bucket.shard_start + start - owned, start - first, stop - start))
        return fragments

    def assemble(self, slot: Slot, owned: Callable[[Fragment], torch.Tensor]) -> torch.Tensor:
        """A parameter's FP32 values, whole and in its shape, from the fragments that the replicas own.

        Called by every replica.

        Args:
            owned: the FP32 values of one of this rank's fragments, [length].
        """
        flat = torch.zeros(slot.padded, device=self.device)
        for fragment in self.fragments(slot):
            flat[fragment.slot_start : fragment.slot_start + fragment.length] = owned(fragment)
        if self.num_shards > 1:
            torch.distributed.all_reduce(flat, group=self.replicas.group)
        return slot.shaped(flat[: slot.numel])

    def block_slots(self, bucket: Bucket, block: int) -> torch.Tensor:
        """int32 [bucket.numel / block]: index of the slot that each block of the bucket belongs to.

        The padding at the end of a space counts to its last slot.
        """
        starts = torch.arange(bucket.start, bucket.stop, block, device="cpu")
        return self._slot_at(starts).to(self.device, torch.int32)

    def shard_chunk_matrices(self) -> torch.Tensor:
        """int32 [shard_numel / CHUNK]: number of the matrix that each chunk of this rank's shard belongs to.

        The padding at the end of a space counts to its last matrix.
        """
        starts = self._shard_starts(CHUNK)
        facts = [(slot.offset, slot.padded_matrix, slot.num_matrices, slot.first_matrix) for slot in self.slots]
        table = torch.tensor(facts, dtype=torch.int64, device="cpu")[self._slot_at(starts)]
        offset, numel, count, first = table.unbind(1)
        inside = torch.minimum((starts - offset) // numel, count - 1)
        return (first + inside).to(self.device, torch.int32)

    def _slot_at(self, elements: torch.Tensor) -> torch.Tensor:
        """int64: index of the slot of each element, int64 on the CPU."""
        ends = torch.tensor([slot.offset + slot.padded for slot in self.slots[:-1]], dtype=torch.int64, device="cpu")
        return torch.searchsorted(ends, elements, right=True)

    def _shard_starts(self, unit: int) -> torch.Tensor:
        """int64 [shard_numel / unit] on the CPU: the element of the space where each unit of this rank's shard
        starts."""
        parts = (torch.arange(bucket.start, bucket.stop, unit, device="cpu") for bucket in self.buckets)
        return torch.cat([part.view(self.num_shards, -1)[self.shard_index] for part in parts])

    @property
    def place_unit(self) -> int:
        """Elements of a unit of `shard_places`: parameters and shards of buckets are whole units."""
        return self.storage.alignment

    def shard_places(self) -> ops.Places:
        """Where the elements of this rank's shard lie in the whole model: a row of the table for each `place_unit`."""
        starts = self._shard_starts(self.place_unit)
        index = self._slot_at(starts)
        cuts = [(slot.region and slot.region.cut) or Cut(_ENDLESS, _ENDLESS, 0) for slot in self.slots]
        facts = [
            (ops.seed_of(slot.name), slot.offset, cut.width, cut.stride - cut.width, cut.first)
            for slot, cut in zip(self.slots, cuts, strict=True)
        ]
        seed, offset, width, gap, first = torch.tensor(facts, dtype=torch.int64, device="cpu")[index].unbind(1)
        element = starts - offset
        place = first + element + element // width * gap
        left = width - element % width
        table = torch.stack([seed, place, left.clamp_max(_ENDLESS), width.clamp_max(_ENDLESS), gap], dim=1)
        wrapped = (table + 2**31) % 2**32 - 2**31
        narrowest = min((cut.width for cut in cuts if cut.stride != cut.width), default=0)
        return ops.Places(wrapped.to(self.device, torch.int32), narrowest)


def alone(part: torch.Tensor) -> torch.Tensor:
    """The same memory, shape and dtype as a storage of its own, which ends where the part does.

    What saves a tensor with its storage (torch.save, safetensors, deepcopy) takes the part and not its space.
    """
    return torch.from_dlpack(part.detach())


def storage_class(param: torch.nn.Parameter) -> StorageClass:
    """The storage class of a parameter. Axis 0 may count matrices (`counts_matrices`)."""
    if isinstance(param, ScaledTensor):
        return StorageClass.LINEAR
    num_dims = param.ndim - counts_matrices(param)
    return StorageClass.MATRIX if num_dims > 1 and not param.is_complex() else StorageClass.VECTOR


def partition(
    named_params: Iterable[tuple[str, torch.nn.Parameter]],
    sharing_of: Callable[[torch.nn.Parameter], Sharing] | None = None,
    *,
    region_of: Callable[[torch.nn.Parameter], Region] | None = None,
    rate_of: Callable[[str, torch.nn.Parameter], Rate] | None = None,
    is_matrix: Callable[[str, torch.nn.Parameter], bool] | None = None,
    row_split_of: Callable[[torch.nn.Parameter], RowSplit | None] | None = None,
    bucket_numel: int = 1 << 30,
    whole_linears: bool = False,
    keeps_dtype: bool = False,
) -> list[ParamSpace]:
    """Lay parameters out in spaces, in the order given, and cut each space over its replicas.

    Args:
        sharing_of: how ranks share a parameter; None: this rank alone has all of them.
        region_of: where a parameter's elements lie in the whole parameter; None: all parameters are whole.
        rate_of: how a parameter's learning rate follows from the run's. Each `Rate` has a space apart; None: all alike.
        is_matrix: whether a parameter is matrices of a hidden layer, and so has a space apart; None: no space is.
        row_split_of: matrices of the model that a parameter stores as one; None: there is one.
        bucket_numel: elements of a bucket, rounded to what the cut needs.
        whole_linears: no linear weight lies in two buckets. A weight larger than a bucket makes a larger bucket.
        keeps_dtype: plain parameters keep their dtypes, and their channels-last order. Those of each dtype have a space
            apart.

    Raises:
        ValueError: the matrices of a linear weight have a size that cannot be cut; with the size.
    """
    grouped: dict[tuple[StorageClass, Sharing, Rate, bool, torch.dtype | None], list[Slot]] = {}
    for name, param in named_params:
        storage = storage_class(param)
        dtype = param.dtype.to_real() if keeps_dtype and storage is not StorageClass.LINEAR else None
        sharing = Sharing(Replicas.of(None, param.device)) if sharing_of is None else sharing_of(param)
        rate = RUNS_RATE if rate_of is None else rate_of(name, param)
        matrices = is_matrix is not None and is_matrix(name, param)
        slots = grouped.setdefault((storage, sharing, rate, matrices, dtype), [])
        start, first_matrix = (slots[-1].offset + slots[-1].padded, slots[-1].matrices.stop) if slots else (0, 0)
        region = None if region_of is None else region_of(param)
        order = _order(param) if keeps_dtype else None
        row_split = None if row_split_of is None else row_split_of(param)
        slot = Slot(name, param, start, storage.alignment, region, order, first_matrix, row_split)
        if slot.numel % (slot.num_matrices * CHUNK) and slot.num_matrices > 1:
            rows, columns = param.shape[1:]
            raise ValueError(
                f"{name}: {rows} × {columns} elements of a matrix are no multiple of {CHUNK}, the unit in which the "
                f"amaxes of FP8 weights are taken; choose other sizes"
            )
        slots.append(slot)
    return [
        replace(
            _space(storage, sharing, slots, bucket_numel=bucket_numel, whole_linears=whole_linears),
            rate=rate,
            has_matrices=matrices,
            dtype=dtype,
        )
        for (storage, sharing, rate, matrices, dtype), slots in grouped.items()
    ]


def _order(param: torch.Tensor) -> tuple[int, ...] | None:
    """The order of the dimensions of a channels-last parameter, outermost first; None for any other parameter."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if param.ndim not in formats or param.is_contiguous() or param.is_complex():
        return None
    return (0, *range(2, param.ndim), 1) if param.is_contiguous(memory_format=formats[param.ndim]) else None


def _space(
    storage: StorageClass, sharing: Sharing, slots: list[Slot], *, bucket_numel: int, whole_linears: bool
) -> ParamSpace:
    num_shards = sharing.replicas.size
    unit = num_shards * storage.alignment
    end = slots[-1].offset + slots[-1].padded
    numel = -(-end // unit) * unit
    if whole_linears and storage is StorageClass.LINEAR:
        starts = [slot.offset for slot in slots if slot.offset % unit == 0]
        buckets = _cut_between(starts, numel, bucket_numel, num_shards)
    else:
        buckets = _cut(numel, max(unit, bucket_numel // unit * unit), num_shards)
    return ParamSpace(storage, sharing, tuple(slots), buckets, numel, slots[0].param.device)


def _cut(numel: int, bucket_numel: int, num_shards: int) -> tuple[Bucket, ...]:
    """Buckets of one size; the rest comes first, because the first layers' gradients are the last to be ready."""
    return _buckets([0, *range(numel % bucket_numel or bucket_numel, numel, bucket_numel)], numel, num_shards)


def _cut_between(slot_starts: list[int], numel: int, bucket_numel: int, num_shards: int) -> tuple[Bucket, ...]:
    """Buckets of whole slots, filled from the end: as many slots as fit in `bucket_numel`, and at least one."""
    starts = [numel]
    for slot_start, before in zip(reversed(slot_starts), [*reversed(slot_starts[:-1]), None], strict=True):
        if before is None or starts[0] - before > bucket_numel:
            starts.insert(0, slot_start)
    return _buckets(starts[:-1], numel, num_shards)


def _buckets(starts: list[int], numel: int, num_shards: int) -> tuple[Bucket, ...]:
    stops = [*starts[1:], numel]
    return tuple(
        Bucket(index, start, stop, num_shards) for index, (start, stop) in enumerate(zip(starts, stops, strict=True))
    )
