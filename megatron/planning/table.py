"""A table of texts: for a terminal, or for a document."""
from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

_PIPED_WIDTH = 160


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        lines = [self.columns, ("---", *["---:"] * (len(self.columns) - 1)), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def print_table(table: Table) -> None:
    """For a terminal; piped, it is wide."""
    from rich.console import Console
    from rich.table import Table as RichTable

    shown = RichTable(title=table.title, title_justify="left")
    for i, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if i else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*row)
    Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH).print(shown)
