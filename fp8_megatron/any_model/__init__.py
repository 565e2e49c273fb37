"""FP8 for any PyTorch model: linear layers, an optimizer and data parallelism behind `fp8_megatron.initialize`."""
