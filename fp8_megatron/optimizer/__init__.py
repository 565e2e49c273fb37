"""AdamW over FP8 and scaled FP16 state, gradient clipping, and the sharded optimizer."""
