"""Types of the configuration's fields. Each states its limits, which `limits` enforces, and how --help shows it."""

from __future__ import annotations

from typing import Annotated

import tyro
from annotated_types import Ge, Gt, Le, Lt


def _default_hint(default: str) -> str:
    """The note on a flag's default; empty if there is no default or the flag's form shows it."""
    return "" if default in ("", "none", "True", "False") else f"(default: {default})"


#: Marks fields that have no default, or whose help text or form of flag names it.
UNSET = tyro.conf.arg(help_behavior_hint=_default_hint)

Switch = Annotated[bool, UNSET]
OptionalSwitch = Annotated[bool | None, UNSET]
Words = Annotated[tuple[str, ...], UNSET]
Text = Annotated[str | None, UNSET]

#: The largest count of steps or bytes' owners: it fits into every integer that counts are kept in.
MAX_COUNT = 2**31 - 1
#: The largest count of samples, which have 64 bits. 15 trillion tokens are 3.7 billion sequences of 4,096.
MAX_SAMPLES = 2**40
#: Kernels compute in FP32. Within these there is room for products with learning rates and scales: 1e-320 would be 0.
MIN_REAL, MAX_REAL = 1e-30, 1e30

Count = Annotated[int, Ge(1), Le(MAX_COUNT)]
CountOrZero = Annotated[int, Ge(0), Le(MAX_COUNT)]
Samples = Annotated[int, Ge(1), Le(MAX_SAMPLES)]
SamplesOrZero = Annotated[int, Ge(0), Le(MAX_SAMPLES)]
#: A dimension of the model. The largest published ones are vocabularies and contexts of some millions.
Size = Annotated[int, Ge(1), Le(2**24)]
#: The most layers of a model.
MAX_LAYERS = 100_000
Layers = Annotated[int, Ge(1), Le(MAX_LAYERS)]
LayersOrZero = Annotated[int, Ge(0), Le(MAX_LAYERS)]
#: The largest number of ranks of a job.
MAX_RANKS = 1_000_000
#: Ranks that share something.
Ranks = Annotated[int, Ge(1), Le(MAX_RANKS)]
#: Sequences in a step.
BatchSize = Annotated[int, Ge(1), Le(2**20)]
#: Processes that each rank starts.
Processes = Annotated[int, Ge(0), Le(256)]
#: Threads of one process.
Threads = Annotated[int, Ge(1), Le(1024)]
#: Steps whose values are kept.
History = Annotated[int, Ge(1), Le(65_536)]
#: Powers of two; E4M3 reaches 448.
Margin = Annotated[int, Ge(0), Le(8)]
#: torch's group timeouts are milliseconds; a collective between nodes takes some at least, and no job runs for years.
Minutes = Annotated[float, Ge(0.01), Le(1e6)]
Positive = Annotated[float, Ge(MIN_REAL), Le(MAX_REAL)]
NotNegative = Annotated[float, Ge(0), Le(MAX_REAL)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
UpToOne = Annotated[float, Gt(0), Le(1)]
AtLeastOne = Annotated[float, Ge(1), Le(MAX_REAL)]

OptionalCount = Annotated[Count | None, UNSET]
OptionalSamples = Annotated[Samples | None, UNSET]
OptionalIndex = Annotated[CountOrZero | None, UNSET]
OptionalSize = Annotated[Size | None, UNSET]
OptionalLayers = Annotated[Layers | None, UNSET]
OptionalBatchSize = Annotated[BatchSize | None, UNSET]
OptionalPositive = Annotated[Positive | None, UNSET]
OptionalNotNegative = Annotated[NotNegative | None, UNSET]
OptionalFraction = Annotated[BelowOne | None, UNSET]
