"""Text to token files (`documents`, `tokenizer`), to samples (`indexed`, `datasets`), to batches (`loader`)."""
