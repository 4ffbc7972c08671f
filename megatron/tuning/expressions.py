"""Expressions of a space file, such as `mbs * dp * accumulation` and `tp * pp <= 64`: a small part of Python's.

They are parsed by Python and interpreted here, so that a file can compute but do nothing else, and always ends.
"""
from __future__ import annotations

import ast
import functools
import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.tuning.types import Value

_LONGEST = 1000  # characters
_DEEPEST = 60  # operators within each other; the interpreter's stack holds several frames for each
_BITS = 256  # of the largest whole number: far beyond any size, and computed at once

_ARITHMETIC: Mapping[type, tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", operator.add), ast.Sub: ("-", operator.sub), ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv), ast.FloorDiv: ("//", operator.floordiv), ast.Mod: ("%", operator.mod),
    ast.Pow: ("**", operator.pow),
}  # fmt: skip
_COMPARISONS: Mapping[type, tuple[str, Callable[[Any, Any], bool]]] = {
    ast.Lt: ("<", operator.lt), ast.LtE: ("<=", operator.le), ast.Gt: (">", operator.gt), ast.GtE: (">=", operator.ge),
    ast.Eq: ("==", operator.eq), ast.NotEq: ("!=", operator.ne),
}  # fmt: skip
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {"min": min, "max": max}
_CONSTANTS: Mapping[str, Value] = {"true": True, "false": False, "none": None}
RESERVED = frozenset({*_FUNCTIONS, *_CONSTANTS})
"""Names that mean something in every expression."""
_OFFERED = "names, numbers, 'words', + - * / // % **, comparisons, in, and, or, not, A if B else C, min() and max()"


class ExpressionError(ValueError):
    """What is wrong, and at which character of the expression (from 1 on)."""

    def __init__(self, problem: str, column: int | None = None) -> None:
        super().__init__(problem if column is None else f"column {column}: {problem}")
        self.problem, self.column = problem, column


@dataclass(frozen=True)
class Expression:
    """A checked expression; make one with `parse_expression`. `names`: those that stand in it, with the character at
    which each does first."""

    text: str
    names: Mapping[str, int]

    def value(self, values: Mapping[str, Value]) -> Value:
        """Its value with these values of names; `and`, `or` and `if` look at no more than Python's do.

        Raises ExpressionError where it has none, such as after a division by zero. What a lookup in `values` raises
        is passed on.
        """
        found = _evaluate(_tree(self.text), values)
        return found if not isinstance(found, tuple) else str(found)


def parse_expression(text: str) -> Expression:
    """Raises ExpressionError for anything but the operators above.

    >>> parse_expression("max(1, 1024 // tp)").value({"tp": 8})
    128
    """
    text, names = text.strip(), dict[str, int]()
    for node in ast.walk(_tree(text)):
        if isinstance(node, ast.Name) and node.id not in _FUNCTIONS and node.id not in _CONSTANTS:
            names[node.id] = min(node.col_offset + 1, names.get(node.id, _LONGEST))
    return Expression(text, names)


@functools.lru_cache(maxsize=1024)
def _tree(text: str) -> ast.expr:
    if len(text) > _LONGEST:
        raise ExpressionError(f"it has {len(text):,} characters: at most {_LONGEST:,} are read")
    if not text:
        raise ExpressionError("it is empty")
    if "\n" in text:
        raise ExpressionError("it has several lines: write it on one", text.index("\n") + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the parser, about `1or 2` and the like
            tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ExpressionError(error.msg, max(1, error.offset or 1)) from None
    except (ValueError, RecursionError, MemoryError):  # a NUL, or hundreds of signs in a row
        raise ExpressionError("it cannot be read") from None
    _check(tree)
    return tree


def _check(node: ast.expr, depth: int = 0) -> None:
    """Raises ExpressionError for the first node that is not offered, `depth` being that of operators around it."""
    if depth > _DEEPEST:
        raise ExpressionError(f"more than {_DEEPEST} operators within each other: take it apart", node.col_offset + 1)
    problem = _problem(node)
    if problem is not None:
        raise ExpressionError(problem, node.col_offset + 1)
    called = [node.func] if isinstance(node, ast.Call) else []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr) and child not in called:
            _check(child, depth + 1)


def _problem(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant):
        if type(node.value) not in (int, float, str, bool) and node.value is not None:
            return f"{type(node.value).__name__} has no place here"
        if isinstance(node.value, float) and not _finite(node.value):  # 1e999
            return "a number of that size has no place here"
        small = not isinstance(node.value, int) or node.value.bit_length() <= _BITS
        return None if small else "a number of that many digits has no place here"
    if isinstance(node, ast.Name):
        return f"{node.id} is a function: write {node.id}(A, B)" if node.id in _FUNCTIONS else None
    if isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS:
            return f"{ast.unparse(node.func)}() is not known: the functions are min and max"
        if node.keywords or len(node.args) < 2 or any(isinstance(arg, ast.Starred) for arg in node.args):
            return f"{node.func.id} takes two or more values"
        return None
    if isinstance(node, ast.Compare):
        for kind, right in zip(node.ops, node.comparators, strict=True):
            if isinstance(kind, (ast.In, ast.NotIn)):
                if not isinstance(right, (ast.Tuple, ast.List)):
                    return "in needs a list on its right, such as in (1, 2, 4)"
            elif type(kind) not in _COMPARISONS:
                return "is compares nothing here: write =="
        return None
    known = (
        isinstance(node, (ast.BoolOp, ast.IfExp, ast.Tuple, ast.List))
        or (isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC)
        or (isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub, ast.UAdd)))
    )
    return None if known else f"'{ast.unparse(node)}' is not read here: there are {_OFFERED}"


def _evaluate(node: ast.expr, values: Mapping[str, Value]) -> Any:
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name):
            if name in _CONSTANTS:
                return _CONSTANTS[name]
            try:
                return values[name]
            except KeyError:
                raise ExpressionError(f"'{name}' is unknown", node.col_offset + 1) from None
        case ast.Tuple(parts) | ast.List(parts):
            return tuple(_evaluate(part, values) for part in parts)
        case ast.BoolOp(kind, parts):
            ends = isinstance(kind, ast.Or)
            return any(_truth(part, values) for part in parts) if ends else all(_truth(part, values) for part in parts)
        case ast.IfExp(test, body, orelse):
            return _evaluate(body if _truth(test, values) else orelse, values)
        case ast.UnaryOp(ast.Not(), operand):
            return not _truth(operand, values)
        case ast.UnaryOp(kind, operand):
            number = _number(operand, _evaluate(operand, values))
            return -number if isinstance(kind, ast.USub) else number
        case ast.BinOp(left, kind, right):
            return _arithmetic(node, kind, _evaluate(left, values), _evaluate(right, values))
        case ast.Compare():
            return _compare(node, values)
        case ast.Call(ast.Name(name), arguments):
            return _FUNCTIONS[name](*(_number(part, _evaluate(part, values)) for part in arguments))
    raise AssertionError(f"{ast.dump(node)} was checked")


def _truth(node: ast.expr, values: Mapping[str, Value]) -> bool:
    found = _evaluate(node, values)
    if isinstance(found, (str, tuple)):
        raise ExpressionError(f"'{ast.unparse(node)}' is {found!r}, neither true nor false", node.col_offset + 1)
    return bool(found)


def _number(node: ast.expr, found: Any) -> Any:
    if not isinstance(found, (int, float)):
        written = "none" if found is None else repr(found)
        raise ExpressionError(f"'{ast.unparse(node)}' is {written}, not a number", node.col_offset + 1)
    return found


def _arithmetic(node: ast.BinOp, kind: ast.operator, left: Any, right: Any) -> Any:
    sign, function = _ARITHMETIC[type(kind)]
    a, b = _number(node.left, left), _number(node.right, right)
    written = f"{a} {sign} {b}"
    # A power may be too long to compute at all; every other result is at most the sum of its operands' lengths.
    whole = isinstance(a, int) and isinstance(b, int)
    if sign == "**" and ((whole and b > 0 and a.bit_length() * b > 2 * _BITS) or (a < 0 and not isinstance(b, int))):
        raise ExpressionError(f"{written} is no number that could be used", node.col_offset + 1)
    try:
        found = function(a, b)
    except ZeroDivisionError:
        raise ExpressionError(f"'{ast.unparse(node)}' divides by zero: {written}", node.col_offset + 1) from None
    except OverflowError:
        raise ExpressionError(f"{written} is too large", node.col_offset + 1) from None
    if (isinstance(found, int) and found.bit_length() > _BITS) or (isinstance(found, float) and not _finite(found)):
        raise ExpressionError(f"{written} is too large", node.col_offset + 1)
    return found


def _finite(number: float) -> bool:
    return number - number == 0


def _compare(node: ast.Compare, values: Mapping[str, Value]) -> bool:
    left, first = _evaluate(node.left, values), node.left
    for kind, right_node in zip(node.ops, node.comparators, strict=True):
        right = _evaluate(right_node, values)
        if isinstance(kind, (ast.In, ast.NotIn)):
            holds = any(_equal(left, item) for item in right) == isinstance(kind, ast.In)
        elif isinstance(kind, (ast.Eq, ast.NotEq)):
            holds = _equal(left, right) == isinstance(kind, ast.Eq)
        else:
            holds = _COMPARISONS[type(kind)][1](_number(first, left), _number(right_node, right))
        if not holds:
            return False
        left, first = right, right_node
    return True


def _equal(left: Any, right: Any) -> bool:
    """none, which is a flag that is not given, is also written as a word."""
    plain = [None if side == "none" else side for side in (left, right)]
    return bool(plain[0] == plain[1])
