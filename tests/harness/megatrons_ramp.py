"""megatron-core's own ramp of the batch, which it has had until 0.17, and the mark of tests that compare with it."""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core import num_microbatches_calculator

#: The calculator's class; None: this version has none.
MegatronsRamp: Any = getattr(num_microbatches_calculator, "RampupBatchsizeNumMicroBatchesCalculator", None)
needs_megatrons_ramp = pytest.mark.skipif(MegatronsRamp is None, reason="megatron-core 0.18 dropped ramps")
