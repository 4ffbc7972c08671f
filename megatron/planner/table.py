"""Text tables for a terminal or a document."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

_PIPED_WIDTH = 200
_WIDE_GAP = 3
_GAP = 2
_LEAST = 16
"""Width below which a column of text is not made narrower."""


@dataclass(frozen=True)
class Table:
    """Rows of texts under headings.

    split  number of columns in the first part of a table that is too wide for a terminal; 0: as
           many as fit. The other parts repeat the first column
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    split: int = 0

    def markdown(self) -> str:
        lines = [self.columns, ("---", *["---:"] * (len(self.columns) - 1)), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def text(self, width: int) -> str:
        """Render for a terminal of this width, with numbers right-aligned.

        If the table is too wide, a column with the same value in all rows becomes a line above it,
        texts and headings are wrapped, and the rest of the columns follows as another table.
        """
        lines = textwrap.wrap(self.title, width, break_on_hyphens=False)
        natural = [max(map(_cells, column)) for column in self._by_column()]
        if _total(natural, _WIDE_GAP) <= width:
            return "\n".join([*lines, *self._lines(natural, _WIDE_GAP)])
        table, same = self._without_constants()
        if same:
            words = "the same in all rows: " + "; ".join(same)
            lines += textwrap.wrap(words, width, break_on_hyphens=False)
        for number, part in enumerate(table._parts(width)):
            lines += [""] * (number > 0)
            lines += part._lines(part._widths(width), _GAP)
        return "\n".join(lines)

    def _by_column(self) -> list[tuple[str, ...]]:
        return list(zip(self.columns, *self.rows, strict=True))

    def _keeping(self, kept: Sequence[int]) -> Table:
        columns = tuple(self.columns[i] for i in kept)
        return replace(
            self, columns=columns, rows=[tuple(row[i] for i in kept) for row in self.rows], split=0
        )

    def _without_constants(self) -> tuple[Table, list[str]]:
        """Return the table without columns that have one value, and these columns' values."""
        by_column = self._by_column()
        constant = [
            i
            for i, (_, *values) in enumerate(by_column)
            if i and len(values) > 1 and len(set(values)) == 1 and len(values[0]) <= 2 * _LEAST
        ]
        kept = [i for i in range(len(by_column)) if i not in constant]
        same = [f"{by_column[i][0]} {by_column[i][1]}" for i in constant]
        split = sum(i < self.split for i in kept)
        return replace(self._keeping(kept), split=split), same

    def _parts(self, width: int) -> Iterator[Table]:
        """Yield tables that fit, each with the first column."""
        count = len(self.columns)
        if _total(self._least(), _GAP) <= width or count <= 2:
            yield self
            return
        first = self.split
        if not 1 < first < count:
            first = count
            while first > 2 and _total(self._least()[:first], _GAP) > width:
                first -= 1
            parts = -(-(count - 1) // (first - 1))
            first = 1 - (1 - count) // parts  # about equally many in each part
        for kept in (range(first), (0, *range(first, count))):
            yield from self._keeping(kept)._parts(width)

    def _least(self) -> list[int]:
        """Return the least width of each column: texts may be wrapped, numbers not."""
        widths = list[int]()
        for heading, *values in self._by_column():
            pieces = values if _is_number(values) else [p for v in values for p in _pieces(v)]
            longest = max((_cells(piece.rstrip()) for piece in pieces), default=0)
            if not _is_number(values):
                most = max(map(_cells, values), default=0)
                longest = min(max(longest, _LEAST), 2 * _LEAST, most)
            of_heading = (_cells(piece.rstrip()) for piece in _pieces(heading, _HEADING))
            widths.append(max(longest, *of_heading))
        return widths

    def _widths(self, width: int) -> list[int]:
        """Return widths of columns for a table of at most this width: the widest ones give way."""
        least = self._least()
        widths = [max(map(_cells, column)) for column in self._by_column()]
        while _total(widths, _GAP) > width:
            at = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
            if widths[at] == 1:
                break
            widths[at] -= 1
        return widths

    def _lines(self, widths: Sequence[int], gap: int) -> Iterator[str]:
        by_column = self._by_column()
        right = [_is_number(values) for _, *values in by_column]
        for number, row in enumerate((self.columns, *self.rows)):
            ends = _TEXT if number else _HEADING
            cells = [_wrapped(cell, width, ends) for cell, width in zip(row, widths, strict=True)]
            for at in range(max(map(len, cells))):
                texts = [cell[at] if at < len(cell) else "" for cell in cells]
                padded = (
                    " " * (width - _cells(text)) * to_right
                    + text
                    + " " * (width - _cells(text)) * (not to_right)
                    for text, width, to_right in zip(texts, widths, right, strict=True)
                )
                yield f" {(' ' * gap).join(padded)}".rstrip()
            if not number:
                yield " " + "─" * (_total(widths, gap) - 1)


def _total(widths: Sequence[int], gap: int) -> int:
    return 1 + sum(widths) + gap * (len(widths) - 1)


def _is_number(values: Sequence[str]) -> bool:
    """Return whether values are numbers, with a unit perhaps, or missing."""
    return any(values) and all(_NUMBER.fullmatch(value) for value in values)


_NUMBER = re.compile(r"-?|[+~-]?\d\S*( [^\d\s]\S{,4})?")


def _cells(text: str) -> int:
    """Return the columns of a terminal that the longest line of a text takes."""
    from rich.cells import cell_len

    return max(map(cell_len, text.split("\n")))


_TEXT = re.compile(r".+?(?:[,+](?=[a-z])|\s+(?!%)|$)")
_HEADING = re.compile(r".+?(?:[-/](?=[a-z])|\s+|$)")
"""Pieces of a text, and of a heading, after which a line may end."""


def _pieces(text: str, ends: re.Pattern[str] = _TEXT) -> list[str]:
    """Return a text in pieces after which a line may end.

    >>> _pieces("tp=4,pp=8, 1,000 a-b 5 %"), _pieces("data-parallel s/step", _HEADING)
    (['tp=4,', 'pp=8, ', '1,000 ', 'a-b ', '5 %'], ['data-', 'parallel ', 's/', 'step'])
    """
    return ends.findall(text) or [text]


def _wrapped(text: str, width: int, ends: re.Pattern[str]) -> list[str]:
    """Return the lines of a text, none wider than `width`."""
    from rich.control import strip_control_codes

    lines = list[str]()
    for paragraph in text.split("\n"):
        line = ""
        for piece in _pieces(strip_control_codes(paragraph), ends):
            if line and _cells((line + piece).rstrip()) > width:
                lines.append(line.rstrip())
                line = ""
            line += piece
            while _cells(line.rstrip()) > width:
                lines.append(line[:width])
                line = line[width:]
        lines.append(line.rstrip())
    return lines


def print_table(table: Table) -> None:
    """Print at the terminal's width, or at a fixed large width if piped."""
    from shutil import get_terminal_size

    print(table.text(get_terminal_size().columns if sys.stdout.isatty() else _PIPED_WIDTH))
