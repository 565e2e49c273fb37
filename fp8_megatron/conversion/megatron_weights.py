"""Checkpoints of Megatron-LM and megatron-core as sources: their weights, and the model that their arguments describe.

Weights are taken as they were saved, rounded to the model's dtype. Masters and moments are for ``--load``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checkpoint.files import CheckpointError, is_megatron_checkpoint, is_torch_files
from ..checkpoint.megatron_checkpoint import MegatronCheckpoint
from ..checkpoint.megatron_layout import Name
from ..checkpoint.megatron_loading import ONLY, open_megatron_checkpoint
from ..checkpoint.saved_settings import model_of_arguments
from ..checkpoint.torch_dist_weights import TorchDistWeights
from ..checkpoint.weights import WeightReader
from ..config.model import ModelConfig
from ..config.schema import Config

#: Arguments that say which model it is. Without them --config has to.
_DESCRIBING = ("num_layers", "hidden_size", "num_attention_heads")
#: Settings that change what weights of the same shapes compute.
_COMPUTED = (
    "num_attention_heads",
    "normalization",
    "norm_epsilon",
    "swiglu",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
)
#: Megatron's arguments that change what a model computes, with their values under which it is one that is converted.
_NOT_CONVERTED: Mapping[str, tuple[object, ...]] = {
    **ONLY,
    "num_experts": (None, 0),
    "multi_latent_attention": (None, False),
    "mtp_num_layers": (None, 0),
    "qk_layernorm": (None, False),
    "apply_layernorm_1p": (None, False),
    "quick_geglu": (None, False),
    "no_rope_freq": (None,),
    "softmax_type": (None, "vanilla"),
    "attention_output_gate": (None, False),
    "position_embedding_type": (None, "learned_absolute", "rope"),
    "normalization": (None, "LayerNorm", "RMSNorm"),
}


class TorchWeights:
    """Reads the weights of Megatron-LM's ``torch`` under standard keys, in FP32, from the files of all ranks."""

    def __init__(self, checkpoint: MegatronCheckpoint) -> None:
        self._checkpoint = checkpoint
        self.shapes = checkpoint.shapes

    def read(self, key: str, layer: int | None) -> Tensor:
        """As `weights.WeightReader.read`."""
        return self._checkpoint.read("weight", Name(key, layer))


def open_weights(folder: Path) -> tuple[WeightReader, dict[str, Any]]:
    """The weights in a folder of Megatron-LM or megatron-core, and Megatron's arguments (empty where there are none).

    Raises:
        CheckpointError: damaged, or of a kind that is not read.
    """
    if not is_megatron_checkpoint(folder):  # a description of tensors alone
        return TorchDistWeights(folder), {}
    checkpoint = open_megatron_checkpoint(folder)
    weights = TorchWeights(checkpoint) if is_torch_files(folder) else TorchDistWeights(folder)
    return weights, checkpoint.arguments


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
    for name, plain in _NOT_CONVERTED.items():
        value = arguments.get(name)
        if not any(value is one or (type(value) is type(one) and value == one) for one in plain):
            raise CheckpointError(f"{folder} was saved with {name}({value}); a model of that kind is not converted")
    described = all(isinstance(arguments.get(name), int) for name in _DESCRIBING)
    if given is None and not described:
        raise CheckpointError(
            f"{folder} does not say which model it is; give --config with the model's settings and its vocab_size"
        )
    theirs = model_of_arguments(arguments)
    config = replace(Config(), model=theirs) if given is None else given
    if given is not None:
        _check_agree(folder, {name: getattr(theirs, name) for name in _COMPUTED if name in arguments}, given.model)
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


def _check_agree(folder: Path, theirs: Mapping[str, Any], model: ModelConfig) -> None:
    """Raise `CheckpointError` for the first setting of --config that is another than Megatron's argument."""
    for name, value in theirs.items():
        if getattr(model, name) != value:
            raise CheckpointError(
                f"{folder} was saved with {name}({value}), --config has {name}({getattr(model, name)}), under which "
                f"those weights compute something else; correct it"
            )
