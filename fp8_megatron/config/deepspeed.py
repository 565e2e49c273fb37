"""DeepSpeed's JSON file as flags of ours, where Megatron-DeepSpeed's scripts name one with --deepspeed_config.

Batch sizes, clipping, the 16-bit type and ZeRO up to stage 1 have flags. Anything else that the file turns on is
refused by name (https://www.deepspeed.ai/docs/config-json).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .command_line import flags_of
from .words import flag_name, shortened

_FLAGS = {
    "train_batch_size": "--global-batch-size",
    "train_micro_batch_size_per_gpu": "--micro-batch-size",
    "gradient_clipping": "--clip-grad",
}
_OF_LOSS_SCALE = {"loss_scale_window": "--loss-scale-window", "hysteresis": "--hysteresis"}
#: How often DeepSpeed prints, what it times and how it cuts messages.
_IDLE = {"steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"}
_IDLE_OF_ZERO = {
    "allgather_bucket_size",
    "allgather_partitions",
    "contiguous_gradients",
    "overlap_comm",
    "reduce_bucket_size",
    "reduce_scatter",
    "round_robin_gradients",
}


def words_of_deepspeed(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(flags that stand for the file of --deepspeed_config, one line for each problem) of a command line."""
    given = {one.name: one.words for one in flags_of(words)}
    path = " ".join(given.get("deepspeed_config", ())).strip()
    if not path:
        return [], []
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(content, Mapping):
            raise ValueError("it is no object")
    except (OSError, ValueError, RecursionError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or shortened(str(error))
        return [], [f"deepspeed_config({shortened(path)}) cannot be read ({reason}); give DeepSpeed's JSON file"]
    found: list[str] = []
    problems: list[str] = []
    for key, flag, value in _read(content):
        own = given.get((flag or "").removeprefix("--").replace("-", "_"))
        if flag is None:
            shown = shortened(json.dumps(value))
            problems.append(f"deepspeed_config: {key}: {shown} has no flag here; drop it from {shortened(path)}")
        elif own is not None and value is not None and not _same(own, value):
            problems.append(
                f"deepspeed_config: {key}({value}) contradicts {flag} {shortened(' '.join(own))}; make them one"
            )
        elif own is None:
            found += [flag] if value is None else [flag, str(value)]
    return found, problems


def _read(content: Mapping[str, Any]) -> Iterator[tuple[str, str | None, Any]]:
    """(key, flag, value) of what a file turns on. The value of a switch is None; no flag: there is none for the key."""
    for key, value in content.items():
        if value == "auto" or key in _IDLE or _is_off(value):
            continue
        if key in _FLAGS:
            yield key, _FLAGS[key], value
        elif key in ("bf16", "bfloat16", "fp16") and isinstance(value, Mapping):
            yield from _precision(key, value)
        elif key == "zero_optimization" and isinstance(value, Mapping):
            yield from _zero(value)
        elif key == "data_types" and value == {"grad_accum_dtype": "fp32"}:
            yield key, "--accumulate-allreduce-grads-in-fp32", None
        elif key != "gradient_accumulation_steps" or not ("train_batch_size" in content or value == 1):
            yield key, None, value


def _precision(key: str, section: Mapping[str, Any]) -> Iterator[tuple[str, str | None, Any]]:
    yield key, flag_name("fp16" if key == "fp16" else "bf16"), None
    for name, value in section.items():
        if name == "enabled" or _is_off(value) or value == "auto":
            continue
        if key == "fp16" and name == "initial_scale_power" and isinstance(value, int):
            yield f"{key}.{name}", "--initial-loss-scale", 2**value
        elif key == "fp16" and name in ("loss_scale", "min_loss_scale"):
            if name == "min_loss_scale" or value != 0:  # 0: dynamic
                yield f"{key}.{name}", f"--{name.replace('_', '-')}", value
        else:
            yield f"{key}.{name}", _OF_LOSS_SCALE.get(name) if key == "fp16" else None, value


def _zero(section: Mapping[str, Any]) -> Iterator[tuple[str, str | None, Any]]:
    for name, value in section.items():
        is_idle = name in _IDLE_OF_ZERO or (name == "stage" and value in (0, 1))
        if not (is_idle or value == "auto" or _is_off(value)):
            yield f"zero_optimization.{name}", None, value


def _is_off(value: Any) -> bool:
    """Whether a value asks for nothing."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled", True) is False or value.get("device") == "none"
    return value is False or value is None


def _same(words: Sequence[str], value: Any) -> bool:
    try:
        return float(" ".join(words)) == float(value)
    except (TypeError, ValueError):
        return False
