"""Storage formats of every space of a model: weights, gradients and optimizer state, by storage class."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..dtypes import LEVELS, StorageDtype, StorageFormats
from .partition import StorageClass

#: The most micro-batches that a rank adds in BF16 by default. Sums of 32 equal gradients, the worst case, keep 36 dB,
#: of 64 they keep 30 dB, of 256 21 dB (measured against FP64). FP32 keeps 150 dB of 1,024.
MAX_BF16_MICRO_BATCHES = 32
#: The same of micro-batches that several replicas reduce one by one. Of 16 equal gradients BF16 keeps the 31 dB that
#: E4M3 leaves of one, of 32 it keeps 29 dB.
MAX_BF16_REDUCTIONS = 16

#: How plain parameters that keep their dtype are stored.
_STORAGE_OF = {
    torch.float32: StorageDtype.FP32,
    torch.bfloat16: StorageDtype.BF16,
    torch.float16: StorageDtype.FP16,
}


@dataclass(frozen=True)
class GradFormats:
    """How the gradients of one space are kept on their way to the optimizer.

    Attributes:
        local: storage of all gradients on the rank that computes them.
        shard: storage of one rank's shard of the mean over several replicas.
        wire: dtype between replicas.
        adds_locally: several replicas add micro-batches in `local` and reduce once a step. Otherwise each micro-batch
            is reduced, and `local` is not used.
        is_released: gradients go into the optimizer as soon as they are written and are not stored.
    """

    local: StorageDtype
    shard: StorageDtype
    wire: StorageDtype
    adds_locally: bool
    is_released: bool


@dataclass(frozen=True)
class ModelStorage:
    """The storage of a whole model, from which that of each space follows.

    Attributes:
        formats: storage of linear weights and of what the optimizer keeps for them.
        has_fp8_layers: linear weights are `ScaledTensor`s of this package's FP8 layers; else all parameters are plain
            16-bit tensors with FP32 gradients.
        num_micro_batches: gradients that each parameter receives per step.
        adds_locally: FP8 weight gradients of several micro-batches are added up on each rank, then reduced once a step.
        accumulator: dtype in which FP8 weight gradients are added. None: BF16 for up to `MAX_BF16_MICRO_BATCHES`, in a
            shard up to `MAX_BF16_REDUCTIONS`; else FP32.
        releases_gradients: linear weights are updated during backward.
        is_trained: False: the model is evaluated, and has no storage for gradients and moments.
    """

    formats: StorageFormats = LEVELS["O3"]
    has_fp8_layers: bool = True
    num_micro_batches: int = 1
    adds_locally: bool = False
    accumulator: StorageDtype | None = None
    releases_gradients: bool = False
    is_trained: bool = True

    def of_grads(self, storage: StorageClass, dtype: torch.dtype | None = None) -> GradFormats:
        """Storage of the gradients of one space.

        Args:
            dtype: the dtype that the space's parameters keep (`ParamSpace.dtype`). Their gradients have it too.
        """
        if dtype is not None:
            own = _STORAGE_OF[dtype]
            wire = StorageDtype.BF16 if storage is StorageClass.MATRIX else StorageDtype.FP32
            return GradFormats(own, StorageDtype.FP32, wire, adds_locally=True, is_released=False)
        is_linear = storage is StorageClass.LINEAR
        return GradFormats(
            local=self._local_grad(storage),
            shard=self._shard() if is_linear and self.has_fp8_layers else StorageDtype.FP32,
            wire=self._wire(storage),
            adds_locally=self._adds_locally(storage),
            is_released=self.releases_gradients and is_linear,
        )

    def of_state(self, storage: StorageClass, dtype: torch.dtype | None = None) -> StorageFormats:
        """Storage of weights, masters and moments of one space.

        Linear weights are stored as `formats` says. The 16-bit rest is stored in 16 bits beside a master: matrices keep
        the moments of `formats`; norms and biases, under 0.1% of a model, keep FP32 state.

        Args:
            dtype: the dtype that the space's parameters keep (`ParamSpace.dtype`). FP32 is its own master.
        """
        fp32, bf16 = StorageDtype.FP32, StorageDtype.BF16
        formats = self.formats
        if storage is StorageClass.LINEAR:
            return formats
        if dtype is not None:
            return self._of_kept(storage, _STORAGE_OF[dtype])
        if storage is StorageClass.VECTOR or not self.has_fp8_layers:
            return StorageFormats(bf16 if self.has_fp8_layers else formats.weight, fp32, fp32, fp32, fp32)
        return StorageFormats(bf16, bf16, self._master_of_matrix(), formats.average, formats.square)

    def _sum(self, is_long: bool) -> StorageDtype:
        return self.accumulator or (StorageDtype.FP32 if is_long else StorageDtype.BF16)

    def _shard(self) -> StorageDtype:
        """Storage of a linear weight's means over replicas, and of their sum."""
        num_reductions = 1 if self._adds_locally(StorageClass.LINEAR) else self.num_micro_batches
        return self._sum(num_reductions > MAX_BF16_REDUCTIONS)

    def _master_of_matrix(self) -> StorageDtype:
        """Storage of the master of a matrix in 16 bits."""
        master = self.formats.master_weight
        # A split master needs an FP8 weight beside it.
        return StorageDtype.FP16 if master is None or master is StorageDtype.SPLIT else master

    def _of_kept(self, storage: StorageClass, own: StorageDtype) -> StorageFormats:
        """Storage of a space whose parameters keep their dtype `own`."""
        is_matrix = storage is StorageClass.MATRIX
        fp32 = StorageDtype.FP32
        master = None if own is fp32 else self._master_of_matrix() if is_matrix else fp32
        states = (self.formats.average, self.formats.square) if is_matrix else (fp32, fp32)
        return StorageFormats(own, own, master, *states)

    def _adds_locally(self, storage: StorageClass) -> bool:
        """Whether several replicas add a space's micro-batches up before one reduction a step.

        The 16-bit rest always does: its gradients are small beside the linear weights'. An embedding's gradients come
        at the end of backward, when no compute is left to hide their reduction.
        """
        if not self.has_fp8_layers:
            return True
        is_rest = storage is not StorageClass.LINEAR
        return self.num_micro_batches > 1 and (is_rest or self.adds_locally)

    def _wire(self, storage: StorageClass) -> StorageDtype:
        if not self.has_fp8_layers:
            return StorageDtype.FP32
        return self.formats.main_grad if storage is StorageClass.LINEAR else StorageDtype.BF16

    def _local_grad(self, storage: StorageClass) -> StorageDtype:
        if storage is StorageClass.VECTOR or not self.has_fp8_layers:
            return StorageDtype.FP32
        main_grad = self.formats.main_grad if storage is StorageClass.LINEAR else StorageDtype.BF16
        if self.num_micro_batches == 1:
            return main_grad
        if main_grad not in (StorageDtype.FP8, StorageDtype.BF16):
            return main_grad
        return self._sum(self.num_micro_batches > MAX_BF16_MICRO_BATCHES)
