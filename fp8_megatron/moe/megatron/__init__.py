"""A mixture of experts in megatron-core's GPT."""
