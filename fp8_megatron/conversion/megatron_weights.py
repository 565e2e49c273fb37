"""Checkpoints of Megatron-LM and megatron-core as sources: their weights, and the model that their arguments describe.

Weights are taken as they were saved, rounded to the model's dtype. Masters and moments are for ``--load``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checkpoint.files import CheckpointError, is_megatron_checkpoint
from ..checkpoint.megatron_checkpoint import MegatronCheckpoint
from ..checkpoint.megatron_layout import Name
from ..checkpoint.megatron_loading import open_megatron_checkpoint
from ..checkpoint.same_model import first_difference, settings_of_arguments, unsupported_argument
from ..checkpoint.saved_settings import model_of_arguments
from ..checkpoint.weights import MatricesOfLayer, TorchDistWeights, WeightReader
from ..config.schema import Config

#: Arguments that say which model it is. Without them --config has to.
_DESCRIBING = ("num_layers", "hidden_size", "num_attention_heads")


class MegatronWeights:
    """Reads the weights of a checkpoint of Megatron-LM under standard keys, in FP32."""

    def __init__(self, checkpoint: MegatronCheckpoint) -> None:
        self.shapes = checkpoint.shapes
        self._matrices = MatricesOfLayer(lambda key, layer: checkpoint.read("weight", Name(key, layer)))

    def read(self, key: str, layer: int | None, matrix: int | None = None) -> Tensor:
        """As `weights.WeightReader.read`."""
        return self._matrices.read(key, layer, matrix)


def open_weights(folder: Path) -> tuple[WeightReader, dict[str, Any]]:
    """The weights in a folder of Megatron-LM or megatron-core, and Megatron's arguments (empty where there are none).

    Raises:
        CheckpointError: damaged, or of a kind that is not read.
    """
    if not is_megatron_checkpoint(folder):  # a description of tensors alone
        return TorchDistWeights(folder), {}
    checkpoint = open_megatron_checkpoint(folder)
    return MegatronWeights(checkpoint), checkpoint.arguments


def config_of(folder: Path, arguments: dict[str, Any], given: Config | None, vocab_size: int | None) -> Config:
    """The configuration of a checkpoint, with its model and the size of its vocabulary.

    Args:
        arguments: Megatron's.
        given: from --config; it has to agree with `arguments`.
        vocab_size: without padding; None if `given` or `arguments` have it.

    Raises:
        CheckpointError: nothing says which model it is or how large its vocabulary is, what says so disagrees, or
            it is of a kind that is not converted.
    """
    unsupported = unsupported_argument(folder, arguments)
    if unsupported is not None:
        raise CheckpointError(unsupported)
    described = all(isinstance(arguments.get(name), int) for name in _DESCRIBING)
    if given is None and not described:
        raise CheckpointError(
            f"{folder} does not say which model it is; give --config with the model's settings and its vocab_size"
        )
    if given is None:
        config = replace(Config(), model=model_of_arguments(arguments))
    else:
        config = given
        found = first_difference(settings_of_arguments(arguments), given.model)
        if found is not None:
            raise CheckpointError(found.sentence(folder, "--config", "correct it"))
    stated = config.model.vocab_size
    if vocab_size is not None and stated not in (None, vocab_size):
        raise CheckpointError(f"--vocab-size {vocab_size} is not the vocab_size({stated}) of {folder}; drop it")
    size = stated if vocab_size is None else vocab_size
    if size is None:
        padded = arguments.get("padded_vocab_size")
        of = f" of {padded} rows" if isinstance(padded, int) else ""
        raise CheckpointError(
            f"{folder} says only how large its vocabulary is with padding{of}; give --vocab-size, the tokenizer's size"
        )
    return replace(config, model=replace(config.model, vocab_size=size))
