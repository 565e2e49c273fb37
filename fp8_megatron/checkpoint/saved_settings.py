"""What a checkpoint says before it is loaded: seed, samples and, for --use-checkpoint-args, model and tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config.io import load_config
from ..config.model import ModelConfig
from ..config.schema import Config, DataConfig
from .description import read_description
from .files import (
    CONFIG,
    CheckpointError,
    candidates,
    is_megatron_checkpoint,
    iteration_folder,
    named_checkpoint,
    no_checkpoint,
)
from .manifest import check_files
from .megatron_loading import open_megatron_checkpoint
from .same_model import settings_of_arguments
from .saved_run import saved_config, saved_settings

#: Settings of the data section that name the tokenizer.
_TOKENIZER = ("vocab_file", "merge_file", "tiktoken_", "tokenizer_", "null_tokenizer_")


def settings_of_checkpoint(config: Config) -> Config | None:
    """Defaults with the model section of --load's checkpoint, and its tokenizer unless that is left out.

    A checkpoint of Megatron-LM gives the model alone.

    Returns:
        None if --load, which is --save too, holds no checkpoint yet.

    Raises:
        CheckpointError: there is no checkpoint, or none with a whole ``config.yaml``.
    """
    checkpoint = config.checkpoint
    assert checkpoint.load is not None
    root, iteration = named_checkpoint(Path(checkpoint.load), checkpoint.ckpt_step)
    found = candidates(root, iteration) if root.is_dir() else []
    if not found:
        if checkpoint.loads_what_it_saves:
            return None
        raise CheckpointError(f"use_checkpoint_args: {no_checkpoint('load', root)}")
    folder = iteration_folder(root, found[0])
    if is_megatron_checkpoint(folder):
        return replace(Config(), model=model_of_arguments(open_megatron_checkpoint(folder).arguments))
    saved = saved_config(_newest_whole([iteration_folder(root, number) for number in found]))
    data = DataConfig()
    if checkpoint.use_tokenizer_model_from_checkpoint_args:
        names = [name for name in DataConfig.__dataclass_fields__ if name.startswith(_TOKENIZER)]
        data = replace(data, **{name: getattr(saved.data, name) for name in names})
    return replace(Config(), model=saved.model, data=data)


def saved_seed(folder: Path) -> int | None:
    """--seed of the run that saved a checkpoint; None if a checkpoint of Megatron-LM does not say.

    Raises:
        UserError: the settings cannot be read.
    """
    if is_megatron_checkpoint(folder):
        found = open_megatron_checkpoint(folder).arguments.get("seed")
        return found if isinstance(found, int) else None
    return load_config(folder / CONFIG).training.seed


def differing_order(folder: Path, config: Config) -> list[str]:
    """The settings of the order of samples that are not the checkpoint's, each with both values.

    What a checkpoint does not say counts as equal.
    """
    if is_megatron_checkpoint(folder):
        arguments = open_megatron_checkpoint(folder).arguments
        saved = {name: arguments.get(name) for name in ("seed", "dataloader_type", "data_sharding")}
    else:
        saved = {**saved_settings(folder, "training"), **saved_settings(folder, "data")}
    data = config.data
    now = {
        "seed": config.training.seed,
        "split": data.split,
        "dataloader_type": data.dataloader_type,
        "data_sharding": data.data_sharding,
    }
    return [
        f"{name} {saved[name]} → {value}"
        for name, value in now.items()
        if type(saved.get(name)) is type(value) and saved[name] != value
    ]


def saved_samples(folder: Path) -> int:
    """Samples that lie behind a checkpoint.

    Raises:
        CheckpointError: it is damaged.
    """
    if is_megatron_checkpoint(folder):
        return open_megatron_checkpoint(folder).consumed_samples
    return int(read_description(folder)["consumed_samples"])


def _newest_whole(folders: Sequence[Path]) -> Path:
    """The first checkpoint whose ``config.yaml`` is as it was written. The run passes over damaged ones, too.

    Raises:
        CheckpointError: none is; names the first one's file.
    """
    first_problem: CheckpointError | None = None
    for folder in folders:
        try:
            check_files(folder, (CONFIG,))
        except CheckpointError as error:
            first_problem = first_problem or error
        else:
            return folder
    assert first_problem is not None
    raise first_problem


def model_of_arguments(arguments: dict[str, Any]) -> ModelConfig:
    """The model that Megatron's arguments describe, as far as they say."""
    return ModelConfig(**settings_of_arguments(arguments))
