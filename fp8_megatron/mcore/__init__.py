"""megatron-core's GPT with this project's layers. Code that depends on megatron-core is here."""
