"""LayerNorm and RMSNorm with the cast to FP8."""
