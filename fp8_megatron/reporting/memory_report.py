"""Measured memory of weights and optimizer state on one rank, compared with BF16 mixed precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..storage import LEVELS, StateSpec, StorageDtype, StorageFormats
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
    states: Mapping[str, int]
    """What the update rule stores, by name."""
    scales: int
    """Scales of weights, gradients, masters and states."""

    @classmethod
    def none(cls, states: Iterable[StateSpec]) -> StorageBytes:
        """Of no parameters."""
        return cls(0, 0, 0, 0, {spec.name: 0 for spec in states}, 0)

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes of each kind, and of each state by its name."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "master_weights": self.master_weights,
            **self.states,
            "scales": self.scales,
        }

    @property
    def total(self) -> int:
        """Sum of all kinds, in bytes."""
        return sum(self.by_kind.values())

    def __add__(self, other: StorageBytes) -> StorageBytes:
        return StorageBytes(
            self.num_params + other.num_params,
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.master_weights + other.master_weights,
            {name: count + other.states.get(name, 0) for name, count in self.states.items()},
            self.scales + other.scales,
        )


@dataclass(frozen=True)
class MemoryByKind:
    """The two groups of parameters: linear weights in the level's formats, all others in BF16 mixed precision."""

    linear: StorageBytes
    rest: StorageBytes
    """Embedding, LM head, norms and biases."""
    wire_buffers: int = 0
    """Bytes of the buffers that gradients are sent from and received into, for all parameters."""


def memory_table(
    measured: MemoryByKind,
    formats: StorageFormats,
    states: Sequence[StateSpec],
    *,
    predicted: MemoryByKind | None = None,
    level: str = "this run",
    num_optimizer_shards: int = 1,
) -> str:
    """Bytes per parameter and GB by kind: measured for this run, for BF16 mixed precision, and their ratio.

    Args:
        predicted: what `predict_memory` gave for the configuration before the model was built.
        formats: storage dtypes of linear weights and their state.
        states: what the update rule stores.
        level: name of the run's level, for the heading.
        num_optimizer_shards: data-parallel ranks that share master weights and states. BF16 is counted with the same
            sharding, so that the ratio shows the formats' saving alone.

    Returns:
        Text without colours, at most 120 columns wide on any terminal.
    """
    total = measured.linear + measured.rest
    parts = (measured.linear, measured.rest)
    counts = {spec: sum(part.num_params for part in parts if part.states.get(spec.name)) for spec in states}
    baseline = bf16_bytes(total.num_params, counts, num_optimizer_shards=num_optimizer_shards)
    headings = (
        *("bytes per parameter", "stored as"),
        *("linear\nweights", "16-bit\nrest", "all", "BF16\nmixed"),
        *(["predicted\nGB"] if predicted is not None else []),
        *("all\nGB", "BF16\nGB", "saving"),
    )
    dtypes = _dtype_names(formats, states)
    if measured.linear.num_params and not measured.linear.gradients:
        dtypes["gradients"] = "released"
    titles = {spec.name: spec.title for spec in states}
    rows = [
        [
            titles.get(kind, kind.replace("_", " ")),
            dtypes.get(kind, ""),
            *(_per_param(group, kind) for group in (measured.linear, measured.rest, total, baseline)),
            *([] if predicted is None else [_gigabytes(_bytes(predicted.linear + predicted.rest, kind))]),
            _gigabytes(_bytes(total, kind)),
            _gigabytes(_bytes(baseline, kind)),
            _saving(_bytes(baseline, kind), _bytes(total, kind)),
        ]
        for kind in (*total.by_kind, "total")
    ]
    linear, rest = measured.linear.num_params, measured.rest.num_params
    notes = f"{linear:,} parameters in linear weights, {rest:,} in the 16-bit rest; GB = 10^9 bytes"
    if measured.wire_buffers:
        notes += f"\nbuffers of the wire, whatever the model's size: {_gigabytes(measured.wire_buffers)} GB more"
    if num_optimizer_shards > 1:
        notes += f"; master weights and states, BF16's too, over {num_optimizer_shards} ranks"
    title = f"Memory of weights and optimizer on one rank: {level} beside BF16 mixed precision"
    return f"{table_text(headings, rows, title=title, num_left=2)}\n{notes}"


def bf16_bytes(num_params: int, states: Mapping[StateSpec, int], *, num_optimizer_shards: int = 1) -> StorageBytes:
    """Memory of `num_params` parameters in BF16 mixed precision: 2 + 4 + (4 + 4 · states) / shards bytes each.

    Args:
        states: parameters that have each state.
    """
    formats = LEVELS["bf16"]
    assert formats.master_weight is not None
    return StorageBytes(
        num_params=num_params,
        weights=num_params * formats.weight.itemsize,
        gradients=num_params * formats.main_grad.itemsize,
        master_weights=num_params * formats.master_weight.itemsize // num_optimizer_shards,
        states={
            spec.name: count * spec.dtype(formats).itemsize // num_optimizer_shards for spec, count in states.items()
        },
        scales=0,
    )


def _dtype_names(formats: StorageFormats, states: Sequence[StateSpec]) -> dict[str, str]:
    def name(dtype: StorageDtype | None) -> str:
        return "= weight" if dtype is None else dtype.value.upper()

    return {
        "weights": name(formats.weight),
        "gradients": name(formats.main_grad),
        "master_weights": name(formats.master_weight),
        **{spec.name: name(spec.dtype(formats)) for spec in states},
        "scales": "FP32",
    }


def _per_param(group: StorageBytes, kind: str) -> str:
    return f"{_bytes(group, kind) / group.num_params:.3f}" if group.num_params else "-"


def _bytes(group: StorageBytes, kind: str) -> int:
    return group.total if kind == "total" else group.by_kind[kind]


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3f}"


def _saving(baseline: int, measured: int) -> str:
    return f"{baseline / measured:.2f}x" if baseline and measured else "-"
