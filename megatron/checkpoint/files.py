"""The small files of a checkpoint: their names, how they are written, and their manifest.

    {"format": 3, "generation": 17, "files": {NAME: [bytes, digest], ...}, "digest": digest of the
    rest}

The manifest holds the size and digest of every other file except the data files, and its own
digest. The digests of shards in data files are in the shard lists (shards.py), which the manifest
covers in turn. Thus a flipped bit or a truncation anywhere in a checkpoint is found when the
affected part is read, before it is used.

The generation gives the order in which the checkpoints in a folder were saved. Iterations do
not, because a run may roll back; timestamps do not, because clocks may be wrong. Each save uses the
largest generation in its --save and --load folders plus one; checkpoints without a generation
count as older than all others.

Digests are 128-bit XXH3 in hex (Y. Collet, https://github.com/Cyan4973/xxHash), which takes about
as long as reading the memory. Digests detect accidental damage but are not a signature.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import xxhash

from megatron.errors import CheckpointError
from megatron.untrusted import is_count, is_file_name, parse_json, read_bytes

STATE = "state.json"
CONFIG = "config.json"
METADATA = ".metadata"
SHARD_INDEX = "boxes.json"
MANIFEST = "manifest.json"
PROVENANCE = "passport.json"
FORMAT = 3

StrPath = str | os.PathLike[str]
Written = tuple[int, str]
"""Size in bytes and digest of a file that was written."""

_OTHER = "load another checkpoint"
# largest sizes of the manifest, and of a file that it lists
_MANIFEST_LIMIT_BYTES = 64 << 20
_FILE_LIMIT_BYTES = 1 << 30
_BLOCK_BYTES = 4096  # size of the blocks that sampled_digest reads between the ends of a file
_LARGEST_GENERATION = 1 << 62  # so that the next save can still add one


def digest(data: Any) -> str:
    """Return the digest of bytes, as 32 hex digits.

    `data` is any object with the buffer protocol, such as bytes, a memoryview or a numpy array.

    >>> digest(b"")
    '99aa06d3014798d86001c324468d497f'
    """
    return xxhash.xxh3_128_hexdigest(data)


def file_digest(path: StrPath) -> Written:
    """Return the size and digest of a file, which is read in blocks. Raises OSError."""
    with open(path, "rb", buffering=0) as f:
        value = hashlib.file_digest(f, xxhash.xxh3_128).hexdigest()
        return f.tell(), value


def sampled_digest(path: StrPath, most_bytes: int) -> Written:
    """Return the size of a file, and the digest of at most `most_bytes` of it. Raises OSError.

    A longer file is read in part: a quarter of `most_bytes` at each end, and evenly spaced blocks
    in between.
    """
    with open(path, "rb", buffering=0) as f:
        size = os.fstat(f.fileno()).st_size
        ranges = [(0, size)]
        if size > most_bytes:
            end = most_bytes // 4
            count = most_bytes // 2 // _BLOCK_BYTES
            blocks = [(size * i // (count + 1), _BLOCK_BYTES) for i in range(1, count + 1)]
            ranges = [(0, end), *blocks, (size - end, end)]
        return size, digest(b"".join(os.pread(f.fileno(), n, start) for start, n in ranges))


def to_json(value: object, what: str) -> str:
    """Return JSON text.

    Raises CheckpointError, naming `what`, for values that JSON cannot represent or that
    `parse_json` would refuse.
    """
    try:
        text = json.dumps(value, indent=1, sort_keys=True) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{what} cannot be saved as JSON ({error}): use numbers, strings, lists and dicts"
        ) from error
    parse_json(text, what, error=CheckpointError)
    return text


def write_text(path: Path, text: str) -> Written:
    """Write a text file, like `write_bytes`."""
    return write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> Written:
    """Write a file, sync it to disk, and return its size and digest. Raises OSError.

    Use it only for files that nobody reads yet: a crash may leave a partial file.
    """
    with open(path, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    sys.audit("megatron.checkpoint.synced", str(path))
    return len(data), digest(data)


@dataclass(frozen=True)
class Manifest:
    """The small files of a checkpoint, {name: (bytes, digest)}, and the generation of its save."""

    folder: Path
    files: Mapping[str, Written]
    generation: int = 0

    def read_bytes(self, name: str) -> bytes:
        """Return the content of a file, checked against the manifest.

        Raises CheckpointError naming the file.
        """
        if name not in self.files:
            raise CheckpointError(f"{self.folder / MANIFEST} does not list {name}")
        size, expected = self.files[name]
        path = self.folder / name
        data = read_bytes(path, size, error=CheckpointError)
        if len(data) != size or digest(data) != expected:
            raise CheckpointError(
                f"{path} is damaged: it has {len(data)} bytes with digest {digest(data)}, but "
                f"{size} with digest {expected} were written: {_OTHER}"
            )
        return data

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file, checked against the manifest.

        Raises CheckpointError naming the file.
        """
        content: dict[str, Any] = parse_json(
            self.read_bytes(name), self.folder / name, error=CheckpointError
        )
        return content


def write_manifest(
    folder: Path,
    names: Iterable[str],
    known: Mapping[str, Written] = MappingProxyType({}),
    generation: int = 0,
) -> Written:
    """Write the manifest for the files `names` of a folder and return its size and digest.

    known   {name: (bytes, digest)} of files that are already known, as from write_text. They are
            not read again: corruption on the way to the disk is found when they are loaded

    Raises OSError.
    """
    files = {name: known[name] if name in known else file_digest(folder / name) for name in names}
    content = {"format": FORMAT, "generation": generation, "files": files}
    return write_text(folder / MANIFEST, _text(content))


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises CheckpointError naming the file if it is missing, damaged or of another format.
    """
    path = folder / MANIFEST
    text = read_bytes(path, _MANIFEST_LIMIT_BYTES, error=CheckpointError)
    content = parse_json(text, path, error=CheckpointError)
    content.pop("digest", None)
    if _text(content).encode() != text:
        raise CheckpointError(f"{path} is damaged: its digest does not match its content: {_OTHER}")
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {content.get('format')!r}, but this program reads {FORMAT}: use "
            "the version that wrote it"
        )
    try:
        files = {name: _checked(name, *entry) for name, entry in content["files"].items()}
        generation = min(content.get("generation", 0), _LARGEST_GENERATION)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} does not list files with their sizes and digests: {_OTHER}"
        ) from error
    return Manifest(folder, files, generation)


def _checked(name: str, size: Any, value: str) -> Written:
    if not (is_file_name(name) and is_count(size) and size <= _FILE_LIMIT_BYTES):
        raise ValueError(f"not a file of a checkpoint: {name}")
    return size, value


def _text(content: Mapping[str, object]) -> str:
    """Return the text of a manifest: `content`, and the digest of its compact JSON form.

    The same content always gives the same bytes.
    """
    content_digest = digest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    return json.dumps({**content, "digest": content_digest}, indent=1, sort_keys=True) + "\n"
