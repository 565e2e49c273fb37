"""What weights of the same shapes compute: every setting and every argument of Megatron's has its place."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from fp8_megatron.checkpoint.same_model import (
    NO_SETTING,
    first_difference,
    model_settings,
    settings_of_arguments,
    unsupported_argument,
)
from fp8_megatron.checkpoint.saved_run import CONFIG, differing_setting, saved_config
from fp8_megatron.config.io import config_text
from fp8_megatron.config.megatron_flags import Kind, megatron_options
from fp8_megatron.config.model import ModelConfig
from fp8_megatron.config.schema import Config
from fp8_megatron.config.words import decimal
from fp8_megatron.moe.architecture import computed_settings
from tests.harness.tiny_gpt import GPT3_STYLE, LLAMA_STYLE

YARN = replace(LLAMA_STYLE, position_embedding_type="yarn", rotary_scaling_factor=4.0)
WITHOUT_BIASES = replace(GPT3_STYLE, disable_bias_linear=True)
MUP = replace(LLAMA_STYLE, use_mup=True)
FOLDER = Path("iter_0000003")
#: Settings that a tensor's name or shape shows.
SHOWN = {
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "kv_channels",
    "group_query_attention",
    "num_query_groups",
    "max_position_embeddings",
    "disable_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
    "vocab_size",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_router_enable_expert_bias",
}
#: Settings under which the same weights compute the same.
FREE = {
    "seq_length",
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "mup_width_mult",
    "make_vocab_size_divisible_by",
    "attention_backend",
    "moe_router_dtype",
    "moe_router_bias_update_rate",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_input_jitter_eps",
    "moe_router_force_load_balancing",
    "moe_expert_capacity_factor",
    "moe_token_drop_policy",
}


def saved_by_megatron(model: ModelConfig, **arguments: object) -> dict[str, object]:
    """The settings that a checkpoint states, whose arguments are those of `model` but for `arguments`."""
    own = asdict(model)
    if "layernorm_epsilon" in arguments:
        del own["norm_epsilon"]
    return settings_of_arguments({**own, **arguments})


def test_every_setting_of_the_model_has_its_place() -> None:
    """A new one joins `computed_settings`, or the sets above."""
    names = [field.name for field in fields(ModelConfig)]
    assert sorted(names) == sorted([*computed_settings, *SHOWN, *FREE])


@pytest.mark.parametrize("name", NO_SETTING)
def test_arguments_without_a_setting(name: str) -> None:
    """Each is an option that is refused, and its default changes nothing."""
    option = megatron_options()[name]
    assert option.kind is Kind.CANNOT, f"--{name} is built: remove its row, and name its setting in computed_settings"
    default: object = option.default or (False if option.arity == "0" else None)
    if isinstance(default, str) and default[0].isdigit():
        default = decimal(default)
    assert default in NO_SETTING[name]
    assert unsupported_argument(FOLDER, {name: default}) is None
    assert unsupported_argument(FOLDER, {name: None}) is None
    other = True if option.arity == "0" else 7
    expected = f"iter_0000003 was saved with {name}({other}), which this project does not have"
    assert unsupported_argument(FOLDER, {"num_layers": 2, name: other}) == expected


def test_the_first_by_name_of_several_arguments_is_named() -> None:
    problem = unsupported_argument(FOLDER, {"multi_latent_attention": True, "mtp_num_layers": 1, "moe_latent_size": 64})
    assert problem == "iter_0000003 was saved with moe_latent_size(64), which this project does not have"


def test_arguments_of_experts() -> None:
    """Numbers and lists are as this project's settings have them."""
    arguments = {"num_experts": 8, "moe_layer_freq": [0, 1], "moe_aux_loss_coeff": 0.01, "moe_router_topk": 4}
    model = replace(LLAMA_STYLE, num_layers=2, num_experts=8, moe_layer_freq="[0]+[1]")
    known = saved_by_megatron(model, **arguments, moe_router_load_balancing_type="seq_aux_loss")
    assert replace(model, **known).balancing_losses == {"seq_aux_loss": 0.01}  # type: ignore[arg-type]
    found = first_difference(known, replace(model, moe_router_topk=4))
    assert found is None
    found = first_difference(known, model)
    assert found is not None and found.flag == "--moe-router-topk 4"
    assert unsupported_argument(FOLDER, arguments) is None
    found = first_difference({"num_experts": 8}, LLAMA_STYLE)
    assert found is not None and "num_experts(8), this run has num_experts(None), another model" in found.sentence(
        FOLDER, "this run", "give it"
    )


@pytest.mark.parametrize(
    ("name", "value"), [("position_embedding_type", "mrope"), ("normalization", "ScaleNorm"), ("window_size", 128)]
)
def test_a_value_that_the_setting_does_not_take(name: str, value: object) -> None:
    assert f"{name}({value}), which this project does not have" in str(unsupported_argument(FOLDER, {name: value}))


@pytest.mark.parametrize(
    ("arguments", "model", "flag"),
    [
        ({"layernorm_epsilon": 1e-6}, GPT3_STYLE, "--norm-epsilon 1e-06"),
        ({"normalization": "RMSNorm"}, GPT3_STYLE, "--normalization RMSNorm"),
        ({"swiglu": True}, GPT3_STYLE, "--swiglu"),
        ({"bias_gelu_fusion": False}, GPT3_STYLE, "--no-bias-gelu-fusion"),
        ({"bias_gelu_fusion": True}, replace(GPT3_STYLE, bias_gelu_fusion=False), "--bias-gelu-fusion"),
        ({"use_transformer_engine_op_fuser": True}, WITHOUT_BIASES, "--use-te-activation-func"),
        ({"swiglu": False}, LLAMA_STYLE, "--no-swiglu"),
        ({"position_embedding_type": "rope"}, GPT3_STYLE, "--position-embedding-type rope"),
        ({"rotary_percent": 0.25, "rotary_base": 500_000}, LLAMA_STYLE, "--rotary-percent 0.25"),
        ({"rotary_interleaved": True}, LLAMA_STYLE, "--rotary-interleaved"),
        ({"rotary_seq_len_interpolation_factor": 4}, LLAMA_STYLE, "--rotary-seq-len-interpolation-factor 4"),
        ({"use_rope_scaling": True, "rope_scaling_factor": 32.0}, LLAMA_STYLE, "--use-rope-scaling"),
        (
            {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
            replace(LLAMA_STYLE, use_rope_scaling=True),
            "--rope-scaling-factor 32.0",
        ),
        ({"position_embedding_type": "yarn"}, LLAMA_STYLE, "--position-embedding-type yarn"),
        ({"rotary_scaling_factor": 8.0, "yarn_beta_fast": None}, YARN, "--rotary-scaling-factor 8.0"),
        ({"yarn_beta_fast": None}, replace(YARN, yarn_beta_fast=64.0), "--yarn-beta-fast 32.0"),
        (
            {"yarn_original_max_position_embeddings": None},
            replace(YARN, yarn_original_max_position_embeddings=32),
            "--yarn-original-max-position-embeddings 4096",
        ),
        ({"yarn_correction_range_round_to_int": False}, YARN, "--no-yarn-correction-range-round-to-int"),
        ({"mscale": 0.7, "mscale_all_dim": 0.7}, YARN, "--mscale 0.7"),
        ({"window_size": (128, 0), "window_attn_skip_freq": 2}, GPT3_STYLE, "--window-size 128,0"),
        ({"use_mup": True}, GPT3_STYLE, "--use-mup"),
        ({"mup_base_hidden_size": None}, replace(MUP, mup_base_hidden_size=32), "--mup-base-hidden-size none"),
        ({"mup_embedding_mult": 2.0}, MUP, "--mup-embedding-mult 2.0"),
        ({"mup_base_head_dim": 32.0}, MUP, "--mup-base-head-dim 32.0"),
    ],
)
def test_differences(arguments: dict[str, object], model: ModelConfig, flag: str) -> None:
    found = first_difference(saved_by_megatron(model, **arguments), model)
    assert found is not None and found.flag == flag
    word = flag.split()[0].removeprefix("--").removeprefix("no-")
    (name,) = [name for name in computed_settings if name.replace("_", "-") == word]
    assert found.sentence(FOLDER, "--config", "correct it") == (
        f"iter_0000003 was saved with {name}({found.saved}), --config has {name}({getattr(model, name)}), under which "
        "those weights compute something else; correct it"
    )


@pytest.mark.parametrize(
    ("settings", "own", "flag"),
    [
        ({"moe_ffn_hidden_size": 64}, {}, "--moe-ffn-hidden-size 64"),
        ({}, {"moe_ffn_hidden_size": 64}, "--moe-ffn-hidden-size none"),
        ({"moe_ffn_hidden_size": 256}, {}, None),
        (
            {"moe_shared_expert_intermediate_size": 64},
            {"moe_shared_expert_intermediate_size": 32},
            "--moe-shared-expert-intermediate-size 64",
        ),
        ({}, {"moe_shared_expert_intermediate_size": 32}, "--moe-shared-expert-intermediate-size none"),
        (
            {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True},
            {"moe_shared_expert_intermediate_size": 32},
            "--moe-shared-expert-gate",
        ),
        ({"moe_router_enable_expert_bias": True}, {}, "--moe-router-enable-expert-bias"),
        ({"qk_layernorm": True, "add_qkv_bias": True}, {"add_qkv_bias": True}, "--qk-layernorm"),
        ({"num_query_groups": 4}, {}, "--num-query-groups 4"),
        ({"kv_channels": 32}, {}, None),
        ({"num_query_groups": 1, "group_query_attention": False}, {}, "--no-group-query-attention"),
    ],
)
def test_sizes_differ_by_what_they_mean(settings: dict[str, object], own: dict[str, object], flag: str | None) -> None:
    """A width that another setting gives by default is no other one."""
    experts = replace(LLAMA_STYLE, num_experts=4)
    found = first_difference(asdict(replace(experts, **settings)), replace(experts, **own))  # type: ignore[arg-type]
    assert (None if found is None else found.flag) == flag
    assert found is None or "another model; give" in found.sentence(FOLDER, "this run", f"give {found.flag}")


@pytest.mark.parametrize(
    ("model", "is_told"), [(WITHOUT_BIASES, True), (GPT3_STYLE, False), (replace(LLAMA_STYLE, swiglu=True), False)]
)
def test_a_checkpoint_of_a_version_with_one_gelu(model: ModelConfig, is_told: bool, tmp_path: Path) -> None:
    """Its GELU was the tanh form, also without biases."""
    (tmp_path / CONFIG).write_text(config_text(replace(Config(), model=model)))
    assert saved_config(tmp_path).model == model and differing_setting(tmp_path, model) is None
    lines = (tmp_path / CONFIG).read_text().splitlines()
    kept = [line for line in lines if "bias_gelu_fusion" not in line and "use_te_activation_func" not in line]
    assert len(lines) - len(kept) == 2
    (tmp_path / CONFIG).write_text("\n".join(kept))
    assert saved_config(tmp_path).model == replace(model, use_te_activation_func=is_told)
    told = differing_setting(tmp_path, model)
    assert (told is not None) == is_told and (told is None or "give --use-te-activation-func, as in" in told)
    assert differing_setting(tmp_path, saved_config(tmp_path).model) is None


def test_an_absent_setting_has_its_default(tmp_path: Path) -> None:
    """It did not exist when the weights were saved. What cannot be read counts as equal."""
    model = replace(LLAMA_STYLE, rotary_interleaved=True)
    text = config_text(replace(Config(), model=model))
    (tmp_path / CONFIG).write_text(text)
    assert differing_setting(tmp_path, model) is None
    (tmp_path / CONFIG).write_text(text.replace("rotary_interleaved: true", ""))
    assert "rotary_interleaved(False), this run has rotary_interleaved(True)" in str(differing_setting(tmp_path, model))
    assert differing_setting(tmp_path, LLAMA_STYLE) is None
    (tmp_path / CONFIG).write_text(text.replace("rotary_interleaved: true", "rotary_interleaved: 3"))
    assert differing_setting(tmp_path, model) is None
    (tmp_path / CONFIG).unlink()
    assert differing_setting(tmp_path, model) is None
    arguments = {"normalization": "RMSNorm", "swiglu": True, "num_attention_heads": model.num_attention_heads}
    found = first_difference(settings_of_arguments(arguments), model)
    assert found is not None and found.flag == "--position-embedding-type learned_absolute"
    found = first_difference(settings_of_arguments({**arguments, "use_rotary_position_embeddings": True}), model)
    assert found is not None and found.flag == "--no-rotary-interleaved"


def test_what_does_not_differ() -> None:
    assert first_difference({"use_mup": True, "mup_attn_scale_power": 0.5}, GPT3_STYLE) is None, "all factors are 1"
    written_out = replace(MUP, mup_base_hidden_size=64, mup_output_mult=0.5)
    assert first_difference(saved_by_megatron(written_out, mup_output_mult=1.0), written_out) is None
    assert first_difference({}, MUP) is None and first_difference(model_settings({"seq_length": 8}), MUP) is not None
    assert first_difference({"rotary_base": 7, "rotary_percent": 0.5}, GPT3_STYLE) is None, "nothing rotates"
    no_fusion = saved_by_megatron(WITHOUT_BIASES, bias_gelu_fusion=False, add_bias_linear=False)
    assert first_difference(no_fusion, WITHOUT_BIASES) is None, "without biases there is no fusion"
    assert first_difference({"bias_gelu_fusion": False}, LLAMA_STYLE) is None, "no GELU"
    assert first_difference({"use_te_activation_func": True}, GPT3_STYLE) is None, "the same form"
    assert first_difference({"rotary_base": 7}, LLAMA_STYLE, finetune=True) is None
    assert first_difference({"rotary_base": 7}, LLAMA_STYLE) is not None
    assert first_difference({}, LLAMA_STYLE) is None
    unscaled = saved_by_megatron(LLAMA_STYLE, rope_scaling_factor=32.0, rotary_seq_len_interpolation_factor=None)
    assert first_difference(unscaled, LLAMA_STYLE) is None
    longer = replace(LLAMA_STYLE, use_rope_scaling=True, rotary_seq_len_interpolation_factor=2)
    for saved in ({"use_rope_scaling": False}, unscaled):
        assert first_difference(saved, longer) is not None
        assert first_difference(saved, longer, finetune=True) is None
    assert first_difference({"rotary_scaling_factor": 8.0, "mscale": 0.7}, LLAMA_STYLE) is None
    assert first_difference({"rotary_percent": 0.5, "use_rope_scaling": True, "rope_scaling_factor": 4.0}, YARN) is None
    scaled = {"position_embedding_type": "yarn", "rotary_scaling_factor": 8.0}
    assert first_difference(scaled, LLAMA_STYLE, finetune=True) is None
    assert first_difference({"position_embedding_type": "rope"}, YARN, finetune=True) is None
    assert first_difference({"position_embedding_type": "rope"}, GPT3_STYLE, finetune=True) is not None
    assert first_difference({"position_embedding_type": "none"}, YARN, finetune=True) is not None
    own = replace(LLAMA_STYLE, num_layers=2, window_size="(8, 0)", window_attn_skip_freq="[1, 0]")
    theirs = saved_by_megatron(own, window_size=(8, 0), window_attn_skip_freq=2)
    assert (theirs["window_size"], theirs["window_attn_skip_freq"]) == ("8,0", "2")
    assert first_difference(theirs, own) is None
    everywhere = saved_by_megatron(own, window_size=(8, 0), window_attn_skip_freq=None)
    found = first_difference(everywhere, own)
    assert found is not None and found.flag == "--window-size 8,0"
    read = model_settings({"norm_epsilon": 1, "num_layers": True, "swiglu": 1, "normalization": "no", "other": 3})
    assert read["norm_epsilon"] == 1.0 and not {"num_layers", "swiglu", "normalization", "other"} & set(read)
    assert replace(ModelConfig(), **settings_of_arguments({"add_bias_linear": False})).disable_bias_linear
