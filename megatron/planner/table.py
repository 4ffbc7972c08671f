"""Text tables for a terminal or a document."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_PIPED_WIDTH = 200


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        lines = [self.columns, ("---", *["---:"] * (len(self.columns) - 1)), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def text(self, width: int) -> str:
        """Render for a terminal, with numbers right-aligned."""
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable

        shown = RichTable(
            title=self.title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
        )
        for i, column in enumerate(self.columns):
            number = all(row[i][:1] in "0123456789+-~" for row in self.rows)
            shown.add_column(column, justify="right" if number else "left", overflow="fold")
        for row in self.rows:
            shown.add_row(*row)
        file = io.StringIO()
        console = Console(
            file=file,
            width=width,
            color_system=None,
            legacy_windows=False,
            markup=False,
            emoji=False,
        )
        console.print(shown)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines() if line.strip())


def print_table(table: Table) -> None:
    """Print at the terminal's width, or at a fixed large width if piped."""
    from shutil import get_terminal_size

    print(table.text(get_terminal_size().columns if sys.stdout.isatty() else _PIPED_WIDTH))
