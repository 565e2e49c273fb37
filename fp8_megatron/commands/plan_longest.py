"""The longest sequence that fits into a GPU's memory, as a table."""

from __future__ import annotations

from ..config.schema import Config
from ..planning.layouts import ROOM, Cluster
from ..planning.longest import CHUNK, longest_sequences


def report_longest(config: Config, cluster: Cluster) -> int:
    """Print the table; returns the exit status: 1 if no form fits.

    Args:
        config: a configuration that passed its checks for the cluster's GPUs.
    """
    from rich.table import Table

    from ..reporting.tables import table_lines

    context = config.parallel.context_parallel_size
    shares = "" if context == 1 else f" of {context} that share it"
    table = Table(title=f"Longest sequence, {config.precision.level}, on a GPU{shares}")
    for heading in (
        "recomputed",
        "loss in\nchunks",
        "MLPs in\nchunks",
        "activations\non the host",
        "longest",
        "peak GB",
        "host GB",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    found = list(longest_sequences(config, cluster))
    for one in found:
        fits = one.config is not None
        table.add_row(
            one.recomputed,
            "yes" if one.cuts_loss else "no",
            "yes" if one.cuts_mlps else "no",
            "yes" if one.offloads else "no",
            f"{one.config.model.seq_length:,}" if one.config is not None else "none",
            f"{one.peak_bytes / 1e9:.1f}" if fits else "-",
            f"{one.host_bytes / 1e9:.1f}" if fits else "-",
        )
    limit = (
        f"peak within {ROOM:.0%} of {cluster.memory_bytes / 1e9:g} GB; micro-batch 1; --loss-chunk-size {CHUNK}; "
        f"--mlp-chunks-for-training: {CHUNK} positions each; --cpu-offloading-num-layers: all of a stage but one"
    )
    print("\n".join([*table_lines(table), limit]), flush=True)
    return 0 if any(one.config is not None for one in found) else 1
