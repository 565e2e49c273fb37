"""The names of a decoder with experts in transformers: no family is read or written yet."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from ...config.model import ModelConfig
from ...errors import CheckpointError
from ..hugging_face import Family, Rule
from ..hugging_face_values import Json

#: As `HuggingFace.families`.
families: Mapping[str, Family] = MappingProxyType({})


def model_from_json(settings: Json) -> ModelConfig:
    """As `HuggingFace.model_from_json`."""
    _refuse()


def token_ids_of_json(settings: Json) -> dict[str, Any]:
    """As `HuggingFace.token_ids_of_json`."""
    _refuse()


def family_of(model: ModelConfig) -> Family:
    """As `HuggingFace.family_of`."""
    _refuse()


def json_from_model(model: ModelConfig, vocab_size: int, dtype: str) -> dict[str, Any]:
    """As `HuggingFace.json_from_model`."""
    _refuse()


def rules(model: ModelConfig, vocab_size: int, settings: Json | None = None) -> list[Rule]:
    """As `HuggingFace.rules`."""
    _refuse()


def _refuse() -> NoReturn:
    raise CheckpointError("a model with num_experts has no Hugging Face format here; keep this project's checkpoint")
