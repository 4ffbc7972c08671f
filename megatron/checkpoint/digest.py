"""Digests of what a checkpoint holds: XXH3 of 128 bits, in hex.

A digest finds accidents: flipped bits, cuts, files that were mixed up. It is no signature. XXH3 (Y. Collet,
https://github.com/Cyan4973/xxHash) is about as fast as memory can be read, so that it costs a save next to nothing.
"""
from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import xxhash

_CHUNK = 4 << 20  # bytes: a file is read in parts of this size


def digest(data: Any) -> str:
    """32 hex digits for bytes, or anything else with the buffer protocol (a memoryview, a numpy array).

    >>> digest(b"")
    '99aa06d3014798d86001c324468d497f'
    """
    return xxhash.xxh3_128_hexdigest(data)


def running_digest() -> Any:
    """A digest to which bytes are added by `.update(data)`; `.hexdigest()` is what `digest` gives for all of them."""
    return xxhash.xxh3_128()


def file_digest(path: str | os.PathLike[str]) -> tuple[int, str]:
    """Size in bytes and digest of a file, read in parts. Raises OSError."""
    found, size = running_digest(), 0
    buffer = memoryview(bytearray(_CHUNK))
    with open(Path(path), "rb", buffering=0) as f:
        while count := f.readinto(buffer):
            found.update(buffer[:count])
            size += count
    return size, found.hexdigest()
