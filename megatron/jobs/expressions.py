"""Expressions of a space file, such as `mbs * dp * accumulation` and `tp * pp <= 64`: a small part of Python's.

Python's `ast` reads them. They are evaluated here, node by node, so that a file can compute and do nothing else.
"""
from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_KNOWN: Mapping[str, Any] = {"true": True, "false": False, "none": None}
_FUNCTIONS = {"min": min, "max": max}
_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.In: lambda item, items: item in items, ast.NotIn: lambda item, items: item not in items,
}  # fmt: skip


@dataclass(frozen=True)
class Expression:
    """An expression and the names in it; make one with `parse_expression`."""

    text: str
    names: frozenset[str]
    tree: ast.expr

    def value(self, values: Mapping[str, Any]) -> Any:
        """Evaluate with these values of names; `and`, `or` and `if` look at no more than Python's do. Raises ValueError
        for what is not offered, and where there is no value, such as after a division by zero."""
        try:
            return _value(self.tree, values)
        except (ArithmeticError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(f"no value: {error}") from None


def parse_expression(text: str) -> Expression:
    """Offered are names, numbers, 'words', lists, + - * / // %, comparisons, in, and, or, not, A if B else C, min() and
    max(). Raises ValueError for what is no expression of Python.

    >>> parse_expression("max(1, 1024 // tp)").value({"tp": 8})
    128
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"'{text}' cannot be read: {getattr(error, 'msg', error)}") from None
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return Expression(text.strip(), frozenset(names - _KNOWN.keys() - _FUNCTIONS.keys()), tree)


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=int() | float() | str()):
            return None if node.value == "none" else node.value  # a flag that is not given
        case ast.Name():
            return _KNOWN[node.id] if node.id in _KNOWN else values[node.id]
        case ast.List() | ast.Tuple():
            return [_value(item, values) for item in node.elts]
        case ast.UnaryOp(op=ast.Not()):
            return not _value(node.operand, values)
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, values)
        case ast.BinOp() if type(node.op) in _OPERATORS:
            sides = _value(node.left, values), _value(node.right, values)
            if not all(isinstance(side, int | float) for side in sides):  # a text times a number may fill the memory
                raise TypeError(f"{sides[0]!r} and {sides[1]!r}: only numbers can be computed with")
            return _OPERATORS[type(node.op)](*sides)
        case ast.BoolOp():
            found = None
            for part in node.values:
                found = _value(part, values)
                if bool(found) is isinstance(node.op, ast.Or):
                    break
            return found
        case ast.IfExp():
            return _value(node.body if _value(node.test, values) else node.orelse, values)
        case ast.Compare() if _OPERATORS.keys() >= set(map(type, node.ops)):
            left = _value(node.left, values)
            for kind, item in zip(node.ops, node.comparators, strict=True):
                right = _value(item, values)
                if not _OPERATORS[type(kind)](left, right):
                    return False
                left = right
            return True
        case ast.Call(func=ast.Name(id="min" | "max" as name), keywords=[]) if len(node.args) > 1:
            return _FUNCTIONS[name](_value(argument, values) for argument in node.args)
    raise ValueError(f"'{ast.unparse(node)}' is not offered")
