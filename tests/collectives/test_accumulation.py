"""Many micro-batches: reducing each in E4M3 into FP32 keeps the precision that adding in low precision loses.

Every micro-batch of every rank is rounded once, to 31.5 dB, and everything after that is FP32. Independent roundings
and gradients add up alike: 31.5 dB remain. Where gradients share a signal and differ by noise, the roundings average
out over 256 · 4 of them, by up to 30 dB. Adding in E4M3 rounds each partial sum, of a signal that has grown, and stops
adding where a gradient is less than half a unit of the sum.
"""

from __future__ import annotations

import pytest

from tests.collectives.simulated_reductions import (
    ACCUMULATION_IN_BF16,
    ACCUMULATION_OF_OURS,
    Kind,
    measure_accumulation,
)


@pytest.mark.parametrize("kind", ["uncorrelated", "correlated"])
def test_256_micro_batches(kind: Kind) -> None:
    """Uncorrelated, the signal is itself a random sum: in some 300 values that carry a tensor's power it is uncertain
    by 0.4 dB, and the worst of eight tensors is asked for 30. Correlated, each rounding has 1.25 of the signal's power:
    60.6 dB, of which 10 are left for what the noise of a quarter of it does not make independent."""
    measured = measure_accumulation(256, kind, blocks_per_tensor=8)
    ours = measured[ACCUMULATION_OF_OURS]
    assert ours > (50.0 if kind == "correlated" else 30.0)
    # The measure can tell the difference.
    assert measured["added in E4M3"] < 15.0
    assert measured["added in BF16, then E4M3 once"] < ours


@pytest.mark.parametrize("kind", ["uncorrelated", "correlated"])
def test_a_shard_in_bf16_holds_a_few_micro_batches(kind: Kind) -> None:
    """Each addition rounds the sum to 2⁻⁹ of its size. Of 16 correlated gradients the sum grows as k/16, so its last
    value has Σ(k/16)² ≈ 5.8 roundings of power (2⁻⁹)²/3 at most: 51 dB or more beside FP32's 48, 46 together, of which
    rounding errors that are alike (the signal grows along one line) may take 3."""
    measured = measure_accumulation(16, kind, blocks_per_tensor=8)
    assert measured[ACCUMULATION_IN_BF16] > (43.0 if kind == "correlated" else 30.0)
