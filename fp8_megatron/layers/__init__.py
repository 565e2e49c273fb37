"""Linear layers, embedding, norm and attention with FP8 operands."""
