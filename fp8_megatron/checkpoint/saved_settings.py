"""--use-checkpoint-args: the model's settings and the tokenizer of a checkpoint as defaults of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..config.io import load_config
from ..config.schema import Config, DataConfig
from .files import CONFIG, CheckpointError, candidates, iteration_folder, named_checkpoint

#: Settings of the data section that name the tokenizer.
_TOKENIZER = ("vocab_file", "merge_file", "tiktoken_", "tokenizer_", "null_tokenizer_")


def settings_of_checkpoint(config: Config) -> Config | None:
    """Defaults with the model section of --load's checkpoint, and its tokenizer unless that is left out.

    Returns:
        None if --load, which is --save too, holds no checkpoint yet.

    Raises:
        CheckpointError: there is no checkpoint, or its ``config.yaml`` cannot be read.
    """
    checkpoint = config.checkpoint
    assert checkpoint.load is not None
    root, iteration = named_checkpoint(Path(checkpoint.load), checkpoint.ckpt_step)
    found = candidates(root, iteration) if root.is_dir() else []
    if not found:
        if checkpoint.load == checkpoint.save:
            return None
        raise CheckpointError(
            f"use_checkpoint_args: load({root}) holds no checkpoint; give the folder that --save named"
        )
    saved = load_config(iteration_folder(root, found[0]) / CONFIG)
    data = DataConfig()
    if checkpoint.use_tokenizer_model_from_checkpoint_args:
        names = [name for name in DataConfig.__dataclass_fields__ if name.startswith(_TOKENIZER)]
        data = replace(data, **{name: getattr(saved.data, name) for name in names})
    return replace(Config(), model=saved.model, data=data)
