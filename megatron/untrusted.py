"""Files that others may have put there: only regular ones are read, so much and no more, and JSON
is checked; to write one never waits.

A name may be a fifo, on which a reader waits for ever, or /dev/zero, which has no end. JSON may be
nested deeper than Python's stack, or hold a number of millions of digits. Each ends in the caller's
own kind of error.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any, BinaryIO

from megatron.errors import ConfigError, MegatronError

_DIGITS = 20  # of the longest whole number of 64 bits, its sign included
_LONG = re.compile(rf"\d{{{_DIGITS}}}")
_DEPTH = 100  # levels of JSON, a tenth of Python's stack


def open_regular(path: str | os.PathLike[str], *, error: type[MegatronError]) -> BinaryIO:
    """A file, open for reading. Raises `error` for one that is missing, unreadable or not
    regular.
    """
    try:
        # else a fifo without a writer would wait
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return open(handle, "rb")
        os.close(handle)
    # ValueError: a name with a zero byte, or with what is no character
    except (OSError, ValueError) as problem:
        raise error(
            f"cannot read {path}: {getattr(problem, 'strerror', None) or problem}"
        ) from problem
    raise error(f"cannot read {path}: it is not a regular file")


def without_waiting(path: str, flags: int) -> int:
    """Opens a file for writing, as an `opener` of open(); a pipe that nobody reads is an error
    instead of a wait.
    """
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def write_text(path: Path, text: str, *, choose: str) -> Path:
    """Write a text in UTF-8; the file. Raises ConfigError where that fails; `choose` is what its
    user can choose.
    """
    try:
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
    """The content of a regular file of at most `limit_bytes`. Raises `error`, naming the file, for
    any other.
    """
    with open_regular(path, error=error) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            parts, left = list[bytes](), limit_bytes + 1
            while size <= limit_bytes and left and (part := file.read(min(left, max(size, 1) + 1))):
                parts.append(part)
                left -= len(part)
        except OSError as problem:
            raise error(f"cannot read {path}: {problem.strerror or problem}") from problem
    if size > limit_bytes or not left:
        raise error(
            f"{path} has more than {limit_bytes} bytes, too many for what it should be: is it "
            "another file?"
        )
    return b"".join(parts)


def read_text(path: str | os.PathLike[str], limit_bytes: int, *, error: type[MegatronError]) -> str:
    """The text of a regular file in UTF-8 of at most `limit_bytes`. Raises `error`, naming the
    file.
    """
    try:
        return read_bytes(path, limit_bytes, error=error).decode()
    except UnicodeDecodeError as problem:
        raise error(
            f"{path} holds no text in UTF-8 ({problem}): it is damaged, or another file"
        ) from problem


def read_json(
    path: str | os.PathLike[str],
    limit_bytes: int,
    *,
    error: type[MegatronError],
    kind: type | tuple[type, ...] = dict,
) -> Any:
    """The value in a regular JSON file of at most `limit_bytes`; see `parse_json`. Raises `error`,
    naming the file.
    """
    return parse_json(read_bytes(path, limit_bytes, error=error), path, error=error, kind=kind)


def read_toml(
    path: str | os.PathLike[str], limit_bytes: int, *, error: type[MegatronError]
) -> dict[str, Any]:
    """The tables of a regular TOML file of at most `limit_bytes`. Raises `error`, naming the file,
    for what is no TOML or is nested too deep."""
    text = read_text(path, limit_bytes, error=error)
    try:
        found = tomllib.loads(text)
        _check_depth(found)
    # a number of thousands of digits is no TOMLDecodeError
    except (ValueError, RecursionError) as problem:
        reason = "it is nested too deep" if isinstance(problem, RecursionError) else problem
        raise error(f"{path} holds no TOML that can be read: {reason}") from None
    return found


def parse_json(
    text: str | bytes,
    source: str | os.PathLike[str],
    *,
    error: type[MegatronError],
    kind: type | tuple[type, ...] = dict,
    **hooks: Any,
) -> Any:
    """The value in a JSON text.

    source   where the text is from, for the message
    kind     what the value has to be: dict, list, ...
    hooks    further arguments of json.loads, such as object_pairs_hook; what they raise besides
             ValueError passes

    Raises `error` for what is no JSON or of another kind, is nested too deep, or has whole numbers
    beyond 64 bits.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        # perhaps in a string: only then each number is looked at, which takes as long again
        if _LONG.search(text):
            hooks = {"parse_int": _integer, **hooks}
        found = json.loads(text, **hooks)
        _check_depth(found)
        if re.search(r"\\u[dD]", text):
            # half a surrogate pair can neither be printed nor be a name
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as problem:
        reason = "it is nested too deep" if isinstance(problem, RecursionError) else problem
        raise error(
            f"{source} holds no JSON that can be read ({reason}): it is damaged, or another file"
        ) from None
    if not isinstance(found, kind):
        raise error(
            f"{source} holds a JSON {type(found).__name__} where another kind of value is expected"
        )
    return found


def is_count(value: Any) -> bool:
    """Return whether a value of JSON is a whole number from 0 to 2**63 - 1."""
    return type(value) is int and 0 <= value < 1 << 63


def is_file_name(value: Any) -> bool:
    """Return whether a value of JSON can be the name of a file in a folder, and leads nowhere
    else.
    """
    return isinstance(value, str) and value not in ("", ".", "..") and not {"/", "\0"} & set(value)


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _check_depth(value: Any) -> None:
    """Raise RecursionError for what would be too deep for whoever walks over it."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(_DEPTH):
        if not level:
            return
        inner = (item for v in level for item in (v.values() if isinstance(v, dict) else v))
        level = [item for item in inner if isinstance(item, (dict, list))]
    raise RecursionError
