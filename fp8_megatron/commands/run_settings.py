"""The configuration of a run, from its command line and, with --use-checkpoint-args, from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..config.io import CommandLine, parse_command_line


def run_command_line(words: Sequence[str] | None, prog: str) -> CommandLine:
    """As `parse_command_line`; --use-checkpoint-args puts the checkpoint's settings below the files of --config.

    Raises:
        ConfigError, CheckpointError: as `parse_command_line` and `settings_of_checkpoint`; or a setting without a
            default is not given.
    """
    line = parse_command_line(words, prog=prog)
    checkpoint = line.config.checkpoint
    if not checkpoint.use_checkpoint_args or checkpoint.load is None:
        line.check_stated()
        return line
    from ..checkpoint.saved_settings import settings_of_checkpoint  # imports torch

    base = settings_of_checkpoint(line.config)
    if base is None:
        line.check_stated()
        return replace(line, notes=(*line.notes, f"load({checkpoint.load}) holds no checkpoint yet: no settings of it"))
    line = parse_command_line(words, prog=prog, base=base)
    line.check_stated()
    return line
