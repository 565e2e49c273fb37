"""Windows of attention in ``config.json`` ↔ ``--window-size`` and the layers that have it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...config.model import ModelConfig
from ..hugging_face import Family
from ..hugging_face_values import Json, shown
from .hugging_face_rules import GPT_OSS, MISTRAL

#: Tokens that a token attends to, itself included, where the file does not say.
_MISTRALS_WINDOW, _GPT_OSS_WINDOW = 4096, 128
_SLIDING, _FULL = "sliding_attention", "full_attention"


def layer_type_problems(family: Family, settings: Json) -> Iterator[str]:
    """A line if ``layer_types`` has others than the family's, or another number of layers."""
    kinds, known = settings.get("layer_types"), (_FULL, _SLIDING) if family is GPT_OSS else (_FULL,)
    if kinds is None:
        return
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
        reason = "its layers have windows or none" if family is GPT_OSS else "attention sees the whole context"
        yield f"layer_types({shown(kinds)}) is not supported ({reason}); only {' and '.join(known)}"
    elif len(kinds) != settings.get("num_hidden_layers"):
        yield (
            f"layer_types has {len(kinds)} entries for num_hidden_layers({settings.get('num_hidden_layers')}); "
            "correct one of them"
        )


def windows_of_json(family: Family, settings: Json) -> dict[str, Any]:
    """``--window-size`` and the layers that have it; their window counts the token itself."""
    if family is GPT_OSS:
        size = {"window_size": f"{settings.get('sliding_window', _GPT_OSS_WINDOW) - 1},0"}
        kinds = settings.get("layer_types")
        if kinds is None or kinds == [(_SLIDING, _FULL)[layer % 2] for layer in range(len(kinds))]:
            return {**size, "window_attn_skip_freq": "2"}
        if _FULL not in kinds:
            return size
        has_window = [int(kind == _SLIDING) for kind in kinds]
        return {**size, "window_attn_skip_freq": str(has_window).replace(" ", "")} if any(has_window) else {}
    window = settings.get("sliding_window", _MISTRALS_WINDOW) if family is MISTRAL else None
    return {} if window is None else {"window_size": f"{window - 1},0"}


def windows_json(model: ModelConfig) -> dict[str, Any]:
    """gpt-oss's settings for the windows of a model, which are of one size."""
    left = next((window for window in model.windows if window is not None), _GPT_OSS_WINDOW - 1)
    kinds = [_FULL if window is None else _SLIDING for window in model.windows]
    return {"sliding_window": left + 1, "layer_types": kinds}
