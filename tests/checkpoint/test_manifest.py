"""Digests and the manifest: a file with any byte changed, lost or added is named."""

import json
import random

import pytest
import xxhash

from megatron.checkpoint.files import (
    MANIFEST,
    digest,
    file_digest,
    read_manifest,
    to_json,
    write_manifest,
)
from megatron.errors import CheckpointError
from tests.checkpoint.made import signed

STATE = {"format": 3, "iteration": 4}


def checkpoint(folder):
    folder.mkdir(exist_ok=True)
    (folder / "state.json").write_text(json.dumps(STATE))
    (folder / "list.json").write_text("[1, 2]")
    (folder / "raw").write_bytes(bytes(range(256)))
    write_manifest(folder, ["state.json", "list.json", "raw"])
    return read_manifest(folder)


def test_digest_is_xxh3_also_of_files_larger_than_a_buffer(tmp_path):
    # The XXH3_128bits test vector for the empty input, seed 0 (xxHash,
    # tests/sanity_test_vectors.h).
    assert digest(b"") == "99aa06d3014798d86001c324468d497f"
    for size in (0, 1, 7, 8, 50, 1_000_003):
        data = random.Random(size).randbytes(size)
        (tmp_path / "f").write_bytes(data)
        assert (
            file_digest(tmp_path / "f")
            == (size, xxhash.xxh3_128(data).hexdigest())
            == (size, digest(data))
        )


def test_damage_of_the_manifest(tmp_path):
    checkpoint(tmp_path)
    path = tmp_path / MANIFEST
    sound = path.read_bytes()
    flips = [
        sound[:at] + bytes([sound[at] ^ 1 << at % 8]) + sound[at + 1 :] for at in range(len(sound))
    ]
    cuts = [sound[:length] for length in range(0, len(sound), 7)]
    for broken in (*flips, *cuts, sound + b" ", b"[]", b"null", b'{"digest": 3}', b"\xff\xfe"):
        path.write_bytes(broken)
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["state.json", "raw"])
def test_damage_of_a_file(tmp_path, name):
    found = checkpoint(tmp_path)
    path = tmp_path / name
    sound = path.read_bytes()
    flipped = sound[:5] + bytes([sound[5] ^ 4]) + sound[6:]
    for broken in (flipped, sound[:-1], sound + b"\0", b"", None):
        if broken is None:
            path.unlink()
        else:
            path.write_bytes(broken)
        for action in (found.read_bytes, found.read_json):
            with pytest.raises(CheckpointError, match=name):
                action(name)


def test_a_file_that_changed_on_its_way_to_the_disk_is_found(tmp_path):
    """The manifest records the digest that the writer reports, not that of the file on disk."""
    (tmp_path / "a").write_bytes(b"what arrived")
    write_manifest(tmp_path, ["a"], {"a": (12, digest(b"what was sent"[:12]))})
    found = read_manifest(tmp_path)
    with pytest.raises(CheckpointError, match=r"\ba\b"):
        found.read_bytes("a")


def nested(levels):
    return [nested(levels - 1)] if levels else 0


def test_what_could_not_be_read_is_not_written():
    """A file that cannot be read is not put in a manifest: the checkpoint could never be loaded."""
    assert json.loads(to_json({"a": nested(90)}, "it")) == {"a": nested(90)}
    for value in ({1, 2}, 10**30, "\ud800", nested(110)):
        with pytest.raises(CheckpointError, match="^it "):
            to_json({"a": value}, "it")


def test_a_later_format_is_called_so(tmp_path):
    (tmp_path / MANIFEST).write_text(signed({"format": 4, "files": {}}))
    with pytest.raises(CheckpointError, match=r"\b4\b"):
        read_manifest(tmp_path)
