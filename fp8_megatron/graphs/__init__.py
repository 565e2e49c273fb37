"""Work that the host launches, recorded as CUDA graphs."""
