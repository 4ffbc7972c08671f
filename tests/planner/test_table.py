"""Tables of the planner and of other tools on terminals of any width."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.planner.table import Table

WORD = st.text("abc=+,-/.", min_size=1, max_size=12)
NUMBERS = st.integers(0, 10**6).map("{:,}".format)
CELL = st.one_of(NUMBERS, st.lists(WORD, max_size=9).map(" ".join))


@st.composite
def tables(draw):
    columns = draw(st.integers(1, 24))
    rows = draw(st.lists(st.tuples(*[CELL] * columns), max_size=5))
    return Table(
        draw(CELL), tuple(draw(st.tuples(*[WORD] * columns))), rows, draw(st.integers(0, 30))
    )


@given(tables())
def test_a_table_fits_80_columns_and_keeps_its_cells(table):
    text = table.text(80)
    assert max(map(len, text.splitlines()), default=0) <= 80
    if len(table.rows) < 2:  # otherwise values that are the same in all rows are shown once
        shown, cells = Counter(text), Counter("".join(map("".join, (table.columns, *table.rows))))
        assert all(shown[letter] >= cells[letter] for letter in cells if letter != " ")


def test_a_wide_table_continues_below_with_the_same_numbers():
    """Ten numbers of ten digits, two numbers of rows, and a column that is the same in all rows."""
    names = [f"column-{i}" for i in range(9)]
    rows = [(str(n), *(str(10**9 * n + i) for i in range(9)), "same") for n in (1, 2)]
    wide = Table("a title", ("#", *names, "kind"), rows)
    first, second = wide.text(80).split("\n\n")
    assert "kind same" in first.splitlines()[1]
    shown = [line.split() for part in (first, second) for line in part.splitlines()]
    for number, *values, _ in rows:
        assert [word for words in shown if words[0] == number for word in words[1:]] == values
    assert wide.text(400).splitlines()[1].split() == ["#", *names, "kind"]


@pytest.mark.parametrize(("split", "first"), [(0, 5), (3, 3)])
def test_a_table_may_say_where_it_is_divided(split, first):
    columns = tuple("abcdefghi")
    text = Table("", columns, [("1", *["1234567890123"] * 8), ("2", *["2234567890123"] * 8)], split)
    assert text.text(80).splitlines()[0].split() == list(columns[:first])
