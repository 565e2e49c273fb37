"""The precision that Megatron's and MS-AMP's switches ask for.

--bf16 and --fp16 name the 16-bit type. A switch of FP8 beside them leaves FP8 on. --accumulate-allreduce-grads-in-fp32
is --grad-accumulation-dtype fp32 of FP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from .limits import FieldType
from .precision import Precision, PrecisionConfig
from .words import flag_name

#: Flags that stand beside the settings. Their words are no setting's values.
SWITCHES: Mapping[str, FieldType] = MappingProxyType(
    {
        "bf16": FieldType(bool),
        "fp16": FieldType(bool),
        "fp8_format": FieldType(str, ("hybrid", "e4m3")),
        "fp8_hybrid": FieldType(bool),
        "fp8_e4m3": FieldType(bool),
        "msamp": FieldType(bool),
        "msamp_opt_level": FieldType(str, ("O1", "O2", "O3")),
        "transformer_impl": FieldType(str, ("transformer_engine", "local")),
        "accumulate_allreduce_grads_in_fp32": FieldType(bool),
    }
)
#: Flags that turn FP8 on, in the order in which one is named.
_FP8_SWITCHES = ("fp8_format", "fp8_hybrid", "fp8_e4m3", "msamp", "msamp_opt_level", "fp8_recipe")
#: Megatron's defaults of the settings that its FP8 switches turn on.
_MEGATRONS_RECIPE = {"fp8_recipe": "delayed", "fp8_amax_history_len": 1, "fp8_amax_compute_algo": "most_recent"}
_SIXTEEN_BITS: tuple[Precision, ...] = ("bf16", "fp16")


@dataclass(frozen=True)
class Chosen:
    """What switches choose.

    Attributes:
        settings: fields of `PrecisionConfig` and their values.
        notes: lines for the start of the run.
        problems: one line for each contradiction.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def chosen_precision(given: Mapping[str, tuple[str, ...]], base: PrecisionConfig, *, has_files: bool) -> Chosen:
    """The settings that the flags of a command line choose together.

    Args:
        given: each flag's words by setting; the last where one is given twice. Switches that are off are left out.
        base: the settings of the --config files, or the defaults.
        has_files: whether there are such files.
    """
    if {"bf16", "fp16"} <= set(given):
        return _problem("--bf16 contradicts --fp16; give one of them")
    for name, kind in SWITCHES.items():
        if name in given and kind.choices and given[name][0] not in kind.choices:
            return _problem(f"{flag_name(name)} {given[name][0]!r} is not one of {', '.join(kind.choices)}")
    fp8_flags = [flag_name(name) for name in _FP8_SWITCHES if name in given]
    problem = _contradiction(given, base, fp8_flags)
    if problem is not None:
        return _problem(problem)
    precision = _precision(given, base.precision, bool(fp8_flags))
    settings: dict[str, Any] = {} if precision is None else {"precision": precision}
    if "msamp_opt_level" in given:
        settings["opt_level"] = given["msamp_opt_level"][0]
    is_megatrons = bool({"fp8_format", "fp8_hybrid", "fp8_e4m3"} & set(given))
    if is_megatrons and not has_files and given.get("fp8_recipe", ("delayed",)) == ("delayed",):
        settings |= {name: value for name, value in _MEGATRONS_RECIPE.items() if name not in given}
    # Without FP8 gradients are added in FP32 anyway.
    if "accumulate_allreduce_grads_in_fp32" in given and (precision or base.precision) == "fp8":
        if given.get("grad_accumulation_dtype", ("fp32",)) != ("fp32",):
            return _problem(
                f"--accumulate-allreduce-grads-in-fp32 contradicts --grad-accumulation-dtype "
                f"{given['grad_accumulation_dtype'][0]}; give one of them"
            )
        settings["grad_accumulation_dtype"] = "fp32"
    notes = []
    if "fp16" in given and fp8_flags:
        notes.append(f"--fp16 beside {fp8_flags[0]}: the 16-bit type of FP8 layers is BF16, without a loss scale")
    recipe = given["fp8_recipe"][0] if "fp8_recipe" in given else settings.get("fp8_recipe", base.fp8_recipe)
    asks_for_e4m3 = "fp8_e4m3" in given or given.get("fp8_format") == ("e4m3",)
    if asks_for_e4m3 and recipe != "blockwise":
        return _problem(
            f"{'--fp8-e4m3' if 'fp8_e4m3' in given else '--fp8-format e4m3'}: output gradients are E5M2 under "
            f"fp8_recipe({recipe}); give --fp8-format hybrid, or --fp8-recipe blockwise"
        )
    return Chosen(settings, tuple(notes))


def _precision(given: Mapping[str, tuple[str, ...]], of_files: Precision, has_fp8_switch: bool) -> str | None:
    """The precision that flags choose; None if they leave it to the files."""
    if "precision" in given:
        return given["precision"][0]
    if not has_fp8_switch:
        return next((name for name in _SIXTEEN_BITS if name in given), None)
    is_msamp = "msamp" in given or "msamp_opt_level" in given
    if given.get("transformer_impl") == ("transformer_engine",) and not is_msamp:
        return "te"
    return "te" if of_files == "te" and not is_msamp else "fp8"


def _contradiction(given: Mapping[str, tuple[str, ...]], base: PrecisionConfig, fp8_flags: list[str]) -> str | None:
    """The contradiction between --precision, or a file's precision, and the switches; None if there is none."""
    if "msamp_opt_level" in given and "opt_level" in given and given["msamp_opt_level"] != given["opt_level"]:
        return (
            f"--msamp-opt-level {given['msamp_opt_level'][0]} contradicts --opt-level {given['opt_level'][0]}; "
            f"give one of them"
        )
    if "precision" not in given:
        if fp8_flags and base.precision in _SIXTEEN_BITS:
            return f"{fp8_flags[0]} contradicts precision({base.precision}) of the --config files; give --precision fp8"
        return None
    precision = given["precision"][0]
    for alias in _SIXTEEN_BITS:
        if alias in given and precision in _SIXTEEN_BITS and precision != alias:
            return f"--{alias} contradicts --precision {precision}; give one of them"
    if precision in _SIXTEEN_BITS and fp8_flags:
        return f"{fp8_flags[0]} contradicts --precision {precision}; give one of them"
    if precision == "te" and ("msamp" in given or "msamp_opt_level" in given):
        return "--msamp contradicts --precision te; give one of them"
    return None


def _problem(line: str) -> Chosen:
    return Chosen(problems=(line,))
