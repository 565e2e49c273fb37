"""What Megatron does with settings after it has read them, and the defaults that are not Megatron's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from .fields import MAX_COUNT, limit_problems
from .precision import PrecisionConfig
from .run_outputs import CheckpointConfig, LoggingConfig
from .schema import Config, TrainingConfig
from .words import shortened

#: Settings whose default is not Megatron's, and why. docs/from-megatron.md shows them.
OTHER_DEFAULTS: Mapping[str, str] = MappingProxyType(
    {
        "fp8_amax_history_len": "16 steps; `--fp8-format` and `--fp8-hybrid` bring Megatron's 1",
        "fp8_amax_compute_algo": "`max`; `--fp8-format` and `--fp8-hybrid` bring Megatron's `most_recent`",
        "main_grads_dtype": "that of the level (`--opt-level`)",
        "main_params_dtype": "that of the level",
        "exp_avg_dtype": "that of the level",
        "exp_avg_sq_dtype": "that of the level",
        "initial_loss_scale": "2^16: Megatron's 2^32 overflows for 16 steps until it has halved to this",
        "cuda_graph_impl": "`auto`: the same numbers, faster",
        "sft_tokenizer_prompt_format": "`default`, the tokenizer's own template; its answers alone count too",
        "tokenizer_type": "`GPT2BPETokenizer` with `--vocab-file` or `--merge-file`, else `SentencePieceTokenizer`",
    }
)
#: Settings of token files. Random tokens need none of them, and Megatron's scripts give them.
_OF_TOKEN_FILES = (
    "split",
    "data_cache_path",
    "mmap_bin_files",
    "num_dataset_builder_threads",
    "null_tokenizer_eod_id",
)

_Section = TypeVar("_Section", TrainingConfig, CheckpointConfig, LoggingConfig)

_SPLIT = re.compile(r"[\s'\"]*[0-9.]+(?:[\s'\"]*[,/][\s'\"]*[0-9.]+){0,2}[\s'\"]*")


def as_megatron_settles(config: Config) -> tuple[Config, list[str]]:
    """`config` with what Megatron changes in it, and one line for each change that a user may not expect.

    Sequence parallelism is off with one tensor-parallel rank. A split has three weights. No more layers keep transposes
    than a stage has. A schedule of batches goes before --global-batch-size. A block of no layers recomputes nothing.
    Intervals of more steps than a run may have are cut.
    """
    notes = []
    parallel, precision = config.parallel, config.precision
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        parallel = dataclasses.replace(parallel, sequence_parallel=False)
        notes.append("sequence_parallel is off: tensor_model_parallel_size is 1, and there is nothing to shard")
    layers = _layers_of_a_stage(config)
    if precision.keep_fp8_transpose_cache > layers:
        precision = dataclasses.replace(precision, keep_fp8_transpose_cache=layers)
    if parallel.ddp_bucket_size > MAX_COUNT:
        notes.append(f"ddp_bucket_size({parallel.ddp_bucket_size}) is {MAX_COUNT} here, the largest bucket")
        parallel = dataclasses.replace(parallel, ddp_bucket_size=MAX_COUNT)
    training = config.training
    if training.step_batch_size_schedule and training.global_batch_size is not None:
        notes.append(
            f"step_batch_size_schedule sets the global batch; global_batch_size({training.global_batch_size}) is not "
            f"read"
        )
        training = dataclasses.replace(training, global_batch_size=None)
    recomputed = (training.recompute_granularity, training.recompute_method, training.recompute_num_layers)
    if recomputed == ("full", "block", 0):
        notes.append("recompute_num_layers(0) with recompute_method(block): no layer is recomputed")
        training = dataclasses.replace(
            training, recompute_granularity=None, recompute_method=None, recompute_num_layers=None
        )
    training = _within_reach(training, "eval_interval", "exit_interval")
    config = dataclasses.replace(
        config,
        checkpoint=_within_reach(config.checkpoint, "save_interval"),
        logging=_within_reach(config.logging, "log_interval"),
    )
    data = dataclasses.replace(config.data, split=three_weights(config.data.split))
    config = dataclasses.replace(config, parallel=parallel, precision=precision, training=training, data=data)
    if training.skip_train:
        training = dataclasses.replace(training, rollback_on_loss_spike=False)
        folder = config.logging.output_dir or config.checkpoint.save
        logging = dataclasses.replace(config.logging, output_dir=folder)
        checkpoint = _only_loading(config.checkpoint)
        config = dataclasses.replace(config, training=training, checkpoint=checkpoint, logging=logging)
        shown = "shown alone" if folder is None else f"shown and added to evaluations.jsonl of {shortened(folder)}"
        notes.append(f"skip_train: nothing is trained or saved; losses are {shown}, TensorBoard and W&B get none")
    return config, notes


def _within_reach(section: _Section, *names: str) -> _Section:
    """`section` with intervals that no run reaches, as scripts give them for never, as the largest ones."""
    values = {name: getattr(section, name) for name in names}
    far: dict[str, Any] = {name: MAX_COUNT for name, value in values.items() if value is not None and value > MAX_COUNT}
    return dataclasses.replace(section, **far)


def _only_loading(checkpoint: CheckpointConfig) -> CheckpointConfig:
    """What says where weights come from, and nothing of saving."""
    from_where = ("load", "ckpt_step", "finetune", "exit_on_missing_checkpoint", "pretrained_checkpoint")
    what = (
        "moe_use_upcycling",
        "moe_upcycling_granularity",
        "load_optim",
        "load_rng",
        "use_checkpoint_args",
        "use_tokenizer_model_from_checkpoint_args",
    )
    return CheckpointConfig(**{name: getattr(checkpoint, name) for name in (*from_where, *what)})


def unread_settings(config: Config) -> frozenset[str]:
    """Settings that Megatron takes too where nothing reads them, and without which a run is the same.

    Flags of them are no mistake: one line at the start names them. Others that a mode does not read are errors
    (`ignored`).
    """
    unread = set(_OF_TOKEN_FILES) if config.data.mock_data else set()
    if config.training.cuda_graph_impl == "none":
        unread.add("cuda_graph_warmup_steps")
    if not config.training.validates:
        unread.add("eval_iters")
    if config.training.full_validation or config.training.skip_train or not config.training.validates:
        unread.add("eval_fixed_samples")
    if config.optimizer.weight_decay_incr_style != "constant":
        unread.add("weight_decay")
    if config.model.position_embedding_type != "learned_absolute" and not config.data.sft:
        unread.add("reset_position_ids")
    if not config.model.has_gelu:
        unread |= {"bias_gelu_fusion", "use_te_activation_func"}
    return frozenset(unread)


def evaluation_note(config: Config) -> str | None:
    """The line at the start of a run that is given data for validation or test, or an interval, and reads no data."""
    data, training = config.data, config.training
    if not training.validates:
        mode, fix = "eval_interval(0)", "--eval-interval"
    elif training.eval_iters == 0:
        mode, fix = "eval_iters(0)", "--eval-iters"
    else:
        return None
    paths = {"valid_data_path": data.valid_data_path, "test_data_path": data.test_data_path}
    if training.validates and training.full_validation:
        del paths["valid_data_path"]
    unread = [f"{name}({shortened(' '.join(words))})" for name, words in paths.items() if words]
    if not unread and training.validates and not training.full_validation:
        interval = training.eval_interval
        return f"eval_interval({interval}) with {mode} evaluates nothing; give {fix}, or --eval-interval 0"
    if not unread:
        return None
    return f"with {mode} nothing reads {' and '.join(unread)}; {fix} turns validation and the test at the end on"


def _layers_of_a_stage(config: Config) -> int:
    """Layers of the largest stage. If `checks` will refuse the layers or the stages, about as many."""
    try:
        if next(limit_problems(config), None) is None:
            return max(len(config.layers_of_stage(stage)) for stage in range(config.pipeline_layout.num_stages))
    except ValueError:
        pass
    return max(config.model.num_layers // max(config.parallel.pipeline_model_parallel_size, 1), 1)


def three_weights(split: str) -> str:
    """A split as three weights: ``99,1`` and ``'99,1,0'``, with its quotes, are ``99,1,0``. Other text stays."""
    if not _SPLIT.fullmatch(split):
        return split
    weights = re.findall(r"[0-9.]+", split)
    return ",".join([*weights, *["0"] * (3 - len(weights))])


def precision_note(precision: PrecisionConfig) -> str:
    """The line at the start of a run whose command line and files name no precision."""
    return (
        f"precision is {precision.precision} ({precision.opt_level}), the default here; --bf16 turns FP8 off "
        f"(docs/from-megatron.md lists the defaults that are not Megatron's)"
    )
