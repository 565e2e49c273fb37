"""Measured memory of weights and optimizer state on one rank, compared with BF16 mixed precision."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..storage import LEVELS, StorageDtype, StorageFormats
from .tables import table_text


@dataclass(frozen=True)
class StorageBytes:
    """Bytes of one group of parameters on this rank, summed over the actual tensors."""

    num_params: int
    """Parameters of this rank, before the optimizer shards them over data-parallel ranks."""
    weights: int
    """Weights at rest, without temporary copies made by a forward."""
    gradients: int
    """Gradient buffers that live for the whole step."""
    master_weights: int
    """0 if the weight is its own master."""
    exp_avg: int
    exp_avg_sq: int
    scales: int
    """Scales of weights, gradients, masters and moments."""

    @property
    def total(self) -> int:
        """Sum of all kinds, in bytes."""
        return sum(getattr(self, kind) for kind in _KINDS)

    def __add__(self, other: StorageBytes) -> StorageBytes:
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return StorageBytes(**sums)


@dataclass(frozen=True)
class MemoryByKind:
    """The two groups of parameters: linear weights in the level's formats, all others in BF16 mixed precision."""

    linear: StorageBytes
    rest: StorageBytes
    """Embedding, LM head, norms and biases."""
    wire_buffers: int = 0
    """Bytes of the buffers that gradients are sent from and received into, for all parameters."""


_KINDS: dict[str, str] = {
    "weights": "weights",
    "gradients": "gradients",
    "master_weights": "master weights",
    "exp_avg": "first moment",
    "exp_avg_sq": "second moment",
    "scales": "scales",
}


def memory_table(
    measured: MemoryByKind,
    formats: StorageFormats,
    *,
    predicted: MemoryByKind | None = None,
    level: str = "this run",
    num_optimizer_shards: int = 1,
) -> str:
    """Bytes per parameter and GB by kind: measured for this run, for BF16 mixed precision, and their ratio.

    Args:
        predicted: what `predict_memory` gave for the configuration before the model was built.
        formats: storage dtypes of linear weights and their state.
        level: name of the run's level, for the heading.
        num_optimizer_shards: data-parallel ranks that share master weights and moments. BF16 is counted with the same
            sharding, so that the ratio shows the formats' saving alone.

    Returns:
        Text without colours, at most 120 columns wide on any terminal.
    """
    total = measured.linear + measured.rest
    baseline = bf16_bytes(total.num_params, num_optimizer_shards=num_optimizer_shards)
    headings = (
        *("bytes per parameter", "stored as"),
        *("linear\nweights", "16-bit\nrest", "all", "BF16\nmixed"),
        *(["predicted\nGB"] if predicted is not None else []),
        *("all\nGB", "BF16\nGB", "saving"),
    )
    dtypes = _dtype_names(formats)
    if measured.linear.num_params and not measured.linear.gradients:
        dtypes["gradients"] = "released"
    rows = [
        [
            name,
            dtypes.get(kind, ""),
            *(_per_param(group, kind) for group in (measured.linear, measured.rest, total, baseline)),
            *([] if predicted is None else [_gigabytes(getattr(predicted.linear + predicted.rest, kind))]),
            _gigabytes(getattr(total, kind)),
            _gigabytes(getattr(baseline, kind)),
            _saving(getattr(baseline, kind), getattr(total, kind)),
        ]
        for kind, name in (*_KINDS.items(), ("total", "total"))
    ]
    linear, rest = measured.linear.num_params, measured.rest.num_params
    notes = f"{linear:,} parameters in linear weights, {rest:,} in the 16-bit rest; GB = 10^9 bytes"
    if measured.wire_buffers:
        notes += f"\nbuffers of the wire, whatever the model's size: {_gigabytes(measured.wire_buffers)} GB more"
    if num_optimizer_shards > 1:
        notes += f"; master weights and moments, BF16's too, over {num_optimizer_shards} ranks"
    title = f"Memory of weights and optimizer on one rank: {level} beside BF16 mixed precision"
    return f"{table_text(headings, rows, title=title, num_left=2)}\n{notes}"


def bf16_bytes(num_params: int, *, num_optimizer_shards: int = 1) -> StorageBytes:
    """Memory of `num_params` parameters in BF16 mixed precision: 2 + 4 + (4 + 4 + 4) / shards bytes each."""
    formats = LEVELS["bf16"]
    assert formats.master_weight is not None
    return StorageBytes(
        num_params=num_params,
        weights=num_params * formats.weight.itemsize,
        gradients=num_params * formats.main_grad.itemsize,
        master_weights=num_params * formats.master_weight.itemsize // num_optimizer_shards,
        exp_avg=num_params * formats.exp_avg.itemsize // num_optimizer_shards,
        exp_avg_sq=num_params * formats.exp_avg_sq.itemsize // num_optimizer_shards,
        scales=0,
    )


def _dtype_names(formats: StorageFormats) -> dict[str, str]:
    def name(dtype: StorageDtype | None) -> str:
        return "= weight" if dtype is None else dtype.value.upper()

    return {
        "weights": name(formats.weight),
        "gradients": name(formats.main_grad),
        "master_weights": name(formats.master_weight),
        "exp_avg": name(formats.exp_avg),
        "exp_avg_sq": name(formats.exp_avg_sq),
        "scales": "FP32",
    }


def _per_param(group: StorageBytes, kind: str) -> str:
    return f"{getattr(group, kind) / group.num_params:.3f}" if group.num_params else "-"


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3f}"


def _saving(baseline: int, measured: int) -> str:
    return f"{baseline / measured:.2f}x" if baseline and measured else "-"
