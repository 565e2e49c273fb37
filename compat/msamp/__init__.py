"""MS-AMP's names over fp8_megatron."""
