"""FP8 exports: read back by this project, by transformers and by compressed-tensors; equal to what training holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="models are made and compared with transformers (pip install -e '.[dev]')")

from safetensors.torch import load_file, save_file

from fp8_megatron.checkpoint.files import CheckpointError
from fp8_megatron.checkpoint.weights import places
from fp8_megatron.conversion import hugging_face_fp8 as fp8
from fp8_megatron.conversion.hugging_face_folder import Export, HuggingFaceWeights, write_hugging_face
from fp8_megatron.conversion.hugging_face_fp8 import FP8Layout
from fp8_megatron.conversion.logits import logits_of_weights, random_tokens
from fp8_megatron.dtypes import E4M3
from fp8_megatron.formats.blockwise import Tiles
from fp8_megatron.kernels import ops
from fp8_megatron.models.decoder.hugging_face_config import rules as rules_of_model
from fp8_megatron.models.decoder.table import FC1, QKV
from fp8_megatron.models.hugging_face import Rule
from fp8_megatron.models.registry import is_linear_weight
from fp8_megatron.quantization.stats import snr_db
from fp8_megatron.quantization.stored_scales import dequantize
from tests.harness.hugging_face_models import MODELS, VOCAB_SIZE, load_logits, make_model, save_model

TOKENS = random_tokens(VOCAB_SIZE, batch_size=2, length=32, seed=1)
# FP32 sums of 256 and 384 terms in another order, logits near 3: measured 3.6e-6.
FP32_TOLERANCE = 1e-5


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


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
    for key, layer, _ in places(weights.shapes):
        before, after = weights.read(key, layer), again.read(key, layer)
        if is_linear_weight(key):
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
    rules: dict[str, Rule] = {rule.key: rule for rule in rules_of_model(weights.model, VOCAB_SIZE)}
    for key in (QKV + "weight", FC1 + "weight"):
        payload, _, scale = ops.quantize_current(weights.read(key, 2), E4M3)
        names = rules[key].names_of(2)
        for name, part in zip(names, rules[key].split(payload), strict=True):
            assert torch.equal(stored[name].view(torch.uint8), part.contiguous().view(torch.uint8)), name
            assert torch.equal(stored[name + "_scale"], scale)


def test_blocks_against_one_block_at_a_time() -> None:
    weight = torch.randn(256, 384) * torch.logspace(-3, 3, 384)
    payload, scales = fp8.quantize_blocks(weight)
    assert payload.dtype is E4M3 and scales.shape == (2, 3)
    values = dequantize(payload, scales)
    for row in range(2):
        for column in range(3):
            box = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
            one, _, scale = ops.quantize_current(weight[box], E4M3)
            assert scale.item() == scales[row, column].item() == pytest.approx(weight[box].abs().max().item() / 448)
            assert torch.equal(values[box], one.float() * scale)
    small = torch.randn(32, 256)  # one row of blocks
    assert fp8.quantize_blocks(small)[1].shape == (1, 2)
    with pytest.raises(CheckpointError, match=r"shape \(160, 96\) does not divide into blocks of 128 × 128"):
        fp8.specs(FP8Layout.BLOCKS, "w", (160, 96))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("has_fp8_weights", [True, False])
def test_blocks_keep_the_trained_bits(tmp_path: Path, has_fp8_weights: bool, power_of_two: bool) -> None:
    """What a GEMM of a blockwise run multiplies, and what a reader of the export does, are the same numbers."""
    source = HuggingFaceWeights(save_model(quantizable(), tmp_path / "in"))
    export = Export(torch.bfloat16, FP8Layout.BLOCKS, has_fp8_weights=has_fp8_weights, power_of_two=power_of_two)
    write_hugging_face(tmp_path / "out", source, source.model, VOCAB_SIZE, export)
    again, stored = HuggingFaceWeights(tmp_path / "out"), _tensors(tmp_path / "out")
    tiles = Tiles(E4M3, power_of_two)
    names = {rule.key: rule.names_of for rule in rules_of_model(source.model, VOCAB_SIZE)}
    for key, layer, _ in places(source.shapes):
        if not is_linear_weight(key) or (key == QKV + "weight" and not has_fp8_weights):
            continue  # training's blocks of Q, K and V lie across heads that the export has apart
        master = source.read(key, layer)
        if has_fp8_weights:  # at rest: one scale, which every tile takes
            payload, _, scale = ops.quantize_current(master, E4M3)
            operand = tiles.stored_weight(payload, scale)
        else:  # FP16 at rest, cast by tiles for each GEMM
            operand = tiles.cast(master)
        spread = operand.scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: master.shape[0], : master.shape[1]]
        assert torch.equal(again.read(key, layer), operand.payload.float() * spread), key
        parts = [stored[name] for name in names[key](layer)]
        if has_fp8_weights:
            trained = [part.contiguous().view(torch.uint8) for part in rule_of(source, key).split(operand.payload)]
            assert all(torch.equal(part.view(torch.uint8), own) for part, own in zip(parts, trained, strict=True)), key
            for name in names[key](layer):
                assert (stored[name + "_scale_inv"] == scale).all(), key


def rule_of(weights: HuggingFaceWeights, key: str) -> Rule:
    return next(rule for rule in rules_of_model(weights.model, VOCAB_SIZE) if rule.key == key)


def _compressed(**weights: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors; ``weights=None`` quantises none."""
    number = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", **weights}
    group = {"targets": ["Linear"], "weights": None if "weights" in weights else number}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


#: Of a weight [out, in]: the shape of its scales, and how many elements along each axis share one.
SCALES: dict[str, Any] = {
    "one": lambda out, width: ((), (out, width)),
    "one, with an axis": lambda out, width: ((1,), (out, width)),
    "channels": lambda out, width: ((out,), (1, width)),
    "channels, with an axis": lambda out, width: ((out, 1), (1, width)),
    "blocks": lambda out, width: ((-(-out // 128), -(-width // 128)), (128, 128)),
    "blocks, four axes": lambda out, width: ((-(-out // 128), 1, -(-width // 128), 1), (128, 128)),
}
#: quant_method and what goes with it, the suffix of a scale, and its shape.
FOREIGN: list[tuple[dict[str, Any], str, str]] = [
    ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, "_scale_inv", "blocks"),
    ({"quant_method": "fp8", "activation_scheme": "static"}, "_scale", "one"),
    (_compressed(strategy="tensor"), "_scale", "one, with an axis"),
    (_compressed(strategy="channel"), "_scale", "channels, with an axis"),
    (_compressed(strategy="block", block_structure=[128, 128]), "_scale", "blocks"),
    ({"quant_method": "fbgemm_fp8"}, "_scale", "channels, with an axis"),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, "_scale", "one"),
    ({"producer": {"name": "modelopt"}, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "_scale", "channels"),
    ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "_scale", "blocks, four axes"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("quantization", "suffix", "kind"), FOREIGN)
def test_folders_of_others_are_dequantised(
    tmp_path: Path, quantization: dict[str, Any], suffix: str, kind: str, dtype: torch.dtype
) -> None:
    """Every element is payload · scale in float64, rounded once to FP32, where the format says its scale is."""
    source = save_model(make_model("llama_gqa"), tmp_path / "in")  # widths that blocks do not divide
    tensors = _tensors(source)
    expected = {}
    for name, value in list(tensors.items()):
        if name.endswith("_proj.weight"):
            shape, (rows, columns) = SCALES[kind](*value.shape)
            payload = (value * 1000).to(E4M3)
            scale = torch.rand(shape).add(0.5).to(dtype)
            row, column = (torch.arange(size) // step for size, step in zip(value.shape, (rows, columns), strict=True))
            table = scale.double().reshape(int(row[-1]) + 1, int(column[-1]) + 1)
            expected[name] = (payload.double() * table[row][:, column]).float()
            tensors |= {name: payload, name + suffix: scale, name.replace("weight", "input_scale"): torch.ones(())}
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(())
    for file in source.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    weights = HuggingFaceWeights(source)
    assert expected
    for name, values in expected.items():
        assert torch.equal(weights.read_theirs(name), values), name


def test_modelopts_own_file_is_asked(tmp_path: Path) -> None:
    source = save_model(make_model("llama_gqa"), tmp_path / "in")
    file = source / "hf_quant_config.json"
    for algorithm in ("FP8", "W4A8_AWQ"):
        file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}))
        if algorithm == "FP8":
            HuggingFaceWeights(source)
    with pytest.raises(CheckpointError, match="quant_algo 'W4A8_AWQ' of modelopt is not supported"):
        HuggingFaceWeights(source)


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
    ours = logits_of_weights(again, again.model, TOKENS)
    assert (theirs - ours).abs().max() < FP32_TOLERANCE


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


def test_gpt2_is_not_exported_in_fp8(tmp_path: Path) -> None:
    weights = HuggingFaceWeights(save_model(make_model("gpt2_tied"), tmp_path / "in"))
    with pytest.raises(CheckpointError, match="gpt2 has others"):
        write_hugging_face(
            tmp_path / "out", weights, weights.model, VOCAB_SIZE, Export(torch.bfloat16, FP8Layout.COMPRESSED_TENSORS)
        )


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq"}, r"quant_method 'gptq' is not supported; only compressed-tensors, fp8, fbgemm-fp8, "),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "format 'pack-quantized'"),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized", "transform_config": {"R3": {}}},
            "compressed-tensors' transform_config is not supported",
        ),
        ({"quant_method": "fp8", "weight_block_size": 128}, r"weight_block_size\(128\)"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size\(\[64, 64\]\)"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"fmt\('e5m2'\) is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4' of modelopt .* in 16 bits first"),
        (_compressed(weights=None), "group_0 of config_groups quantises activations alone"),
        (_compressed(num_bits=4, type="int"), r"weights of group_0 .*num_bits 4, type 'int'.* are not supported"),
        (_compressed(strategy="group", group_size=128), r"strategy 'group', group_size 128\) are not supported"),
        (_compressed(strategy="block", block_structure=[64, 64]), r"block_structure \[64, 64\]\) are not supported"),
        ({**_compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config has format 'sparse-"),
    ],
)
def test_other_quantizations_are_refused(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        fp8.check_readable(quantization)
