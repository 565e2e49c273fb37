"""The FP8 functions of a layer's experts, on torch alone."""
