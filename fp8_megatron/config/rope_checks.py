"""Checks of rotary position embedding."""

from __future__ import annotations

from collections.abc import Iterator

from .schema import Config


def rope_problems(config: Config) -> Iterator[str]:
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
