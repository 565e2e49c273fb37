"""The device a rank runs on: selection, limits, memory, cuDNN."""
