"""Whether the weights of a checkpoint compute the same in this run, where no shape shows it.

Every reader asks here: ``--load`` and conversions, of this project's checkpoints and of Megatron's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..config.fields import FieldType, field_types
from ..config.model import LAYER_PATTERNS, YARN_SETTINGS, ModelConfig
from ..config.words import flag_with
from ..models.registry import ARCHITECTURES, architecture_of, weight_shapes

#: As `Architecture.sizes` and `Architecture.arguments_without_setting`, of all architectures. Errors name the first.
_SIZES = tuple(dict.fromkeys(name for each in ARCHITECTURES for name in each.sizes))
NO_SETTING: Mapping[str, tuple[object, ...]] = MappingProxyType(
    dict(
        sorted({name: idle for each in ARCHITECTURES for name, idle in each.arguments_without_setting.items()}.items())
    )
)


@dataclass(frozen=True)
class Difference:
    """A setting that a checkpoint has otherwise than a run or a ``--config``."""

    name: str
    saved: object
    own: object

    @property
    def flag(self) -> str:
        """What asks for the checkpoint's value."""
        return flag_with(self.name, self.saved)

    def sentence(self, folder: Path, holder: str, fix: str) -> str:
        """The error's line; `folder` is the checkpoint's."""
        is_computed = any(self.name in each.computed_settings for each in ARCHITECTURES)
        means = "under which those weights compute something else" if is_computed else "another model"
        return (
            f"{folder} was saved with {self.name}({self.saved}), {holder} has {self.name}({self.own}), {means}; {fix}"
        )


def model_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the model among unchecked values; none of no values. Leaves out what is no value of its setting.

    A setting that changes what weights compute and is absent has its default: it did not exist when they were saved.
    """
    found = {name: _as_setting(kind, values[name]) for name, kind in field_types(ModelConfig).items() if name in values}
    absent = {name for each in ARCHITECTURES for name in each.computed_settings if name not in values}
    defaults = {name: getattr(ModelConfig, name) for name in absent} if values else {}
    return {**defaults, **{name: known[0] for name, known in found.items() if known}}


def _as_setting(kind: FieldType, value: Any) -> tuple[Any] | None:
    """A field's value, alone in a tuple; None if `value` is of another type or not among the choices."""
    if value is None:
        return (None,) if kind.optional else None
    if kind.base is tuple:
        return (tuple(value),) if isinstance(value, list | tuple) else None
    if isinstance(value, bool) != (kind.base is bool):
        return None
    if kind.base is float and isinstance(value, int):
        value = float(value)
    return (value,) if isinstance(value, kind.base) and (not kind.choices or value in kind.choices) else None


def settings_of_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the model that Megatron's arguments state."""
    known = dict(arguments)
    if "layernorm_epsilon" in known:  # its name in earlier versions
        known.setdefault("norm_epsilon", known["layernorm_epsilon"])
    if isinstance(known.get("add_bias_linear"), bool):
        known["disable_bias_linear"] = not known["add_bias_linear"]
    if known.get("use_transformer_engine_op_fuser") is True:  # then GELU is Transformer Engine's, too
        known["use_te_activation_func"] = True
    if known.get("use_rotary_position_embeddings") is True:  # versions without the kinds of position embedding
        known.setdefault("position_embedding_type", "rope")
    if known.get("rotary_seq_len_interpolation_factor", 1) is None:
        known["rotary_seq_len_interpolation_factor"] = 1
    for name in YARN_SETTINGS:  # None stands for the default of megatron-core's YaRN, which is this project's
        if name in known and known[name] is None:
            known[name] = getattr(ModelConfig, name)
    window = known.get("window_size")
    if isinstance(window, tuple | list):
        known["window_size"] = ",".join(map(str, window))
    for name in LAYER_PATTERNS:
        if isinstance(known.get(name), int | list):
            known[name] = str(known[name])
    for name, kind in field_types(ModelConfig).items():  # one of several values may stand alone
        if kind.base is tuple and known.get(name) is not None:
            values = known[name] if isinstance(known[name], list | tuple) else [known[name]]
            known[name] = [str(value) for value in values]
    return model_settings(known)


def unsupported_argument(folder: Path, arguments: Mapping[str, Any]) -> str | None:
    """The first of Megatron's arguments that makes the checkpoint's model one that this project does not have."""
    for name, idle in NO_SETTING.items():
        if arguments.get(name) not in idle:
            return _unsupported(folder, name, arguments[name])
    known = settings_of_arguments(arguments)
    for name in (name for each in ARCHITECTURES for name in each.computed_settings):
        if arguments.get(name) is not None and name not in known:
            return _unsupported(folder, name, arguments[name])
    return None


def _unsupported(folder: Path, name: str, value: object) -> str:
    return f"{folder} was saved with {name}({value}), which this project does not have"


def first_difference(saved: Mapping[str, Any], model: ModelConfig, *, finetune: bool = False) -> Difference | None:
    """The first of the saved settings that differs from the model's: a size, or what changes what weights compute.

    Args:
        saved: from `model_settings` or `settings_of_arguments`. A setting that is not in it, because it cannot be read,
            counts as equal.
        finetune: allow another base and scaling of RoPE, YaRN too, for a longer context.
    """
    size = next((name for name in _SIZES if name in saved and saved[name] != getattr(model, name)), None)
    name = size or architecture_of(model).changed_setting(saved, model, finetune=finetune) or _shown(saved, model)
    return None if name is None else Difference(name, saved[name], getattr(model, name))


def _shown(saved: Mapping[str, Any], model: ModelConfig) -> str | None:
    """The first of the saved settings with which a weight has another name or shape."""
    theirs = model
    for name in (each.name for each in fields(ModelConfig) if each.name in saved):
        theirs = replace(theirs, **{name: saved[name]})
        if saved[name] != getattr(model, name) and _shapes(theirs) not in (None, _shapes(model)):
            return name
    return None


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]] | None:
    """Of all weights; None if the settings are those of no model."""
    try:
        return weight_shapes(model, padded_vocab_size=0)
    except (ValueError, ZeroDivisionError):
        return None


def unread_tensor(folder: Path, found: Iterable[str], read: Collection[str]) -> str | None:
    """The error's line for the first tensor of a checkpoint that no parameter takes; None if all are taken."""
    unread = min((key for key in found if key not in read), default=None)
    if unread is None:
        return None
    return (
        f"{folder} holds {unread!r}, which this model has not: it is another model's; give the model's flags as they "
        f"were when it was saved"
    )
