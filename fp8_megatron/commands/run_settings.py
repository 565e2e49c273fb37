"""The configuration of a run, from its command line and, with --use-checkpoint-args, from a checkpoint.

`LEVELS` names levels of precision as flags of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ..config.io import CommandLine, parse_command_line

_FP8 = ("--precision", "fp8")
_O3 = (*_FP8, "--opt-level", "O3")
_CURRENT = ("--fp8-recipe", "tensorwise")  # with an LM head in 16 bits, and gradients scaled in blocks

#: Flags of each level. They stand behind those of the run, so they win.
LEVELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "bf16": ("--precision", "bf16"),
        "te": ("--precision", "te", "--fp8-recipe", "delayed"),
        "te-tensorwise": ("--precision", "te", "--fp8-recipe", "tensorwise"),
        "O1": (*_FP8, "--opt-level", "O1", *_CURRENT),
        "O2": (*_FP8, "--opt-level", "O2", *_CURRENT),
        "O3": (*_O3, *_CURRENT),
        "O3-delayed": (
            *(*_O3, "--fp8-recipe", "delayed"),
            *("--no-fp8-lm-head", "--fp8-weight-grad-scaling", "block"),
        ),
        "O3-blockwise": (*_O3, "--fp8-recipe", "blockwise"),
        # what --precision fp8 does by itself, and with the LM head in 16 bits
        "default": (*_O3, "--fp8-recipe", "delayed"),
        "16-bit-head": (*_O3, "--fp8-recipe", "delayed", "--no-fp8-lm-head"),
        # configs/fast.yaml
        "fast": (
            *(*_O3, "--fp8-recipe", "delayed"),
            *("--fp8-lm-head", "--fp8-weight-grad-scaling", "delayed", "--grad-accumulation-dtype", "bf16"),
        ),
        "5-byte": (
            *(*_FP8, *_CURRENT, "--main-params-dtype", "split"),
            *("--exp-avg-dtype", "int8", "--exp-avg-sq-dtype", "uint8"),
        ),
    }
)


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
