"""Names in health.jsonl: its roles and quantities. Without torch, for programs that only read it."""

from __future__ import annotations

HEALTH_FILE = "health.jsonl"

#: The roles of a linear layer's FP8 operands.
ROLES = ("input", "weight", "grad_output", "weight_grad")

#: Name → whether a large value is the worse one.
QUANTITIES = {
    "saturated": True,
    "underflowed": True,
    "snr_db": False,
    "amax": True,
    "amax_over_scale": True,
    "kurtosis": True,
    "mu": False,
}
