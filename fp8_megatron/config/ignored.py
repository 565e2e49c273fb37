"""Settings that a mode does not read. Each that is not at its default is an error, which names the mode and the fix.

A few are notes instead: Megatron does not read them in that mode either, a run is the same without them, and public
scripts give them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from .model import SETTINGS_WITHOUT_YARN, YARN_SETTINGS
from .schema import Config


@dataclass(frozen=True)
class Ignored:
    """Settings that have no effect in one mode.

    Attributes:
        names: the settings.
        mode: the mode in words with its value, if `config` is in it; else None.
        fix: what to choose so that they have one.
        is_error: whether they stop a run.
    """

    names: tuple[str, ...]
    mode: Callable[[Config], str | None]
    fix: str
    is_error: bool = True


def ignored_settings(config: Config) -> Iterator[str]:
    """One line for each setting that is not at its default, has no effect and is an error: value, mode, fix."""
    yield from _lines(config, is_error=True)


def ignored_notes(config: Config) -> Iterator[str]:
    """One line for each setting that is not at its default, has no effect and may be given: value, mode, fix."""
    yield from _lines(config, is_error=False)


def _lines(config: Config, is_error: bool) -> Iterator[str]:
    values, defaults = _values(config), _defaults()
    for rule in _RULES:
        mode = rule.mode(config) if rule.is_error == is_error else None
        for name in rule.names if mode is not None else ():
            if values[name] != defaults[name]:
                yield f"{name}({_shown(values[name])}) has no effect {mode}; drop it or {rule.fix}"


def _sixteen_bits(config: Config) -> str | None:
    precision = config.precision.precision
    return f"under precision({precision})" if precision in ("bf16", "fp16") else None


def _whole_sequences(config: Config) -> str | None:
    return "under context_parallel_size(1)" if config.parallel.context_parallel_size == 1 else None


def _one_stage(config: Config) -> str | None:
    has_one = config.parallel.pipeline_model_parallel_size == 1
    return "under pipeline_model_parallel_size(1)" if has_one else None


def _not_fp8(config: Config) -> str | None:
    return None if config.precision.is_fp8 else f"under precision({config.precision.precision})"


def _no_history(config: Config) -> str | None:
    recipe = config.precision.fp8_recipe
    has_none = config.precision.precision in ("fp8", "te") and recipe != "delayed"
    return f"under fp8_recipe({recipe})" if has_none else None


def _no_rope(config: Config) -> str | None:
    kind = config.model.position_embedding_type
    return None if config.model.uses_rope else f"under position_embedding_type({kind})"


def _other_than_rope(config: Config) -> str | None:
    kind = config.model.position_embedding_type
    return None if kind == "rope" else f"under position_embedding_type({kind})"


def _no_rope_scaling(config: Config) -> str | None:
    is_plain = config.model.position_embedding_type == "rope" and not config.model.use_rope_scaling
    return "without use_rope_scaling" if is_plain else None


def _no_yarn(config: Config) -> str | None:
    kind = config.model.position_embedding_type
    return None if kind == "yarn" else f"under position_embedding_type({kind})"


def _not_fp16(config: Config) -> str | None:
    precision = config.precision.precision
    return None if precision == "fp16" else f"under precision({precision})"


def _constant_scale(config: Config) -> str | None:
    scale = config.optimizer.loss_scale
    return f"with loss_scale({scale})" if scale is not None and config.precision.precision == "fp16" else None


def _no_warmup(config: Config) -> str | None:
    optimizer = config.optimizer
    has_one = optimizer.lr_warmup_iters or optimizer.lr_warmup_samples or optimizer.lr_warmup_fraction
    return None if has_one else "without a warm-up"


def _no_decay(config: Config) -> str | None:
    return "under lr_decay_style(constant)" if config.optimizer.lr_decay_style == "constant" else None


def _no_wsd(config: Config) -> str | None:
    style = config.optimizer.lr_decay_style
    return None if style == "WSD" else f"under lr_decay_style({style})"


def _no_decay_end(config: Config) -> str | None:
    is_constant = _no_decay(config) is not None and _no_warmup(config) is not None
    return "under lr_decay_style(constant) without a warm-up" if is_constant else None


def _random_tokens(config: Config) -> str | None:
    return "with mock_data" if config.data.mock_data else None


def _no_tokenizer_file(config: Config) -> str | None:
    data = config.data
    has_one = data.tokenizer_model is not None or data.vocab_file is not None
    return "with mock_data and no tokenizer" if data.mock_data and not has_one else None


def _conversations(config: Config) -> str | None:
    return "with sft" if config.data.sft else None


def _no_conversations(config: Config) -> str | None:
    return None if config.data.sft else "without sft"


def _no_tokenizer(config: Config) -> str | None:
    kind = config.data.tokenizer_kind
    return f"under tokenizer_type({kind})" if kind in ("NullTokenizer", "GPT2BPETokenizer") else None


def _other_tokenizer(*kinds: str) -> Callable[[Config], str | None]:
    """The mode of every kind of tokenizer but these."""

    def mode(config: Config) -> str | None:
        kind = config.data.tokenizer_kind
        return None if kind in kinds else f"under tokenizer_type({kind})"

    return mode


def _no_validation(config: Config) -> str | None:
    return None if config.training.validates else "with eval_interval(0)"


def _one_pass(config: Config) -> str | None:
    kind = config.data.dataloader_type
    return None if kind == "cyclic" else f"under dataloader_type({kind})"


def _no_load(config: Config) -> str | None:
    return "without load" if config.checkpoint.load is None else None


def _weights_alone(config: Config) -> str | None:
    return "with finetune" if config.checkpoint.finetune else None


def _no_tensorboard(config: Config) -> str | None:
    return None if config.logging.tensorboard else "without tensorboard"


def _no_wandb(config: Config) -> str | None:
    return "without wandb_project" if config.logging.wandb_project is None else None


def _no_profile(config: Config) -> str | None:
    return None if config.profile.profile else "without profile"


_RULES = (
    Ignored(("rotary_base",), _no_rope, "give --position-embedding-type rope"),
    # megatron-core's YaRN reads none of them, or refuses them.
    Ignored(SETTINGS_WITHOUT_YARN, _other_than_rope, "give --position-embedding-type rope"),
    Ignored(YARN_SETTINGS, _no_yarn, "give --position-embedding-type yarn"),
    Ignored(("rope_scaling_factor",), _no_rope_scaling, "give --use-rope-scaling"),
    Ignored(("cp_comm_type", "fp8_context_communication"), _whole_sequences, "raise --context-parallel-size"),
    Ignored(
        (
            "fp8_pipeline_communication",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        ),
        _one_stage,
        "raise --pipeline-model-parallel-size",
    ),
    Ignored(("opt_level",), _not_fp8, "choose --precision fp8"),
    Ignored(
        ("fp8_recipe", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_margin", "first_last_layers_bf16"),
        _sixteen_bits,
        "choose --precision fp8",
    ),
    Ignored(
        (
            "fp8_power_of_two_scales",
            "fp8_health_interval",
            "fp8_weight_grad_scaling",
            "grad_accumulation",
            "grad_accumulation_dtype",
        ),
        _not_fp8,
        "choose --precision fp8",
    ),
    Ignored(
        ("fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_margin"), _no_history, "choose --fp8-recipe delayed"
    ),
    Ignored(
        ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        _not_fp16,
        "choose fp16",
        is_error=False,
    ),
    Ignored(
        ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"), _constant_scale, "drop loss_scale"
    ),
    Ignored(("lr_warmup_init",), _no_warmup, "give --lr-warmup-iters", is_error=False),
    Ignored(("min_lr", "decoupled_min_lr"), _no_decay, "choose another --lr-decay-style"),
    Ignored(("lr_decay_iters", "lr_decay_samples"), _no_decay_end, "choose another --lr-decay-style"),
    Ignored(("lr_wsd_decay_style",), _no_wsd, "choose --lr-decay-style WSD"),
    Ignored(
        ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), _random_tokens, "give --data-path instead"
    ),
    Ignored(("merge_file",), _no_tokenizer_file, "give --vocab-file"),
    Ignored(
        (
            "tiktoken_pattern",
            "tiktoken_num_special_tokens",
            "tokenizer_special_tokens",
            "tokenizer_hf_no_include_special_tokens",
        ),
        _no_tokenizer_file,
        "give --tokenizer-model",
    ),
    Ignored(
        (
            "reset_position_ids",
            "reset_attention_mask",
            "eod_mask_loss",
            "mmap_bin_files",
            "tokenizer_hf_no_include_special_tokens",
        ),
        _conversations,
        "drop --sft",
    ),
    Ignored(("sft_tokenizer_prompt_format", "sft_chat_template", "sft_packing"), _no_conversations, "give --sft"),
    Ignored(("tokenizer_model",), _no_tokenizer, "choose another --tokenizer-type"),
    Ignored(("vocab_file", "merge_file"), _other_tokenizer("GPT2BPETokenizer"), "choose GPT2BPETokenizer"),
    Ignored(
        ("tiktoken_pattern", "tiktoken_num_special_tokens"), _other_tokenizer("TikTokenizer"), "choose TikTokenizer"
    ),
    Ignored(
        ("tokenizer_special_tokens",),
        _other_tokenizer("GPT2BPETokenizer", "HuggingFaceTokenizer", "TikTokenizer"),
        "choose another --tokenizer-type",
    ),
    Ignored(
        ("tokenizer_hf_no_include_special_tokens",),
        _other_tokenizer("HuggingFaceTokenizer"),
        "choose HuggingFaceTokenizer",
    ),
    Ignored(("null_tokenizer_eod_id",), _other_tokenizer("NullTokenizer"), "choose NullTokenizer"),
    Ignored(("load_optim", "load_rng"), _no_load, "give --load", is_error=False),
    Ignored(("full_validation",), _no_validation, "give --eval-interval"),
    Ignored(("data_sharding",), _one_pass, "give --dataloader-type cyclic"),
    Ignored(
        ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"), _no_load, "give --load", is_error=False
    ),
    Ignored(("use_checkpoint_opt_param_scheduler",), _weights_alone, "drop --finetune"),
    Ignored(
        ("use_tokenizer_model_from_checkpoint_args",),
        lambda config: None if config.checkpoint.use_checkpoint_args else "without use_checkpoint_args",
        "give --use-checkpoint-args",
    ),
    Ignored(
        ("log_num_zeros_in_grad",),
        lambda config: "with release_gradients" if config.precision.release_gradients else None,
        "drop --release-gradients",
    ),
    Ignored(("tensorboard_dir",), _no_tensorboard, "give --tensorboard"),
    Ignored(("wandb_exp_name", "wandb_entity", "wandb_save_dir"), _no_wandb, "give --wandb-project", is_error=False),
    Ignored(("profile_step_start", "profile_step_end", "profile_ranks"), _no_profile, "give --profile", is_error=False),
    Ignored(("profile_trace",), _no_profile, "give --profile"),
)


def _values(config: Config) -> dict[str, Any]:
    """Every setting by name; names are unique over sections."""
    sections = [getattr(config, section.name) for section in dataclasses.fields(Config)]
    return {field.name: getattr(section, field.name) for section in sections for field in dataclasses.fields(section)}


@cache
def _defaults() -> dict[str, Any]:
    return _values(Config())


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(value)
    return str(value.value if isinstance(value, Enum) else value)
