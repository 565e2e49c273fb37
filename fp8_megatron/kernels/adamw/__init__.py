"""Adam and AdamW steps over flat, precision-decoupled state."""
