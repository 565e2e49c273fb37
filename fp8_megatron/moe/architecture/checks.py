"""Checks of a decoder with experts: what its layers can compute, and what ranks can share."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, lcm

from ...config.fields import MAX_REAL
from ...config.moe import ALONE, LOSSES
from ...config.schema import Config
from ...config.words import multiples_near, number, shortened
from ...models.decoder.checks import problems as decoder_problems
from ...storage import CHUNK

#: Losses of Megatron that no router here has, and what to use instead.
_MISSING = {
    "quantile_balancing": "there is no quantile balancing; choose aux_loss, or --moe-router-enable-expert-bias",
}

#: Settings of how a token's experts are chosen that sinkhorn does not read.
_UNREAD_BY_SINKHORN = (
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
    "moe_expert_capacity_factor",
)


def problems(config: Config) -> Iterator[str]:
    """As `Architecture.problems`."""
    yield from decoder_problems(config)
    yield from _layer_problems(config)
    yield from _parallel_problems(config)
    yield from _overlap_problems(config)
    yield from _router_problems(config)
    yield from _balance_problems(config)
    yield from _precision_problems(config)
    yield from _memory_problems(config)
    yield from _width_problems(config)
    yield from _upcycling_problems(config)


def _layer_problems(config: Config) -> Iterator[str]:
    """Check which layers have experts, and what an expert is."""
    model = config.model
    pattern, count = f"moe_layer_freq({shortened(model.moe_layer_freq)})", model.num_layers
    fix = "give --moe-layer-freq 1" + (f", or a list such as [0]*1+[1]*{count - 1}" if count > 1 else "")
    try:
        if not model.expert_layers:
            yield f"{pattern} leaves no layer with experts; {fix}, or drop num_experts"
    except ValueError:
        yield f"{pattern} is neither a number of layers nor a list of 0 and 1 for num_layers({count}); {fix}"
    if not model.disable_bias_linear and model.moe_shared_expert_intermediate_size is not None:
        yield (
            f"moe_shared_expert_intermediate_size({model.moe_shared_expert_intermediate_size}): a shared expert has no "
            f"biases, as in Megatron; give --disable-bias-linear, and --add-qkv-bias to keep attention's"
        )


def _parallel_problems(config: Config) -> Iterator[str]:
    """Check which ranks share experts."""
    parallel, experts = config.parallel, config.model.num_experts
    assert experts is not None
    tp, ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    if experts % ep:
        yield (
            f"num_experts({experts}) % expert_model_parallel_size({ep}) = {experts % ep}; choose an "
            f"expert_model_parallel_size that divides the experts"
        )
    if tp > 1 and not parallel.sequence_parallel:
        yield (
            f"num_experts with tensor_model_parallel_size({tp}): each rank routes its part of the sequence; give "
            f"--sequence-parallel"
        )
    shared = parallel.expert_tensor_size
    if shared not in (1, tp):
        yield f"expert_tensor_parallel_size({shared}): choose 1, or tensor_model_parallel_size({tp})"
    elif shared > 1 and not config.model.disable_bias_linear:
        yield (
            f"expert_tensor_parallel_size({shared}): experts with biases are whole, as in Megatron; give "
            f"--expert-tensor-parallel-size 1, or --disable-bias-linear"
        )


def _overlap_problems(config: Config) -> Iterator[str]:
    """Check what a forward can run beside the backward of another micro-batch."""
    name, training = "overlap_moe_expert_parallel_comm", config.training
    stages, count = config.parallel.pipeline_model_parallel_size, training.cpu_offloading_num_layers
    if not config.parallel.overlap_moe_expert_parallel_comm:
        return
    if stages > 1:
        yield f"{name} is for one stage, pipeline_model_parallel_size is {stages}; drop one"
    if training.recompute_granularity == "full":
        yield f"{name}: recompute_granularity(full) sets random states back while a forward draws; choose selective"
    if count:
        yield f"{name}: cpu_offloading_num_layers({count}) copies the layers of one micro-batch at a time; drop one"


def _router_problems(config: Config) -> Iterator[str]:
    """Check how a token's experts are chosen."""
    model = config.model
    experts, chosen = model.num_experts, model.moe_router_topk
    assert experts is not None
    if chosen > experts:
        yield f"moe_router_topk({chosen}) > num_experts({experts}); choose at most {experts}"
    is_softmax = model.moe_router_score_function == "softmax"
    if "sinkhorn" in model.moe_router_load_balancing_type:
        unread = [name for name in _UNREAD_BY_SINKHORN if getattr(model, name) != getattr(type(model), name)]
        if unread:
            yield f"moe_router_load_balancing_type(sinkhorn) does not read {' and '.join(unread)}; drop one of them"
        return
    if chosen == 1 and is_softmax and not model.moe_router_pre_softmax:
        yield "moe_router_topk(1): the softmax of one score is 1 and teaches nothing; give --moe-router-pre-softmax"
    if model.moe_router_enable_expert_bias and is_softmax:
        yield "moe_router_enable_expert_bias needs --moe-router-score-function sigmoid; give both, or drop it"
    groups, best = model.moe_router_num_groups, model.moe_router_group_topk
    if groups is None or best is None:
        if groups is not best:
            yield (
                f"moe_router_num_groups({groups}) and moe_router_group_topk({best}) belong together; give both, or "
                f"neither"
            )
        return
    if experts % groups:
        yield f"num_experts({experts}) % moe_router_num_groups({groups}) = {experts % groups}; choose whole groups"
    elif best > groups:
        yield f"moe_router_group_topk({best}) > moe_router_num_groups({groups}); choose at most {groups}"
    elif best * (experts // groups) < chosen or chosen < best:
        yield (
            f"moe_router_topk({chosen}) experts do not come from moe_router_group_topk({best}) groups of "
            f"{experts // groups} experts; choose {best} to {best * (experts // groups)}"
        )


def _balance_problems(config: Config) -> Iterator[str]:
    """Check the losses that balance experts."""
    model = config.model
    kinds, factors = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    for kind in kinds:
        if kind not in (*LOSSES, *ALONE):
            reason = _MISSING.get(kind, f"there is no such loss; choose from {' '.join((*LOSSES, *ALONE))}")
            yield f"moe_router_load_balancing_type({shortened(kind)}): {reason}"
    if len(set(kinds)) != len(kinds) or (len(kinds) > 1 and set(ALONE) & set(kinds)):
        name = f"moe_router_load_balancing_type({shortened(' '.join(kinds))})"
        yield f"{name}: name losses once, {' or '.join(ALONE)} alone"
    given = f"moe_aux_loss_coeff({shortened(' '.join(factors))})"
    try:
        values = [number(factor) for factor in factors]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= MAX_REAL for value in values):
        yield f"{given} are not factors of at least 0 and up to {MAX_REAL:g}; give such as 1e-3"
    elif set(kinds) <= set(ALONE) and any(values):
        name = f"moe_router_load_balancing_type({' '.join(kinds) or 'none'})"
        yield f"{given} has no effect with {name}, which has no loss; give 0, or drop it"
    elif kinds not in ((), ("none",)) and len(kinds) != len(factors):
        yield (
            f"moe_aux_loss_coeff has {len(factors)} factors for {len(kinds)} losses of moe_router_load_balancing_type; "
            f"give one for each"
        )


def _precision_problems(config: Config) -> Iterator[str]:
    """Check the forms that experts have."""
    precision = config.precision
    if precision.precision in ("te", "fp16"):
        yield f"num_experts: experts are in FP8 or BF16, not {precision.precision}; choose --precision fp8 or bf16"
    for name in ("fp8_recipe", "fp8_fallback_recipe"):
        recipe = getattr(precision, name)
        if precision.is_fp8 and recipe not in (None, "delayed", "tensorwise", "blockwise"):
            yield (
                f"num_experts with {name}({recipe}): there are no products of experts in its blocks; choose tensorwise "
                f"or blockwise" + (", or delayed" if name == "fp8_recipe" else "")
            )


def _memory_problems(config: Config) -> Iterator[str]:
    """Check what of a layer with experts is not computed again."""
    training, model = config.training, config.model
    if training.mlp_chunks_for_training > 1:
        count = training.mlp_chunks_for_training
        yield f"mlp_chunks_for_training({count}): experts take all tokens at once; drop it, or num_experts"
    if "mlp" in training.recomputed_modules and not model.has_dense_mlps:
        yield "recompute_modules(mlp): every layer has experts; choose moe"


def _upcycling_problems(config: Config) -> Iterator[str]:
    """Check that the MLPs of a dense model make these experts."""
    model, granularity = config.model, config.checkpoint.upcycles
    if granularity is None or model.num_experts is None:
        return
    if model.num_experts % granularity:
        yield (
            f"num_experts({model.num_experts}) % moe_upcycling_granularity({granularity}) = "
            f"{model.num_experts % granularity}; choose a granularity that divides the experts"
        )
    if not model.disable_bias_linear:
        yield "moe_use_upcycling: experts with biases are not made of MLPs; give --disable-bias-linear"
    shared = model.moe_shared_expert_intermediate_size
    if shared is not None:
        name = f"moe_shared_expert_intermediate_size({shared})"
        yield f"moe_use_upcycling: a model without experts has no {name}; drop it"
    width, mlp = granularity * model.expert_ffn_hidden_size, model.padded_ffn_hidden_size
    if model.has_dense_mlps and width != mlp:
        yield (
            f"moe_use_upcycling: {granularity} × moe_ffn_hidden_size({model.expert_ffn_hidden_size}) = {width} is not "
            f"ffn_hidden_size({mlp}) of the layers without experts; give one width of all MLPs"
        )


def _width_problems(config: Config) -> Iterator[str]:
    """Check that an expert's weights are whole for FP8 tensor cores and for the optimizer."""
    model, parallel, multiple = config.model, config.parallel, config.precision.gemm_multiple
    width, shared = model.expert_ffn_hidden_size, model.moe_shared_expert_intermediate_size
    ranks = parallel.expert_tensor_size
    sizes = [("moe_ffn_hidden_size", width, ranks)]
    if shared is not None:
        sizes.append(("moe_shared_expert_intermediate_size", shared, parallel.tensor_model_parallel_size))
    of_gemm = multiple if config.precision.is_fp8 else 1
    for name, size, sharing in sizes:
        if size % (sharing * of_gemm):
            yield (
                f"{name}({size}) is not a multiple of {of_gemm}{_on_each(sharing)}; {_choice(size, sharing * of_gemm)}"
            )
    if width % (ranks * of_gemm) == 0 and width // ranks * model.hidden_size % CHUNK:
        numel, needed = width // ranks * model.hidden_size, lcm(CHUNK // gcd(CHUNK, model.hidden_size), of_gemm)
        yield (
            f"moe_ffn_hidden_size({width}) × hidden_size({model.hidden_size}) = {numel}{_on_each(ranks)} is not a "
            f"multiple of {CHUNK}, in which an expert's weights are stored; {_choice(width, ranks * needed)}"
        )


def _on_each(sharing: int) -> str:
    return "" if sharing == 1 else f" on each of {sharing} ranks"


def _choice(size: int, needed: int) -> str:
    return f"choose a multiple of {needed} ({multiples_near(size, needed)})"
