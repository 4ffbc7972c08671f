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
from tests.checkpoint.written import signed


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


def test_a_file_that_changed_on_its_way_to_the_disk_is_found(tmp_path):
    """The manifest records the digest that the writer reports, not that of the file on disk."""
    (tmp_path / "a").write_bytes(b"what arrived")
    write_manifest(tmp_path, ["a"], {"a": (12, digest(b"what was sent"[:12]))})
    manifest = read_manifest(tmp_path)
    with pytest.raises(CheckpointError, match=r"\ba\b"):
        manifest.read_bytes("a")


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
