"""Settings that Transformer Engine's layers read from the configuration, through megatron-core's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fp8_megatron.config.schema import PrecisionConfig
from fp8_megatron.mcore.transformer_config import transformer_config
from tests.harness.tiny_gpt import GPT3_STYLE, tiny_config


def test_transformer_engine_is_told_what_stays_out_of_fp8() -> None:
    precision = PrecisionConfig(
        precision="te", fp8_recipe="tensorwise", first_last_layers_bf16=True, num_layers_at_end_in_bf16=2
    )
    told = transformer_config(tiny_config(GPT3_STYLE, precision=precision), torch.device("cpu"))
    assert (told.fp8, told.fp8_recipe) == ("hybrid", "tensorwise")
    assert told.first_last_layers_bf16
    assert (told.num_layers_at_start_in_bf16, told.num_layers_at_end_in_bf16) == (1, 2)


@pytest.mark.parametrize(
    ("ours", "theirs"), [("auto", "auto"), ("cudnn", "fused"), ("flash", "flash"), ("math", "unfused")]
)
def test_transformer_engine_is_told_the_kernel_of_attention(ours: Any, theirs: str) -> None:
    model = replace(GPT3_STYLE, attention_backend=ours)
    told = transformer_config(tiny_config(model, precision=PrecisionConfig(precision="te")), torch.device("cpu"))
    assert told.attention_backend.name == theirs
