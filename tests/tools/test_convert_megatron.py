"""Megatron-LM's own checkpoints as sources of a conversion, and what inspection shows of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

pytest.importorskip("transformers", reason="exports are compared with transformers (pip install -e '.[dev]')")

from fp8_megatron.checkpoint.megatron_layout import Name, part_of
from fp8_megatron.checkpoint.weights import WeightReader, places
from fp8_megatron.commands import convert_checkpoint, inspect_checkpoint
from fp8_megatron.config.io import config_text, load_config
from fp8_megatron.conversion.conversion import open_source
from fp8_megatron.conversion.hugging_face_folder import HuggingFaceWeights
from fp8_megatron.models.keys import name_in_model
from tests.harness.megatron_run import BEFORE, config_of, megatron_run

#: The vocabulary; six of the 256 rows are padding.
VOCAB_SIZE = 250
FOLDER = f"iter_{BEFORE:07d}"


@pytest.fixture(scope="module", params=["gpt3", "llama"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one run of megatron-core, in every format."""
    return megatron_run(request.param, tmp_path_factory)


def convert(source: Path, output: Path, to: str, *flags: str) -> int:
    return convert_checkpoint.main(["--input", str(source), "--output", str(output), "--to", to, *flags])


def assert_megatrons_weights(reader: WeightReader, run: Path, num_places: int, *, add_to_norms: float = 0.0) -> None:
    """Every value is the BF16 weight that megatron-core had; a norm's is that and `add_to_norms`."""
    states = load_file(run / "states.safetensors")
    found = list(places(reader.shapes))
    assert len(found) == num_places == sum(name.startswith("weight/") for name in states)
    for key, layer, _ in found:
        value, expected = reader.read(key, layer), states[f"weight/{name_in_model(key, layer)}"].float()
        if "word_embeddings" in key or "output_layer" in key:
            value, expected = value[:VOCAB_SIZE], expected[:VOCAB_SIZE]
        if key.endswith(("layernorm.weight", "layer_norm_weight")):
            expected = expected + add_to_norms
        assert torch.equal(value, expected), key


def number_of_weights(run: Path) -> int:
    return len([name for name in load_file(run / "states.safetensors") if name.startswith("weight/")])


@pytest.mark.parametrize("saved_as", ["torch", "dp_reshardable", "fully_reshardable"])
def test_to_hugging_face_and_to_ours(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], saved_as: str
) -> None:
    size = ("--vocab-size", str(VOCAB_SIZE))
    assert convert(run / saved_as, tmp_path / "hf", "hf", *size) == 0
    assert capsys.readouterr().err.count("agree: ") == 2
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == VOCAB_SIZE
    assert_megatrons_weights(HuggingFaceWeights(tmp_path / "hf"), run, number_of_weights(run))
    flags = ("--precision", "bf16", "--tensor-model-parallel-size", "2")
    assert convert(run / saved_as / FOLDER, tmp_path / "ours", "ours", *size, *flags) == 0
    ours = open_source(tmp_path / "ours")
    assert_megatrons_weights(ours.weights, run, number_of_weights(run))
    own, expected = load_config(tmp_path / "ours" / "iter_0000000" / "config.yaml").model, config_of(run.name).model
    assert replace(own, attention_backend=expected.attention_backend) == replace(expected, vocab_size=VOCAB_SIZE)


def test_to_fp8_and_to_torch_dist(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ("--vocab-size", str(VOCAB_SIZE))
    assert convert(run / "torch", tmp_path / "mcore", "mcore", *size) == 0
    file = tmp_path / "model.yaml"
    file.write_text(
        config_text(replace(config_of(run.name), model=replace(config_of(run.name).model, vocab_size=VOCAB_SIZE)))
    )
    back = open_source(tmp_path / "mcore", config=load_config(file))
    assert_megatrons_weights(back.weights, run, number_of_weights(run))
    if run.name == "llama":  # GPT-2 has no FP8 form
        assert convert(run / "torch", tmp_path / "fp8", "hf", *size, "--fp8", "compressed-tensors") == 0
        assert "weights rounded to float8_e4m3fn" in capsys.readouterr().err


def test_the_parts_of_tensor_parallel_ranks_are_joined(run: Path, tmp_path: Path) -> None:
    _on_two_ranks(run, tmp_path / "two")
    assert_megatrons_weights(open_source(tmp_path / "two", vocab_size=VOCAB_SIZE).weights, run, number_of_weights(run))


_QKV, _EMBEDDING, _HEAD = "self_attention.linear_qkv.weight", "embedding.word_embeddings.weight", "output_layer.weight"


@pytest.mark.parametrize(
    ("rank", "damage", "message"),
    [
        (0, {f"decoder.layers.1.{_QKV}": None}, f"has 2 layers and no decoder.layers.{_QKV}, layer 1: a file is"),
        (
            1,
            {f"decoder.layers.1.{_QKV}": None},
            f"mp_rank_01: decoder.layers.1.{_QKV} is missing, and is (128, 128) on",
        ),
        (0, {f"decoder.layers.0.{_QKV}": (96, 128)}, "layer 0 has shape (192, 128), and is (256, 128) in other"),
        (1, {_EMBEDDING: (64, 128)}, f"mp_rank_01: {_EMBEDDING} has shape (64, 128), and is (128, 128) on other ranks"),
        (0, {_EMBEDDING: None}, f"has no {_EMBEDDING!r}, which this model has"),
        (0, {_HEAD: (256, 128)}, "the head has 512 rows, the embedding 256: a file is damaged"),
        (0, "args", "has no arguments of Megatron-LM, which say whether an MLP has two halves: its 2 tensor-parallel"),
    ],
    ids=["layer", "missing", "other_shape", "other_rank", "embedding", "head", "arguments"],
)
def test_damaged_ranks_are_named(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rank: int,
    damage: dict[str, tuple[int, ...] | None] | str,
    message: str,
) -> None:
    """Each file is one of `torch.save`, so only what they hold together shows it."""
    if run.name != "llama":
        pytest.skip("one model is enough")
    folder = _on_two_ranks(run, tmp_path / "two")
    for file in folder.glob("mp_rank_*/*.pt") if isinstance(damage, str) else [_file(folder, rank)]:
        content = torch.load(file, weights_only=False)
        if isinstance(damage, str):
            del content[damage]
        else:
            for name, shape in damage.items():
                old = content["model"].pop(name)
                content["model"] |= {} if shape is None else {name: torch.ones(shape, dtype=old.dtype)}
        torch.save(content, file)
    size = ("--vocab-size", str(VOCAB_SIZE))
    if isinstance(damage, str):
        own = config_of(run.name)
        (tmp_path / "model.yaml").write_text(config_text(replace(own, model=replace(own.model, vocab_size=VOCAB_SIZE))))
        size = ("--config", str(tmp_path / "model.yaml"))
    assert convert(tmp_path / "two", tmp_path / "out", "ours", *size, "--precision", "bf16") == 2
    error = capsys.readouterr().err
    assert message in error and "internal error" not in error, error
    assert not (tmp_path / "out").exists()


def _file(folder: Path, rank: int) -> Path:
    return folder / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"


def _on_two_ranks(run: Path, root: Path) -> Path:
    """A checkpoint in the format torch as two tensor-parallel ranks would have saved it, weights alone."""
    folder = root / FOLDER
    content = torch.load(_file(run / "torch" / FOLDER, 0), weights_only=False)
    weights = {name: value for name, value in content["model"].items() if isinstance(value, Tensor)}
    for rank in range(2):
        own = {
            name: part_of(Name.of(name, 0).key, value, rank, 2, is_gated=content["args"].swiglu).clone()
            for name, value in weights.items()
        }
        _file(folder, rank).parent.mkdir(parents=True)
        torch.save({**{name: content[name] for name in ("args", "iteration")}, "model": own}, _file(folder, rank))
    (root / "latest_checkpointed_iteration.txt").write_text(str(BEFORE))
    return folder


def test_converted_weights_without_an_iteration(run: Path, tmp_path: Path) -> None:
    """Megatron's tracker names them release."""
    shutil.copytree(run / "torch" / FOLDER, tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    source = open_source(tmp_path, vocab_size=VOCAB_SIZE)
    assert_megatrons_weights(source.weights, run, number_of_weights(run))


@pytest.mark.parametrize("saved_as", ["torch", "dp_reshardable"])
def test_norm_weights_that_are_stored_less_one(run: Path, tmp_path: Path, saved_as: str) -> None:
    folder = _with_argument(run, tmp_path / "changed", "apply_layernorm_1p", True, saved_as=saved_as)
    source = open_source(folder, vocab_size=VOCAB_SIZE)
    assert_megatrons_weights(source.weights, run, number_of_weights(run), add_to_norms=1.0)


def test_what_a_conversion_refuses(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = config_of(run.name)
    other = tmp_path / "other.yaml"
    other.write_text(config_text(replace(own, model=replace(own.model, vocab_size=VOCAB_SIZE, norm_epsilon=1e-6))))
    gated = _with_argument(run, tmp_path / "gated", "attention_output_gate", True)
    normed = _with_argument(run, tmp_path / "normed", "qk_l2_norm", True)
    legacy = _with_argument(run, tmp_path / "unstated", "hidden_size", None)
    converted = tmp_path / "hf"
    assert convert(run / "torch", converted, "hf", "--vocab-size", "256", "--no-verify") == 0
    size = ("--vocab-size", "250")
    for source, flags, message in (
        (run / "torch", (), "with padding of 256 rows; give --vocab-size, the tokenizer's size"),
        (run / "torch", ("--config", str(other)), "saved with norm_epsilon(1e-05), --config has norm_epsilon(1e-06)"),
        (run / "torch", ("--config", str(other), "--vocab-size", "9"), "norm_epsilon(1e-06), under which those"),
        (run / "torch", ("--vocab-size", "257"), "has 256 rows, fewer than vocab_size(257)"),
        (run / "torch", ("--vocab-size", "0"), "argument --vocab-size: 0 is out of range"),
        (gated, size, "was saved with attention_output_gate(True), which this project does not have"),
        (normed, size, "was saved with qk_l2_norm(True), which this project does not have"),
        (legacy, size, "does not say which model it is; give --config"),
        (converted, size, "says how large its vocabulary is; leave it out"),
    ):
        try:
            status = convert(source, tmp_path / "out", "hf", *flags)
        except SystemExit as error:
            status = error.code
        error = capsys.readouterr().err
        assert status == 2 and message in error, error
    assert not (tmp_path / "out").exists()


def _with_argument(run: Path, folder: Path, name: str, value: object, *, saved_as: str = "torch") -> Path:
    """A copy of a checkpoint whose arguments have another value."""
    shutil.copytree(run / saved_as, folder)
    file = folder / FOLDER / ("mp_rank_00/model_optim_rng.pt" if saved_as == "torch" else "common.pt")
    content = torch.load(file, weights_only=False)
    setattr(content["args"], name, value)
    torch.save(content, file)
    return folder


def test_inspection_of_torch_files(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_checkpoint.main([str(run / "torch"), "--values", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    description = report["description"]
    assert report["format"] == "mcore" and description["optimizer"] == "saved" and description["hidden_size"] == 128
    assert (description["iteration"], description["consumed_samples"], description["bf16"]) == (BEFORE, 12, True)
    lines = {line["name"]: line for line in report["tensors"]}
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    weight: Tensor = load_file(run / "states.safetensors")[f"weight/{name}"]
    line = lines[f"mp_rank_00/model.{name}"]
    assert (line["shape"], line["dtype"]) == (list(weight.shape), "bfloat16")
    assert line["amax"] == weight.abs().max().item()
    assert report["files"]["mp_rank_00/distrib_optim.pt"] > 12 * weight.numel()
    copy = shutil.copytree(run / "torch", tmp_path / "copy")
    state = copy / FOLDER / "mp_rank_00" / "distrib_optim.pt"
    state.write_bytes(state.read_bytes()[:-100])
    assert inspect_checkpoint.main([str(copy)]) == 1
    assert "distrib_optim.pt is damaged" in capsys.readouterr().out


@pytest.mark.parametrize("saved_as", ["torch", "dp_reshardable", "fully_reshardable"])
def test_inspection_sums_by_kind(run: Path, capsys: pytest.CaptureFixture[str], saved_as: str) -> None:
    """The sizes of weights and moments are the model's in every format; buffers have padding."""
    report = inspect_checkpoint.report_of(inspect_checkpoint.InspectOptions(run / saved_as))
    states = load_file(run / "states.safetensors")
    numel = sum(value.numel() for name, value in states.items() if name.startswith("weight/"))
    found = inspect_checkpoint.sums(report)
    extra = 5 if saved_as == "torch" else 0
    assert found["weights"][1] == numel + extra
    for kind in ("exp_avg", "exp_avg_sq"):
        assert numel <= found[f"optimizer.{kind}"][1] <= numel * 1.05
