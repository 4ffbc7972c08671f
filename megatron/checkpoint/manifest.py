"""The manifest of a checkpoint: size and digest of every file but the data files, and of itself.

    {"format": 3, "generation": 17, "files": {NAME: [bytes, digest], ...}, "digest": digest of the rest}

The generation says in which order the checkpoints of a folder were saved, which iterations do not where a run went
back, and clocks do not where one was wrong: each save has one more than all that are there. Checkpoints from before it
was counted have none, and count as saved before all others.

The bytes in data files have their digests in the lists of boxes (boxes.py), which the manifest covers in turn. So a
flipped bit or a cut anywhere in a checkpoint is found by whoever reads the part that is hit, before it is used.
"""
from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.digest import digest, file_digest
from megatron.checkpoint.folder import FORMAT, MANIFEST, Written, write_text
from megatron.errors import CheckpointError
from megatron.untrusted import is_count, is_file_name, parse_json, read_bytes

_OTHER = "load another checkpoint"
_OWN_BYTES, _FILE_BYTES = 64 << 20, 1 << 30  # at most: of a manifest, and of a file that it lists
_LAST = 1 << 62


@dataclass(frozen=True)
class Manifest:
    """Small files of a checkpoint, {name: (bytes, digest)}, and the number of its save."""

    folder: Path
    files: Mapping[str, Written]
    generation: int = 0

    def read_bytes(self, name: str) -> bytes:
        """A file's content, after it was compared with the manifest. Raises CheckpointError naming the file."""
        if name not in self.files:
            raise CheckpointError(f"{self.folder / MANIFEST} does not list {name}: the file is no part of it")
        (size, expected), path = self.files[name], self.folder / name
        data = read_bytes(path, size, error=CheckpointError)
        if len(data) != size:
            raise CheckpointError(f"{path} has {len(data)} bytes where {size} were written: {_OTHER}")
        if digest(data) != expected:
            raise CheckpointError(f"{path} is damaged: its digest is {digest(data)}, written was {expected}: {_OTHER}")
        return data

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON object from a file, after the file was compared with the manifest. Raises CheckpointError."""
        found: dict[str, Any] = parse_json(self.read_bytes(name), self.folder / name, error=CheckpointError)
        return found


def write_manifest(
    folder: Path, names: Iterable[str], known: Mapping[str, Written] | None = None, generation: int = 0
) -> Written:
    """Write the manifest for the files `names` of a folder; bytes and digest of it. Raises OSError.

    known   what the writers of some files said of them ({name: (bytes, digest)}, as write_text returns it): those
            are not read again, and what went wrong on their way to the disk is found later
    """
    known = known or {}
    files = {name: known[name] if name in known else file_digest(folder / name) for name in names}
    return write_text(folder / MANIFEST, _text({"format": FORMAT, "generation": generation, "files": files}))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError, naming the file, where it is missing or damaged."""
    path = folder / MANIFEST
    text = read_bytes(path, _OWN_BYTES, error=CheckpointError)
    content = parse_json(text, path, error=CheckpointError)
    content.pop("digest", None)
    if _text(content).encode() != text:
        raise CheckpointError(f"{path} is damaged: its digest is not that of its content: {_OTHER}")
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is of format {content.get('format')!r}, this program reads {FORMAT}: use the version that wrote it"
        )
    files, generation = content.get("files"), content.get("generation", 0)
    if not isinstance(files, dict) or not all(map(_is_entry, files.items())) or not is_count(generation):
        raise CheckpointError(f"{path} does not list files with their sizes and digests: {_OTHER}")
    listed = {name: (size, value) for name, (size, value) in files.items()}
    return Manifest(folder, listed, min(generation, _LAST))  # whoever saves next still has a number above it


def _is_entry(item: tuple[str, Any]) -> bool:
    name, entry = item
    pair = isinstance(entry, list) and len(entry) == 2 and is_count(entry[0]) and isinstance(entry[1], str)
    return is_file_name(name) and pair and entry[0] <= _FILE_BYTES


def _text(content: dict[str, Any]) -> str:
    """The file: `content` and the digest of its compact form. Every byte follows from the content."""
    own = digest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    return json.dumps(content | {"digest": own}, indent=1, sort_keys=True) + "\n"
