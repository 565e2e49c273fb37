"""What the formats of Megatron-LM's checkpoints have in common: whole parameters, masters and moments by their keys.

Where the order of an optimizer's buffer has to be known, every master is compared with its 16-bit weight, which is the
same value rounded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config.model import ModelConfig
from ..sharding.region import Shape
from .description import check_of_megatron
from .files import CheckpointError
from .megatron_layout import Name, is_rounded
from .same_model import settings_of_arguments

#: Ends of the names of norm weights, which --apply-layernorm-1p stores less 1.
_NORM_WEIGHTS = ("layernorm.weight", "layer_norm_weight")

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


#: What Adam of Megatron-LM stores beside a weight. Optimizers without it are not read.
STATES = ("exp_avg", "exp_avg_sq")
#: What Megatron-LM's optimizers of matrices store; other weights have Adam's.
MOMENTUM = "momentum_buffer"


class MegatronCheckpoint(ABC):
    """One checkpoint as one rank reads it.

    Args:
        folder: of one iteration.
        content: what is common to all ranks: arguments, iteration, the optimizer's parameter groups.

    Attributes:
        arguments: Megatron's arguments of the run by name.

    Raises:
        CheckpointError: damaged, or of a kind that is not read.
    """

    def __init__(self, folder: Path, content: dict[str, Any]) -> None:
        self.folder = folder
        arguments = content.get("args")
        self.arguments: dict[str, Any] = vars(arguments) if isinstance(arguments, Namespace) else {}
        self.optimizer = content.get("optimizer")
        scheduler = content.get("opt_param_scheduler")
        #: Samples that the schedule of the learning rate has counted; None if it is not known.
        self.scheduled_samples: int | None = scheduler.get("num_steps") if isinstance(scheduler, dict) else None
        self.iteration: int = content.get("iteration", 0)
        self.consumed_samples: int = self.arguments.get("consumed_train_samples", 0)
        self.consumed_valid_samples: int = self.arguments.get("consumed_valid_samples", 0)
        check_of_megatron(
            folder,
            iteration=self.iteration,
            num_steps=self.scheduled_samples,
            consumed_train_samples=self.consumed_samples,
            consumed_valid_samples=self.consumed_valid_samples,
            **{name: self.arguments[name] for name in _SIZES if name in self.arguments},
        )

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, Shape]:
        """The shape of every weight by its key, with layers stacked."""

    @property
    @abstractmethod
    def has_moments(self) -> bool:
        """Whether the optimizer's state was saved."""

    @abstractmethod
    def check_moments(self) -> None:
        """Check what can be known of the optimizer's state before it is read.

        Raises:
            CheckpointError: it is of a kind that is not read.
        """

    def holds(self, kind: str, name: Name) -> bool:
        """Whether a parameter has a state, which is one of `STATES` or `MOMENTUM`."""
        return kind != MOMENTUM

    def read(self, kind: str, name: Name) -> Tensor:
        """A whole parameter in FP32; `kind` is weight, master or a state.

        Raises:
            CheckpointError: damaged, or the order of a buffer is not known.
        """
        value = self.stored(kind, name)
        is_less_one = self.arguments.get("apply_layernorm_1p") and name.key.endswith(_NORM_WEIGHTS)
        return value + 1.0 if is_less_one and kind in ("weight", "master") else value

    @abstractmethod
    def stored(self, kind: str, name: Name) -> Tensor:
        """Read a value as it was saved: under --apply-layernorm-1p a norm's weight is less 1."""

    @cached_property
    def step_count(self) -> int:
        """Steps that the moments have seen."""
        found = _first_step(self.optimizer)
        if isinstance(found, Tensor):
            found = found.item() if found.numel() == 1 else found.tolist()
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        if found is None:
            return self.iteration
        check_of_megatron(self.folder, step=found)
        return int(found)

    @property
    def is_gated(self) -> bool:
        """Whether the first linear layer of an MLP has two halves."""
        return ModelConfig(**settings_of_arguments(self.arguments)).is_gated

    @property
    def ties_embeddings(self) -> bool:
        """Whether the head is the embedding."""
        return not self.arguments.get("untie_embeddings_and_output_weights", False)

    def in_model_dtype(self, master: Tensor) -> Tensor:
        """FP32 values, rounded to the dtype of the model's parameters."""
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
        dtype = next((dtypes[name] for name in dtypes if self.arguments.get(name)), torch.float32)
        return master.to(dtype).float()

    def checked(self, master: Tensor, weight: Tensor, name: Name) -> Tensor:
        """`master`.

        Raises:
            CheckpointError: rounded to the dtype of `weight`, it is another value.
        """
        if not is_rounded(master, weight):
            raise CheckpointError(
                f"{self.folder}: the optimizer's master of {name} is not its weight before rounding, so the order of "
                f"the optimizer's buffers is not the known one; save again with --ckpt-format torch_dist "
                f"--dist-ckpt-optim-fully-reshardable, or give --no-load-optim"
            )
        return master


def _first_step(optimizer: Any) -> Any:
    """The first step count in an optimizer's state, wherever its kind keeps it; unchecked."""
    if isinstance(optimizer, list | tuple):
        return next((step for each in optimizer if (step := _first_step(each)) is not None), None)
    if not isinstance(optimizer, dict):
        return None
    for key in ("step", "common_step"):
        value = optimizer.get(key)
        if value is not None and not isinstance(value, dict | list | tuple):
            return value
    return next((step for each in optimizer.values() if (step := _first_step(each)) is not None), None)
