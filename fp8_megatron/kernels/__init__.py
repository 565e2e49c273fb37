"""Kernels: `ops` is the only door; `reference` is the specification every variant is tested against."""
