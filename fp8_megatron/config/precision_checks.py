"""Checks that the choices of precision and storage work together; `checks` calls them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from ..storage import StorageDtype
from ..update_rules import RULES
from .schema import Config, PrecisionConfig

#: Columns of a head in FP8 attention (`kernels.attention`).
_ATTENTION_WIDTH = 128


def precision_problems(config: Config, *, on_this_machine: bool = True) -> Iterator[str]:
    """One line for each problem: what cannot work, the values, the fix.

    Args:
        on_this_machine: whether Transformer Engine must be installed here to be used.
    """
    precision = config.precision
    if config.optimizer.loss_scale is not None and precision.precision != "fp16":
        yield (
            f"loss_scale({config.optimizer.loss_scale}) has no effect under precision({precision.precision}), whose "
            f"gradients need no loss scale; drop it or choose --precision fp16"
        )
    if precision.precision == "te":
        yield from _check_te(config, on_this_machine=on_this_machine)
    if not precision.is_fp8:
        yield from _check_without_fp8(precision)
    elif precision.main_params_dtype is StorageDtype.SPLIT:
        yield from _check_split(config)
    else:
        yield from _check_master(precision)
    if precision.fp8_dot_product_attention:
        yield from _check_fp8_attention(config)
    yield from _check_fallback(config)
    yield from _check_first_last_layers(precision, config.model.num_layers)


def _check_fallback(config: Config) -> Iterator[str]:
    precision = config.precision
    name, recipe = "fp8_fallback_recipe", precision.fp8_fallback_recipe
    if recipe is None:
        return
    if precision.fp8_recipe != "delayed" or not precision.is_fp8:
        yield f"{name}({recipe}) is left delayed scaling for: choose --precision fp8 --fp8-recipe delayed, or drop it"
    if precision.fp8_fallback_iter is None and precision.fp8_fallback_underflow is None:
        yield f"{name}({recipe}) is never taken; give --fp8-fallback-iter or --fp8-fallback-underflow, or drop it"
    if precision.fp8_fallback_underflow is not None and config.logging.fp8_health_interval == 0:
        yield (
            f"fp8_fallback_underflow({precision.fp8_fallback_underflow}) is measured every fp8_health_interval steps, "
            f"which is 0; raise it"
        )
    if precision.fp8_dot_product_attention:
        yield f"{name}({recipe}): fp8_dot_product_attention needs delayed scales to the end; drop one of them"


def fallback_length_problems(precision: PrecisionConfig, train_iters: int) -> Iterator[str]:
    """A line if a run of `train_iters` steps ends before its recipe changes."""
    first = precision.fp8_fallback_iter
    if precision.fp8_fallback_recipe is not None and first is not None and first > train_iters:
        yield f"fp8_fallback_iter({first}) > train_iters({train_iters}): the run ends before; lower it"


def _check_te(config: Config, *, on_this_machine: bool) -> Iterator[str]:
    precision = config.precision
    if on_this_machine and importlib.util.find_spec("transformer_engine") is None:
        yield (
            "precision(te) needs Transformer Engine, which is not installed; "
            "pip install --no-build-isolation transformer_engine[pytorch], or choose --precision fp8"
        )
    if not precision.first_last_layers_bf16:
        return
    if precision.fp8_recipe == "delayed":
        yield (
            "precision(te) with fp8_recipe(delayed) has no first_last_layers_bf16; drop it, or choose --fp8-recipe "
            "tensorwise or --precision fp8"
        )
    stage = config.model.num_layers // config.parallel.pipeline_model_parallel_size
    for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        if getattr(precision, name) > stage:
            yield (
                f"{name}({getattr(precision, name)}) > {stage} layers of a pipeline stage, all that precision(te) "
                f"keeps out of FP8; choose at most {stage}, or --precision fp8"
            )


def _check_without_fp8(precision: PrecisionConfig) -> Iterator[str]:
    """Check that dtypes are not given, but for those of Megatron's optimizer that are what there is anyway."""
    formats = precision.formats
    same = {
        "main_params_dtype": formats.master_weight,
        "main_grads_dtype": formats.main_grad,
        "exp_avg_dtype": formats.average,
        "exp_avg_sq_dtype": formats.square,
    }
    for name in ("params_dtype", *same):
        dtype = getattr(precision, name)
        if dtype is not None and (name not in same or getattr(same[name], "value", None) != dtype.value):
            yield f"{name}({dtype.value}) has no effect under precision({precision.precision}); drop it or use fp8"
    if precision.fp8_lm_head:
        yield (
            f"fp8_lm_head runs this project's FP8 GEMMs, which precision({precision.precision}) does not use; "
            f"drop it or choose --precision fp8"
        )
    for name in ("fp8_pipeline_communication", "fp8_context_communication"):
        if getattr(precision, name):
            yield (
                f"{name} is for FP8 layers, which precision({precision.precision}) does not have; drop it or "
                f"choose --precision fp8"
            )


def _check_first_last_layers(precision: PrecisionConfig, num_layers: int) -> Iterator[str]:
    start, end = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    if precision.first_last_layers_bf16 and start + end > num_layers:
        yield (
            f"num_layers_at_start_in_bf16({start}) + num_layers_at_end_in_bf16({end}) = {start + end} > "
            f"num_layers({num_layers}); choose fewer"
        )


def _check_fp8_attention(config: Config) -> Iterator[str]:
    name, model, precision = "fp8_dot_product_attention", config.model, config.precision
    if not precision.is_fp8:
        yield (
            f"{name} runs this project's FP8 attention, which precision({precision.precision}) does not use; "
            f"drop it or choose --precision fp8"
        )
    elif precision.fp8_recipe != "delayed":
        yield (
            f"{name} needs scales before its kernels run, fp8_recipe({precision.fp8_recipe}) takes them from the "
            f"values; choose --fp8-recipe delayed"
        )
    if model.attention_dropout > 0:
        yield f"{name} has no dropout, attention_dropout is {model.attention_dropout}; give --attention-dropout 0"
    if model.attention_backend != "auto":
        yield f"{name} has a kernel of its own, not attention_backend({model.attention_backend}); drop one of them"
    if config.data.keeps_documents_apart:
        yield f"{name} cannot keep documents apart; drop it or {'sft' if config.data.sft else 'reset_attention_mask'}"
    if model.window_size is not None:
        yield f"{name} does not support windows; drop it or window_size({model.window_size})"
    if model.softmax_type != "vanilla":
        yield f"{name} has no sinks; drop it or softmax_type({model.softmax_type})"
    width = model.head_dim
    if width != _ATTENTION_WIDTH:
        yield (
            f"{name} takes heads of {_ATTENTION_WIDTH} columns, not {width}; give --kv-channels {_ATTENTION_WIDTH}, or "
            f"choose another num_attention_heads"
        )
    if "core_attn" in config.training.recomputed_modules:
        yield f"{name} keeps no scores to recompute; drop it, or name other modules than core_attn in recompute_modules"


def _check_split(config: Config) -> Iterator[str]:
    weight, optimizer = config.precision.formats.weight, config.optimizer
    if weight is not StorageDtype.FP8:
        yield f"main_params_dtype(split) is half of an FP8 weight, params_dtype is {weight.value}; choose fp8 (O3)"
    if RULES[optimizer.optimizer].split_place is None:
        yield f"main_params_dtype(split) needs optimizer(adam), not {optimizer.optimizer}; choose one of them"
    elif RULES[optimizer.optimizer] is RULES["adam"] and optimizer.adam_beta1**2 >= optimizer.adam_beta2:
        yield (
            f"main_params_dtype(split) foretells scales from the bound of Adam's update, which "
            f"adam_beta1({optimizer.adam_beta1})² ≥ adam_beta2({optimizer.adam_beta2}) has not; raise adam_beta2"
        )


def _check_master(precision: PrecisionConfig) -> Iterator[str]:
    """A master must be wider than its weight, but FP8 weights may have a split or FP8 one (the paper's ablation)."""
    weight, master = precision.formats.weight, precision.formats.master_weight
    if master is None:
        return
    beside_fp8 = weight is StorageDtype.FP8 and master in (StorageDtype.FP8, StorageDtype.SPLIT)
    if master.itemsize <= weight.itemsize and not beside_fp8:
        yield (
            f"a master in {master.value} (main_params_dtype or opt_level {precision.opt_level}) holds no more than the "
            f"weight in params_dtype({weight.value}); choose a wider main_params_dtype, or opt_level O2, whose weight "
            f"is its own master"
        )
