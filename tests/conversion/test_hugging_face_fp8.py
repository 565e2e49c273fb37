"""FP8 exports: read back by this project, by transformers and by compressed-tensors; equal to what training holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="models are made and compared with transformers (pip install -e '.[dev]')")

from safetensors.torch import load_file

from fp8_megatron.checkpoint.files import CheckpointError
from fp8_megatron.checkpoint.weights import places
from fp8_megatron.conversion import hugging_face_fp8 as fp8
from fp8_megatron.conversion.hugging_face_folder import Export, HuggingFaceWeights, write_hugging_face
from fp8_megatron.conversion.hugging_face_fp8 import FP8Layout
from fp8_megatron.conversion.logits import logits_of_weights, random_tokens
from fp8_megatron.dtypes import E4M3
from fp8_megatron.kernels import ops
from fp8_megatron.models.decoder.hugging_face_config import rules as rules_of_model
from fp8_megatron.models.decoder.table import FC1, QKV
from fp8_megatron.models.hugging_face import Rule
from fp8_megatron.models.registry import is_linear_weight
from fp8_megatron.quantization.stats import snr_db
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
    values = fp8.dequantize(payload, scales)
    for row in range(2):
        for column in range(3):
            box = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
            one, scale = fp8.quantize_tensor(weight[box])
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
        ({"quant_method": "gptq"}, r"quant_method 'gptq' is not supported; only compressed-tensors and fp8"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "format 'pack-quantized'"),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized", "transform_config": {"R3": {}}},
            "compressed-tensors' transform_config is not supported",
        ),
        ({"quant_method": "fp8", "weight_block_size": 128}, r"weight_block_size\(128\)"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size\(\[64, 64\]\)"),
    ],
)
def test_other_quantizations_are_refused(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        fp8.check_readable(quantization)
