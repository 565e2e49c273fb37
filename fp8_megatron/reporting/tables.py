"""Tables as text."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

#: Columns of a terminal, and of a page of the documentation, that a table may take.
_WIDTH = 120


def table_lines(table: Table) -> list[str]:
    """The lines of a table without colours, at most 120 columns wide on any terminal."""
    text = io.StringIO()
    Console(file=text, width=_WIDTH, color_system=None, force_terminal=False).print(table)
    return [line.rstrip() for line in text.getvalue().splitlines()]
