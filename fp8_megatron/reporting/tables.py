"""Tables as text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.table import Table

#: Columns of a terminal, and of a page of the documentation, that a table may take.
_WIDTH = 120


def table_text(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    num_left: int = 0,
    has_lines: bool = True,
) -> str:
    """A table without colours, at most 120 columns wide on any terminal.

    Args:
        num_left: columns at the left whose text starts at their left edge; that of others ends at their right edge.
        has_lines: lines around the table and its cells.
    """
    table = Table(title=title, box=HEAVY_HEAD if has_lines else None, pad_edge=has_lines)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < num_left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=_WIDTH, color_system=None, force_terminal=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
