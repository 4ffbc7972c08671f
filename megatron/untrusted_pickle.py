"""Bounds on untrusted pickles, checked before any of their values is created.

A pickle can share a value: sixty nested pairs, each of which holds the next one twice, take 300
bytes in a file but 2^60 steps to hash, print or copy. Even readers that execute nothing accept
such pickles. This module follows the instructions without creating values, and tracks only their
sizes. A pickle is refused for a tuple or number that is too large to hash, for a structure that is
far larger than its file, is nested too deeply or contains itself, and for repeated copies of large
containers.
"""

from __future__ import annotations

import os
import pickletools
import struct
import zipfile
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from megatron.errors import MegatronError

_LARGEST_TUPLE = 4096  # values in a tuple and its inner tuples; 64 bits of a number count as one
_GROWTH = 64  # values for each instruction of the pickle
_FREE = 1 << 20  # values in addition to these
_DEPTH = 200
_LEGACY_PICKLES = 5  # in a file from before torch 1.6; its tensors' bytes follow
_ZIP = b"PK\x03\x04"
_NAME_LENGTHS = 26  # their offset in a zip entry's header; the name and extra field follow

_KINDS = {
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), "put"),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), "get"),
    **dict.fromkeys(("REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ", "INST"), "call"),
    **dict.fromkeys(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET"), "tuple"),
    **dict.fromkeys(("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS"), "add"),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "GLOBAL"), "empty"),
    **dict.fromkeys(("LONG", "LONG1", "LONG4", "INT"), "number"),
    **dict.fromkeys(("PROTO", "FRAME"), "format"),
    **dict.fromkeys(("POP", "POP_MARK"), "pop"),
    **{name: name.lower() for name in ("BUILD", "DUP", "MARK", "STOP")},
}


@dataclass(eq=False, slots=True)
class _Value:
    """A value without content: the values inside it, and its size as part of a key."""

    inside: list[_Value]
    hashed: int = 1


_PLAIN = _Value([])
_MARK = _Value([])


def check_torch_file(file: BinaryIO, source: object, error: type[MegatronError]) -> None:
    """Check the pickles in a file that torch.save wrote, as torch.load will read them.

    `file` is positioned at its start, before and after. Raises `error`, naming `source`, if a
    pickle is refused or the file cannot be read.
    """
    try:
        if file.read(len(_ZIP)) == _ZIP:
            with zipfile.ZipFile(file) as archive:
                listed = [one for one in archive.infolist() if _is_pickle(one.filename)]
                if len(listed) != 1 or listed[0].compress_type != zipfile.ZIP_STORED:
                    raise ValueError("its data.pkl is missing, compressed or present twice")
            # Not with zipfile, which verifies checksums: torch may not have written any.
            file.seek(listed[0].header_offset + _NAME_LENGTHS)
            file.seek(sum(struct.unpack("<HH", file.read(4))), os.SEEK_CUR)
            check_pickle(file.read(listed[0].file_size), source, error)
        else:
            file.seek(0)
            for _ in range(_LEGACY_PICKLES):
                check_pickle(file, source, error)
    except MegatronError:
        raise
    except Exception as problem:  # a damaged archive or pickle can raise anything
        raise error(
            f"{source} cannot be read ({type(problem).__name__}: {str(problem)[:200]}): it is "
            "damaged, or torch.save did not write it"
        ) from problem
    finally:
        file.seek(0)


def _is_pickle(name: str) -> bool:
    path = PurePosixPath(name)
    return path.name == "data.pkl" and len(path.parts) == 2


def check_pickle(content: bytes | BinaryIO, source: object, error: type[MegatronError]) -> None:
    """Check a pickle, given as bytes or at a file's position, which moves to the pickle's end.

    Raises `error`, naming `source`, if the pickle would take time or memory out of proportion to
    its size, and LookupError or ValueError if it is damaged.
    """
    stack: list[_Value] = []
    memo: dict[int, _Value] = {}
    copied = 0
    for count, (opcode, read, _) in enumerate(pickletools.genops(content), 1):
        argument: Any = read
        before = opcode.stack_before
        kind = _KINDS.get(opcode.name, "other" if before else "plain")
        if kind == "plain":
            stack.append(_PLAIN)
        elif kind == "put":
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif kind == "get":
            stack.append(memo[argument])
        elif kind == "mark":
            stack.append(_MARK)
        elif kind == "empty":
            stack.append(_Value([]))
        elif kind == "number":
            # Its hash is not cached: hashing a large number takes time on every use.
            stack.append(_Value([], 1 + argument.bit_length() // 64))
        elif kind == "dup":
            stack.append(stack[-1])
        elif kind == "stop":
            _check_size(stack[-1], _GROWTH * count + _FREE, source, error)
        elif kind != "format":
            values = []
            operands = len(before)
            if pickletools.markobject in before:
                last = len(stack) - 1
                while stack[last] is not _MARK:
                    last -= 1
                    if last < 0:
                        raise ValueError("it has no mark")
                values = stack[last + 1 :]
                del stack[last:]
                operands = before.index(pickletools.markobject)
            if len(stack) < operands:
                raise ValueError("it takes more values from the stack than there are")
            if operands:
                values = stack[-operands:] + values
                del stack[-operands:]
            if kind == "pop":
                continue
            if kind in ("add", "build"):  # the object remains the same
                made = values[0]
                if made in (_PLAIN, _MARK):  # shared by all pickles
                    raise ValueError("it adds to a value that can hold none")
                made.inside += values[1:]
            else:
                hashed = kind in ("tuple", "call")
                made = _Value(values, 1 + sum(v.hashed for v in values) if hashed else 1)
            stack.append(made)
            if kind in ("call", "build"):
                inside = values[-1].inside
                copied += len(inside) + sum(len(v.inside) for v in inside)
            if copied > 4 * count + _FREE:
                raise error(_refusal(source, "copies of large containers"))
        if stack and stack[-1].hashed > _LARGEST_TUPLE:
            what = f"a tuple of more than {_LARGEST_TUPLE} values, or a number as large"
            raise error(_refusal(source, what))


def _check_size(top: _Value, most: int, source: object, error: type[MegatronError]) -> None:
    """Raise `error` if a value is too large or too deep with its content, or contains itself."""
    sizes = {id(_PLAIN): (1, 1)}  # numbers of values, with those inside, and of levels
    started: set[int] = set()
    pending = [top]
    while pending:
        value = pending[-1]
        if id(value) in sizes:
            pending.pop()
        elif id(value) in started:
            size = levels = 1
            for one in value.inside:
                inner, below = sizes[id(one)]
                size += inner
                levels = max(levels, 1 + below)
            if size > most or levels > _DEPTH:
                what = f"{levels} levels" if levels > _DEPTH else f"more than {most} values"
                raise error(_refusal(source, what))
            sizes[id(value)] = size, levels
        else:
            started.add(id(value))
            for one in value.inside:
                if id(one) not in sizes:
                    if id(one) in started:
                        raise error(_refusal(source, "a value that contains itself"))
                    pending.append(one)


def _refusal(source: object, what: str) -> str:
    return (
        f"{source} is not read: it has {what}, which no checkpoint needs and which would take "
        "time or memory out of proportion to the file"
    )
