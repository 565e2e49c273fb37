"""RoPE's settings in ``config.json`` ↔ this project's: plain, scaled linearly, and scaled as Llama 3.1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..config.schema import ModelConfig
from .hugging_face_values import number, plain, shown

Json = Mapping[str, Any]

#: What ``--use-rope-scaling`` is beside its factor: Llama 3.1's and 3.2's.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_of(settings: Json) -> dict[str, Any]:
    """RoPE's settings. Transformers 5 nests them; transformers 4 does not."""
    nested = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    theta = nested.get("rope_theta", settings.get("rope_theta", 10000.0))
    return {**nested, "rope_theta": theta, "rope_type": nested.get("rope_type", nested.get("type", "default"))}


def scaling_problems(rope: Json) -> Iterator[str]:
    """A line for each way in which the scaling in `rope_of` is none of this project's."""
    kind = rope["rope_type"]
    if kind == "default":
        return
    if kind not in ("linear", "llama3"):
        yield f"rope_scaling({plain(kind)}) is not supported; only default, linear and llama3 convert"
        return
    expected = number(least=1)(rope.get("factor"))
    if expected is not None:
        yield f"factor({shown(rope.get('factor'))}) of rope_scaling({kind}) is wrong: {expected}; correct it"
    elif kind == "linear" and rope["factor"] != int(rope["factor"]):
        yield (
            f"factor({rope['factor']}) of rope_scaling(linear) is not a whole number, which "
            "rotary_seq_len_interpolation_factor is"
        )
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
    return {}


def scaling_json(model: ModelConfig) -> dict[str, Any] | None:
    """``rope_scaling`` of a model that is scaled in one way at most."""
    if model.use_rope_scaling:
        return {"rope_type": "llama3", "factor": model.rope_scaling_factor, **_LLAMA3}
    if model.rotary_seq_len_interpolation_factor != 1:
        return {"rope_type": "linear", "factor": float(model.rotary_seq_len_interpolation_factor)}
    return None
