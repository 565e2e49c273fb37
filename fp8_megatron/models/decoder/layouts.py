"""What layouts of a decoder's ranks may choose, and what is known of their speed."""

from __future__ import annotations

from collections.abc import Sequence

from ...config.schema import Config, ModelConfig
from ..architecture import LayoutSize

#: As `Architecture.cuts_mlps`.
cuts_mlps = True
#: As `Architecture.other_matrices`.
other_matrices: str | None = None


def mlp_modules(model: ModelConfig) -> tuple[str, ...]:
    """As `Architecture.mlp_modules`."""
    return ("mlp",)


def layout_sizes(model: ModelConfig) -> Sequence[LayoutSize]:
    """As `Architecture.layout_sizes`: none."""
    return ()


def assumptions(config: Config) -> Sequence[str]:
    """As `Architecture.assumptions`: nothing."""
    return ()


def why_no_rates(model: ModelConfig) -> str | None:
    """As `Architecture.why_no_rates`."""
    return None
