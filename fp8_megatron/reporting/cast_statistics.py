"""Statistics of single casts for the host: each layer's FP8 operands, and their line in health.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..kernels import ops
from ..kernels.ops import Statistic
from .metrics_file import QUANTITIES

#: Errors below this share of the values' squares are roundings of FP32, not of FP8.
_EXACT = 1e-12


@dataclass(frozen=True, order=True)
class CastName:
    """Which cast: the layer's name in the whole model, one of `health_file.ROLES`, and the name of the format."""

    layer: str
    role: str
    format: str

    def __str__(self) -> str:
        return f"{self.layer} {self.role}"


@dataclass(frozen=True)
class CastStatistics:
    """One cast of a sampled step.

    Attributes:
        saturated: fraction of the elements that exceed scale · fp_max.
        underflowed: fraction of the elements other than 0 that become 0.
        snr_db: 10·log10(Σ x² / Σ (x̂ − x)²); None if nothing is known of the values before the cast, or they are exact.
        amax: largest magnitude.
        amax_over_scale: largest |x| / (scale · fp_max). Above 1 the cast saturates. Far below 1 it wastes range.
        kurtosis: n · Σ x⁴ / (Σ x²)². 3 for a normal distribution; large if a few outliers carry the norm.
        mu: auto-scaling's μ of a weight gradient; None without auto-scaling.
        non_finite: number of elements that are not finite.
        lowest_exponent, exponents: a histogram of ⌊log₂(|x| / scale)⌋ in fractions of the elements other than 0.
    """

    name: CastName
    saturated: float
    underflowed: float
    snr_db: float | None
    amax: float
    amax_over_scale: float
    kurtosis: float | None
    mu: float | None
    non_finite: int
    lowest_exponent: int
    exponents: tuple[float, ...]

    @classmethod
    def of_row(cls, name: CastName, row: Sequence[float], inverse_mu: float = 0.0) -> CastStatistics | None:
        """From a row of `ops.Statistic`; None if nothing was measured.

        Args:
            inverse_mu: 1 / μ of auto-scaling; 0 if there is none.
        """
        count, nonzero = row[Statistic.COUNT], row[Statistic.NONZERO]
        non_finite = round(row[Statistic.NON_FINITE])
        if count + non_finite == 0:
            return None
        squares, errors = row[Statistic.SQUARES], row[Statistic.ERRORS]
        bins = [bin / nonzero if nonzero else 0.0 for bin in row[Statistic.EXPONENTS :]]
        filled = [index for index, share in enumerate(bins) if share]
        first, last = (filled[0], filled[-1]) if filled else (0, -1)
        return cls(
            name,
            saturated=row[Statistic.SATURATED] / count if count else 0.0,
            underflowed=row[Statistic.UNDERFLOWED] / nonzero if nonzero else 0.0,
            snr_db=10 * math.log10(squares / errors) if errors > squares * _EXACT else None,
            amax=row[Statistic.AMAX],
            amax_over_scale=row[Statistic.FILL],
            kurtosis=count * row[Statistic.FOURTHS] / squares**2 if squares**2 > 0 else None,
            mu=1 / inverse_mu if inverse_mu > 0 else None,
            non_finite=non_finite,
            lowest_exponent=first + ops.LOWEST_EXPONENT,
            exponents=tuple(bins[first : last + 1]),
        )


@dataclass(frozen=True)
class HealthSample:
    """All casts of one sampled step."""

    iteration: int
    casts: tuple[CastStatistics, ...]

    def first_non_finite(self) -> CastName | None:
        """The cast that first saw a NaN or an inf; None if none did.

        A bad value spreads. So it is the first input or weight in forward, else the last layer's output gradient, else
        a weight gradient.
        """
        bad = [cast.name for cast in self.casts if cast.non_finite]  # in the model's order
        forward = [name for name in bad if name.role in ("input", "weight")]
        backward = [name for name in reversed(bad) if name.role == "grad_output"]
        return next(iter([*forward, *backward, *reversed(bad)]), None)

    def row(self) -> dict[str, Any]:
        """The line in health.jsonl: one list for each quantity, in the order of `layers`."""
        columns: dict[str, list[Any]] = {
            "layers": [cast.name.layer for cast in self.casts],
            "roles": [cast.name.role for cast in self.casts],
            "formats": [cast.name.format for cast in self.casts],
            "non_finite_values": [cast.non_finite for cast in self.casts],
        }
        for quantity in QUANTITIES:
            columns[quantity] = [_short(getattr(cast, quantity)) for cast in self.casts]
        columns["lowest_exponent"] = [cast.lowest_exponent for cast in self.casts]
        columns["exponents"] = [[_short(share, 3) for share in cast.exponents] for cast in self.casts]
        return {"kind": "health", "iteration": self.iteration} | columns

    def scalars(self) -> dict[str, float]:
        """Tag → the worst value of each role and quantity, for TensorBoard and W&B."""
        found: dict[str, float] = {}
        for cast in self.casts:
            for quantity, value in _finite_quantities(cast):
                tag = f"fp8_health/{cast.name.role}/{quantity}"
                worse = max if QUANTITIES[quantity] else min
                found[tag] = worse(found.get(tag, value), value)
        return found


def _finite_quantities(cast: CastStatistics) -> Iterator[tuple[str, float]]:
    for quantity in QUANTITIES:
        value = getattr(cast, quantity)
        if value is not None and math.isfinite(value):
            yield quantity, value


def _short(value: float | None, digits: int = 4) -> float | None:
    """`value` with some significant digits, as JSON takes it."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")
