"""The storage formats that a configuration asks for."""

from __future__ import annotations

from ..config.schema import PrecisionConfig
from ..dtypes import StorageDtype
from ..sharding.storage import ModelStorage


def model_storage(precision: PrecisionConfig, num_micro_batches: int, *, is_trained: bool = True) -> ModelStorage:
    """Storage formats of a model.

    Args:
        num_micro_batches: gradients that each parameter receives per step.
        is_trained: False for --skip-train.
    """
    accumulator = precision.grad_accumulation_dtype
    return ModelStorage(
        precision.formats,
        has_fp8_layers=precision.is_fp8,
        num_micro_batches=num_micro_batches,
        adds_locally=precision.grad_accumulation == "local",
        accumulator=None if accumulator is None else StorageDtype(accumulator),
        releases_gradients=precision.release_gradients,
        is_trained=is_trained,
    )
