"""What a checkpoint says of its run: ``checkpoint.json``, and the tensors that each rank keeps for itself.

This is the schema of both. A file is read by it once, with types and ranges, so the rest of the package trusts what it
gets. An error names the file, the field, the value and the fix.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
from annotated_types import Ge, Le
from torch import Tensor

from ..config.fields import (
    BatchSize,
    CountOrZero,
    FieldType,
    NotNegative,
    NumRanks,
    SamplesOrZero,
    Size,
    field_types,
    value_problem,
)
from ..config.parallel import LAYER_SHARES
from ..config.schema import OptimizerConfig
from ..config.words import shortened
from .files import ANCESTORS, DUE, META, CheckpointError, iteration_of, read_file
from .run_state import FORMAT_VERSIONS, SLOTS

_SamplesOrNone = SamplesOrZero | None
_RanksOrNone = NumRanks | None


@dataclass(frozen=True)
class _Description:
    """The fields of ``checkpoint.json``. Earlier versions wrote fewer; only `_NEEDED` have to be there."""

    iteration: CountOrZero
    consumed_samples: SamplesOrZero
    skipped_steps: CountOrZero
    topology: dict[str, Any]
    vocab_size: Size
    padded_vocab_size: Size
    state_dtype: str
    scheduled_samples: _SamplesOrNone
    schedule: dict[str, Any] | None
    left_out_samples: SamplesOrZero
    consumed_valid_samples: SamplesOrZero
    tokens_of_next_step: Annotated[int, Ge(1), Le(2**60)]
    level: str
    optimizer: list[str]
    due: list[int]
    ancestors: list[int]


_NEEDED = ("iteration", "consumed_samples", "skipped_steps", "topology", "vocab_size", "padded_vocab_size")


@dataclass(frozen=True)
class _SavedTopology:
    tensor_model_parallel_size: _RanksOrNone
    pipeline_model_parallel_size: _RanksOrNone
    virtual_pipeline_model_parallel_size: _RanksOrNone
    data_parallel_size: _RanksOrNone
    context_parallel_size: _RanksOrNone
    pipeline_model_parallel_layout: str | None


@dataclass(frozen=True)
class _Schedule:
    lr: NotNegative
    min_lr: NotNegative
    decoupled_lr: NotNegative | None
    decoupled_min_lr: NotNegative | None
    warmup_init: NotNegative
    warmup_samples: NotNegative
    decay_samples: Annotated[int, Ge(1), Le(2**60)]
    wsd_decay_samples: Annotated[int, Ge(0), Le(2**60)] | None
    start_weight_decay: NotNegative
    end_weight_decay: NotNegative
    weight_decay_incr_samples: Annotated[int, Ge(0), Le(2**60)]
    global_batch_size: BatchSize


@dataclass(frozen=True)
class _Megatron:
    """Counts and sizes that Megatron-LM keeps in its arguments and its common state."""

    iteration: CountOrZero
    step: CountOrZero
    num_steps: _SamplesOrNone
    consumed_train_samples: SamplesOrZero
    consumed_valid_samples: SamplesOrZero
    tensor_model_parallel_size: NumRanks
    pipeline_model_parallel_size: NumRanks


def check_of_megatron(folder: Path, **values: Any) -> None:
    """Check counts and sizes of a checkpoint of Megatron-LM, by their names there.

    Raises:
        CheckpointError: one is of another type, or out of its range.
    """
    for problem in _wrong("", field_types(_Megatron), values):
        raise CheckpointError(f"{folder} is damaged: {problem}; copy it again, or use another iteration")


def _of_schedule() -> Mapping[str, FieldType]:
    styles = {"decay_style": "lr_decay_style", "wsd_decay_style": "lr_wsd_decay_style"}
    styles["weight_decay_incr_style"] = "weight_decay_incr_style"
    chosen = field_types(OptimizerConfig)
    return {**field_types(_Schedule), **{name: chosen[setting] for name, setting in styles.items()}}


def read_description(folder: Path) -> dict[str, Any]:
    """What ``checkpoint.json`` says, with every known field of its type and in its range.

    Raises:
        CheckpointError: missing, damaged, of another format version, or in a folder that is named after another
            iteration.
    """
    path = folder / META
    try:
        description = json.loads(read_file(path))
        version = description["format_version"]
        missing = [name for name in _NEEDED if name not in description]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint file {path} cannot be read ({error!r}); use another iteration") from None
    versions = sorted(FORMAT_VERSIONS.values())
    if version not in versions or missing:
        problem = f"has no {missing[0]}" if version in versions else f"has format version {shortened(repr(version))}"
        raise CheckpointError(
            f"checkpoint file {path} {problem}; this version reads versions {' and '.join(map(str, versions))}"
        )
    for problem in _problems(description):
        raise CheckpointError(f"checkpoint file {path} is damaged: {problem}; use another iteration")
    named = iteration_of(folder)
    if named not in (None, description["iteration"]):
        raise CheckpointError(
            f"checkpoint file {path} is of iteration {description['iteration']}, its folder is named after {named}; "
            "give the folder its name again"
        )
    return dict(description)


def _problems(description: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with each field."""
    yield from _wrong("", field_types(_Description), description)
    topology = field_types(_SavedTopology)
    shares = dict.fromkeys(LAYER_SHARES, topology["tensor_model_parallel_size"])
    yield from _wrong("topology.", {**topology, **shares}, description["topology"])
    schedule = description.get("schedule") or {}
    yield from _wrong("schedule.", _of_schedule(), schedule)
    if schedule and "global_batch_size" not in schedule:
        yield "schedule has no global_batch_size"
    if schedule.get("warmup_samples", 0) >= schedule.get("decay_samples", 2**60):
        yield f"schedule.warmup_samples({schedule['warmup_samples']}) is not below {schedule['decay_samples']} of decay"
    count = field_types(_Description)["iteration"]
    for name in (DUE, ANCESTORS):
        for number in description.get(name, ()):
            if (expected := value_problem(count, number)) is not None:
                yield f"{name} holds {shortened(repr(number))}, not {expected}"


def _wrong(prefix: str, fields: Mapping[str, FieldType], values: Mapping[str, Any]) -> Iterator[str]:
    for name, kind in fields.items():
        if name in values and (expected := value_problem(kind, values[name])) is not None:
            yield f"{prefix}{name} is {shortened(repr(values[name]))}, not {expected}"


@dataclass(frozen=True)
class _RankTensor:
    """What a tensor of a rank's file may be.

    Attributes:
        shape: None stands for an axis of any size.
        least: of every element, which has to be above it if `is_above`; all are finite. None: any value.
    """

    dtype: torch.dtype
    shape: tuple[int | None, ...]
    least: float | None = None
    is_above: bool = False

    def problem(self, tensor: Tensor) -> str | None:
        """What is wrong with a tensor; None if it fits."""
        fits = len(tensor.shape) == len(self.shape)
        fits = fits and all(size in (None, own) for size, own in zip(self.shape, tensor.shape, strict=True))
        if tensor.dtype != self.dtype or not fits:
            expected = ", ".join("n" if size is None else str(size) for size in self.shape)
            return f"is {_name(tensor.dtype)} {list(tensor.shape)}, not {_name(self.dtype)} [{expected}]"
        if self.least is None:
            return None
        wrong = ~tensor.isfinite() | (tensor <= self.least if self.is_above else tensor < self.least)
        if not wrong.any():
            return None
        relation = "above" if self.is_above else "of at least"
        return f"holds {tensor[wrong][0].item()}, not finite numbers {relation} {self.least:g}"


#: Names in a rank's file → what they are. Nothing reads tensors of other names.
_RANK_TENSORS: Mapping[str, _RankTensor] = MappingProxyType(
    {
        r"step_count": _RankTensor(torch.float32, (1,), 0.0),
        r"loss_scale/scale": _RankTensor(torch.float32, (1,), 0.0, is_above=True),
        r"loss_scale/(good_steps|forgiven)": _RankTensor(torch.float32, (1,), 0.0),
        r"rng/.+": _RankTensor(torch.uint8, (None,)),
        r"amax_history\.\d{1,6}/history": _RankTensor(torch.float32, (None, None), 0.0),
        r"amax_history\.\d{1,6}/scale": _RankTensor(torch.float32, (None,), 0.0),  # earlier versions wrote 0
        r"amax_history\.\d{1,6}/known": _RankTensor(torch.float32, (None,), -1.0),
        r"amax_history\.\d{1,6}/streak": _RankTensor(torch.float32, (1,), 0.0),
        r"amax_history\.\d{1,6}/slots": _RankTensor(torch.int64, (None,)),
        r"weight_scale/.+": _RankTensor(torch.float32, (None,), 0.0, is_above=True),
        r"autoscale/.+": _RankTensor(torch.float32, (2, None), -1.0),
    }
)


def check_rank_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Check the tensors of one rank's file.

    Raises:
        CheckpointError: one is of another dtype or shape, or holds a value out of its range.
    """
    for name, tensor in tensors.items():
        kind = next((kind for pattern, kind in _RANK_TENSORS.items() if re.fullmatch(pattern, name)), None)
        problem = None if kind is None else kind.problem(tensor)
        if problem is not None:
            fix = "give --no-load-rng, or use another iteration" if name.startswith("rng/") else "use another iteration"
            raise CheckpointError(f"checkpoint file {path} is damaged: {name} {problem}; {fix}")
    for name, history in tensors.items():
        chunk, _, key = name.rpartition("/")
        if key != "history":
            continue
        for other in ("scale", "known", SLOTS):  # earlier versions wrote the first alone
            beside = tensors.get(f"{chunk}/{other}")
            if (beside is None and other == "scale") or (beside is not None and len(beside) != history.shape[1]):
                size = "none" if beside is None else f"[{len(beside)}]"
                raise CheckpointError(
                    f"checkpoint file {path} is damaged: {name} has {history.shape[1]} slots, and {chunk}/{other} is "
                    f"{size}; use another iteration"
                )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
