"""Not provided: FP4."""

from ..refusals import not_provided

raise not_provided(__name__, "FP4 training is not part of fp8_megatron")
