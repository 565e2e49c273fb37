"""Every file of configs/ parses and passes the checks at the number of ranks that it is meant for."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8_megatron.config.checks import check_config
from fp8_megatron.config.io import parse_config

CONFIGS = Path(__file__).parents[2] / "configs"

WORLD_SIZES = {
    "gpt_quickstart": (2,),
    "gpt_345m": (1, 4, 8),
    "gpt_1.3b": (1, 4, 8),
    "gpt_7b": (1, 4, 8, 16),
    "gpt_18b": (1, 4, 8),
    "gpt_13b": (4, 8, 16),
    "gpt_175b": (128, 1024),
    "llama_7b": (1, 4, 8, 16),
}

#: Files that go over a model's.
OVERLAYS = ("fast",)

#: Parameters of the transformer layers' matrices, in billions: the number in the file's name.
BILLIONS = {
    "gpt_345m": (0.3, 0.35),
    "gpt_1.3b": (1.2, 1.35),
    "gpt_7b": (6.3, 7.0),
    "gpt_18b": (17.5, 18.5),
    "gpt_13b": (12.0, 13.5),
    "gpt_175b": (170.0, 176.0),
    "llama_7b": (6.3, 7.0),
}


def test_every_file_has_a_world_size_here() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*WORLD_SIZES, *OVERLAYS}


@pytest.mark.parametrize("overlay", [None, *OVERLAYS])
@pytest.mark.parametrize("name", WORLD_SIZES)
def test_it_parses_and_passes_the_checks(name: str, overlay: str | None) -> None:
    files = [str(CONFIGS / f"{stem}.yaml") for stem in (name, overlay) if stem is not None]
    argv = ["--config", *files, "--data-path", "prefix", "--tokenizer-model", "tokenizer.model"]
    for world_size in WORLD_SIZES[name]:
        if name == "gpt_345m":
            argv += ["--global-batch-size", str(32 * world_size)]
        check_config(parse_config(argv), world_size)


@pytest.mark.parametrize("name", BILLIONS)
def test_its_size_is_the_one_in_its_name(name: str) -> None:
    model = parse_config(["--config", str(CONFIGS / f"{name}.yaml")]).model
    attention = model.hidden_size * model.head_dim * (2 * model.num_attention_heads + 2 * model.query_groups)
    mlp = (3 if model.swiglu else 2) * model.hidden_size * model.padded_ffn_hidden_size
    low, high = BILLIONS[name]
    assert low < model.num_layers * (attention + mlp) / 1e9 < high
