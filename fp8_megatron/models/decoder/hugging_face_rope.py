"""RoPE's settings in ``config.json`` ↔ this project's: plain, and scaled linearly, as Llama 3.1 or by YaRN."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ...config.model import ModelConfig
from ..hugging_face_values import Json, count, number, plain, shown, truth

#: What ``--use-rope-scaling`` is beside its factor: Llama 3.1's and 3.2's.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

_ORIGINAL = "original_max_position_embeddings"
#: YaRN's settings in ``config.json``: the check of each, ours, and the default. Transformers takes null and 0 for it.
_YARN = (
    ("beta_fast", number(least=0), "yarn_beta_fast", 32.0),
    ("beta_slow", number(least=0), "yarn_beta_slow", 1.0),
    ("mscale", number(least=0), "mscale", 0.0),
    ("mscale_all_dim", number(least=0), "mscale_all_dim", 0.0),
)


def rope_of(settings: Json) -> dict[str, Any]:
    """RoPE's settings. Transformers 5 nests them; transformers 4 does not."""
    nested = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    theta = nested.get("rope_theta", settings.get("rope_theta", 10000.0))
    kind = nested.get("rope_type", nested.get("type", "default"))
    rope = {**nested, "rope_theta": theta, "rope_type": kind}
    if kind in ("yarn", "llama3"):
        places = (settings.get(_ORIGINAL), rope.get(_ORIGINAL), settings.get("max_position_embeddings"))
        rope[_ORIGINAL] = next((value for value in places if value is not None), None)
    return rope


def scaling_problems(rope: Json) -> Iterator[str]:
    """A line for each way in which the scaling in `rope_of` is none of this project's."""
    kind = rope["rope_type"]
    if kind == "default":
        return
    if kind not in ("linear", "llama3", "yarn"):
        yield f"rope_scaling({plain(kind)}) is not supported; only default, linear, llama3 and yarn convert"
        return
    expected = number(least=1)(rope.get("factor"))
    if expected is not None:
        yield f"factor({shown(rope.get('factor'))}) of rope_scaling({kind}) is wrong: {expected}; correct it"
    elif kind == "linear" and rope["factor"] != int(rope["factor"]):
        yield (
            f"factor({rope['factor']}) of rope_scaling(linear) is not a whole number, which "
            "rotary_seq_len_interpolation_factor is"
        )
    if kind == "yarn" and expected is None:
        yield from _yarn_problems(rope)
    for name, value in _LLAMA3.items() if kind == "llama3" else ():
        if rope.get(name) != value:
            yield (
                f"{name}({shown(rope.get(name))}) of rope_scaling(llama3) is not supported; only {value}, as in Llama "
                "3.1 and 3.2"
            )


def scaling_of(rope: Json) -> dict[str, Any]:
    """This project's settings for the scaling in `rope_of`, which has no `scaling_problems`."""
    if rope["rope_type"] == "linear":
        return {"rotary_seq_len_interpolation_factor": int(rope["factor"])}
    if rope["rope_type"] == "llama3":
        return {"use_rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        return _yarn_of_json(rope)
    return {}


def _yarn_problems(rope: Json) -> Iterator[str]:
    checks = [(name, check) for name, check, _, _ in _YARN]
    checks += [("truncate", truth), ("attention_factor", number(above=0)), ("factor", number(above=1))]
    checks += [(_ORIGINAL, count())]
    for name, check in checks:
        given = rope.get(name)
        takes_null = name not in ("factor", _ORIGINAL)
        if (expected := check(given)) is not None and not (takes_null and given is None):
            yield f"{name}({shown(given)}) of rope_scaling(yarn) is wrong: {expected}; correct it"
    if rope["rope_theta"] == 1:
        yield "rope_theta(1) of rope_scaling(yarn) is wrong: expected a number above 1; correct it"


def _yarn_of_json(rope: Json) -> dict[str, Any]:
    """YaRN's settings. An ``attention_factor`` is a value of ``--mscale``, or below 1 of ``--mscale-all-dim``."""
    ours = {name: float(rope.get(theirs) or default) for theirs, _, name, default in _YARN}
    if not (ours["mscale"] and ours["mscale_all_dim"]):  # transformers reads both, or none
        ours |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    truncate, magnitude = rope.get("truncate"), rope.get("attention_factor")
    yarn = {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": float(rope["factor"]),
        "yarn_original_max_position_embeddings": rope[_ORIGINAL],
        "yarn_correction_range_round_to_int": True if truncate is None else truncate,
        **ours,
    }
    if magnitude is not None and not math.isclose(magnitude, ModelConfig(**yarn).rope_magnitude):
        log = 0.1 * math.log(rope["factor"])
        yarn |= {"mscale": max(0.0, magnitude - 1.0) / log, "mscale_all_dim": max(0.0, 1.0 / magnitude - 1.0) / log}
    return yarn


def _json_of_yarn(model: ModelConfig) -> dict[str, Any]:
    json: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": model.rotary_scaling_factor,
        _ORIGINAL: model.yarn_original_max_position_embeddings,
        "beta_fast": model.yarn_beta_fast,
        "beta_slow": model.yarn_beta_slow,
        "truncate": model.yarn_correction_range_round_to_int,
    }
    if model.mscale and model.mscale_all_dim:
        return {**json, "mscale": model.mscale, "mscale_all_dim": model.mscale_all_dim}
    return {**json, "attention_factor": model.rope_magnitude}


def scaling_json(model: ModelConfig) -> dict[str, Any] | None:
    """``rope_scaling`` of a model that is scaled in one way at most."""
    if model.position_embedding_type == "yarn":
        return _json_of_yarn(model)
    if model.use_rope_scaling:
        return {"rope_type": "llama3", "factor": model.rope_scaling_factor, **_LLAMA3}
    if model.rotary_seq_len_interpolation_factor != 1:
        return {"rope_type": "linear", "factor": float(model.rotary_seq_len_interpolation_factor)}
    return None
