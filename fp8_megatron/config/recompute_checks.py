"""Checks of what layers keep for backward: --recompute-modules, --mlp-chunks-for-training,
--cpu-offloading-num-layers, --loss-chunk-size."""

from __future__ import annotations

from collections.abc import Iterator

from ..storage import FP8_GEMM_MULTIPLE
from .schema import Config
from .words import shortened

_MODULES = ("core_attn", "mlp", "layernorm", "moe", "moe_act", "shared_experts")
#: Megatron's other modules, which no model here has, and why.
_MISSING = {"mla_up_proj": "there is no multi-latent attention"}


def recompute_module_problems(config: Config) -> Iterator[str]:
    """One line for each module that cannot be recomputed alone, or need not be."""
    training = config.training
    modules = training.recompute_modules
    for module in modules:
        if module not in _MODULES:
            reason = _MISSING.get(module, "there is no such module")
            yield f"recompute_modules({shortened(module)}): {reason}; choose from {' '.join(_MODULES)}"
    if training.recompute_granularity != "selective":
        return
    if "layernorm" in modules and config.precision.precision in ("bf16", "fp16"):
        precision = config.precision.precision
        yield f"recompute_modules(layernorm): layers of precision({precision}) keep the outputs of norms; drop it"
    elif set(modules) == {"layernorm"} and config.precision.is_fp8:
        yield "recompute_modules(layernorm) has no effect alone: FP8 layers recompute norms anyway; drop it"
    elif set(modules) == {"moe_act"} and config.precision.is_fp8:
        yield "recompute_modules(moe_act) has no effect alone: FP8 experts recompute the activation anyway; drop it"
    for module in ("moe", "moe_act", "shared_experts"):
        if module in modules and config.model.num_experts is None:
            yield f"recompute_modules({module}) is for experts, of which there are none; drop it, or give --num-experts"
    if "shared_experts" in modules and config.model.moe_shared_expert_intermediate_size is None:
        yield (
            "recompute_modules(shared_experts): there is none; drop it, or give --moe-shared-expert-intermediate-size"
        )


def offload_problems(config: Config) -> Iterator[str]:
    """One line for each problem of --cpu-offloading-num-layers."""
    training = config.training
    count, method, group = training.cpu_offloading_num_layers, training.recompute_method, training.recompute_num_layers
    if count == 0:
        return
    name = f"cpu_offloading_num_layers({count})"
    if config.precision.precision == "te":
        yield f"{name} is for this project's layers, not Transformer Engine's; choose precision fp8 or bf16"
    try:
        layout = config.pipeline_layout
    except ValueError:
        return  # `pipeline_checks.layout_problem` reports it
    most = max(len(chunk) for stage in layout.chunks for chunk in stage)
    if count > most:
        stage = "virtual pipeline stage" if layout.is_interleaved else "pipeline stage"
        yield f"{name} > {most} layers of a {stage}; choose at most {most}"
    elif method == "uniform" and group and count % group:
        yield (
            f"{name} % recompute_num_layers({group}) = {count % group}: recomputed chunks are offloaded whole; choose "
            f"{count // group * group or group}, or recompute_num_layers 1"
        )


def mlp_chunk_problems(config: Config) -> Iterator[str]:
    """One line for each problem of --mlp-chunks-for-training."""
    training, parallel = config.training, config.parallel
    count = training.mlp_chunks_for_training
    if count == 1:
        return
    name = f"mlp_chunks_for_training({count})"
    if config.precision.precision == "te":
        yield f"{name} is for this project's layers, not Transformer Engine's; choose precision fp8 or bf16"
    if training.recompute_granularity != "full" and "mlp" not in training.recomputed_modules:
        yield (
            f"{name}: backward recomputes MLPs in chunks; give --recompute-granularity full, or selective with "
            f"--recompute-modules mlp"
        )
    shares = parallel.sequence_shares
    positions = config.model.seq_length // (parallel.context_parallel_size * shares)
    multiple = config.precision.gemm_multiple
    if count > positions // multiple:
        yield (
            f"{name} × {multiple} > {positions} positions of a rank, and a chunk has a multiple of {multiple}; choose "
            f"at most {max(1, positions // multiple)}"
        )


def loss_chunk_problems(config: Config) -> Iterator[str]:
    """One line for each problem of --loss-chunk-size."""
    size, parallel = config.training.loss_chunk_size, config.parallel
    if size is None:
        return
    name = f"loss_chunk_size({size})"
    if config.precision.precision == "te":
        yield f"{name} is for this project's loss, not precision(te)'s; choose precision fp8 or bf16"
    cp, shares = parallel.context_parallel_size, parallel.sequence_shares
    positions, multiple = config.model.seq_length // cp, FP8_GEMM_MULTIPLE * shares
    largest = (positions - 1) // multiple * multiple
    if size >= positions:
        divided = f" / context_parallel_size({cp})" if cp > 1 else ""
        length = f"seq_length({config.model.seq_length}){divided}"
        fix = f"choose at most {largest}, or drop it" if largest else "drop it"
        yield f"{name} is not below {length}; {fix}"
    elif size % multiple:
        over = f"{FP8_GEMM_MULTIPLE} × tensor_model_parallel_size({shares}) = " if shares > 1 else ""
        fix = f"choose {min(max(1, size // multiple) * multiple, largest)}" if largest else "drop it"
        yield f"{name} is not a multiple of {over}{multiple}; {fix}"
