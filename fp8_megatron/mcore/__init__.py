"""megatron-core's GPT with this project's layers: all that knows megatron-core."""
