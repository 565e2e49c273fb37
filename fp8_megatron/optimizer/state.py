"""Optimizer state of one flat space: master weights and moments, each in its own storage dtype, and the weights.

The master weight is the truth. Initialisation, a checkpoint and a converted model all enter through `set_master`; the
weights that the layers compute with are derived from it, and only ever from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..distributed.partition import CHUNK, ParamSpace, Slot, StorageClass
from ..formats import STATE_BLOCK, StorageDtype, StorageFormats
from ..kernels import ops, reference
from ..quantization.recipe import WEIGHT_DTYPE
from ..quantization.scale import scale_from_amax
from ..quantization.scaled_tensor import ScaledTensor


@dataclass(frozen=True)
class StateTensor:
    """Flat state [n] in one storage dtype; FP16 and FP8 have FP32 power-of-two scales [n / 256]."""

    payload: Tensor
    scales: Tensor | None

    @classmethod
    def zeros(cls, numel: int, dtype: StorageDtype, device: torch.device) -> StateTensor:
        """All zero."""
        payload = torch.zeros(numel, dtype=dtype.torch_dtype, device=device)
        return cls(payload, torch.ones(numel // STATE_BLOCK, device=device) if dtype.is_scaled else None)

    def slot(self, slot: Slot) -> StateTensor:
        """One parameter's part with its padding (views)."""
        scales = None if self.scales is None else slot.padded_slice(self.scales, STATE_BLOCK)
        return StateTensor(slot.padded_slice(self.payload), scales)

    def load(self) -> Tensor:
        """FP32 [n]."""
        return reference.load_state(self.payload, self.scales)

    def store_(self, value: Tensor) -> None:
        """Take on `value` [n], rounded to storage."""
        if self.scales is None:
            self.payload.copy_(value)
        else:
            ops.quantize_blockwise_(value.to(self.payload.device), self.payload, self.scales)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payload."""
        return self.payload.nbytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales."""
        return 0 if self.scales is None else self.scales.nbytes


def space_formats(storage: StorageClass, formats: StorageFormats, *, is_fp8: bool) -> StorageFormats:
    """What one space is stored in: linear weights as the level says; the 16-bit rest in BF16 beside a master.

    Matrices keep the level's moments; norms and biases, under 0.1% of a model, keep FP32 state.
    """
    fp32, bf16 = StorageDtype.FP32, StorageDtype.BF16
    if storage is StorageClass.LINEAR:
        return formats
    if storage is StorageClass.VECTOR or not is_fp8:
        return StorageFormats(bf16, fp32, fp32, fp32, fp32)
    master = formats.master_weight or StorageDtype.FP16
    return StorageFormats(bf16, bf16, master, formats.exp_avg, formats.exp_avg_sq)


class SpaceState:
    """Master, moments and weights of one space; re-points every parameter of the space at flat weight storage."""

    def __init__(self, space: ParamSpace, formats: StorageFormats) -> None:
        self.space = space
        self.formats = formats
        n, device = space.numel, space.device
        self.exp_avg = StateTensor.zeros(n, formats.exp_avg, device)
        self.exp_avg_sq = StateTensor.zeros(n, formats.exp_avg_sq, device)
        self.master = StateTensor.zeros(n, formats.master_weight or formats.weight, device)
        self.derives_fp8 = formats.weight is StorageDtype.FP8
        self.weight: Tensor | None = None
        self.weight_scales: Tensor | None = None
        self.chunk_amax: Tensor | None = None
        if formats.master_weight is None:
            self._point_params_at_master()
        elif self.derives_fp8:
            self.weight = torch.zeros(n, dtype=WEIGHT_DTYPE, device=device)
            # cuBLASLt refuses scale pointers that are not 16-byte aligned: one scale for every four floats.
            self.weight_scales = torch.ones(len(space.slots), 4, device=device)
            self.chunk_amax = torch.zeros(n // CHUNK, device=device)
            self.chunk_slots = space.chunk_slots()
            for index, slot in enumerate(space.slots):
                assert isinstance(slot.param, ScaledTensor)
                slot.param.set_storage(slot.slice(self.weight), self.weight_scales[index, :1])
        else:
            self.weight = torch.zeros(n, dtype=formats.weight.torch_dtype, device=device)
            for slot in space.slots:
                if isinstance(slot.param, ScaledTensor):
                    slot.param.set_storage(slot.slice(self.weight), torch.ones(1, device=device))
                else:
                    slot.param.data = slot.slice(self.weight)

    def _point_params_at_master(self) -> None:
        """The weight is its own master: scaled FP16 at levels O1 and O2."""
        for slot in self.space.slots:
            assert isinstance(slot.param, ScaledTensor) and slot.numel % STATE_BLOCK == 0, (slot.name, slot.numel)
            if self.master.scales is None:
                scales = torch.ones(1, device=self.space.device)
            else:
                first_block = slot.offset // STATE_BLOCK
                scales = self.master.scales[first_block : first_block + slot.numel // STATE_BLOCK]
            slot.param.set_storage(slot.slice(self.master.payload), scales)

    def set_master(self, slot: Slot, value: Tensor) -> None:
        """Give a parameter a new value (any float dtype, its shape); `derive_weights` then updates the weights."""
        if value.shape != slot.param.shape:
            raise ValueError(
                f"{slot.name}: the model's shape is {tuple(slot.param.shape)}, the value's {tuple(value.shape)}"
            )
        flat = torch.zeros(slot.padded, dtype=torch.float32, device=self.space.device)
        flat[: slot.numel] = value.reshape(-1).to(self.space.device)
        self.master.slot(slot).store_(flat)

    def get_master(self, slot: Slot) -> Tensor:
        """A parameter's value in FP32."""
        return self.master.slot(slot).load()[: slot.numel].view(slot.param.shape)

    def derive_weights(self) -> None:
        """Weights from the masters."""
        if self.derives_fp8:
            assert self.chunk_amax is not None
            stored = self.master.load().abs().view(-1, CHUNK)
            torch.amax(stored, dim=1, out=self.chunk_amax)
            self.derive_fp8_weights()
        elif self.weight is not None:
            self.weight.copy_(self.master.load())

    def derive_fp8_weights(self) -> None:
        """FP8 weights from the masters, with each tensor's scale taken from `chunk_amax`."""
        assert self.weight is not None and self.weight_scales is not None and self.chunk_amax is not None
        amax = self.chunk_amax.new_zeros(len(self.space.slots))
        amax.scatter_reduce_(0, self.chunk_slots.long(), self.chunk_amax, "amax")
        previous = self.weight_scales[:, 0]
        usable = torch.isfinite(amax) & (amax > 0)
        scale = torch.where(usable, scale_from_amax(amax, WEIGHT_DTYPE, power_of_two=False), previous)
        previous.copy_(scale)
        ops.derive_fp8_weights_(self.master.payload, self.master.scales, self.weight, scale, self.chunk_slots)

    def byte_counts(self) -> dict[str, int]:
        """Bytes held, by kind: weight, master_weight, exp_avg, exp_avg_sq (payloads) and scales (everything small)."""
        separate_master = self.formats.master_weight is not None
        weight = self.weight.nbytes if self.weight is not None else self.master.payload_bytes
        scales = self.exp_avg.scale_bytes + self.exp_avg_sq.scale_bytes + self.master.scale_bytes
        for extra in (self.weight_scales, self.chunk_amax):
            scales += 0 if extra is None else extra.nbytes
        if self.chunk_amax is not None:
            scales += self.chunk_slots.nbytes
        return {
            "weight": weight,
            "master_weight": self.master.payload_bytes if separate_master else 0,
            "exp_avg": self.exp_avg.payload_bytes,
            "exp_avg_sq": self.exp_avg_sq.payload_bytes,
            "scales": scales,
        }
