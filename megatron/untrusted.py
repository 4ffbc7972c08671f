"""Reads and writes files that may come from another user.

Only regular files are read, up to a size limit, because a path may name a fifo, on which a reader
waits forever, or /dev/zero, which has no end. JSON may be nested deeper than Python's stack, or
contain a number with millions of digits. Any failure to read or parse a file is raised as the type
of error that the caller chooses.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from megatron.errors import ConfigError, MegatronError

_DEPTH = 100  # levels of JSON, a tenth of Python's stack


def open_regular(path: str | os.PathLike[str], *, error: type[MegatronError]) -> BinaryIO:
    """Open a file for reading, whatever its size.

    Raises `error` if it is missing, unreadable or not regular.
    """
    try:
        # Without O_NONBLOCK, opening a fifo waits for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return open(handle, "rb")
        os.close(handle)
    # ValueError: the name has a zero byte or a lone surrogate
    except (OSError, ValueError) as problem:
        raise error(
            f"cannot read {path}: {getattr(problem, 'strerror', None) or problem}"
        ) from problem
    raise error(f"cannot read {path}: it is not a regular file")


def without_waiting(path: str, flags: int) -> int:
    """Open a file for writing, as an `opener` for open().

    Raises OSError for a fifo without a reader, instead of waiting for one.
    """
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def write_text(path: Path, text: str, *, choose: str) -> Path:
    """Write text to a UTF-8 file, creating its parent folders; return the path.

    Raises ConfigError if the file cannot be written. The message ends with `choose`, what the user
    can choose instead.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", encoding="utf-8", newline="", opener=without_waiting) as file:
            file.write(text)
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"{path}: {getattr(problem, 'strerror', None) or problem}: choose {choose}"
        ) from problem
    return path


def read_bytes(
    path: str | os.PathLike[str], limit_bytes: int, *, error: type[MegatronError]
) -> bytes:
    """Return the content of a regular file of at most `limit_bytes`.

    Raises `error`, naming the file, if it cannot be read or is larger.
    """
    with open_regular(path, error=error) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit_bytes:
            raise error(
                f"{path} has more than {limit_bytes} bytes, too many for such a file: is it the "
                "right one?"
            )
        try:
            return file.read(size)
        except OSError as problem:
            raise error(f"cannot read {path}: {problem.strerror or problem}") from problem


def read_text(path: str | os.PathLike[str], limit_bytes: int, *, error: type[MegatronError]) -> str:
    """Return the text of a regular UTF-8 file of at most `limit_bytes`, without a byte order mark.

    Raises `error`, naming the file, if it cannot be read, is larger or is not UTF-8.
    """
    try:
        return read_bytes(path, limit_bytes, error=error).decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(
            f"{path} is not UTF-8 text ({problem}): it is damaged, or not the right file"
        ) from problem


def read_json(
    path: str | os.PathLike[str],
    limit_bytes: int,
    *,
    error: type[MegatronError],
    kind: type = dict,
    bits: int = 64,
) -> Any:
    """Return the value in a regular JSON file of at most `limit_bytes`; see `parse_json`.

    Raises `error`, naming the file, if it cannot be read, is larger or is not such JSON.
    """
    text = read_bytes(path, limit_bytes, error=error)
    return parse_json(text, path, error=error, kind=kind, bits=bits)


def read_toml(
    path: str | os.PathLike[str], limit_bytes: int, *, error: type[MegatronError]
) -> dict[str, Any]:
    """Return the tables of a regular TOML file of at most `limit_bytes`.

    Raises `error`, naming the file, if it is not TOML or nested too deeply.
    """
    text = read_text(path, limit_bytes, error=error)
    try:
        tables = tomllib.loads(text)
        check_depth(tables)
    # a number with thousands of digits raises a plain ValueError
    except (ValueError, RecursionError) as problem:
        raise error(f"{path} is not valid TOML: {problem}") from None
    return tables


def parse_json(
    text: str | bytes,
    source: str | os.PathLike[str],
    *,
    error: type[MegatronError],
    kind: type = dict,
    bits: int = 64,
    **hooks: Any,
) -> Any:
    """Return the value in a JSON text.

    source   where the text comes from, for the message
    kind     type that the value must have: dict, list, ...
    bits     most bits that an integer may have
    hooks    further arguments of json.loads, such as object_pairs_hook; errors that these raise,
             other than ValueError, are passed on

    Raises `error` if the text is not JSON, if the value is of another type or nested too deeply, if
    an integer has more bits, or if a string has a lone surrogate.
    """
    try:
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
        value = json.loads(text, parse_int=partial(_integer, bits), **hooks)
        check_depth(value)
        if re.search(r"\\u[dD]", text):
            # a lone surrogate can neither be printed nor be part of a file name
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as problem:
        raise error(
            f"{source} is not valid JSON ({problem}): it is damaged, or not the right file"
        ) from None
    if not isinstance(value, kind):
        raise error(
            f"{source} has a JSON {type(value).__name__} where a {kind.__name__} is expected"
        )
    return value


def is_count(value: Any) -> bool:
    """Return whether a JSON value is an integer from 0 to 2**63 - 1."""
    return type(value) is int and 0 <= value < 1 << 63


def is_file_name(value: Any) -> bool:
    """Return whether a JSON value is a plain file name, which cannot lead out of its folder."""
    return isinstance(value, str) and value not in ("", ".", "..") and not {"/", "\0"} & set(value)


def _integer(bits: int, digits: str) -> int:
    value = int(digits)
    if value.bit_length() > bits:
        raise ValueError(f"it has an integer of more than {bits} bits")
    return value


def check_depth(value: Any, levels: int = _DEPTH) -> None:
    """Raise RecursionError if a value is nested more than `levels` deep.

    Recursive code that walks such a value later could exceed Python's stack.
    """
    if isinstance(value, (dict, list)):
        if not levels:
            raise RecursionError("it is nested too deeply")
        for item in value.values() if isinstance(value, dict) else value:
            check_depth(item, levels - 1)
