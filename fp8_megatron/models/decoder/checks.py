"""Checks of a decoder's settings: what its layers can compute, and what ranks can share."""

from __future__ import annotations

from collections.abc import Iterator

from ...config.schema import Config
from ...config.words import multiples_near
from .attention_checks import attention_problems, context_problems


def problems(config: Config) -> Iterator[str]:
    """As `Architecture.problems`."""
    yield from _head_problems(config)
    yield from _rope_problems(config)
    yield from attention_problems(config)
    yield from context_problems(config)
    yield from _activation_problems(config)
    yield from _mup_problems(config)
    yield from _width_problems(config)


def _head_problems(config: Config) -> Iterator[str]:
    """Check attention heads, their groups and their positions."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    heads = model.num_attention_heads
    if model.kv_channels is None and model.hidden_size % heads:
        yield (
            f"hidden_size({model.hidden_size}) % num_attention_heads({heads}) = {model.hidden_size % heads}; "
            f"choose hidden_size = {multiples_near(model.hidden_size, heads)}, or set kv_channels"
        )
    if heads % tp:
        yield (
            f"num_attention_heads({heads}) % tensor_model_parallel_size({tp}) = {heads % tp}; "
            f"choose a tensor_model_parallel_size that divides the heads"
        )
    if model.group_query_attention:
        groups = model.num_query_groups
        if heads % groups:
            yield (
                f"num_attention_heads({heads}) % num_query_groups({groups}) = {heads % groups}; "
                f"choose groups that divide the heads"
            )
        if groups % tp:
            yield (
                f"num_query_groups({groups}) % tensor_model_parallel_size({tp}) = {groups % tp}; "
                f"choose a multiple of {tp}, or a smaller tensor_model_parallel_size"
            )
    if model.max_position_embeddings is not None and model.max_position_embeddings < model.seq_length:
        yield (
            f"max_position_embeddings({model.max_position_embeddings}) < seq_length({model.seq_length}); "
            f"choose at least {model.seq_length}, or leave it out"
        )


def _rope_problems(config: Config) -> Iterator[str]:
    """One line for each problem of RoPE and its scaling by YaRN."""
    model = config.model
    if not model.uses_rope:
        return
    rotated = int(model.head_dim * model.rotary_percent)
    if rotated % 2 or rotated == 0:
        yield (
            f"rope rotates pairs, but head width({model.head_dim}) × rotary_percent({model.rotary_percent}) = {rotated}"
            f" is not a positive even number; choose another kv_channels or num_attention_heads"
        )
    if model.position_embedding_type != "yarn":
        return
    if model.rotary_scaling_factor == 1.0:
        yield (
            "position_embedding_type(yarn) with rotary_scaling_factor(1.0) scales nothing; give "
            "--rotary-scaling-factor, or choose --position-embedding-type rope"
        )
    if model.rotary_base == 1:
        yield "position_embedding_type(yarn) needs a rotary_base above 1, under which pairs turn differently"
    if model.yarn_beta_fast <= model.yarn_beta_slow:
        yield (
            f"yarn_beta_fast({model.yarn_beta_fast}) is not above yarn_beta_slow({model.yarn_beta_slow}); "
            f"give a larger --yarn-beta-fast"
        )


def _activation_problems(config: Config) -> Iterator[str]:
    given = config.model.given_activations
    if len(given) > 1:
        yield f"{' and '.join(given)} are different activations of one MLP; give one of them"
    offset, limit = config.model.glu_linear_offset, config.model.activation_func_clamp_value
    if (offset, limit) != (0.0, None) and config.model.activation.kind != "clamped_swiglu":
        yield (
            f"glu_linear_offset({offset}) and activation_func_clamp_value({limit}): gpt-oss's MLP alone has them, "
            f"and SwiGLU the clamp alone; give --quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 7, or "
            f"--swiglu --activation-func-clamp-value 7, or drop them"
        )


def _mup_problems(config: Config) -> Iterator[str]:
    """Megatron takes --mup-width-mult and overwrites it."""
    model, given = config.model, config.model.mup_width_mult
    if model.use_mup and given not in (1.0, model.width_mult):
        base = model.mup_base_hidden_size
        yield (
            f"mup_width_mult({given:g}) is not hidden_size({model.hidden_size}) / mup_base_hidden_size({base}) = "
            f"{model.width_mult:g}; drop it, or give --mup-base-hidden-size {round(model.hidden_size / given)}"
        )


def _width_problems(config: Config) -> Iterator[str]:
    """Check that both dimensions of each rank's linear weights are multiples that FP8 tensor cores take.

    In 16 bits, a rank only needs whole columns. Attention's columns are whole if heads and groups divide evenly.
    """
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    ffn = model.padded_ffn_hidden_size
    if config.precision.precision in ("bf16", "fp16"):
        if ffn % tp and model.has_dense_mlps:
            yield (
                f"ffn_hidden_size({ffn}) % tensor_model_parallel_size({tp}) = {ffn % tp}; "
                f"choose ffn_hidden_size = {multiples_near(ffn, tp)}, or another tensor_model_parallel_size"
            )
        return
    heads, groups, head_dim = model.num_attention_heads, model.query_groups, model.head_dim
    sizes = [
        (f"hidden_size({model.hidden_size})", model.hidden_size, 1),
        (f"heads({heads}) × head width({head_dim}) = {heads * head_dim}", heads * head_dim, tp),
        (
            f"(heads({heads}) + 2 × groups({groups})) × head width({head_dim}) = {(heads + 2 * groups) * head_dim}",
            (heads + 2 * groups) * head_dim,
            tp,
        ),
    ]
    if model.has_dense_mlps:
        sizes.append((f"ffn_hidden_size({ffn})", ffn, tp))
    of_one, precision = config.precision.gemm_multiple, config.precision
    of_blocks = "--fp8-recipe" if precision.fp8_fallback_recipe is None else "--fp8-fallback-recipe"
    fix = f"{of_blocks} tensorwise" if precision.has_blocks else "--precision bf16"
    for equation, size, ranks in sizes:
        multiple = of_one * ranks
        if size % multiple:
            over = f"{of_one} × tensor_model_parallel_size({tp}) = {multiple}" if ranks > 1 else f"{multiple}"
            yield (
                f"FP8 GEMM: {equation} is not a multiple of {over}; "
                f"choose one ({multiples_near(size, multiple)}), or {fix}"
            )
