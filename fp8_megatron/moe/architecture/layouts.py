"""What layouts of the ranks of a decoder with experts may choose, and what is not known of their speed."""

from __future__ import annotations

from ...config.schema import Config, ModelConfig
from ...models.architecture import LayoutSize

#: As `Architecture.cuts_mlps`.
cuts_mlps = False
#: As `Architecture.other_matrices`.
other_matrices: str | None = "router"


def mlp_modules(model: ModelConfig) -> tuple[str, ...]:
    """As `Architecture.mlp_modules`: those of dense layers, and experts."""
    dense = ("mlp",) if len(model.expert_layers) < model.num_layers else ()
    return (*dense, "moe")


def layout_sizes(model: ModelConfig) -> list[LayoutSize]:
    """As `Architecture.layout_sizes`: ranks share the experts of a layer."""
    assert model.num_experts is not None
    return [LayoutSize("expert_model_parallel_size", "EP", model.num_experts)]


def assumptions(config: Config) -> list[str]:
    """As `Architecture.assumptions`: how tokens choose their experts."""
    if config.parallel.gathers_tokens:
        return []
    return ["experts: as if every rank got equally many tokens; one that gets more needs more memory"]


def why_no_rates(model: ModelConfig) -> str | None:
    """As `Architecture.why_no_rates`."""
    return "no rates of experts were measured"
