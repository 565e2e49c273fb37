"""Settings that a mode does not read. Each that is not at its default gets one line, which names the mode and the fix.

It is a note for Megatron's settings: Megatron does not read them in that mode either, and a run is the same without
them. It is an error for settings of this project's own, and where a run would be another than the words say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Any, get_args

from ..update_rules import RULES, RuleEntry
from .fields import limit_problems
from .fim import FimConfig
from .megatron_flags import megatron_options
from .model import SETTINGS_WITHOUT_YARN, YARN_SETTINGS
from .moe import MoeConfig
from .mup import MupConfig
from .schema import Config, TokenizerType

#: Values of --tokenizer-type.
TOKENIZER_TYPES: tuple[TokenizerType, ...] = get_args(TokenizerType)
#: Options of tokenizers, and the kinds that read them.
TOKENIZERS_READING: Mapping[str, tuple[TokenizerType, ...]] = MappingProxyType(
    {
        "vocab_file": ("GPT2BPETokenizer",),
        "merge_file": ("GPT2BPETokenizer",),
        "tiktoken_pattern": ("TikTokenizer",),
        "tiktoken_num_special_tokens": ("TikTokenizer",),
        "tokenizer_special_tokens": ("GPT2BPETokenizer", "HuggingFaceTokenizer", "TikTokenizer"),
        "tokenizer_hf_no_include_special_tokens": ("HuggingFaceTokenizer",),
        "null_tokenizer_eod_id": ("NullTokenizer",),
    }
)


@dataclass(frozen=True)
class Ignored:
    """Settings that have no effect in one mode.

    Attributes:
        names: the settings, between blanks.
        mode: the setting that decides, with `values`; or a function that returns the mode in words, None outside of it.
        values: of `mode` in this mode.
        fix: what to choose so that they have an effect.
        is_error: whether they stop a run. None: those that Megatron does not have.
    """

    names: str
    mode: str | Callable[[Config], str | None]
    values: tuple[Any, ...]
    fix: str
    is_error: bool | None = None

    def mode_of(self, config: Config, settings: dict[str, Any]) -> str | None:
        """The mode in words, if `config` is in it; else None."""
        if not isinstance(self.mode, str):
            return self.mode(config)
        value = settings[self.mode]
        if value not in self.values:
            return None
        if value is None or isinstance(value, bool):
            return f"{'with' if value else 'without'} {self.mode}"
        return f"under {self.mode}({_shown(value)})"


def ignored_settings(config: Config) -> Iterator[str]:
    """One line for each setting that is not at its default, has no effect and is an error: value, mode, fix."""
    yield from _lines(config, is_error=True).values()


def without_unread(config: Config) -> tuple[Config, dict[str, str]]:
    """`config` with defaults for settings that it does not read and that may be given, and the line of each of them:
    value, mode, fix.

    A configuration with values out of range stays as it is, for the check that names them.
    """
    if next(limit_problems(config), None) is not None:
        return config, {}
    unread, defaults = _lines(config, is_error=False), _defaults()
    sections = {
        section: replace(fields, **{name: defaults[name] for name in unread.keys() & vars(fields).keys()})
        for section, fields in vars(config).items()
    }
    return Config(**sections), unread


def _lines(config: Config, is_error: bool) -> dict[str, str]:
    """The line of each setting, by its name."""
    values, defaults = config.settings, _defaults()
    settings = {**values, "tokenizer_type": config.data.tokenizer_kind}
    found: dict[str, str] = {}
    for rule in _RULES:
        mode = rule.mode_of(config, settings)
        for name in rule.names.split() if mode is not None else ():
            stops = rule.is_error if rule.is_error is not None else not _is_megatrons(name)
            if stops == is_error and values[name] != defaults[name]:
                found.setdefault(name, f"{name}({_shown(values[name])}) has no effect {mode}; drop it or {rule.fix}")
    return found


def _is_megatrons(name: str) -> bool:
    return bool({name, f"no_{name}"} & megatron_options().keys())


def _no_history(config: Config) -> str | None:
    recipe = config.precision.fp8_recipe
    has_none = config.precision.precision in ("fp8", "te") and recipe != "delayed"
    return f"under fp8_recipe({recipe})" if has_none else None


def _no_rope_scaling(config: Config) -> str | None:
    is_plain = config.model.position_embedding_type == "rope" and not config.model.use_rope_scaling
    return "without use_rope_scaling" if is_plain else None


def _constant_scale(config: Config) -> str | None:
    scale = config.optimizer.loss_scale
    return f"with loss_scale({scale})" if scale is not None and config.precision.precision == "fp16" else None


def _no_warmup(config: Config) -> str | None:
    optimizer = config.optimizer
    has_one = optimizer.lr_warmup_iters or optimizer.lr_warmup_samples or optimizer.lr_warmup_fraction
    return None if has_one else "without a warm-up"


def _no_decay_end(config: Config) -> str | None:
    is_constant = config.optimizer.lr_decay_style == "constant" and _no_warmup(config) is not None
    return "under lr_decay_style(constant) without a warm-up" if is_constant else None


def _no_tokenizer_file(config: Config) -> str | None:
    return "with mock_data and no tokenizer" if config.data.has_no_tokenizer else None


def _heads_of_their_own(config: Config) -> str | None:
    model = config.model
    is_same = model.group_query_attention or model.num_query_groups == model.num_attention_heads
    return None if is_same else "without group_query_attention: each head has keys and values of its own"


def _no_virtual_stages(config: Config) -> str | None:
    try:
        return None if config.pipeline_layout.is_interleaved else "without virtual stages"
    except ValueError:
        return None  # `pipeline_checks.layout_problem` reports it


def _no_expert_ranks(config: Config) -> str | None:
    return None if config.parallel.matrix_holders > 1 else "where each rank has all experts"


def _no_validation(config: Config) -> str | None:
    return None if config.training.validates else "with eval_interval(0)"


_POSITIONS = "position_embedding_type"
_SIXTEEN_BITS = ("bf16", "fp16")
#: Settings of experts in other sections than the model's.
_OF_EXPERTS = (
    "expert_tensor_parallel_size",
    "moe_token_dispatcher_type",
    "overlap_moe_expert_parallel_comm",
    "moe_per_layer_logging",
    "save_tokens_per_expert_interval",
)
_DECAYS = ("constant", "linear", "cosine", "inverse-square-root")
_LOSS_SCALE = "initial_loss_scale min_loss_scale loss_scale_window hysteresis"
_OF_SAVING = (
    "save_interval save_retain_interval non_persistent_save_interval async_save save_optim save_rng keep_last "
    "allow_foreign_checkpoints ckpt_state_dtype"
)
_ENDS = "reset_position_ids reset_attention_mask eod_mask_loss"
_HISTORY = "fp8_amax_history_len fp8_amax_compute_algo fp8_margin"
_WITHOUT_SQUARES = tuple(name for name, rule in RULES.items() if not rule.holds_squares)
_WITHOUT_MATRICES = tuple(name for name, rule in RULES.items() if rule.rest is None)


def _own_settings(rule: RuleEntry) -> list[str]:
    """The settings that only the rule reads, not that of the parameters which it leaves."""
    shared = {} if rule.rest is None else RULES[rule.rest].settings
    return [name for option, names in rule.settings.items() if option not in shared for name in names]


_RULES = (
    Ignored("rotary_base", _POSITIONS, ("learned_absolute", "none"), "give --position-embedding-type rope"),
    # megatron-core's YaRN reads none of them, or refuses them.
    Ignored(
        " ".join(SETTINGS_WITHOUT_YARN),
        *(_POSITIONS, ("learned_absolute", "none", "yarn"), "give --position-embedding-type rope"),
    ),
    Ignored(
        " ".join(YARN_SETTINGS),
        *(_POSITIONS, ("learned_absolute", "none", "rope"), "give --position-embedding-type yarn"),
    ),
    Ignored("num_query_groups", _heads_of_their_own, (), "give --group-query-attention"),
    Ignored("window_attn_skip_freq", "window_size", (None,), "give --window-size"),
    Ignored(
        "recompute_method recompute_num_layers", "recompute_granularity", (None,), "give --recompute-granularity full"
    ),
    Ignored("recompute_modules", "recompute_granularity", (None, "full"), "choose --recompute-granularity selective"),
    Ignored("rope_scaling_factor", _no_rope_scaling, (), "give --use-rope-scaling"),
    Ignored(
        " ".join([*(each.name for each in fields(MoeConfig) if each.name != "num_experts"), *_OF_EXPERTS]),
        *("num_experts", (None,), "give --num-experts"),
    ),
    Ignored(
        "moe_use_upcycling expert_model_parallel_size", "num_experts", (None,), "give --num-experts", is_error=True
    ),
    # The run would not be muP's.
    Ignored(
        " ".join(each.name for each in fields(MupConfig) if each.name != "use_mup"),
        *("use_mup", (False,), "give --use-mup"),
        is_error=True,
    ),
    Ignored("moe_upcycling_granularity", "moe_use_upcycling", (False,), "give --moe-use-upcycling"),
    Ignored(
        "moe_router_bias_update_rate", "moe_router_enable_expert_bias", (False,), "give --moe-router-enable-expert-bias"
    ),
    Ignored(
        "moe_shared_expert_gate",
        *("moe_shared_expert_intermediate_size", (None,), "give --moe-shared-expert-intermediate-size"),
    ),
    Ignored(
        "moe_router_pre_softmax",
        *("moe_router_score_function", ("sigmoid",), "choose --moe-router-score-function softmax"),
    ),
    Ignored("moe_token_drop_policy", "moe_expert_capacity_factor", (None,), "give --moe-expert-capacity-factor"),
    Ignored(
        "moe_token_dispatcher_type",
        *("expert_model_parallel_size", (1,), "raise --expert-model-parallel-size"),
    ),
    Ignored("overlap_moe_expert_parallel_comm", _no_expert_ranks, (), "raise --expert-model-parallel-size"),
    Ignored("cp_comm_type fp8_context_communication", "context_parallel_size", (1,), "raise --context-parallel-size"),
    Ignored(
        "microbatch_group_size_per_virtual_pipeline_stage",
        *(_no_virtual_stages, (), "give --num-virtual-stages-per-pipeline-rank"),
    ),
    Ignored(
        "fp8_pipeline_communication account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        *("pipeline_model_parallel_size", (1,), "raise --pipeline-model-parallel-size"),
    ),
    Ignored("opt_level", "precision", (*_SIXTEEN_BITS, "te"), "choose --precision fp8"),
    Ignored("fp8_recipe", "precision", _SIXTEEN_BITS, "choose --precision fp8", is_error=True),
    Ignored(f"{_HISTORY} first_last_layers_bf16", "precision", _SIXTEEN_BITS, "choose --precision fp8"),
    Ignored(
        "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
        *("first_last_layers_bf16", (False,), "give --first-last-layers-bf16"),
    ),
    Ignored(
        "fp8_power_of_two_scales fp8_health_interval fp8_weight_grad_scaling grad_accumulation grad_accumulation_dtype",
        *("precision", (*_SIXTEEN_BITS, "te"), "choose --precision fp8"),
    ),
    Ignored(_HISTORY, _no_history, (), "choose --fp8-recipe delayed"),
    Ignored("fp8_fallback_iter fp8_fallback_underflow", "fp8_fallback_recipe", (None,), "give --fp8-fallback-recipe"),
    Ignored(_LOSS_SCALE, "precision", ("bf16", "fp8", "te"), "choose fp16"),
    Ignored(_LOSS_SCALE, _constant_scale, (), "drop loss_scale"),
    *(
        Ignored(
            " ".join(_own_settings(rule)),
            *(
                "optimizer",
                tuple(name for name, other in RULES.items() if not rule.settings.items() <= other.settings.items()),
                f"choose --optimizer {chosen}",
            ),
        )
        for chosen, rule in RULES.items()
        if chosen != "adamw"
    ),
    Ignored("muon_split_qkv", "optimizer", _WITHOUT_MATRICES, "choose --optimizer muon"),
    Ignored("exp_avg_sq_dtype", "optimizer", _WITHOUT_SQUARES, "choose --optimizer adam"),
    Ignored("lr_warmup_init", _no_warmup, (), "give --lr-warmup-iters"),
    Ignored("decoupled_min_lr", "decoupled_lr", (None,), "give --decoupled-lr"),
    Ignored("min_lr decoupled_min_lr", "lr_decay_style", ("constant",), "choose another --lr-decay-style"),
    Ignored("lr_decay_iters lr_decay_samples", _no_decay_end, (), "choose another --lr-decay-style"),
    Ignored(
        "lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples",
        "lr_decay_style",
        _DECAYS,
        "choose --lr-decay-style WSD",
    ),
    Ignored(
        " ".join(each.name for each in fields(FimConfig) if each.name != "fim_data"),
        *("fim_data", (False,), "give --fim-data"),
    ),
    Ignored("fim_fragment_rate", "fim_split_sample", (None,), "give --fim-split-sample"),
    Ignored("fim_data", "mock_data", (True,), "give --data-path instead"),
    Ignored("fim_data", "sft", (True,), "drop --sft"),
    Ignored(_ENDS, "mock_data", (True,), "give --data-path instead"),
    Ignored("merge_file", _no_tokenizer_file, (), "give --vocab-file"),
    Ignored(
        "tiktoken_pattern tiktoken_num_special_tokens tokenizer_special_tokens tokenizer_hf_no_include_special_tokens",
        *(_no_tokenizer_file, (), "give --tokenizer-model"),
    ),
    Ignored(f"{_ENDS} mmap_bin_files tokenizer_hf_no_include_special_tokens", "sft", (True,), "drop --sft"),
    Ignored("sft_tokenizer_prompt_format sft_chat_template sft_packing", "sft", (False,), "give --sft"),
    Ignored(
        "tokenizer_model",
        *("tokenizer_type", ("NullTokenizer", "GPT2BPETokenizer"), "choose another --tokenizer-type"),
    ),
    *(
        Ignored(
            name,
            "tokenizer_type",
            tuple(kind for kind in TOKENIZER_TYPES if kind not in kinds),
            f"choose --tokenizer-type {' or '.join(kinds)}",
        )
        for name, kinds in TOKENIZERS_READING.items()
    ),
    Ignored("load_optim load_rng", "load", (None,), "give --load"),
    Ignored(_OF_SAVING, "save", (None,), "give --save"),
    Ignored(
        "non_persistent_ckpt_type",
        *("non_persistent_save_interval", (None,), "give --non-persistent-save-interval"),
    ),
    Ignored("eval_global_batch_size", _no_validation, (), "give --eval-interval"),
    # Nothing would validate.
    Ignored("full_validation", _no_validation, (), "give --eval-interval", is_error=True),
    Ignored("data_sharding", "dataloader_type", ("single",), "give --dataloader-type cyclic"),
    Ignored(
        "override_opt_param_scheduler use_checkpoint_opt_param_scheduler",
        "load",
        (None,),
        "give --load",
    ),
    Ignored("use_checkpoint_opt_param_scheduler", "finetune", (True,), "drop --finetune"),
    Ignored("use_tokenizer_model_from_checkpoint_args", "use_checkpoint_args", (False,), "give --use-checkpoint-args"),
    Ignored("log_num_zeros_in_grad", "release_gradients", (True,), "drop --release-gradients", is_error=True),
    Ignored("tensorboard_dir", "tensorboard", (False,), "give --tensorboard", is_error=True),
    Ignored("wandb_exp_name wandb_entity wandb_save_dir", "wandb_project", (None,), "give --wandb-project"),
    Ignored("profile_step_start profile_step_end profile_ranks profile_trace", "profile", (False,), "give --profile"),
)


@cache
def _defaults() -> dict[str, Any]:
    return Config().settings


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(value)
    return str(value.value if isinstance(value, Enum) else value)
