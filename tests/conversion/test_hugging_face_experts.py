"""Hugging Face's models with experts: the forms of their files, their settings, and what a conversion holds of them.

`test_hugging_face` compares logits and weights of these models as of all others.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="models are made and compared with transformers (pip install -e '.[dev]')")

from safetensors.torch import load_file, save_file

from fp8_megatron.activation_functions import Activation
from fp8_megatron.checkpoint import torch_dist
from fp8_megatron.checkpoint.files import CheckpointError
from fp8_megatron.checkpoint.weights import places
from fp8_megatron.config.schema import ModelConfig
from fp8_megatron.conversion.hugging_face_folder import Export, HuggingFaceWeights, write_hugging_face
from fp8_megatron.conversion.hugging_face_fp8 import FP8Layout
from fp8_megatron.conversion.logits import logits_of_folder, logits_of_weights, random_tokens
from fp8_megatron.conversion.torch_dist_writer import write_torch_dist
from fp8_megatron.dtypes import E4M3
from fp8_megatron.kernels import ops
from fp8_megatron.models.registry import hugging_face_of_json, weight_shapes
from fp8_megatron.moe.architecture.hugging_face_config import family_of, model_from_json
from fp8_megatron.moe.architecture.table import EXPERTS_FC1
from tests.harness.counted_weights import CountedWeights
from tests.harness.hugging_face_models import MODELS, VOCAB_SIZE, load_logits, make_model, save_model

TOKENS = random_tokens(VOCAB_SIZE, batch_size=2, length=32, seed=1)
#: As in `test_hugging_face`.
FP32_TOLERANCE = 1e-5
FC1 = EXPERTS_FC1 + "weight"


def model_named(name: str, **settings: Any) -> ModelConfig:
    kind, given = MODELS[name]
    types = {"Mixtral": "mixtral", "Qwen3Moe": "qwen3_moe", "Qwen2Moe": "qwen2_moe", "GptOss": "gpt_oss"}
    model_type = types[kind]
    return model_from_json({**given, "model_type": model_type, **settings})


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("name", ["qwen3_moe_mixed", "mixtral"])
def test_files_may_hold_all_experts_of_a_layer_together(tmp_path: Path, name: str) -> None:
    """As transformers 5 has them in memory, under its names there."""
    model = make_model(name)
    one_by_one = HuggingFaceWeights(save_model(model, tmp_path / "one"))
    together = tmp_path / "together"
    together.mkdir()
    save_file(model.state_dict(), together / "model.safetensors")
    (together / "config.json").write_text((tmp_path / "one" / "config.json").read_text())
    weights = HuggingFaceWeights(together)
    for place in places(weights.shapes):
        assert torch.equal(weights.read(*place), one_by_one.read(*place)), place
    assert torch.equal(weights.read(FC1, 1), one_by_one.read(FC1, 1))
    expected = load_logits(tmp_path / "one", TOKENS)
    assert (logits_of_folder(together, TOKENS) - expected).abs().max() < FP32_TOLERANCE
    # Transformers 4 has them one by one in memory, too.
    theirs = "model.layers.2.mlp.experts.1.up_proj.weight"
    if name == "mixtral":
        theirs = "model.layers.2.block_sparse_moe.experts.1.w3.weight"
    assert torch.equal(weights.read_theirs(theirs), one_by_one.read_theirs(theirs))
    missing = {key: value for key, value in model.state_dict().items() if "layers.2.mlp.experts.down" not in key}
    save_file(missing, together / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no tensor 'model.layers.2.mlp.experts.down_proj', which config"):
        HuggingFaceWeights(together)
    wrong = {
        key: value[:3] if "layers.2.mlp.experts.down" in key else value for key, value in model.state_dict().items()
    }
    save_file(wrong, together / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"down_proj has shape \(3, 96, 128\), config.json describes \(\d, 96, 128\)"
    ):
        HuggingFaceWeights(together)


def test_mxfp4_of_gpt_oss_is_unpacked(tmp_path: Path) -> None:
    """Against transformers' own, value for value; logits are those of its model with these values."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model, generator = make_model("gpt_oss"), torch.Generator().manual_seed(7)
    published = save_model(model, tmp_path / "published")
    state = _tensors(published)
    for name in [name for name in state if name.endswith(("up_proj", "down_proj"))]:
        experts, inputs, outputs = state.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        state[name + "_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        state[name + "_scales"] = torch.randint(120, 126, shape, generator=generator, dtype=torch.uint8)
    save_file(state, published / "model.safetensors")
    settings = json.loads((published / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (published / "config.json").write_text(json.dumps(settings))
    weights = HuggingFaceWeights(published)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("up_proj", "down_proj")):
                packed = (state[name + part] for part in ("_blocks", "_scales"))
                parameter.copy_(convert_moe_packed_tensors(*packed, dtype=torch.float32))
                assert torch.equal(weights.read_theirs(name), parameter), name
        expected = model(TOKENS).logits
    # Logits are up to 9.
    assert (logits_of_weights(weights, weights.model, TOKENS) - expected).abs().max() < 1e-4
    write_hugging_face(tmp_path / "out", weights, weights.model, VOCAB_SIZE, Export(torch.bfloat16))
    written, (name, *_) = _tensors(tmp_path / "out"), [key for key, _ in model.named_parameters() if "up_proj" in key]
    assert written[name].dtype is torch.bfloat16 and torch.equal(written[name].float(), model.get_parameter(name))


def test_whole_numbers_are_weights_of_no_other_model(tmp_path: Path) -> None:
    folder = save_model(make_model("mixtral"), tmp_path)
    state = {name: value.to(torch.uint8) if "lm_head" in name else value for name, value in _tensors(folder).items()}
    save_file(state, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is U8, of a quantisation that is not supported"):
        HuggingFaceWeights(folder)


def test_what_a_run_does_with_tokens_in_training_does_not_change_logits() -> None:
    model = model_named("qwen3_moe")
    weights = CountedWeights(weight_shapes(model, VOCAB_SIZE))
    in_training = replace(model, moe_expert_capacity_factor=0.2, moe_router_force_load_balancing=True)
    logits = logits_of_weights(weights, in_training, TOKENS)
    assert torch.equal(logits, logits_of_weights(weights, model, TOKENS))


@pytest.mark.parametrize("target", ["theirs", "ours"])
def test_memory_holds_one_expert_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    model = replace(model_named("qwen3_moe", num_experts=40), num_layers=6)
    weights = CountedWeights(weight_shapes(model, 256))
    largest = 4 * 256 * 96  # the vocabulary; gate and up of an expert are as large
    monkeypatch.setattr(torch_dist, "_UNWRITTEN_BYTES", largest)
    if target == "theirs":
        export = Export(torch.float32, FP8Layout.COMPRESSED_TENSORS)
        write_hugging_face(tmp_path / "out", weights, model, VOCAB_SIZE, export)
    else:
        write_torch_dist(tmp_path, weights, common={})
    assert 0 < weights.most_bytes_alive <= (2 if target == "theirs" else 3) * largest


@pytest.mark.parametrize("layout", FP8Layout)
def test_each_expert_has_its_own_scales(tmp_path: Path, layout: FP8Layout) -> None:
    """Routers and gates stay linear modules in 16 bits, which readers are told."""
    settings = {"hidden_size": 128, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 128}
    model = model_named("qwen2_moe", **settings)
    weights = CountedWeights(weight_shapes(model, VOCAB_SIZE))
    write_hugging_face(tmp_path, weights, model, VOCAB_SIZE, Export(torch.bfloat16, layout, layers_in_16_bits=(1,)))
    stored = _tensors(tmp_path)
    names = [f"model.layers.2.mlp.experts.5.{name}_proj.weight" for name in ("gate", "up")]
    gate_and_up = weights.read(FC1, 2, 5)
    again = HuggingFaceWeights(tmp_path)
    if layout is FP8Layout.COMPRESSED_TENSORS:  # the FP8 weight of training at one scale an expert
        payload, _, scale = ops.quantize_current(gate_and_up, E4M3)
        assert torch.equal(torch.cat([stored[name] for name in names]).view(torch.uint8), payload.view(torch.uint8))
        assert all(torch.equal(stored[name + "_scale"], scale) for name in names)
    else:
        assert stored[names[0] + "_scale_inv"].shape == (2, 1)
    error = (again.read(FC1, 2, 5) - gate_and_up).norm() / gate_and_up.norm()
    assert 0.01 < error < 0.04  # E4M3 rounds to 2^-4 of a value at most
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    unquantized = settings["ignore" if layout is FP8Layout.COMPRESSED_TENSORS else "modules_to_not_convert"]
    outside = [name for name in unquantized if "layers.1." not in name]
    gates = [f"model.layers.{layer}.mlp.{gate}" for layer in (0, 2) for gate in ("gate", "shared_expert_gate")]
    assert sorted(outside) == sorted(["lm_head", *gates])
    assert "model.layers.1.mlp.experts.5.up_proj" in unquantized
    fp8_names = {name for name, tensor in stored.items() if tensor.dtype is E4M3}
    assert len(fp8_names) == 2 * (4 + 3 * 6 + 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_transformers_reads_experts_in_fp8(tmp_path: Path, name: str) -> None:
    from transformers.utils.quantization_config import FineGrainedFP8Config

    pytest.importorskip("accelerate", reason="transformers reads fp8 with accelerate: pip install accelerate")
    widths = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128}
    model = model_named(name, **widths, head_dim=64)
    weights = CountedWeights(weight_shapes(model, VOCAB_SIZE))
    write_hugging_face(tmp_path, weights, model, VOCAB_SIZE, Export(torch.float32, FP8Layout.BLOCKS))
    ours = logits_of_weights(HuggingFaceWeights(tmp_path), model, TOKENS)
    theirs = load_logits(tmp_path, TOKENS, quantization_config=FineGrainedFP8Config(dequantize=True))
    # Logits up to 8 of weights 2.5 to 6 times those of other tests: measured 1.3e-5.
    assert (ours - theirs).abs().max() < 1e-4


def test_what_a_file_of_gpt_oss_does_not_say_is_the_published_models() -> None:
    """gpt-oss-120b's config.json, which transformers' defaults are."""
    import transformers

    theirs = transformers.GptOssConfig()
    required = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    model = model_from_json({"model_type": "gpt_oss", **{name: getattr(theirs, name) for name in required}})
    assert model_from_json({**json.loads(theirs.to_json_string()), "vocab_size": theirs.vocab_size}) == model
    assert (model.num_experts, model.moe_router_topk, model.head_dim, model.query_groups) == (128, 4, 64, 8)
    assert model.windows == [127, None] * 18 and model.softmax_type == "learnable"
    assert model.activation == Activation("clamped_swiglu", (7.0, 1.702, 1.0))
    assert model.rope_magnitude == pytest.approx(0.1 * math.log(32) + 1)
    plain = replace(model, position_embedding_type="rope", vocab_size=theirs.vocab_size)
    settings = hugging_face_of_json({"model_type": "gpt_oss"}).json_from_model(plain, theirs.vocab_size, "float32")
    assert model_from_json(settings).position_embedding_type == "rope"


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen2Moe", "Qwen3Moe"])
def test_what_a_file_does_not_say_is_transformers_default(kind: str) -> None:
    import transformers

    theirs = getattr(transformers, f"{kind}Config")()
    required = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    model = model_from_json({"model_type": theirs.model_type, **{name: getattr(theirs, name) for name in required}})
    assert (
        (model.num_experts, model.moe_router_topk) == (theirs.num_local_experts, theirs.num_experts_per_tok)
        if (kind != "Qwen2Moe")
        else (theirs.num_experts, theirs.num_experts_per_tok)
    )
    assert model.query_groups == theirs.num_key_value_heads
    assert model.head_dim == theirs.hidden_size // theirs.num_attention_heads
    assert model.rotary_base == theirs.rope_parameters["rope_theta"] and model.norm_epsilon == theirs.rms_norm_eps
    width = theirs.intermediate_size if kind == "Mixtral" else theirs.moe_intermediate_size
    assert model.expert_ffn_hidden_size == width
    assert model.moe_router_pre_softmax is not getattr(theirs, "norm_topk_prob", True)
    assert model.balancing_losses == {"aux_loss": theirs.router_aux_loss_coef}
    assert model.moe_shared_expert_intermediate_size == getattr(theirs, "shared_expert_intermediate_size", None)
    assert model.window_size is None and model.expert_layers == tuple(range(model.num_layers))


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3, 9]}, (1,)),
        ({"mlp_only_layers": [0, 2]}, (1, 3)),
        ({"mlp_only_layers": None}, (0, 1, 2, 3)),
    ],
)
def test_layers_with_experts(settings: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert model_named("qwen3_moe", num_hidden_layers=4, **settings).expert_layers == layers


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 7}, r"num_experts_per_tok\(7\) > num_experts\(6\); correct"),
        ("qwen3_moe", {"decoder_sparse_step": 4}, r"decoder_sparse_step\(4\) and mlp_only_layers leave no layer"),
        ("qwen3_moe", {"mlp_only_layers": 1}, r"mlp_only_layers\(1\) is wrong: expected a list of whole numbers"),
        ("qwen3_moe", {"num_experts": 0}, r"num_experts\(0\) is wrong: expected a whole number from 1"),
        ("qwen3_moe", {"norm_topk_prob": None}, r"norm_topk_prob\(None\) is wrong: expected true or false"),
        ("qwen3_moe", {"num_local_experts": 4}, r"num_local_experts\(4\) contradicts num_experts\(6\)"),
        ("qwen3_moe", {"attention_bias": True}, r"attention_bias\(True\) is not supported"),
        ("qwen3_moe", {"use_sliding_window": True, "num_experts": []}, "use_sliding_window.*\n.*num_experts"),
        ("qwen3_moe", {"hidden_size": "96"}, r"hidden_size\('96'\) is wrong"),
        ("qwen2_moe", {"qkv_bias": False}, r"qkv_bias\(False\) is not supported; only True"),
        ("gpt_oss", {"attention_bias": False}, r"attention_bias\(False\) is not supported \(gpt-oss has biases every"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, r"swiglu_alpha\(1.5\) is not supported"),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 3}, r"its layers have windows or none\); only full_atten"),
        ("gpt_oss", {"sliding_window": None}, r"sliding_window\(None\) is wrong"),
        ("mixtral", {"router_jitter_noise": 1.5}, r"router_jitter_noise\(1.5\) is wrong"),
    ],
)
def test_settings_that_are_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        model_named(name, **settings)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_a_dense_family_has_no_experts(family: str) -> None:
    assert hugging_face_of_json({"model_type": family, "num_local_experts": 1}).families[family].model_type == family
    with pytest.raises(CheckpointError, match=r"num_local_experts\(8\) is not supported \(only dense MLPs are supp"):
        hugging_face_of_json({"model_type": family, "num_local_experts": 8})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"moe_router_score_function": "sigmoid"},
            r"mixtral: qk_layernorm, moe_router_score_function\(sigmoid\); Against qwen3",
        ),
        ({"moe_router_topk_scaling_factor": 2.5}, r"qwen3_moe: moe_router_topk_scaling_factor\(2.5\)"),
        ({"moe_router_num_groups": 2, "moe_router_group_topk": 1}, r"qwen3_moe: moe_router_num_groups\(2\)"),
        ({"moe_router_load_balancing_type": ("sinkhorn",)}, r"moe_router_load_balancing_type\(sinkhorn\)"),
        ({"moe_shared_expert_intermediate_size": 64}, r"qwen3_moe: moe_shared_expert_intermediate_size\(64\);"),
        ({"moe_shared_expert_intermediate_size": 64}, r"qwen2_moe: .*no shared expert with a gate"),
        ({"qk_layernorm": False, "moe_router_pre_softmax": True}, r"Against mixtral: moe_router_pre_softmax;"),
        ({"qk_layernorm": False, "moe_layer_freq": "2"}, r"Against mixtral: moe_layer_freq\(2\);"),
    ],
)
def test_a_model_that_no_family_computes_says_what_stands_against_each(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        family_of(replace(model_named("qwen3_moe"), **settings))
