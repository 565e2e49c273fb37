"""Hugging Face's GPT-2 and Llama and this project's model: the same numbers both ways, and what cannot be converted."""

from __future__ import annotations

import json
import shutil
import struct
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="models are made and compared with transformers (pip install -e '.[dev]')")

from safetensors.torch import load_file, save_file

from fp8_megatron.checkpoint import hugging_face_fp8 as fp8
from fp8_megatron.checkpoint import safetensors_files
from fp8_megatron.checkpoint.conversion import Format, Source, find_format, open_source
from fp8_megatron.checkpoint.files import CheckpointError
from fp8_megatron.checkpoint.hugging_face import Heads, Rule
from fp8_megatron.checkpoint.hugging_face_config import export_rules, family_of, json_from_model, model_from_json
from fp8_megatron.checkpoint.hugging_face_folder import Export, HuggingFaceWeights, write_hugging_face
from fp8_megatron.checkpoint.hugging_face_fp8 import FP8Layout
from fp8_megatron.checkpoint.logits import logits_of_folder, logits_of_weights, random_tokens
from fp8_megatron.checkpoint.safetensors_files import SafetensorsFolder, SafetensorsWriter, TensorSpec
from fp8_megatron.checkpoint.torch_dist_weights import TorchDistWeights, write_torch_dist
from fp8_megatron.checkpoint.weights import (
    FC1,
    OUTPUT_LAYER,
    QKV,
    WORD_EMBEDDING,
    Repadded,
    places,
    weight_shapes,
    with_vocab_rows,
)
from fp8_megatron.config import Config
from fp8_megatron.formats import E4M3
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db
from fp8_megatron.testing.hugging_face_models import MODELS, VOCAB_SIZE, load_logits, make_model, save_model

TOKENS = random_tokens(VOCAB_SIZE, batch_size=2, length=32, seed=1)
# FP32 sums of 96 to 160 terms in another order, logits near 2: measured 1.5e-6. Another GELU gives 5e-4.
FP32_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every model of MODELS as transformers saves it, in shards."""
    root = tmp_path_factory.mktemp("hugging_face")
    return {name: save_model(make_model(name), root / name, max_shard_size="60KB") for name in MODELS}


def differ_by(a: Tensor, b: Tensor) -> float:
    return (a[..., :VOCAB_SIZE] - b[..., :VOCAB_SIZE]).abs().max().item()


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(folders: dict[str, Path], name: str) -> None:
    weights = HuggingFaceWeights(folders[name])
    expected = load_logits(folders[name], TOKENS)
    assert differ_by(logits_of_weights(weights, weights.model, TOKENS), expected) < FP32_TOLERANCE
    assert differ_by(logits_of_folder(folders[name], TOKENS), expected) < FP32_TOLERANCE, "one layer at a time"


@pytest.mark.parametrize("name", MODELS)
def test_a_round_trip_gives_every_bit_back(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Theirs → ours as torch_dist, padded → theirs; written in shards, read by safetensors itself."""
    weights = HuggingFaceWeights(folders[name])
    write_torch_dist(tmp_path / "ours", Repadded(weights, VOCAB_SIZE, 256), common={})
    ours = TorchDistWeights(tmp_path / "ours")
    assert ours.shapes == weight_shapes(weights.model, 256)
    export = Export(torch.float32, max_shard_bytes=100_000)
    write_hugging_face(tmp_path / "theirs", ours, weights.model, VOCAB_SIZE, export)
    before, after = (_tensors(folder) for folder in (folders[name], tmp_path / "theirs"))
    assert before.keys() == after.keys()
    for tensor_name, tensor in before.items():
        assert torch.equal(tensor, after[tensor_name]), tensor_name
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 3
    assert differ_by(load_logits(tmp_path / "theirs", TOKENS), load_logits(folders[name], TOKENS)) == 0.0


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_go_in_and_out_unchanged(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = save_model(make_model("llama_gqa"), tmp_path / "in", dtype=dtype)
    weights = HuggingFaceWeights(folder)
    write_hugging_face(tmp_path / "out", weights, weights.model, VOCAB_SIZE, Export(dtype))
    before, after = _tensors(folder), _tensors(tmp_path / "out")
    assert all(torch.equal(before[name], after[name]) and after[name].dtype is dtype for name in before)
    assert differ_by(logits_of_weights(weights, weights.model, TOKENS), load_logits(folder, TOKENS)) < FP32_TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3])
@pytest.mark.parametrize(("groups", "queries", "dim"), [(4, 1, 8), (2, 3, 4), (1, 4, 2)])
def test_qkv_is_interleaved_by_query_group(groups: int, queries: int, dim: int, dtype: torch.dtype) -> None:
    """Against megatron-core's own cutting: [groups, queries + 2, dim] along the first axis."""
    heads, columns = Heads(groups, queries, dim), 6
    qkv = torch.randn(groups * (queries + 2) * dim, columns).to(dtype)
    query, key, value = heads.split(qkv)
    for group in range(groups):
        rows = slice(group * (queries + 2) * dim, (group + 1) * (queries + 2) * dim)
        head = qkv[rows].float().view(queries + 2, dim, columns)
        mine = slice(group * dim, (group + 1) * dim)
        assert torch.equal(query.float().view(groups, queries, dim, columns)[group], head[:queries])
        assert torch.equal(key.float()[mine], head[queries])
        assert torch.equal(value.float()[mine], head[queries + 1])
    if dtype is not E4M3:  # only read from FP8
        assert torch.equal(heads.join([query, key, value]), qkv)


@pytest.mark.parametrize("name", MODELS)
def test_config_goes_both_ways(folders: dict[str, Path], name: str) -> None:
    settings = json.loads((folders[name] / "config.json").read_text())
    model = model_from_json(settings)
    written = json_from_model(model, VOCAB_SIZE, "float32")
    assert model_from_json(written) == model
    for key in written.keys() & settings.keys() - {"torch_dtype", "rope_scaling"}:
        given = settings[key]
        if key == "n_inner" and given is None:
            given = 4 * settings["n_embd"]
        assert written[key] == given, key


LLAMA_JSON: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_both_places_of_rope_theta_are_read() -> None:
    assert model_from_json(LLAMA_JSON).rotary_base == 10000
    assert model_from_json({**LLAMA_JSON, "rope_theta": 5e5}).rotary_base == 500000
    nested = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert model_from_json({**LLAMA_JSON, **nested}).rotary_base == 500000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "mamba"}, r"model_type 'mamba' is not supported; convertible ones: gpt2, llama"),
        ({"model_type": "gpt2", "activation_function": "gelu"}, r"activation_function\(gelu\) .*gelu_new"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, r"inverse_layer_idx\(True\)"),
        ({"model_type": "gpt2", "add_cross_attention": True}, r"add_cross_attention\(True\)"),
        ({"model_type": "gpt2", "embd_pdrop": 0.0}, r"embd_pdrop\(0.0\) and resid_pdrop\(0.1\)"),
        ({**LLAMA_JSON, "hidden_act": "gelu"}, r"hidden_act\(gelu\)"),
        ({**LLAMA_JSON, "sliding_window": 4096}, r"sliding_window\(4096\)"),
        ({**LLAMA_JSON, "attention_bias": True}, r"attention_bias\(True\) without the same mlp_bias\(False\)"),
        ({**LLAMA_JSON, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"rope_scaling\(llama3\)"),
        ({**LLAMA_JSON, "rope_scaling": {"type": "linear", "factor": 2.0}}, r"rope_scaling\(linear\)"),
        ({**LLAMA_JSON, "rope_parameters": {"rope_type": "yarn"}}, r"rope_scaling\(yarn\)"),
        ({**LLAMA_JSON, "rope_theta": 10000.5}, r"rope_theta\(10000.5\)"),
        ({key: value for key, value in LLAMA_JSON.items() if key != "hidden_size"}, "hidden_size is missing"),
    ],
)
def test_what_is_not_implemented_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        model_from_json(settings)


def test_a_model_between_the_architectures_says_what_stands_against_each() -> None:
    model = replace(model_from_json({"model_type": "gpt2"}), normalization="RMSNorm", swiglu=True)
    with pytest.raises(CheckpointError, match=r"gpt2: normalization\(RMSNorm\), swiglu; Against llama: position"):
        family_of(model)


@pytest.mark.parametrize("tied", [True, False])
def test_biases_that_ours_lacks_are_zero_there(tmp_path: Path, tied: bool) -> None:
    """A GPT without biases, and a Llama with biases of QKV alone."""
    gpt2 = replace(
        model_from_json({**MODELS["gpt2_tied"][1], "model_type": "gpt2"}),
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=not tied,
    )
    llama = model_from_json({**MODELS["llama_gqa"][1], "model_type": "llama"})
    for model in (gpt2, replace(llama, add_qkv_bias=True)):
        weights = RandomWeights(weight_shapes(model, 256))
        folder = tmp_path / model.normalization
        write_hugging_face(folder, weights, model, VOCAB_SIZE, Export(torch.float32))
        expected = logits_of_weights(weights, model, TOKENS)
        assert differ_by(load_logits(folder, TOKENS), expected) < FP32_TOLERANCE


class RandomWeights:
    """Random weights of given shapes that counts how many bytes of them are alive."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.bytes_alive = self.most_bytes_alive = 0

    def read(self, key: str, layer: int | None) -> Tensor:
        shape = self.shapes[key] if layer is None else self.shapes[key][1:]
        seed = abs(hash((key, layer))) % 2**31
        value = 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        self.bytes_alive += value.nbytes
        self.most_bytes_alive = max(self.most_bytes_alive, self.bytes_alive)
        weakref.finalize(value.untyped_storage(), self._freed, value.nbytes)
        return value

    def _freed(self, nbytes: int) -> None:
        self.bytes_alive -= nbytes


@pytest.mark.parametrize("target", ["theirs", "ours"])
def test_memory_is_bounded_by_the_largest_weights(tmp_path: Path, target: str) -> None:
    """24 layers pass; no more than two weights are alive at any time."""
    model = replace(model_from_json({**MODELS["llama_gqa"][1], "model_type": "llama"}), num_layers=24)
    weights = RandomWeights(weight_shapes(model, 256))
    if target == "theirs":
        write_hugging_face(
            tmp_path / "out", weights, model, VOCAB_SIZE, Export(torch.float32, FP8Layout.COMPRESSED_TENSORS)
        )
    else:
        write_torch_dist(tmp_path, weights, common={})
    largest = 4 * 2 * 160 * 96  # gate and up, FP32
    assert 0 < weights.most_bytes_alive <= 2 * largest


def test_padding_rows_take_no_more_than_their_share() -> None:
    """Logits far below zero, as published GPT-2s have them: rows of zeros would take all of the softmax."""
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(50, 16, generator=generator) - 4.0
    hidden = torch.rand(20, 16, generator=generator) + 1.0
    padded = with_vocab_rows(torch.cat([head, torch.full((3, 16), 9.0)]), 50, 64)
    assert torch.equal(padded[:50], head) and padded.shape == (64, 16)
    probabilities = (hidden @ padded.t()).softmax(-1)
    assert probabilities[:, 50:].sum(-1).max() <= 14 / 64
    zeros = torch.cat([head, torch.zeros(14, 16)])
    assert (hidden @ zeros.t()).softmax(-1)[:, 50:].sum(-1).min() > 0.99


# FP8


def quantizable() -> Any:
    """A Llama whose widths blocks divide."""
    import transformers

    settings = {**MODELS["llama_gqa"][1], "hidden_size": 256, "intermediate_size": 384}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, bos_token_id=None, eos_token_id=None))


@pytest.mark.parametrize("layout", FP8Layout)
def test_fp8_export_is_read_back(tmp_path: Path, layout: FP8Layout) -> None:
    weights = HuggingFaceWeights(save_model(quantizable(), tmp_path / "in"))
    export = Export(torch.bfloat16, layout, layers_in_16_bits=(1,))
    write_hugging_face(tmp_path / "out", weights, weights.model, VOCAB_SIZE, export)
    stored = _tensors(tmp_path / "out")
    again = HuggingFaceWeights(tmp_path / "out")
    for key, layer in places(weights.shapes):
        before, after = weights.read(key, layer), again.read(key, layer)
        if key.endswith(("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")):
            # E4M3 of normal weights: 31.5 dB; BF16: 50 and more.
            low, high = (30.0, 34.0) if layer != 1 else (48.0, 60.0)
            assert low < snr_db(after, before) < high, (key, layer)
        else:
            assert torch.equal(after, before.bfloat16().float()), key
    fp8_names = {name for name, tensor in stored.items() if tensor.dtype is E4M3}
    assert len(fp8_names) == 2 * 7 and not any("layers.1." in name or "lm_head" in name for name in fp8_names)
    assert all(stored[name + layout.scale_suffix].dtype is torch.float32 for name in fp8_names)
    quantization = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    unquantized = quantization["ignore" if layout is FP8Layout.COMPRESSED_TENSORS else "modules_to_not_convert"]
    assert "lm_head" in unquantized and "model.layers.1.mlp.up_proj" in unquantized and len(unquantized) == 8


def test_per_tensor_payload_is_the_weight_that_training_holds(tmp_path: Path) -> None:
    weights = HuggingFaceWeights(save_model(quantizable(), tmp_path / "in"))
    write_hugging_face(
        tmp_path / "out", weights, weights.model, VOCAB_SIZE, Export(torch.bfloat16, FP8Layout.COMPRESSED_TENSORS)
    )
    stored = _tensors(tmp_path / "out")
    rules: dict[str, Rule] = {rule.key: rule for rule in export_rules(weights.model, VOCAB_SIZE)}
    for key in (QKV + "weight", FC1 + "weight"):
        trained = ScaledTensor.quantize(weights.read(key, 2))
        names = rules[key].names_of(2)
        for name, part in zip(names, rules[key].split(trained.payload), strict=True):
            assert torch.equal(stored[name].view(torch.uint8), part.contiguous().view(torch.uint8)), name
            assert torch.equal(stored[name + "_scale"], trained.scale)


def test_blocks_against_one_block_at_a_time() -> None:
    weight = torch.randn(256, 384) * torch.logspace(-3, 3, 384)
    payload, scales = fp8.quantize_blocks(weight)
    assert payload.dtype is E4M3 and scales.shape == (2, 3)
    values = fp8.dequantize(payload, scales)
    for row in range(2):
        for column in range(3):
            box = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
            one, scale = fp8.quantize_tensor(weight[box], power_of_two=False)
            assert scale.item() == scales[row, column].item() == pytest.approx(weight[box].abs().max().item() / 448)
            assert torch.equal(values[box], one.float() * scale)
    small = torch.randn(32, 256)  # one row of blocks
    assert fp8.quantize_blocks(small)[1].shape == (1, 2)
    with pytest.raises(CheckpointError, match=r"shape \(160, 96\) does not divide into blocks of 128 × 128"):
        fp8.specs(FP8Layout.BLOCKS, "w", (160, 96))


@pytest.mark.slow
@pytest.mark.parametrize("layout", FP8Layout)
def test_transformers_reads_fp8(tmp_path: Path, layout: FP8Layout) -> None:
    from transformers.utils.quantization_config import CompressedTensorsConfig, FineGrainedFP8Config

    package = "compressed_tensors" if layout is FP8Layout.COMPRESSED_TENSORS else "accelerate"
    pytest.importorskip(package, reason=f"transformers reads {layout.value} with {package}: pip install {package}")
    weights = HuggingFaceWeights(save_model(quantizable(), tmp_path / "in"))
    write_hugging_face(tmp_path / "out", weights, weights.model, VOCAB_SIZE, Export(torch.float32, layout))
    again = HuggingFaceWeights(tmp_path / "out")
    config = CompressedTensorsConfig if layout is FP8Layout.COMPRESSED_TENSORS else FineGrainedFP8Config
    theirs = load_logits(tmp_path / "out", TOKENS, quantization_config=config(dequantize=True))
    assert differ_by(theirs, logits_of_weights(again, again.model, TOKENS)) < FP32_TOLERANCE


def test_compressed_tensors_own_decompressor(tmp_path: Path) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors", reason="pip install compressed-tensors")
    from compressed_tensors.quantization import QuantizationConfig

    weights = HuggingFaceWeights(save_model(quantizable(), tmp_path / "in"))
    write_hugging_face(
        tmp_path / "out", weights, weights.model, VOCAB_SIZE, Export(torch.float32, FP8Layout.COMPRESSED_TENSORS)
    )
    quantization = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(quantization).config_groups["group_0"]
    name, stored, again = (
        "model.layers.0.mlp.down_proj.weight",
        _tensors(tmp_path / "out"),
        HuggingFaceWeights(tmp_path / "out"),
    )
    state = {"weight": stored[name], "weight_scale": stored[name + "_scale"]}
    compressor = compressors.BaseCompressor.get_value_from_registry("float-quantized")
    assert torch.equal(compressor.decompress(state, scheme)["weight"].float(), again.read_theirs(name))


def test_gpt2_is_not_exported_in_fp8(folders: dict[str, Path], tmp_path: Path) -> None:
    weights = HuggingFaceWeights(folders["gpt2_tied"])
    with pytest.raises(CheckpointError, match="gpt2 has Conv1D"):
        write_hugging_face(
            tmp_path, weights, weights.model, VOCAB_SIZE, Export(torch.bfloat16, FP8Layout.COMPRESSED_TENSORS)
        )


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq"}, r"quant_method 'gptq' is not supported; only compressed-tensors and fp8"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "format 'pack-quantized'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size\(\[64, 64\]\)"),
    ],
)
def test_other_quantizations_are_refused(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        fp8.check_readable(quantization)


# Files


def _damaged(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "damaged"))


def test_unknown_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    folder = save_model(make_model("llama_gqa"), tmp_path / "in")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    cases = {
        "q_norm": ({**tensors, "model.layers.0.self_attn.q_norm.weight": torch.ones(24)}, "holds .*q_norm.weight"),
        "missing": ({key: value for key, value in tensors.items() if key != name}, f"has no tensor '{name}'"),
        "shape": ({**tensors, name: torch.ones(48, 96)}, r"has shape \(48, 96\), config.json describes \(96, 96\)"),
        "dtype": ({**tensors, name: torch.ones(96, 96, dtype=torch.int8)}, "is I8; weights in F32, F16"),
    }
    for changed, message in cases.values():
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            HuggingFaceWeights(folder)
    extra = {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(12)}
    save_file(extra, folder / "model.safetensors")
    HuggingFaceWeights(folder)  # a buffer that older versions saved


def test_damaged_folders_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = _damaged(folders["llama_gqa"], tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    first = sorted(set(index["weight_map"].values()))[0]
    content = (folder / first).read_bytes()
    (folder / first).write_bytes(content[:-10])
    with pytest.raises(CheckpointError, match=f"{first} is damaged"):
        HuggingFaceWeights(folder)
    (folder / first).unlink()
    with pytest.raises(CheckpointError, match=f"{first} is missing"):
        HuggingFaceWeights(folder)
    index["weight_map"]["lm_head.weight"] = "../../outside.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a file of its folder"):
        HuggingFaceWeights(folder)
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin: load and save it with transformers"):
        HuggingFaceWeights(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds a list, not a JSON object"):
        HuggingFaceWeights(folder)


def test_gpt2_as_it_was_published(folders: dict[str, Path], tmp_path: Path) -> None:
    """Without the wrapper's prefix, with attention masks among the weights and the tied head stored twice."""
    tensors = {name.removeprefix("transformer."): value for name, value in _tensors(folders["gpt2_tied"]).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 40, 40)
    shutil.copytree(folders["gpt2_tied"], tmp_path, ignore=shutil.ignore_patterns("model*"), dirs_exist_ok=True)
    save_file(tensors, tmp_path / "model.safetensors")
    weights = HuggingFaceWeights(tmp_path)
    expected = load_logits(folders["gpt2_tied"], TOKENS)
    assert differ_by(logits_of_weights(weights, weights.model, TOKENS), expected) < FP32_TOLERANCE


def test_values_that_do_not_fit_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    class Broken(HuggingFaceWeights):
        value = torch.nan

        def read(self, key: str, layer: int | None) -> Tensor:
            weight = super().read(key, layer)
            if (key, layer) == (FC1 + "weight", 1):
                weight[3, 5] = self.value
            return weight

    weights = Broken(folders["llama_gqa"])
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.gate_proj.weight would not be finite"):
        write_hugging_face(tmp_path, weights, weights.model, VOCAB_SIZE, Export(torch.float32))
    with pytest.raises(CheckpointError, match=r"mlp.linear_fc1.weight, layer 1, holds an inf or a NaN"):
        write_torch_dist(tmp_path, weights, common={})
    weights.value = 70000.0
    with pytest.raises(CheckpointError, match=r"gate_proj.weight overflows torch.float16 \(\|x\| up to 70000\)"):
        write_hugging_face(tmp_path, weights, weights.model, VOCAB_SIZE, Export(torch.float16))


def test_written_files_are_safetensors(tmp_path: Path) -> None:
    """Mixed widths in any order of writing; read by the safetensors package."""
    tensors = {
        "a": torch.randn(3, 5).to(E4M3),
        "b": torch.randn(7),
        "c": torch.randn(2, 3).bfloat16(),
        "d": torch.randn(1).half(),
        "e": torch.randn(4, 4).t(),
    }
    specs = [TensorSpec(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]
    with SafetensorsWriter(tmp_path, specs, max_shard_bytes=10**6) as writer:
        for name in "ceadb":
            writer.write(name, tensors[name])
    read = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(read[name].float(), value.float()) for name, value in tensors.items())
    assert SafetensorsFolder(tmp_path).spec("a") == specs[0]
    header = struct.unpack("<Q", (tmp_path / "model.safetensors").read_bytes()[:8])[0]
    assert header % 8 == 0
    incomplete = SafetensorsWriter(tmp_path / "incomplete", specs, max_shard_bytes=20)
    with pytest.raises(CheckpointError, match="'b' was never written"), incomplete as writer:
        for name in "acde":
            writer.write(name, tensors[name])
    assert not (tmp_path / "incomplete" / safetensors_files.INDEX_FILE).exists(), "no index of an incomplete folder"


# Sources


def test_what_a_folder_holds_is_found(folders: dict[str, Path], tmp_path: Path) -> None:
    assert find_format(folders["llama_gqa"]) == (Format.HUGGING_FACE, folders["llama_gqa"])
    weights = HuggingFaceWeights(folders["llama_gqa"])
    write_torch_dist(tmp_path / "iter_0000007", weights, common={})
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert (
        find_format(tmp_path)
        == find_format(tmp_path / "iter_0000007")
        == (
            Format.MEGATRON_CORE,
            tmp_path / "iter_0000007",
        )
    )
    with pytest.raises(CheckpointError, match="does not say which model it is; give --config"):
        open_source(tmp_path)
    source: Source = open_source(tmp_path, config=Config(model=weights.model))
    assert torch.equal(source.weights.read(OUTPUT_LAYER, None), weights.read(OUTPUT_LAYER, None))
    other = Config(model=replace(weights.model, num_query_groups=4))
    with pytest.raises(CheckpointError, match=r"linear_qkv.weight has shape \(3, 192, 96\), this model's is \(3, 288"):
        open_source(tmp_path, config=other)
    small = Config(model=replace(weights.model, vocab_size=500))
    with pytest.raises(CheckpointError, match=r"has 203 rows, fewer than vocab_size\(500\)"):
        open_source(tmp_path, config=small)
    with pytest.raises(CheckpointError, match="has none of config.json"):
        find_format(tmp_path.parent)
    with pytest.raises(CheckpointError, match="is not a folder"):
        find_format(tmp_path / "nothing")


def test_norms_are_found_under_their_modules_names(folders: dict[str, Path], tmp_path: Path) -> None:
    """As a layer spec without `sharded_state_dict_keys_map` saves them."""
    weights = HuggingFaceWeights(folders["llama_gqa"])

    class Renamed:
        shapes = {
            key.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.").replace(
                "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
            ): shape
            for key, shape in weights.shapes.items()
        }

        def read(self, key: str, layer: int | None) -> Tensor:
            return weights.read(dict(zip(self.shapes, weights.shapes, strict=True))[key], layer)

    write_torch_dist(tmp_path, Renamed(), common={})
    found = TorchDistWeights(tmp_path)
    assert found.shapes == weights.shapes
    for key, layer in places(weights.shapes):
        assert torch.equal(found.read(key, layer), weights.read(key, layer)), key
    assert WORD_EMBEDDING in found.shapes
