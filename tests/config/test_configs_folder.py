"""Every file of configs/ parses and passes the checks at the number of ranks that it is meant for."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fp8_megatron.config.checks import ConfigError, check_config
from fp8_megatron.config.io import load_config, parse_config
from fp8_megatron.config.learning_rate import LearningRateSchedule
from fp8_megatron.data.tokenizer import padded_vocab_size
from fp8_megatron.planning.memory import predict_memory

CONFIGS = Path(__file__).parents[2] / "configs"

WORLD_SIZES = {
    "gpt_quickstart": (2,),
    "gpt_125m": (1,),
    "llama_125m": (1,),
    "gpt_345m": (1, 4, 8),
    "gpt_1.3b": (1, 4, 8),
    "gpt_7b": (1, 4, 8, 16),
    "gpt_18b": (1, 4, 8),
    "gpt_13b": (4, 8, 16),
    "gpt_175b": (128, 1024),
    "llama_7b": (1, 4, 8, 16),
    "gpt_30b": (8, 16),
    "llama_8b": (4, 8),
    "llama_1b": (1, 4, 8),
    "llama_70b": (32, 64),
    "qwen3_8b": (4, 8),
    "qwen3_30b_a3b": (8, 16),
    "mixtral_8x7b": (8, 16),
    "gpt_oss_20b": (8, 16),
}

#: Files that go over a model's.
OVERLAYS = ("fast",)

#: Parameters of the transformer layers' matrices, in billions: the number in the file's name.
BILLIONS = {
    "gpt_125m": (0.08, 0.09),
    "llama_125m": (0.08, 0.09),
    "gpt_345m": (0.3, 0.35),
    "gpt_1.3b": (1.2, 1.35),
    "gpt_7b": (6.3, 7.0),
    "gpt_18b": (17.5, 18.5),
    "gpt_13b": (12.0, 13.5),
    "gpt_175b": (170.0, 176.0),
    "llama_7b": (6.3, 7.0),
    "gpt_30b": (29.0, 31.0),
    "llama_8b": (6.9, 8.1),
    "llama_1b": (0.9, 1.0),
    "llama_70b": (68.0, 71.0),
    "qwen3_8b": (6.9, 7.0),
    "qwen3_30b_a3b": (29.5, 30.5),
    "mixtral_8x7b": (46.0, 47.0),
    "gpt_oss_20b": (19.5, 20.0),
}


#: The GPUs that a file is for, as its first line says, and GB of each.
NAMED_GPUS = {
    "gpt_125m": (1, 80, "one GPU"),
    "llama_125m": (1, 80, "one GPU"),
    "gpt_345m": (1, 80, "one GPU"),
    "gpt_1.3b": (1, 80, "one GPU of 80 GB"),
    "gpt_7b": (4, 80, "4 GPUs of 80 GB"),
    "gpt_18b": (4, 80, "4 GPUs of 80 GB"),
    "gpt_13b": (4, 80, "4 GPUs of 80 GB"),
    "gpt_175b": (128, 80, "128 GPUs"),
    "llama_7b": (4, 80, "4 GPUs of 80 GB"),
    "gpt_30b": (8, 80, "8 GPUs"),
    "llama_8b": (4, 80, "4 GPUs of 80 GB"),
    "llama_1b": (1, 80, "one GPU of 80 GB"),
    "llama_70b": (32, 80, "32 GPUs"),
    "qwen3_8b": (4, 80, "4 GPUs of 80 GB"),
    "qwen3_30b_a3b": (8, 141, "8 GPUs of 141 GB"),
    "mixtral_8x7b": (8, 141, "8 GPUs of 141 GB"),
    "gpt_oss_20b": (8, 80, "8 GPUs of 80 GB"),
}


def predicted_gb(words: list[str], num_gpus: int) -> float:
    """Weights, gradients and optimizer state of a rank, in GB of 10^9 bytes."""
    config = parse_config([*words, "--mock-data"])
    assert config.model.vocab_size is not None
    padded = padded_vocab_size(
        config.model.vocab_size, config.model.make_vocab_size_divisible_by, config.parallel.tensor_model_parallel_size
    )
    memory = predict_memory(config, padded, world_size=num_gpus)
    return (memory.linear.total + memory.rest.total) / 1e9


@pytest.mark.parametrize("name", NAMED_GPUS)
def test_it_fits_the_gpus_that_it_names(name: str) -> None:
    """With a fifth of each GPU left for activations, buffers and CUDA."""
    num_gpus, gigabytes, said = NAMED_GPUS[name]
    path = CONFIGS / f"{name}.yaml"
    assert said in path.read_text().splitlines()[0]
    assert predicted_gb(["--config", str(path)], num_gpus) < 0.8 * gigabytes


def test_one_large_gpu_takes_18b_with_the_flags_that_its_file_names() -> None:
    """The figures of the file's comment."""
    words = ["--config", str(CONFIGS / "gpt_18b.yaml")]
    text = (CONFIGS / "gpt_18b.yaml").read_text()
    flags = re.findall(r"--\S+ \w+", text[: text.index("Data and tokenizer")])
    assert len(flags) == 4
    assert f"{predicted_gb(words, 4):.0f} GB of each" in text
    assert f"in {predicted_gb([*words, *' '.join(flags).split()], 1):.0f} GB" in text


@pytest.mark.parametrize("name", [name for name in WORLD_SIZES if name != "gpt_quickstart"])
def test_a_short_first_try_needs_no_other_schedule(name: str) -> None:
    config = parse_config(["--config", str(CONFIGS / f"{name}.yaml"), "--mock-data"])
    assert config.optimizer.lr_warmup_fraction is not None
    for train_iters in (1, 5, 20):
        short = replace(config, training=replace(config.training, train_iters=train_iters))
        check_config(short, WORLD_SIZES[name][0])
        schedule = LearningRateSchedule.of(short, WORLD_SIZES[name][0])
        assert 0 < schedule.warmup_samples < schedule.decay_samples


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
    width = (model.num_experts or 1) * model.expert_ffn_hidden_size
    mlp = (3 if model.is_gated else 2) * model.hidden_size * width
    low, high = BILLIONS[name]
    assert low < model.num_layers * (attention + mlp) / 1e9 < high


def test_an_installed_package_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the working folder has none of that name; what is not the package's is an error as ever."""
    here = load_config(CONFIGS / "recipes" / "gpt_7b.yaml")
    monkeypatch.chdir(tmp_path)
    assert load_config("configs/recipes/gpt_7b.yaml") == here
    for path in ("configs/gpt_7c.yaml", "configs/../config/schema.py", "recipes/gpt_7b.yaml", "configs"):
        with pytest.raises(ConfigError, match="cannot read the configuration file"):
            load_config(path)
    (tmp_path / "configs" / "recipes").mkdir(parents=True)
    (tmp_path / "configs" / "recipes" / "gpt_7b.yaml").write_text("seed: 7\n")
    assert load_config("configs/recipes/gpt_7b.yaml").training.seed == 7
