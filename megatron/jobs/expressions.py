"""Expressions of a space file, such as `mbs * dp * accumulation` and `tp * pp <= 64`: a small part of Python's.

They are parsed by Python's `ast` and interpreted here, so that a file can compute and do nothing else, and always ends.
"""
from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_LONGEST = 1000  # characters
_OPERATORS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.Not: operator.not_,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {"min": min, "max": max}
_CONSTANTS = {"true": True, "false": False, "none": None}
RESERVED = frozenset({*_FUNCTIONS, *_CONSTANTS})
"""Names that mean something in every expression."""
_ALLOWED = (ast.Constant, ast.Name, ast.Tuple, ast.List, ast.BoolOp, ast.IfExp, ast.UnaryOp, ast.BinOp, ast.Compare,
            ast.Call, ast.expr_context, ast.boolop, *_OPERATORS)  # fmt: skip


@dataclass(frozen=True)
class Expression:
    """A checked expression; make one with `parse_expression`."""

    text: str
    names: frozenset[str]
    tree: ast.expr

    def value(self, values: Mapping[str, Any]) -> Any:
        """Its value with these values of names; `and`, `or` and `if` look at no more than Python's do. Raises
        ValueError where it has none, such as after a division by zero."""
        try:
            return _value(self.tree, values)
        except (ArithmeticError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(f"no value: {error}") from None


def parse_expression(text: str) -> Expression:
    """Raises ValueError for what is no expression of names, numbers, 'words', lists, + - * / // %, comparisons, in,
    and, or, not, A if B else C, min() and max().

    >>> parse_expression("max(1, 1024 // tp)").value({"tp": 8})
    128
    """
    if len(text) > _LONGEST:
        raise ValueError(f"it has {len(text):,} characters: at most {_LONGEST:,} are read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the parser, about `1or 2` and the like
            tree = ast.parse(text.strip(), mode="eval").body
        nodes = list(ast.walk(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"it cannot be read: {getattr(error, 'msg', error)}") from None
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        call = not isinstance(node, ast.Call) or (ast.unparse(node.func) in _FUNCTIONS and len(node.args) > 1
                                                  and not node.keywords)  # fmt: skip
        constant = not isinstance(node, ast.Constant) or type(node.value) in (int, float, str, bool)
        if not isinstance(node, _ALLOWED) or not call or not constant:
            raise ValueError(f"'{ast.unparse(node)}' is not read here: there are names, numbers, 'words', lists, "
                             "+ - * / // %, comparisons, in, and, or, not, A if B else C, min() and max()")  # fmt: skip
    names = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in called}
    return Expression(text.strip(), frozenset(names - _CONSTANTS.keys()), tree)


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value):
            return None if value == "none" else value  # a flag that is not given is also written as a word
        case ast.Name(name):
            return _CONSTANTS[name] if name in _CONSTANTS else values[name]
        case ast.Tuple(parts) | ast.List(parts):
            return tuple(_value(part, values) for part in parts)
        case ast.BoolOp(ast.And(), parts):
            return all(_value(part, values) for part in parts)
        case ast.BoolOp(_, parts):
            return any(_value(part, values) for part in parts)
        case ast.IfExp(test, body, orelse):
            return _value(body if _value(test, values) else orelse, values)
        case ast.UnaryOp(kind, operand):
            return _apply(kind, _value(operand, values))
        case ast.BinOp(left, kind, right):
            return _apply(kind, _value(left, values), _value(right, values))
        case ast.Call(ast.Name(name), parts):
            return _FUNCTIONS[name](*(_value(part, values) for part in parts))
        case ast.Compare(left, kinds, rights):
            found = [_value(part, values) for part in (left, *rights)]
            return all(_apply(kind, *pair) for kind, pair in zip(kinds, pairwise(found), strict=True))
    raise AssertionError(f"{ast.dump(node)} was checked")


def _apply(kind: ast.AST, *operands: Any) -> Any:
    if isinstance(kind, (ast.operator, ast.USub)) and not all(isinstance(each, int | float) for each in operands):
        raise ValueError(f"{' and '.join(map(repr, operands))}: only numbers can be computed with")
    return _OPERATORS[type(kind)](*operands)
