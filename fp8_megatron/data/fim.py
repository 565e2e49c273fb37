"""Fill-in-the-middle samples, as Megatron's --fim-data makes them (Bavarian et al., arXiv 2207.14255).

A document is cut at two places into prefix, middle and suffix. PSM is ``<prefix> p <suffix> s <middle> m``; SPM, the
paper's second variant, is ``<prefix> <suffix> s <middle> p m``. Megatron draws from one generator a process, so that
its samples depend on the order in which they are read. Here they depend on the seed and their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config.fim import FimConfig
from ..config.words import flag_name
from ..errors import UserError
from .tokenizer import Tokenizer

Tokens = np.ndarray


@dataclass(frozen=True)
class FimRule:
    """What is cut and how; `tokenizer` reads and writes text, the other numbers are token ids."""

    settings: FimConfig
    tokenizer: Tokenizer
    prefix: int
    middle: int
    suffix: int
    pad: int
    eod: int
    split: int | None

    @classmethod
    def of(cls, settings: FimConfig, tokenizer: Tokenizer) -> FimRule:
        """Raises UserError for tokens that the tokenizer does not have."""
        names = [f"fim_{name}_token" for name in ("prefix", "middle", "suffix", "pad", "eod")]
        names += [] if settings.fim_split_sample is None else ["fim_split_sample"]
        tokens = {name: getattr(settings, name) for name in names}
        found = {name: tokenizer.token_id(token) for name, token in tokens.items()}
        ids = {name: token_id for name, token_id in found.items() if token_id is not None}
        missing = [f"{flag_name(name)} {token}" for name, token in tokens.items() if name not in ids]
        if missing:
            raise UserError(
                f"the tokenizer {tokenizer.unique_identifiers['tokenizer_path']} has no token of "
                f"{', '.join(missing)}: give others, or add them with --tokenizer-special-tokens"
            )
        prefix, middle, suffix, pad, eod = (ids[name] for name in names[:5])
        return cls(settings, tokenizer, prefix, middle, suffix, pad, eod, ids.get("fim_split_sample"))

    def permuted(self, sample: Tokens, rng: np.random.Generator) -> Tokens:
        """A sample [n] of the same length, with its documents cut."""
        documents = _joined(sample, self.eod, lambda part: self._document(part, rng))
        padding = np.full(max(len(sample) - len(documents), 0), self.pad)
        return np.concatenate([documents, padding])[: len(sample)].astype(sample.dtype)

    def _document(self, tokens: Tokens, rng: np.random.Generator) -> Tokens:
        settings = self.settings
        if self.split is None or not (tokens == self.split).any():
            return self._cut(tokens, settings.fim_rate, rng)
        if rng.random() >= settings.fim_rate:
            return tokens
        rate = settings.fim_fragment_rate
        assert rate is not None
        return _joined(tokens, self.split, lambda part: self._cut(part, rate, rng))

    def _cut(self, tokens: Tokens, rate: float, rng: np.random.Generator) -> Tokens:
        if rng.random() >= rate:
            return tokens
        text, barred = self.tokenizer.decode(tokens.tolist()), self.settings.fim_no_prefix
        if barred is not None and text.startswith(barred):
            return tokens
        start, end = sorted(rng.integers(len(text) + 1, size=2))
        prefix, middle, suffix = map(self.tokenizer.encode_part, (text[:start], text[start:end], text[end:]))
        if rng.random() < self.settings.fim_spm_rate:
            cut = [self.prefix, self.suffix, *suffix, self.middle, *prefix, *middle]
        else:
            cut = [self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle]
        return np.array(cut, dtype=tokens.dtype)


def _joined(tokens: Tokens, border: int, change: Callable[[Tokens], Tokens]) -> Tokens:
    """`tokens` with `change` for each part between borders. Empty parts stay."""

    def parts() -> Iterator[Tokens]:
        start = 0
        for place in [*np.flatnonzero(tokens == border), len(tokens)]:
            yield change(tokens[start:place]) if place > start else tokens[start:place]
            yield tokens[place : place + 1]
            start = place + 1

    return np.concatenate(list(parts()))


def permuted_sample(rule: FimRule, seed: int, index: int, query: tuple[Any, ...]) -> tuple[Any, ...]:
    """What megatron-core's dataset answers for sample `index`, its text first, with the text's documents cut."""
    text, *others = query
    return rule.permuted(text, np.random.default_rng((seed, int(index)))), *others
