"""Flat spaces: how a model chunk's parameters are laid out for gradients and optimizer state.

Parameters that are stored alike form one flat space each, so that the gradient norm, the optimizer step and the
reduction are a few kernels however many layers there are. Every parameter starts on a boundary that is a multiple of
all scale blocks (linear weights: of a chunk): no block crosses two parameters, and a space can be cut evenly at blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch

from ..formats import GRAD_BLOCK, STATE_BLOCK
from ..quantization.scaled_tensor import ScaledTensor

#: Elements of a chunk, the unit in which the amaxes of FP8 weights are taken.
CHUNK = 4096
assert CHUNK % GRAD_BLOCK == 0 and CHUNK % STATE_BLOCK == 0


class StorageClass(Enum):
    """How a parameter is stored."""

    LINEAR = "linear"
    """A linear weight under FP8: a `ScaledTensor`."""
    MATRIX = "matrix"
    """A matrix kept in 16 bits: embeddings, LM head; under bf16 every linear weight too."""
    VECTOR = "vector"
    """Norms and biases: 16 bits, with FP32 state, and no weight decay."""

    @property
    def alignment(self) -> int:
        """Elements that every parameter of the class is padded to a multiple of."""
        return {StorageClass.LINEAR: CHUNK, StorageClass.MATRIX: STATE_BLOCK, StorageClass.VECTOR: 64}[self]


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a space: elements [offset, offset + numel); padding follows up to the alignment."""

    name: str
    param: torch.nn.Parameter
    offset: int
    alignment: int

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.param.numel()

    @property
    def padded(self) -> int:
        """Elements up to the next slot."""
        return -(-self.numel // self.alignment) * self.alignment

    def slice(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter's elements of a flat tensor, in its shape (a view)."""
        return flat[self.offset : self.offset + self.numel].view(self.param.shape)

    def padded_slice(self, flat: torch.Tensor, block: int = 1) -> torch.Tensor:
        """The slot with its padding, from a tensor that holds one value for each `block` elements (a view)."""
        return flat[self.offset // block : (self.offset + self.padded) // block]


@dataclass(frozen=True)
class ParamSpace:
    """Parameters of one storage class in one flat index space of `numel` elements.

    `counts_in_norm` is False on ranks that hold a duplicate of parameters counted elsewhere (norms on tensor-parallel
    ranks above 0, the last stage's copy of a tied embedding).
    """

    storage: StorageClass
    counts_in_norm: bool
    slots: tuple[Slot, ...]
    numel: int
    device: torch.device

    @property
    def num_params(self) -> int:
        """Parameters without padding."""
        return sum(slot.numel for slot in self.slots)

    def chunk_slots(self) -> torch.Tensor:
        """int32 [numel / CHUNK]: index of the slot that each chunk belongs to."""
        counts = torch.tensor([slot.padded // CHUNK for slot in self.slots])
        return torch.repeat_interleave(torch.arange(len(self.slots)), counts).to(self.device, torch.int32)


def storage_class(param: torch.nn.Parameter) -> StorageClass:
    """The storage class of a parameter."""
    if isinstance(param, ScaledTensor):
        return StorageClass.LINEAR
    return StorageClass.MATRIX if param.ndim > 1 else StorageClass.VECTOR


def counts_in_norm(param: torch.nn.Parameter, tensor_parallel_rank: int) -> bool:
    """Whether this rank counts the parameter in the global gradient norm, so that each counts exactly once."""
    if getattr(param, "shared", False):  # the last stage's copy of a tied embedding
        return False
    return bool(getattr(param, "tensor_model_parallel", False)) or tensor_parallel_rank == 0


def partition(named_params: Iterable[tuple[str, torch.nn.Parameter]], tensor_parallel_rank: int) -> list[ParamSpace]:
    """Lay parameters out in spaces by storage class and by whether they count in the norm, in the order given."""
    grouped: dict[tuple[StorageClass, bool], list[Slot]] = {}
    ends: dict[tuple[StorageClass, bool], int] = {}
    for name, param in named_params:
        key = (storage_class(param), counts_in_norm(param, tensor_parallel_rank))
        slot = Slot(name, param, ends.get(key, 0), key[0].alignment)
        grouped.setdefault(key, []).append(slot)
        ends[key] = slot.offset + slot.padded
    return [
        ParamSpace(storage, counted, tuple(slots), ends[storage, counted], slots[0].param.device)
        for (storage, counted), slots in sorted(grouped.items(), key=lambda item: (item[0][0].value, not item[0][1]))
    ]
