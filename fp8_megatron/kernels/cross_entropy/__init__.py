"""Cross-entropy over the vocabulary, with the cast of the logits' gradient."""
