"""Topology, state partition, gradient buffers, data parallelism and the pipeline's P2P."""
