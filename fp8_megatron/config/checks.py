"""Checks of a configuration that need no device. They run before any device is touched.

megatron-core has no arguments module, so this module validates what Megatron-LM's arguments module validates. Each
problem is one line that names the values and a fix.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import UserError
from ..models.registry import architecture_of
from ..storage import FP8_GEMM_MULTIPLE, GradReduceMode, StorageDtype
from .batch_schedule import BatchSchedule
from .fields import limit_problems
from .ignored import ignored_settings
from .pipeline_checks import interleaving_problems, layout_problem, recompute_problem
from .precision_checks import fallback_length_problems, precision_problems
from .recompute_checks import (
    loss_chunk_problems,
    mlp_chunk_problems,
    offload_problems,
    recompute_module_problems,
)
from .run_checks import profile_problems, run_problems
from .schedule_checks import batch_problem, schedule_problems
from .schema import MIN_CUDA_GRAPH_WARMUP_STEPS, Config, ParallelConfig
from .words import multiples_near


class ConfigError(UserError):
    """The configuration cannot be read or cannot work. The message has one problem per line."""


def check_config(config: Config, world_size: int, *, on_this_machine: bool = True) -> None:
    """Raise one `ConfigError` that lists every problem of `config` on `world_size` ranks, one per line.

    Args:
        on_this_machine: whether the run would start here, so that what it needs must be installed.

    This does not check whether the device can compute in the chosen precision. It checks how settings fit together only
    if each is within its own limits.
    """
    problems = list(limit_problems(config))
    if not problems:
        problems += _check_layout(config, world_size)
        problems += architecture_of(config.model).problems(config)
        problems += _check_gemm_sizes(config)
        problems += _check_recompute(config)
        problems += recompute_module_problems(config)
        problems += offload_problems(config)
        problems += loss_chunk_problems(config)
        problems += mlp_chunk_problems(config)
        problems += _check_cuda_graph(config)
        problems += precision_problems(config, on_this_machine=on_this_machine)
        problems += _check_optimizer(config)
        problems += _check_length(config, world_size)
        problems += run_problems(config)
    if not problems:  # what is wrong in itself comes first
        problems += ignored_settings(config)
    if problems:
        raise ConfigError("\n".join(problems))


def _check_optimizer(config: Config) -> Iterator[str]:
    try:
        _ = config.optimizer.rule_options
    except ValueError as error:
        yield str(error)


def check_batches(config: Config, world_size: int, consumed_samples: int) -> None:
    """Check that ranks and pipeline stages can take the batches of the steps after `consumed_samples`.

    Raises:
        ConfigError: they cannot, with the batch and the fix.
    """
    steps = config.batch_schedule(world_size), config, world_size, consumed_samples
    problem = batch_problem(*steps) or next(interleaving_problems(*steps), None)
    if problem is not None:
        raise ConfigError(f"after {consumed_samples} samples: {problem}" if consumed_samples else problem)


def _check_layout(config: Config, world_size: int) -> Iterator[str]:
    """Check ranks, pipeline stages and the batch."""
    parallel, training = config.parallel, config.training
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if parallel.sequence_parallel and tp == 1:
        yield (
            "sequence_parallel shards inside a tensor-parallel group, but tensor_model_parallel_size(1) has one rank; "
            "raise it or pass --no-sequence-parallel"
        )
    if parallel.sequence_parallel and config.model.seq_length % tp:
        yield (
            f"sequence_parallel: seq_length({config.model.seq_length}) % tensor_model_parallel_size({tp}) = "
            f"{config.model.seq_length % tp}; choose a seq_length that is a multiple of {tp}"
        )
    copies_rows = parallel.sequence_parallel and config.precision.is_fp8
    if parallel.tp_transport != "auto" and not copies_rows:
        yield (
            f"tp_transport({parallel.tp_transport}) serves FP8 layers under sequence parallelism, but precision is "
            f"{config.precision.precision} and sequence_parallel {parallel.sequence_parallel}; pass "
            f"--sequence-parallel with --precision fp8, or --tp-transport auto"
        )
    uneven = layout_problem(config)
    if uneven is not None:
        yield uneven
    cp = parallel.context_parallel_size
    if world_size % parallel.ranks_per_sample:
        context, needed = f"context_parallel_size({cp}) × " if cp > 1 else "", parallel.ranks_per_sample
        more = f"start {needed} ranks (--gpus {needed}, on a CPU --cpu-ranks {needed}), or "
        yield (
            f"tensor_model_parallel_size({tp}) × {context}pipeline_model_parallel_size({pp}) = {needed} does not "
            f"divide WORLD_SIZE({world_size}); {more if world_size < needed else ''}choose sizes whose product does"
        )
        return
    yield from _check_expert_ranks(config, world_size)
    num_replicas = config.num_replicas(world_size)
    interval = training.check_weight_hash_across_dp_replicas_interval
    if interval is not None and num_replicas * tp == 1:
        yield (
            f"check_weight_hash_across_dp_replicas_interval({interval}) compares ranks that hold the same weights, but "
            f"WORLD_SIZE({world_size}) has none; drop it or run on more ranks"
        )
    try:
        batches = config.batch_schedule(world_size)
    except ValueError:
        return  # `_check_length` reports it
    # A run that resumes may be past the batches that its ranks cannot share: `check_batches` follows, once its place is
    # known.
    starts_over = config.checkpoint.load is None or config.checkpoint.loads_weights_alone
    first = 0 if starts_over else batches.phases[-1][0]
    problem = batch_problem(batches, config, world_size, first)
    if problem is not None:
        yield problem
        return
    num_micro_batches = config.num_micro_batches(world_size)
    if uneven is None:
        yield from interleaving_problems(batches, config, world_size, first)
    yield from _check_eval_batch(config, world_size)
    yield from _check_reduction(config)
    yield from _check_weight_grad_scaling(config)
    yield from _check_transpose_cache(config, num_micro_batches)
    yield from _check_release(config, world_size, num_replicas, num_micro_batches)


def _check_eval_batch(config: Config, world_size: int) -> Iterator[str]:
    """Check that ranks and pipeline stages can share a batch of --eval-global-batch-size."""
    batch = config.training.eval_global_batch_size
    if batch is None:
        return
    batches = BatchSchedule.constant(batch)
    problem = batch_problem(batches, config, world_size)
    if problem is not None:
        yield f"eval_{problem}"
    else:
        problems = interleaving_problems(batches, config, world_size)
        yield from (f"with eval_global_batch_size({batch}) {line}" for line in problems)


def _check_expert_ranks(config: Config, world_size: int) -> Iterator[str]:
    """Check that the ranks of each stage hold whole copies of its experts."""
    parallel = config.parallel
    ep, tp, pp = parallel.expert_model_parallel_size, parallel.expert_tensor_size, parallel.pipeline_model_parallel_size
    others = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    if config.model.num_experts is not None and parallel.use_tp_pp_dp_mapping and pp > 1 and tp * ep != others:
        yield (
            f"use_tp_pp_dp_mapping: expert_tensor_parallel_size({tp}) × expert_model_parallel_size({ep}) = {tp * ep} "
            f"is not tensor_model_parallel_size × context_parallel_size = {others}; give --expert-model-parallel-size "
            f"{others // tp}, or drop --use-tp-pp-dp-mapping"
        )
    if config.model.num_experts is not None and world_size % (tp * ep * pp):
        yield (
            f"expert_tensor_parallel_size({tp}) × expert_model_parallel_size({ep}) × pipeline_model_parallel_size({pp})"
            f" = {tp * ep * pp} does not divide WORLD_SIZE({world_size}); choose sizes whose product does"
        )


def _check_length(config: Config, world_size: int) -> Iterator[str]:
    """Check the batches, the number of steps, and what depends on it."""
    if world_size % config.parallel.ranks_per_sample:
        return  # without a data-parallel size there is no batch
    try:
        config.batch_schedule(world_size)
    except ValueError as error:
        yield str(error)
        return
    problems = list(schedule_problems(config, world_size))
    yield from problems
    if not problems:
        train_iters = config.train_iters(world_size)
        yield from fallback_length_problems(config.precision, train_iters)
        yield from profile_problems(config, train_iters, world_size)


def _check_reduction(config: Config) -> Iterator[str]:
    """Check how gradients travel between ranks."""
    parallel, precision = config.parallel, config.precision
    mode = parallel.fp8_grad_reduce
    if mode is not GradReduceMode.ALL_TO_ALL and precision.formats.main_grad is not StorageDtype.FP8:
        yield (
            f"fp8_grad_reduce({mode.value}) reduces FP8 gradients, but main_grads_dtype is "
            f"{precision.formats.main_grad.value}; drop it or choose --precision fp8 with --main-grads-dtype fp8"
        )
    if mode is not GradReduceMode.HIERARCHICAL and parallel.fp8_wire_intra != ParallelConfig().fp8_wire_intra:
        yield (
            f"fp8_wire_intra({parallel.fp8_wire_intra}) has no effect under fp8_grad_reduce({mode.value}); "
            f"drop it or choose --fp8-grad-reduce hierarchical"
        )


def _check_release(config: Config, world_size: int, num_replicas: int, num_micro_batches: int) -> Iterator[str]:
    """Check what --release-gradients excludes."""
    precision, clip_grad = config.precision.precision, config.optimizer.clip_grad
    if not config.precision.release_gradients:
        return
    name = "release_gradients updates weights during backward"
    if precision == "fp16":
        yield f"{name}, before an overflow of the loss scale can be known; choose --precision fp8"
    elif precision != "fp8":
        yield f"release_gradients is for FP8's linear weights, precision is {precision}; drop it or choose fp8"
    if clip_grad > 0:
        yield f"{name}, before the norm that clip_grad({clip_grad}) clips by is known; give --clip-grad 0, or drop it"
    if num_micro_batches > 1:
        yield (
            f"{name}, but a step has {num_micro_batches} micro-batches to add up; "
            f"choose global_batch_size = micro_batch_size({config.training.micro_batch_size}), or drop it"
        )
    if num_replicas > 1:
        yield (
            f"{name}, but {num_replicas} data-parallel ranks have gradients to reduce first; drop it (they hold "
            f"4 / {num_replicas} bytes of gradients a parameter), or raise tensor_model_parallel_size"
        )
    parallel = config.parallel
    holders = config.num_replicas(world_size, has_matrices=True)
    if config.model.num_experts is not None and holders > 1 == num_replicas:
        yield (
            f"{name}, but each expert is on {holders} ranks, whose gradients are reduced first; drop it, or choose an "
            f"expert_model_parallel_size of {parallel.expert_model_parallel_size * holders}"
        )


def _check_weight_grad_scaling(config: Config) -> Iterator[str]:
    """Check what --fp8-weight-grad-scaling delayed needs."""
    precision = config.precision
    if precision.weight_grad_scaling == "block":
        return
    name = "fp8_weight_grad_scaling(delayed)"
    if not precision.is_fp8:
        yield f"{name} is for FP8's linear weights, precision is {precision.precision}; drop it or choose fp8"
    elif precision.fp8_recipe != "delayed":
        yield f"{name} takes scales from the amax history of fp8_recipe(delayed), not {precision.fp8_recipe}; give both"
    elif precision.formats.main_grad is not StorageDtype.FP8:
        yield f"{name} is for gradients in fp8, main_grads_dtype is {precision.formats.main_grad.value}; drop one"


def _check_cuda_graph(config: Config) -> Iterator[str]:
    """Check --cuda-graph-impl local. With `auto`, these problems only prevent recording (`training.graph_choice`)."""
    if config.training.cuda_graph_impl == "local":
        yield from cuda_graph_problems(config)


def cuda_graph_problems(config: Config) -> Iterator[str]:
    """One line for each setting that cannot be recorded: saved random states, state kept in Python."""
    training = config.training
    if training.cuda_graph_warmup_steps < MIN_CUDA_GRAPH_WARMUP_STEPS:
        yield (
            f"cuda_graph_warmup_steps({training.cuda_graph_warmup_steps}): the first step with delayed scales is the "
            f"second; choose at least {MIN_CUDA_GRAPH_WARMUP_STEPS}"
        )
    name = f"cuda_graph_impl({training.cuda_graph_impl})"
    all_fp8 = all(map(config.is_fp8_layer, range(config.model.num_layers)))
    saves_none = all_fp8 and training.recomputed_modules and "core_attn" not in training.recomputed_modules
    if training.recompute_granularity is not None and not saves_none:
        yield (
            f"{name} cannot record recompute_granularity({training.recompute_granularity}), which saves the state of "
            f"random generators (FP8 layers with --recompute-modules mlp moe do not); drop one"
        )
    if training.cpu_offloading_num_layers:
        count = training.cpu_offloading_num_layers
        yield f"{name} does not record copies to the host, cpu_offloading_num_layers is {count}; drop one"
    if training.loss_chunk_size is not None:
        yield f"{name} does not record the backward inside loss_chunk_size({training.loss_chunk_size}); drop one"
    if config.precision.release_gradients:
        yield f"{name} would repeat the recorded learning rate in the updates of release_gradients; drop one"
    if config.model.num_experts is not None and not config.parallel.gathers_tokens:
        kind = config.parallel.moe_token_dispatcher_type
        yield (
            f"{name} cannot record moe_token_dispatcher_type({kind}), where the host waits for the numbers of tokens; "
            f"drop one"
        )
    if config.precision.precision == "te":
        yield f"{name} cannot record Transformer Engine's layers, whose scales move in Python; drop it, or choose fp8"


def _check_transpose_cache(config: Config, num_micro_batches: int) -> Iterator[str]:
    """Check --keep-fp8-transpose-cache."""
    layers = config.precision.keep_fp8_transpose_cache
    if layers == 0:
        return
    name = f"keep_fp8_transpose_cache({layers})"
    if not config.precision.is_fp8:
        yield f"{name} is for FP8's weights, precision is {config.precision.precision}; drop it or choose fp8"
    elif num_micro_batches == 1:
        yield f"{name} saves work from one micro-batch of a step to the next, but there is one; drop it"


def _check_gemm_sizes(config: Config) -> Iterator[str]:
    """Check that tokens and the LM head's rows are multiples that FP8 tensor cores take."""
    if config.precision.precision in ("bf16", "fp16"):
        return
    model, tp, of_one = config.model, config.parallel.tensor_model_parallel_size, config.precision.gemm_multiple
    tokens, cp = config.tokens_per_micro_batch, config.parallel.context_parallel_size
    # A block of tokens must lie within one rank's part of the sequence.
    shares = config.parallel.sequence_shares if config.precision.has_blocks else 1
    if tokens % (of_one * shares):
        over = f"{of_one} × tensor_model_parallel_size({tp}) = {of_one * shares}" if shares > 1 else f"{of_one}"
        divided = f" / context_parallel_size({cp})" if cp > 1 else ""
        yield (
            f"FP8 GEMM: seq_length({model.seq_length}) × micro_batch_size({config.training.micro_batch_size}){divided} "
            f"= {tokens} tokens is not a multiple of {over}; choose another seq_length or micro_batch_size"
        )
    if config.has_fp8_lm_head:
        yield from _check_vocabulary(config)


def _check_vocabulary(config: Config) -> Iterator[str]:
    """Check each rank's rows of an FP8 LM head. Without --vocab-size, they must fit for any tokenizer."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    divisor = model.make_vocab_size_divisible_by
    if config.head_rows % FP8_GEMM_MULTIPLE:
        size = "the tokenizer's vocabulary" if model.vocab_size is None else f"vocab_size({model.vocab_size})"
        yield (
            f"fp8_lm_head: {size} padded by make_vocab_size_divisible_by({divisor}) does not guarantee each of "
            f"tensor_model_parallel_size({tp}) ranks a multiple of {FP8_GEMM_MULTIPLE} rows; choose "
            f"make_vocab_size_divisible_by = {multiples_near(divisor, FP8_GEMM_MULTIPLE)}"
        )


def _check_recompute(config: Config) -> Iterator[str]:
    training = config.training
    method, count = training.recompute_method, training.recompute_num_layers
    if training.recompute_granularity == "full":
        missing = [
            name for name, value in (("recompute_method", method), ("recompute_num_layers", count)) if value is None
        ]
        if missing:
            yield f"recompute_granularity(full) needs {' and '.join(missing)}; for every layer: uniform and 1"
        problem = recompute_problem(config)
        if problem is not None:
            yield problem
    elif training.recompute_granularity is not None and (method is not None or count is not None):
        yield (
            f"recompute_method({method}) and recompute_num_layers({count}) belong to recompute_granularity(full), "
            f"not ({training.recompute_granularity}); drop them or choose full"
        )
