"""Environment variables that another program would read as settings."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import UserError

#: Switches of MS-AMP's simulated FP4, for example USE_W_SIMU_FP4. Its scripts export them in the mode fp4.
_FP4 = re.compile(r"(MSAMP_)?USE_\w*SIMU(LATE)?_FP4")


def check_no_fp4(environment: Mapping[str, str]) -> None:
    """Raise `UserError` for a variable that turns MS-AMP's FP4 on: its script has no flag that says so."""
    for name, value in sorted(environment.items()):
        if _FP4.fullmatch(name) and value not in ("", "0"):
            raise UserError(f"{name}={value} asks for MS-AMP's FP4, which there is not; unset it to train in FP8")
