"""Expressions of a space file, such as `mbs * dp * accumulation` and `tp * pp <= 64`: a small part of Python's.

They are checked by Python's `ast` before Python works them out, so that a file can compute and do nothing else, and
always ends.
"""
from __future__ import annotations

import ast
import warnings
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, cast

_LONGEST = 1000  # characters
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {"min": min, "max": max}
_CONSTANTS = {"true": True, "false": False, "none": None}
RESERVED = frozenset({*_FUNCTIONS, *_CONSTANTS})
"""Names that mean something in every expression."""
_ALLOWED = (
    ast.Constant, ast.Name, ast.Tuple, ast.List, ast.BoolOp, ast.IfExp, ast.UnaryOp, ast.BinOp, ast.Compare, ast.Call,
    ast.expr_context, ast.boolop, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.USub, ast.Not, ast.Lt,
    ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq, ast.In, ast.NotIn,
)  # fmt: skip
_NUMBER = "(number)"  # a name that no file can write


@dataclass(frozen=True)
class Expression:
    """A checked expression; make one with `parse_expression`."""

    text: str
    names: frozenset[str]
    code: CodeType

    def value(self, values: Mapping[str, Any]) -> Any:
        """Its value with these values of names; `and`, `or` and `if` look at no more than Python's do. Raises
        ValueError where it has none, such as after a division by zero."""
        known = ChainMap({**_FUNCTIONS, _NUMBER: _number}, cast(MutableMapping[str, Any], values))
        try:
            return eval(self.code, {"__builtins__": {}}, known)
        except (ArithmeticError, LookupError, NameError, TypeError) as error:
            raise ValueError(f"no value: {error}") from None


def _number(value: Any) -> Any:
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r}: only numbers can be computed with")
    return value


class _Meaning(ast.NodeTransformer):
    """Constants for their names; arithmetic with numbers alone, for a text times a number may fill the memory."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.Constant(None) if node.value == "none" else node  # a flag that is not given

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        return ast.BinOp(self._numeric(node.left), node.op, self._numeric(node.right))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        inner = self._numeric(node.operand) if isinstance(node.op, ast.USub) else self.visit(node.operand)
        return ast.UnaryOp(node.op, inner)

    def _numeric(self, node: ast.expr) -> ast.expr:
        return ast.Call(ast.Name(_NUMBER, ast.Load()), [self.visit(node)], [])


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
            tree = ast.parse(text.strip(), mode="eval")
            nodes = list(ast.walk(tree.body))
            called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
            for node in nodes:
                call = not isinstance(node, ast.Call) or (ast.unparse(node.func) in _FUNCTIONS and len(node.args) > 1
                                                          and not node.keywords)  # fmt: skip
                constant = not isinstance(node, ast.Constant) or type(node.value) in (int, float, str, bool)
                name = not isinstance(node, ast.Name) or node.id not in _FUNCTIONS or id(node) in called
                if not (isinstance(node, _ALLOWED) and call and constant and name):
                    raise ValueError("there are names, numbers, 'words', lists, + - * / // %, comparisons, in, and, "
                                     f"or, not, A if B else C, min() and max(), not '{ast.unparse(node)}'")  # fmt: skip
            names = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in called}
            code = compile(ast.fix_missing_locations(_Meaning().visit(tree)), "<expression>", "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"it cannot be read: {getattr(error, 'msg', error)}") from None
    return Expression(text.strip(), frozenset(names - _CONSTANTS.keys()), code)
