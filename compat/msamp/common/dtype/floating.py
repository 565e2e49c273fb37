"""The largest finite number of each format."""

from __future__ import annotations

from fp8_megatron.dtypes import MAX_FINITE

from .dtypes import FP8_BITS, Dtypes


class Floating:
    """Largest finite magnitudes, by qtype (`qfp_max`) and by MS-AMP's dtype (`fp_maxs`)."""

    qfp_max = {  # noqa: RUF012
        qtype: MAX_FINITE[FP8_BITS.get(qtype, dtype)] for qtype, dtype in Dtypes.qtype_to_dtype.items()
    }
    fp_maxs = {Dtypes.qtype_to_dtype[qtype]: largest for qtype, largest in qfp_max.items()}  # noqa: RUF012
