"""Checks that a converted checkpoint computes the same as its source: FP32 logits on random tokens."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..quantization.stats import snr_db
from .conversion import CheckpointFormat, SourceCheckpoint
from .logits import logits_of_folder, logits_of_weights, random_tokens

#: Largest difference of FP32 logits, as a fraction of the largest logit, that the order of sums explains (measured:
#: 6e-7 at 3 layers). A wrong mapping gives about 1, another GELU 2e-4.
TOLERANCE = 2e-5
#: Minimum signal-to-noise ratio in dB of logits with rounded weights. A wrong mapping gives about -3.
ROUNDED_SNR_DB = {torch.bfloat16: 25.0, torch.float16: 35.0, torch.float8_e4m3fn: 8.0}


@dataclass(frozen=True)
class LogitsComparison:
    """Comparison of two checkpoints' logits, a and b, on the same tokens.

    Attributes:
        difference: largest |a − b|; largest: largest |b|.
        snr_db: of a as an approximation of b.
        limit: largest `difference` that passes; None if `least_snr_db` decides.
    """

    what: str
    difference: float
    largest: float
    snr_db: float
    limit: float | None
    least_snr_db: float | None = None

    @property
    def passes(self) -> bool:
        """Whether the two agree."""
        if self.limit is not None:
            return self.difference <= self.limit
        return self.least_snr_db is None or self.snr_db >= self.least_snr_db

    def __str__(self) -> str:
        bound = (
            f"limit {self.limit:.1e}" if self.limit is not None else f"{self.snr_db:.1f} dB, least {self.least_snr_db}"
        )
        verdict = "agree" if self.passes else "DIFFER"
        return f"{verdict}: {self.what}: |Δ| ≤ {self.difference:.1e} beside logits up to {self.largest:.2f} ({bound})"


def compare(
    what: str, a: Tensor, b: Tensor, *, tolerance: float | None, least_snr_db: float | None = None
) -> LogitsComparison:
    """Compare logits [..., vocabulary] of `a` with those of `b`.

    Args:
        tolerance: as a fraction of the largest |b|; None if `least_snr_db` decides.
    """
    difference, largest = (a - b).abs().max().item(), b.abs().max().item()
    limit = None if tolerance is None else tolerance * max(1.0, largest)
    return LogitsComparison(what, difference, largest, snr_db(a, b), limit, least_snr_db)


def has_transformers() -> bool:
    """Whether transformers is installed, to run Hugging Face's own model."""
    return importlib.util.find_spec("transformers") is not None


def num_passes(source: SourceCheckpoint, target: SourceCheckpoint) -> int:
    """Forward passes, each over all layers, that `verify` makes."""
    theirs = sum(side.format is CheckpointFormat.HUGGING_FACE for side in (source, target)) if has_transformers() else 0
    return 2 + theirs


def verify(
    source: SourceCheckpoint,
    target: SourceCheckpoint,
    stored_in: torch.dtype,
    *,
    num_tokens: int,
    seed: int,
    tolerance: float = TOLERANCE,
    target_name: Path | None = None,
    on_layer: Callable[[], None] = lambda: None,
) -> list[LogitsComparison]:
    """Compare the source with the target, and each Hugging Face side with transformers' model.

    Args:
        stored_in: dtype of the target's weights. FP32 does not round.
        target_name: the target's folder in messages. Default: where it is.
        on_layer: called after each layer of each of `num_passes` passes.
    """
    length = min(num_tokens, source.config.model.seq_length)
    vocab_size = source.vocab_size
    tokens = random_tokens(vocab_size, batch_size=max(1, num_tokens // length), length=length, seed=seed)

    def ours(side: SourceCheckpoint) -> Tensor:
        return logits_of_weights(side.weights, side.config.model, tokens, on_layer=on_layer)[..., :vocab_size]

    before, after = ours(source), ours(target)
    comparisons = []
    for side, name, logits in ((source, source.folder, before), (target, target_name or target.folder, after)):
        if side.format is CheckpointFormat.HUGGING_FACE and has_transformers():
            theirs = logits_of_folder(side.folder, tokens, on_layer=on_layer)
            what = f"this project and transformers on {name}"
            comparisons.append(compare(what, logits, theirs, tolerance=tolerance))
    if stored_in is torch.float32:
        comparisons.append(compare("after and before", after, before, tolerance=tolerance))
    else:
        what = f"after and before (weights rounded to {str(stored_in).removeprefix('torch.')})"
        least = ROUNDED_SNR_DB[stored_in]
        comparisons.append(compare(what, after, before, tolerance=None, least_snr_db=least))
    return comparisons
