"""The choice of a token's experts from a router's logits: scores, top-k, probabilities, and their gradient."""
