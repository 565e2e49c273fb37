"""The tool from the outside: every pair of formats, the trained model in FP8, and what a wrong command says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="models are made and compared with transformers (pip install -e '.[dev]')")

from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from safetensors.torch import load_file, save_file

from fp8_megatron.assembly import parts_of
from fp8_megatron.checkpoint.saved_run import SavedRun
from fp8_megatron.checkpoint.weights import TorchDistWeights, places
from fp8_megatron.commands import convert_checkpoint
from fp8_megatron.config.io import config_text, load_config, parse_config
from fp8_megatron.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    PrecisionConfig,
)
from fp8_megatron.conversion import logits as logits_module
from fp8_megatron.conversion.conversion import check_trainable, open_source
from fp8_megatron.conversion.hugging_face_folder import HuggingFaceWeights
from fp8_megatron.conversion.logits import logits_of_weights, random_tokens
from fp8_megatron.data.tokenizer_settings import build_tokenizer
from fp8_megatron.mcore.gpt import build_model
from fp8_megatron.mcore.initialization import named_parameters_of_model
from fp8_megatron.mcore.runtime import runtime
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.mcore.transformer_config import transformer_config
from fp8_megatron.models.keys import name_in_model
from fp8_megatron.models.registry import layers_of_key
from fp8_megatron.quantization.stats import snr_db
from fp8_megatron.training.build import build_recipe
from fp8_megatron.training.trainer import Trainer
from tests.harness.hugging_face_models import VOCAB_SIZE, load_logits, make_model, save_model
from tests.harness.limits import files_limited_to
from tests.harness.megatron_run import spec_of
from tests.harness.ranks import RankPool
from tests.harness.runs import tiny_flags
from tests.harness.tiny_checkpoint import run_tiny_on_a_rank
from tests.harness.tiny_gpt import GPT3_STYLE, LLAMA_STYLE, tiny_config

CPU = torch.device("cpu")
SCRIPT = Path(__file__).with_name("save_with_megatron.py")


def stock_model(config: Config) -> GPTModel:
    """megatron-core's own layers, the vocabulary unpadded."""
    model, settings = config.model, transformer_config(config, CPU, parts_of(config).settings)
    assert model.vocab_size is not None
    return GPTModel(
        settings,
        spec_of(config, settings),
        vocab_size=model.vocab_size,
        max_sequence_length=model.seq_length,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
    )


def convert(source: Path, output: Path, to: str, *flags: str) -> int:
    return convert_checkpoint.main(["--input", str(source), "--output", str(output), "--to", to, *flags])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama_gqa"), tmp_path_factory.mktemp("llama") / "in", max_shard_size="60KB")


@pytest.mark.parametrize(("name", "ranks"), [("gpt2_tied", 2), ("llama_gqa", 2), ("qwen3_moe_mixed", 1)])
def test_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, ranks: int) -> None:
    theirs = save_model(make_model(name), tmp_path / "theirs")
    flags = ("--precision", "fp8", "--opt-level", "O2", "--seq-length", "32")
    assert convert(theirs, tmp_path / "ours", "ours", *flags, "--tensor-model-parallel-size", str(ranks)) == 0
    assert capsys.readouterr().err.count("agree: ") == 2
    folder = tmp_path / "ours" / "iter_0000000"
    config, description = load_config(folder / "config.yaml"), json.loads((folder / "checkpoint.json").read_text())
    assert (config.precision.level, config.parallel.tensor_model_parallel_size) == ("O2", ranks)
    assert (config.model.seq_length, config.model.vocab_size) == (32, VOCAB_SIZE)
    assert config.model.max_position_embeddings == json.loads((theirs / "config.json").read_text()).get(
        "n_positions", 64
    )
    assert (description["padded_vocab_size"], description["level"]) == (256, "O2")
    assert convert(tmp_path / "ours", tmp_path / "back", "hf", "--dtype", "fp32") == 0
    before, after = HuggingFaceWeights(theirs), HuggingFaceWeights(tmp_path / "back")
    assert all(torch.equal(before.read(*place), after.read(*place)) for place in places(before.shapes))


@pytest.mark.parametrize("flags", [(), ("--dtype", "fp16"), ("--fp8", "compressed-tensors")], ids=" ".join)
def test_rounded_exports_are_compared_too(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    assert convert(llama, tmp_path / "out", "hf", *flags) == 0
    text = capsys.readouterr().err
    assert text.count("agree: this project and transformers") == 2 and "weights rounded to" in text


def test_a_wrong_conversion_is_noticed(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate and up exchanged on the way in, which no shape shows."""
    from fp8_megatron.models.decoder import hugging_face_rules

    monkeypatch.setattr(hugging_face_rules, "join_gate_and_up", lambda parts: torch.cat([parts[1], parts[0]]))
    assert convert(llama, tmp_path / "out", "ours", "--precision", "bf16") == 1
    error = capsys.readouterr().err
    assert "DIFFER: this project and transformers on" in error
    assert f"{tmp_path}/out is not written, since the logits differ; --no-verify writes it" in error
    assert list(tmp_path.iterdir()) == [], "nothing is left that looks complete"


def test_wrong_commands(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for source, output, to, flags, message in (
        (llama, tmp_path / "full", "ours", (), "is not an empty folder; give a new one"),
        (tmp_path / "none", tmp_path / "a", "hf", (), "does not exist; check the path"),
        (llama, tmp_path / "a", "ours", ("--tensor-model-parallel-size", "4"), "num_query_groups(2) % tensor_model"),
        (llama, tmp_path / "a", "hf", ("--fp8", "fp8"), "does not divide into blocks of 128 × 128"),
        (llama, tmp_path / "a", "ours", ("--config", "none.yaml"), "cannot read the configuration file"),
        (llama, tmp_path / "a", "ours", ("--verify-tokens", "0"), "argument --verify-tokens: 0 is out of range"),
        (llama, tmp_path / "a", "hf", ("--max-shard-gb", "-1"), "argument --max-shard-gb: -1 is out of range"),
        (llama, tmp_path / "a", "hf", ("--max-shard-gb", "nan"), "nan is out of range; give more than 0"),
        (llama, tmp_path / "a", "ours", ("--dtype", "bf16"), "--dtype bf16: --to ours does not read it, --to hf does"),
        (llama, tmp_path / "a", "hf", ("--no-verify", "--seed", "1"), "--seed 1: --no-verify compares nothing"),
        (llama, tmp_path / "a", "hf", ("--iteration", "-1"), "argument --iteration: -1 is out of range"),
        (Path(""), tmp_path / "a", "hf", ("--input", ""), "argument --input: the text is empty"),
        (llama, tmp_path / "full" / "file" / "a", "hf", (), f"{tmp_path}/full/file is a file, not a folder"),
    ):
        try:
            status = convert(source, output, to, *flags)
        except SystemExit as error:
            status = error.code
        assert status == 2
        error = capsys.readouterr().err
        assert "error: " in error and message in error
    assert not (tmp_path / "a").exists() and not (tmp_path / "a.partial").exists(), "nothing is left behind"


@pytest.mark.parametrize("to", ["ours", "hf", "mcore"])
def test_a_failure_in_the_middle_leaves_nothing(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    """A limit on the size of files stands for a full disk, and an inf among the last weights for a bad model."""
    with files_limited_to(20_000):
        assert convert(llama, tmp_path / "out", to) == 2
    assert f"--output {tmp_path}/out cannot be written (File too large; " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    folder = Path(shutil.copytree(llama, tmp_path / "in"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"]["model.norm.weight"]
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = torch.inf
    save_file(tensors, file, metadata={"format": "pt"})
    assert convert(folder, tmp_path / "out", to) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_damaged_checkpoint_is_told_with_a_flag_that_the_tool_has(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(llama, tmp_path / "ours", "ours", "--precision", "bf16", "--no-verify") == 0
    folder = tmp_path / "ours" / "iter_0000000"
    (folder / "checkpoint.json").write_bytes(b"{}")
    assert convert(tmp_path / "ours", tmp_path / "out", "hf") == 2
    error = capsys.readouterr().err
    assert "checkpoint.json is damaged: it has 2 bytes" in error and "use another iteration (--iteration)" in error
    (folder / "manifest.json").unlink()
    assert convert(tmp_path / "ours", tmp_path / "out", "hf") == 2
    assert capsys.readouterr().err.endswith("manifest.json is missing; use another iteration\n")


@pytest.mark.parametrize("settings", [None, {"eos_token": "<|endoftext|>"}])
def test_a_tokenizer_keeps_its_class_beside_a_model_of_another_type(tmp_path: Path, settings: dict | None) -> None:
    """The config.json gives it its class: a Qwen2's has special tokens, a Llama's none."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    folder = save_model(make_model("qwen2"), tmp_path / "in")
    words = {letter: index for index, letter in enumerate("abcdefgh")} | {"<|endoftext|>": 8}
    tokenizers.Tokenizer(tokenizers.models.BPE(words, [])).save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert convert(folder, tmp_path / "out", "hf", "--no-verify") == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"
    before, after = (transformers.AutoTokenizer.from_pretrained(path) for path in (folder, tmp_path / "out"))
    assert type(after) is type(before) and after.special_tokens_map == before.special_tokens_map
    assert after.encode("bad head") == before.encode("bad head")


def test_another_conversion_into_the_same_folder_is_told(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "theirs").touch()
    assert convert(llama, tmp_path / "out", "hf") == 2
    assert "another conversion into" in capsys.readouterr().err and (tmp_path / "out.partial" / "theirs").exists()


@pytest.mark.parametrize(
    "flags",
    [
        "--full-validation --eval-interval 2",
        "--full-validation --multiple-validation-sets --validation-set-names a --valid-data-path b --eval-interval 2",
        "--rollback-on-loss-spike --save run --save-interval 2",
        "--override-opt_param-scheduler --load run",
        "--use-checkpoint-opt_param-scheduler --load run",
        "--check-weight-hash-across-dp-replicas-interval 2",
    ],
)
def test_what_a_run_sets_of_its_data_folders_and_replicas_is_no_obstacle(tmp_path: Path, flags: str) -> None:
    run = {"mock_data": None, "eval_interval": None, "train_data_path": "a", "tokenizer_type": "NullTokenizer"}
    config = parse_config([*tiny_flags(tmp_path, precision="bf16", **run), *flags.split()])
    words = ["--input", str(tmp_path), "--output", str(tmp_path / "new"), "--to", "ours"]
    check_trainable(convert_checkpoint.with_flags(config, convert_checkpoint.parse_arguments(words)), VOCAB_SIZE)


@pytest.fixture(scope="module")
def qkv_biases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with biases of QKV alone, as transformers saves it: those of o_proj are zero."""
    folder = save_model(make_model("llama_biases"), tmp_path_factory.mktemp("qkv_biases"))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if not ("mlp" in name and name.endswith("bias"))}
    save_file(
        {name: 0 * value if name.endswith("o_proj.bias") else value for name, value in kept.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "mlp_bias": False}))
    return folder


def test_biases_of_qkv_alone_go_there_and_back(
    qkv_biases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(qkv_biases, tmp_path / "ours", "ours", "--precision", "bf16") == 0
    model = load_config(tmp_path / "ours" / "iter_0000000" / "config.yaml").model
    assert model.add_qkv_bias and model.disable_bias_linear
    assert convert(tmp_path / "ours", tmp_path / "back", "hf", "--dtype", "fp32") == 0
    assert capsys.readouterr().err.count("agree: ") == 4
    before, after = (load_file(folder / "model.safetensors") for folder in (qkv_biases, tmp_path / "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_other_biases_of_attention_are_refused(
    qkv_biases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(qkv_biases, tmp_path / "in"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.self_attn.o_proj.bias"][5] = 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert convert(folder, tmp_path / "out", "ours", "--precision", "bf16") == 2
    assert "every self_attn.o_proj.bias is zero (add_qkv_bias), but one is not (|x| up to 5.0e-01)" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


def _train(ranks: RankPool, config: Config, folder: Path, num_steps: int) -> None:
    """A tiny run of this project, saved."""
    ranks.run(run_tiny_on_a_rank, config, num_steps, None, folder, num_ranks=1)


@pytest.mark.parametrize(
    "model", [pytest.param(GPT3_STYLE, id="gpt2", marks=pytest.mark.slow), pytest.param(LLAMA_STYLE, id="llama")]
)
def test_trained_o3_leaves_and_agrees_within_fp8s_error(
    ranks: RankPool, tmp_path: Path, model: ModelConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers in FP32 on the exported masters, and this project's FP8 model at O3.

    E4M3 leaves 31.5 dB of a normal tensor. A linear layer multiplies two such: 28.5 dB. Its error is one of eight in
    the residual stream (two layers of four GEMMs), whose other parts, embeddings and what earlier layers wrote, are
    exact or as good: no worse than 28.5 dB − 10·log10(8) ≈ 19.5 dB, if errors were as large as the stream itself.
    """
    config = tiny_config(model, precision=PrecisionConfig())
    _train(ranks, config, tmp_path / "run", 4)
    assert convert(tmp_path / "run", tmp_path / "out", "hf", "--dtype", "fp32") == 0
    assert capsys.readouterr().err.count("agree: ") == 2
    source = open_source(tmp_path / "run")
    tokens = random_tokens(source.vocab_size, batch_size=2, length=32, seed=1)
    exported = load_logits(tmp_path / "out", tokens)
    assert torch.allclose(exported, logits_of_weights(source.weights, model, tokens), atol=1e-5), "FP32, both sides"
    in_fp8 = _logits_at_o3(config, source.weights, tokens)[..., : source.vocab_size]
    assert 19.5 < snr_db(in_fp8, exported) < 45.0, "within FP8's error, and FP8 indeed"


@torch.no_grad()
def _logits_at_o3(config: Config, weights: TorchDistWeights, tokens: Tensor) -> Tensor:
    with runtime(CPU), initialized(config.parallel, config.model.num_layers, CPU) as topology:
        vocab_size = weights.shapes["embedding.word_embeddings.weight"][0]
        (chunk,) = build_model(
            config, vocab_size, topology, CPU, lambda: build_recipe(config.precision), parts_of(config)
        )
        params = named_parameters_of_model(chunk.module)
        for key, layer, _ in places(weights.shapes):
            params[name_in_model(key, layer)].copy_(weights.read(key, layer))
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        return chunk.module.eval()(tokens, positions, None).float()


def test_ours_to_another_level_and_layout_keeps_everything(ranks: RankPool, tmp_path: Path) -> None:
    config = replace(
        tiny_config(LLAMA_STYLE),
        data=DataConfig(mock_data=True),
        checkpoint=CheckpointConfig(load=str(tmp_path / "earlier"), finetune=True),
    )
    _train(ranks, config, tmp_path / "a", 2)
    assert convert(tmp_path / "a", tmp_path / "b", "ours", "--precision", "bf16", "--no-verify") == 0
    before, after = tmp_path / "a" / "iter_0000002", tmp_path / "b" / "iter_0000002"
    rewritten = load_config(after / "config.yaml")
    assert rewritten.precision.precision == "bf16"
    assert rewritten.checkpoint == CheckpointConfig(), "--load resumes it, whatever the first run did"
    for file in before.iterdir():
        if file.name not in ("config.yaml", "manifest.json"):
            assert (after / file.name).read_bytes() == file.read_bytes(), file.name
    (tmp_path / "best").symlink_to(before)
    assert convert(tmp_path / "best", tmp_path / "c", "ours", "--no-verify") == 0
    assert (tmp_path / "c" / "iter_0000002" / "manifest.json").is_file()
    resumed = tiny_config(LLAMA_STYLE, precision=PrecisionConfig(precision="bf16"))
    (run,) = ranks.run(run_tiny_on_a_rank, resumed, 1, tmp_path / "b", None, num_ranks=1)
    assert run.progress.iteration == 2 and run.losses[0] < 6.0


@pytest.mark.parametrize("to", ["hf", "ours", "mcore"])
def test_another_models_config_is_refused(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    """Settings that no shape shows: logits would be compared under the wrong ones, and agree."""
    config = tiny_config(LLAMA_STYLE)
    _train(ranks, config, tmp_path / "run", 1)
    assert config.model.vocab_size is None
    for change, message in (
        ({"norm_epsilon": 0.1}, "was saved with norm_epsilon(1e-05), --config has norm_epsilon(0.1), under which"),
        ({"rotary_base": 50}, "--config has rotary_base(50), under which those weights compute something else"),
        ({"window_size": "3,0"}, "--config has window_size(3,0)"),
        ({"vocab_size": 99}, "was saved with a vocabulary of 256 tokens, --config has vocab_size(99); correct it"),
    ):
        (tmp_path / "other.yaml").write_text(config_text(replace(config, model=replace(config.model, **change))))
        flags = ("--config", str(tmp_path / "other.yaml"), "--no-verify")
        assert convert(tmp_path / "run", tmp_path / "out", to, *flags) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_config_says_nothing_else_of_a_hugging_face_model(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``config.json`` says what the model is, so other settings of it would be read by nothing."""
    path = tmp_path / "run.yaml"
    flags = ("--config", str(path), "--no-verify")
    path.write_text("model: {hidden_dropout: 0.2, norm_epsilon: 1e-6}\nseq_length: 8\nlr: 1e-4")
    assert convert(llama, tmp_path / "out", "ours", *flags) == 2
    error = capsys.readouterr().err
    assert "nothing reads hidden_dropout(0.2) of --config; leave it out\n" in error
    assert "nothing reads seq_length(8) of --config; leave it out, or give --seq-length" in error
    assert not (tmp_path / "out").exists()
    path.write_text("lr: 3e-4")
    assert convert(llama, tmp_path / "out", "ours", *flags) == 0
    config = load_config(tmp_path / "out" / "iter_0000000" / "config.yaml")
    path.write_text(config_text(config))  # all settings, of the same model
    assert config.optimizer.lr == 3e-4 and convert(llama, tmp_path / "again", "ours", *flags) == 0


def test_native_state_leaves_in_fp32(ranks: RankPool, tmp_path: Path) -> None:
    """Every tensor with its value, moments included; megatron-core reads it, and training goes on from it."""
    config = tiny_config(LLAMA_STYLE, precision=PrecisionConfig())
    _train(ranks, config, tmp_path / "run", 2)
    assert convert(tmp_path / "run", tmp_path / "out", "ours", "--ckpt-state-dtype", "fp32", "--no-verify") == 0
    before, after = (SavedRun(tmp_path / name / "iter_0000002") for name in ("run", "out"))
    assert [each.description["state_dtype"] for each in (before, after)] == ["native", "fp32"]
    assert before.reader.shapes == after.reader.shapes
    for key in before.reader.shapes:
        assert torch.equal(before.reader.read_whole(key), after.reader.read_whole(key)), key
    plain = tiny_config(replace(LLAMA_STYLE, vocab_size=256), precision=PrecisionConfig(precision="bf16"))
    (loaded,) = ranks.run(_load_with_megatron, plain, after.folder, num_ranks=1)
    weights = open_source(tmp_path / "run").weights
    for key, layer, _ in places(weights.shapes):
        assert torch.equal(loaded[name_in_model(key, layer)], weights.read(key, layer)), key
    runs = [ranks.run(run_tiny_on_a_rank, config, 1, tmp_path / name, None, num_ranks=1)[0] for name in ("run", "out")]
    assert runs[0].losses == runs[1].losses
    for name, value in runs[0].end.items():
        assert torch.equal(runs[1].end[name], value), name


def _load_with_megatron(config: Config, folder: Path) -> dict[str, Tensor]:
    """What megatron-core's own reader puts into a stock model; on a rank."""
    with runtime(CPU), initialized(config.parallel, config.model.num_layers, CPU):
        module = stock_model(config).float()
        for param in module.parameters():
            param.data.fill_(torch.nan)
        loaded = dist_checkpointing.load({"model": module.sharded_state_dict()}, str(folder))
        module.load_state_dict(loaded["model"])
        return {name: param.detach().clone() for name, param in module.named_parameters()}


@pytest.mark.parametrize("name", ["gpt2_untied", "llama_gqa", "qwen3_moe", "qwen3_moe_mixed", "qwen2_moe", "mixtral"])
def test_megatron_core_reads_what_came_from_hugging_face(ranks: RankPool, tmp_path: Path, name: str) -> None:
    theirs = save_model(make_model(name), tmp_path / "theirs")
    assert convert(theirs, tmp_path / "mcore", "mcore", "--no-verify") == 0
    weights = HuggingFaceWeights(theirs)
    config = tiny_config(weights.model, precision=PrecisionConfig(precision="bf16"))
    folder = tmp_path / "mcore" / "iter_0000000"
    (loaded,) = ranks.run(_load_with_megatron, config, folder, num_ranks=1)
    for key, layer, expert in places(weights.shapes):
        number = None if layer is None else layers_of_key(weights.model, key)[layer]
        own = name_in_model(key, number).replace("mlp.experts.", f"mlp.experts.local_experts.{expert}.")
        assert torch.equal(loaded.pop(own), weights.read(key, layer, expert)), own
    assert not loaded
    if weights.model.num_experts is not None:
        again = TorchDistWeights(folder)
        assert again.shapes == weights.shapes
        for place in places(weights.shapes):
            assert torch.equal(again.read(*place), weights.read(*place)), place


@pytest.mark.slow
@pytest.mark.parametrize("model", [GPT3_STYLE, LLAMA_STYLE], ids=["gpt3", "llama"])
def test_megatron_cores_own_checkpoints(tmp_path: Path, model: ModelConfig) -> None:
    """Saved by megatron-core → ours → trained on → megatron-core's format again."""
    config = tiny_config(replace(model, vocab_size=200))
    config = replace(config, data=DataConfig(mock_data=True))
    (tmp_path / "model.yaml").write_text(config_text(config))
    values = tmp_path / "values.safetensors"
    command = [sys.executable, SCRIPT, tmp_path / "model.yaml", tmp_path / "mcore", values]
    subprocess.run(command, check=True, timeout=200)
    saved = load_file(values)
    flags = ("--config", str(tmp_path / "model.yaml"))
    assert convert(tmp_path / "mcore", tmp_path / "ours", "ours", *flags) == 0
    ours = open_source(tmp_path / "ours")
    assert ours.vocab_size == 200
    for key, layer, _ in places(ours.weights.shapes):
        value, expected = ours.weights.read(key, layer), saved[name_in_model(key, layer)]
        rows = slice(200) if value.shape[0] == 256 and value.ndim == 2 and "linear" not in key else slice(None)
        assert torch.equal(value[rows], expected[rows].float()), key
    assert convert(tmp_path / "ours", tmp_path / "back", "mcore") == 0
    back = TorchDistWeights(tmp_path / "back" / "iter_0000000")
    assert all(torch.equal(back.read(*place), ours.weights.read(*place)) for place in places(back.shapes))
    assert {file.name for file in (tmp_path / "back" / "iter_0000000").iterdir()} == {
        ".metadata",
        "metadata.json",
        "common.pt",
        "__0_0.distcp",
    }


def test_without_transformers_ours_is_compared_alone(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp8_megatron.conversion import verification

    monkeypatch.setattr(verification, "has_transformers", lambda: False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert convert(llama, tmp_path / "out", "ours", "--precision", "bf16") == 0
    text = capsys.readouterr().err
    assert "transformers is not installed" in text and text.count("agree: ") == 1
    with pytest.raises(ValueError, match="needs transformers"):
        logits_module.logits_of_folder(llama, torch.zeros(1, 4, dtype=torch.long))


# Tokenizers


def test_a_sentencepiece_tokenizer_travels(
    tokenizer_model: str, documents: list[str], ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    data = DataConfig(tokenizer_model=tokenizer_model, mock_data=True)
    config = replace(tiny_config(replace(LLAMA_STYLE, vocab_size=512)), data=data)
    _train(ranks, config, tmp_path / "run", 1)
    assert convert(tmp_path / "run", tmp_path / "out", "hf", "--no-verify") == 0
    assert "a tokenizer.json that gives the same ids" in " ".join(capsys.readouterr().err.split())
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = build_tokenizer("SentencePieceTokenizer", tokenizer_model)
    for text in documents:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == ours.encode(text) and theirs.decode(ids) == text
    assert theirs.eos_token_id == ours.eod
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == ours.eod
    assert convert(tmp_path / "out", tmp_path / "again", "ours", "--no-verify") == 0
    again = load_config(tmp_path / "again" / "iter_0000000" / "config.yaml").data
    assert again.tokenizer_type == "HuggingFaceTokenizer"
    tokenizer = build_tokenizer(again.tokenizer_type, again.tokenizer_model)
    assert tokenizer.encode_batch(documents[:3]) == ours.encode_batch(documents[:3]) and tokenizer.eod == ours.eod


@pytest.mark.parametrize("flags", [(), ("--fp8", "compressed-tensors")], ids=["bf16", "fp8"])
def test_a_hugging_face_folder_keeps_its_tokenizer(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    """And what ends a generated text: without it an engine goes on to its limit."""
    theirs, out = tmp_path / "theirs", tmp_path / "out"
    shutil.copytree(llama, theirs)
    settings = json.loads((theirs / "config.json").read_text())
    ids = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0}
    (theirs / "config.json").write_text(json.dumps(settings | ids))
    (theirs / "generation_config.json").write_text('{"temperature": 0.5}')
    files = {"tokenizer.json": "{}", "tokenizer_config.json": '{"eos_token": "a"}', "chat_template.jinja": "b"}
    for name, text in files.items():
        (theirs / name).write_text(text)
    assert convert(theirs, out, "hf", *flags) == 0
    assert f"copied from {theirs}: tokenizer.json, tokenizer_config.json" in " ".join(capsys.readouterr().err.split())
    assert {name: (out / name).read_text() for name in files} == files
    assert (out / "generation_config.json").read_text() == '{"temperature": 0.5}'
    written = json.loads((out / "config.json").read_text())
    assert {name: written[name] for name in ids} == ids
    for name in ids:
        del settings[name]
    (theirs / "config.json").write_text(json.dumps(settings))
    assert convert(theirs, tmp_path / "again", "hf", "--no-verify") == 0
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (1, 2), "what transformers takes for a Llama"


def test_a_unigram_tokenizer_is_copied_and_said_to_be_incomplete(documents: list[str], tmp_path: Path) -> None:
    from fp8_megatron.commands.train_tokenizer import train
    from fp8_megatron.data.hugging_face_tokenizer import export_tokenizer

    model = tmp_path / "unigram.model"
    model.write_bytes(train(documents[:10], vocab_size=500, model_type="unigram", num_threads=1))
    (tmp_path / "out").mkdir()
    exported = export_tokenizer(DataConfig(tokenizer_model=str(model)), tmp_path / "out")
    assert "tokenizer.model alone, without tokenizer.json: only BPE" in exported.message
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["tokenizer.model"]
    none = export_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), tmp_path / "out")
    assert none.message.startswith("no tokenizer: ")


@pytest.mark.slow
def test_lm_evaluation_harness_runs_on_an_exported_folder(tokenizer_model: str, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install lm_eval")
    llama = {name: getattr(LLAMA_STYLE, name) for name in ("swiglu", "normalization", "position_embedding_type")}
    flags = tiny_flags(
        tmp_path / "log",
        **llama,
        disable_bias_linear=True,
        seq_length=128,
        vocab_size=512,
        tokenizer_model=tokenizer_model,
        train_iters=3,
        save=tmp_path / "run",
    )
    Trainer(parse_config(flags)).fit()
    assert convert(tmp_path / "run", tmp_path / "out", "hf") == 0
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--device", "cpu", "--batch_size", "4"]
    command += ["--model_args", f"pretrained={tmp_path / 'out'},dtype=float32", "--tasks", "python_idioms"]
    command += ["--include_path", "tests/tools/zero_shot", "--output_path", str(tmp_path / "results")]
    subprocess.run(
        command, check=True, timeout=600, cwd=Path(__file__).parents[2]
    )  # the task names its data from there
    (report,) = (tmp_path / "results").rglob("results_*.json")
    found = json.loads(report.read_text())
    assert 0.0 <= found["results"]["python_idioms"]["acc,none"] <= 1.0
    assert found["n-samples"]["python_idioms"]["effective"] == 40
    shutil.rmtree(tmp_path / "out")
