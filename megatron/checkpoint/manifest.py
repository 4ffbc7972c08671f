"""The manifest of a checkpoint: size and digest of every file but the data files, and of itself.

    {"format": 3, "files": {NAME: [bytes, digest], ...}, "digest": digest of the rest}

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
from megatron.checkpoint.folder import CHECKED, FORMATS, MANIFEST, STATE, Written, read_json, write_text
from megatron.errors import CheckpointError

_OTHER = "load another checkpoint"


@dataclass(frozen=True)
class Manifest:
    """What is known of the small files of a checkpoint: {name: (bytes, digest)}."""

    folder: Path
    files: Mapping[str, Written]

    def read_bytes(self, name: str) -> bytes:
        """A file's content, after it was compared with the manifest. Raises CheckpointError naming the file."""
        size, expected = self._entry(name)
        path = self.folder / name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        _compare(path, (len(data), digest(data)), (size, expected))
        return data

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON object from a file, after the file was compared with the manifest. Raises CheckpointError."""
        try:
            found = json.loads(self.read_bytes(name))
        except ValueError as error:  # it was written so
            raise CheckpointError(f"{self.folder / name} holds no JSON ({error}): {_OTHER}") from error
        if not isinstance(found, dict):
            raise CheckpointError(f"{self.folder / name} holds no JSON object: {_OTHER}")
        return found

    def check(self, name: str) -> None:
        """Raise CheckpointError, naming the file, unless it is there with the size and digest it was written with."""
        expected, path = self._entry(name), self.folder / name
        try:
            found = file_digest(path)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        _compare(path, found, expected)

    def _entry(self, name: str) -> Written:
        if name not in self.files:
            raise CheckpointError(f"{self.folder / MANIFEST} does not list {name}: the file is no part of it")
        return self.files[name]


def write_manifest(folder: Path, names: Iterable[str], known: Mapping[str, Written] | None = None) -> Written:
    """Write the manifest for the files `names` of a folder; bytes and digest of it. Raises OSError.

    known   what the writers of some files said of them ({name: (bytes, digest)}, as write_text returns it): those
            are not read again, and what went wrong on their way to the disk is found later
    """
    known = known or {}
    files = {name: known[name] if name in known else file_digest(folder / name) for name in names}
    return write_text(folder / MANIFEST, _text({"format": CHECKED, "files": files}))


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint; None for formats 1 and 2, which have none.

    Raises CheckpointError, naming the file, where it is damaged, and where the checkpoint should have one and has not.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        _check_old(folder)
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        content = json.loads(text)
        found = content.pop("digest")
        sound = _text(content).encode() == text
    except (ValueError, TypeError, KeyError, AttributeError):
        sound = False
    if not sound:
        raise CheckpointError(f"{path} is damaged: its digest is not that of its content: {_OTHER}")
    assert isinstance(found, str), "the text is what _text makes"
    if content.get("format") != CHECKED:
        raise CheckpointError(
            f"{path} is of format {content.get('format')!r}, this program reads {', '.join(map(str, FORMATS))}: use "
            f"the version that wrote it"
        )
    return Manifest(folder, {name: (int(size), str(value)) for name, (size, value) in content["files"].items()})


def _text(content: dict[str, Any]) -> str:
    """The file: `content` and the digest of its compact form. Every byte follows from the content."""
    own = digest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    return json.dumps(content | {"digest": own}, indent=1, sort_keys=True) + "\n"


def _check_old(folder: Path) -> None:
    """Raise CheckpointError where a checkpoint without manifest is of a format that has one."""
    if (folder / STATE).exists() and read_json(folder / STATE).get("format") == CHECKED:
        raise CheckpointError(f"{folder / MANIFEST} is missing: the checkpoint is damaged, {_OTHER}")


def _compare(path: Path, found: Written, expected: Written) -> None:
    if found[0] != expected[0]:
        raise CheckpointError(f"{path} has {found[0]} bytes where {expected[0]} were written: {_OTHER}")
    if found[1] != expected[1]:
        raise CheckpointError(f"{path} is damaged: its digest is {found[1]}, written was {expected[1]}: {_OTHER}")
