"""Printing of tables and lines, for a terminal of any width or as Markdown."""
from __future__ import annotations

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from megatron.planner.table import Table

_PIPE_COLUMNS = 170  # where nobody says how wide the output may be
_BETWEEN = 3  # columns of a terminal from one column of a table to the next
_FOLDED = 24  # to which words are folded where there is little room

_TEXT = ("schedule", "recompute", "also on", "layout", "rank order", "device order", "of", "why", "for example",
         "values", "formula", "basis", "term")  # fmt: skip
_WHOLE = ("schedule", "s/step", "MFU", "HFU", "choice", "rank order", "device order")


class Show:
    """Prints tables and lines. width: of the output, by default the terminal's."""

    def __init__(self, markdown: bool, width: int | None = None) -> None:
        self._markdown = markdown
        if width is None and not sys.stdout.isatty():
            width = _PIPE_COLUMNS
        self._console = Console(width=width, highlight=False, markup=False, emoji=False)

    def text(self, line: str) -> None:
        self._console.print(line, soft_wrap=not sys.stdout.isatty())

    def table(self, table: Table, left: Sequence[int] = (0,)) -> None:
        """One wider than the output is printed in parts, each with the first column. `left`: columns of text."""
        if self._markdown:
            print(f"\n{table.title}\n\n{table.markdown()}")
            return
        text = [i in left or (column in _TEXT and _has_words(table, i)) for i, column in enumerate(table.columns)]
        least = [_least_width(table, i, fold) for i, fold in enumerate(text)]
        for number, part in enumerate(_parts(least, self._console.width)):
            title = f"{table.title}, continued" if number else table.title
            rich = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
            for i in part:
                column = table.columns[i]
                rich.add_column(column, justify="left" if text[i] else "right", overflow="fold",
                                no_wrap=column in _WHOLE, min_width=least[i])  # fmt: skip
            for row in table.rows:
                rich.add_row(*(row[i] for i in part))
            self._console.print(rich)


def _has_words(table: Table, column: int) -> bool:
    """Recomputation is words in one table and seconds in another."""
    return any(letter.isalpha() for row in table.rows for letter in row[column])


def _least_width(table: Table, column: int, fold: bool) -> int:
    """In which numbers stand whole and a title breaks between its words only."""
    words = max(map(len, table.columns[column].split()), default=0)
    cells = max((len(row[column]) for row in table.rows), default=0)
    whole = table.columns[column] in _WHOLE
    return max(words, min(cells, _FOLDED) if fold and not whole else cells)


def _parts(widths: Sequence[int], width: int) -> list[list[int]]:
    """Columns that fit beside each other; each part begins with the first one.

    >>> _parts([1, 4, 4, 4], 15)
    [[0, 1, 2], [0, 3]]
    """
    found, used = [[0]], widths[0]
    for column, own in list(enumerate(widths))[1:]:
        if used + _BETWEEN + own > width - 2 and len(found[-1]) > 1:
            found.append([0])
            used = widths[0]
        found[-1].append(column)
        used += _BETWEEN + own
    return found
