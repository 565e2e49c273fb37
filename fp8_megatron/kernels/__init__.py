"""Kernels. Call them through `ops`; `reference` is the specification that every variant is tested against."""
