"""How many samples each step has: a constant number, a ramp, or steps at given places. Megatron's rules and names."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .words import number

#: More samples or steps than any run has.
_ENDLESS = 1 << 62
#: Suffixes of numbers in --step-batch-size-schedule.
_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class BatchSchedule:
    """The global batch of a step as a function of the samples that were consumed before it.

    Attributes:
        phases: (consumed samples from which a batch counts, samples of that batch); the first starts at 0. Both grow.
    """

    phases: tuple[tuple[int, int], ...]

    @classmethod
    def constant(cls, batch_size: int) -> BatchSchedule:
        """The same batch in every step."""
        return cls(((0, batch_size),))

    @classmethod
    def ramp(cls, start: int, increment: int, samples: int, batch_size: int) -> BatchSchedule:
        """--rampup-batch-size: from `start` to `batch_size` by `increment`, in equal shares of `samples`.

        The shares are the floating-point numbers of megatron-core's
        ``RampupBatchsizeNumMicroBatchesCalculator.update``.

        Raises:
            ValueError: numbers that do not fit together, in words.
        """
        if min(start, increment, samples) < 1:
            raise ValueError("give three whole numbers above 0: start, increment, samples")
        if start >= batch_size:
            raise ValueError(f"its start is not below global_batch_size({batch_size})")
        if (batch_size - start) % increment:
            raise ValueError(
                f"global_batch_size({batch_size}) - {start} is not a multiple of the increment {increment}"
            )
        count = (batch_size - start) // increment
        share = samples / count
        phases = [(_first_in_share(k, share), start + k * increment) for k in range(count)]
        last = min(_first_in_share(count, share), samples + 1)
        # With fewer samples than increments, several phases start at once: the largest counts.
        return cls(tuple(dict([*phases, (last, batch_size)]).items()))

    @classmethod
    def steps(cls, words: Sequence[str], seq_length: int) -> BatchSchedule:
        """--step-batch-size-schedule: ``TOKENS:BATCH`` …, with K, M, B and T for thousands to trillions of tokens.

        Args:
            words: the words after the flag. One word may hold several pairs, between blanks or commas.

        Raises:
            ValueError: no such pairs, in words.
        """
        pairs = [pair for word in words for pair in word.replace(",", " ").split()]
        read = []
        for pair in pairs:
            tokens, colon, samples = pair.partition(":")
            if not colon:
                raise ValueError(f"{pair!r} is not TOKENS:BATCH, such as 2.4B:320")
            read.append((_number(tokens) // seq_length, _number(samples)))
        phases = sorted(read)
        if not phases or phases[0][0] != 0:
            raise ValueError("its first batch does not start at 0 tokens")
        if min(batch for _, batch in phases) < 1:
            raise ValueError("a batch has at least one sample")
        for (start, batch), (next_start, next_batch) in pairwise(phases):
            if start == next_start:
                raise ValueError(f"two batches start at sample {start}")
            if next_batch < batch:
                raise ValueError(f"a batch of {next_batch} follows one of {batch}: batches may only grow")
        return cls(tuple(phases))

    @property
    def largest(self) -> int:
        """The last batch, which no other exceeds."""
        return self.phases[-1][1]

    @property
    def is_constant(self) -> bool:
        """Whether all steps have the same batch."""
        return len(self.phases) == 1

    def batch_size(self, consumed_samples: int) -> int:
        """Samples of the step after `consumed_samples`."""
        return self.phases[bisect_right(self.phases, consumed_samples, key=lambda phase: phase[0]) - 1][1]

    def num_steps(self, end: int, consumed_samples: int = 0) -> int:
        """Whole steps from `consumed_samples` up to `end` samples; an incomplete last batch is dropped."""
        return sum(count for _, count in self._runs(consumed_samples, end=end))

    def num_samples(self, num_steps: int, consumed_samples: int = 0) -> int:
        """Samples of the next `num_steps` steps after `consumed_samples`."""
        return sum(batch * count for batch, count in self._runs(consumed_samples, most_steps=num_steps))

    def batches_from(self, consumed_samples: int) -> list[int]:
        """The different batches of the steps after `consumed_samples`, in order."""
        return [batch for batch, _ in self._runs(consumed_samples)]

    def _runs(
        self, consumed_samples: int, *, end: int = _ENDLESS, most_steps: int = _ENDLESS
    ) -> Iterator[tuple[int, int]]:
        """(batch, number of steps with it), in order."""
        starts = [start for start, _ in self.phases]
        while True:
            index = bisect_right(starts, consumed_samples)
            batch = self.phases[index - 1][1]
            limit = starts[index] if index < len(starts) else _ENDLESS
            count = min(-((consumed_samples - limit) // batch), (end - consumed_samples) // batch, most_steps)
            if count <= 0:
                return
            yield batch, count
            consumed_samples += batch * count
            most_steps -= count


def _first_in_share(index: int, share: float) -> int:
    """The smallest whole number of samples that divided by `share` gives at least `index`."""
    samples = math.ceil(index * share)
    while int(samples / share) < index:
        samples += 1
    while samples > 0 and int((samples - 1) / share) >= index:
        samples -= 1
    return samples


def _number(word: str) -> int:
    factor = _SUFFIXES.get(word[-1:].upper(), 1)
    try:
        return int(number(word if factor == 1 else word[:-1]) * factor)
    except (ValueError, OverflowError):  # no number; one that is not finite
        raise ValueError(f"{word!r} is no number such as 320 or 2.4B") from None
