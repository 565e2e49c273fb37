"""Levels of precision by name, as flags of a run. Tools that compare levels choose among them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..config.checks import ConfigError
from ..config.io import CommandLine

_FP8 = ("--precision", "fp8")
_O3 = (*_FP8, "--opt-level", "O3")
_CURRENT = ("--fp8-recipe", "tensorwise")  # with an LM head in 16 bits, and gradients scaled in blocks

#: Flags of each level. They stand behind those of the run, so they win.
LEVELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "bf16": ("--precision", "bf16"),
        "te": ("--precision", "te"),
        "te-tensorwise": ("--precision", "te", "--fp8-recipe", "tensorwise"),
        "te-delayed": ("--precision", "te", "--fp8-recipe", "delayed"),
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


def check_trains(line: CommandLine, why: str) -> None:
    """Raise `ConfigError`, which says `why`, if the run of a command line would not train."""
    for name, given in (("skip_train", line.config.training.skip_train), ("dry_run", line.dry_run)):
        if given:
            raise ConfigError(f"{name}: {why}; leave it out")


def levels_of(*names: str) -> dict[str, list[str]]:
    """The flags of these levels by name, in this order."""
    return {name: list(LEVELS[name]) for name in names}
