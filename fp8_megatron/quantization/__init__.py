"""Scales, amax histories, recipes and the scaled tensors they describe."""
