"""Files by other users: valid parts are read; anything else raises the caller's error at once."""

import os

import pytest

from megatron.errors import ConfigError, DataError
from megatron.untrusted import (
    is_count,
    is_file_name,
    parse_json,
    read_bytes,
    read_json,
    read_text,
    write_text,
)


def test_regular_files_of_so_many_bytes(tmp_path):
    path = tmp_path / "file"
    for text in ("", "a", "né", "x" * 100_000):
        path.write_text(text)
        size = path.stat().st_size
        assert read_text(path, size, error=DataError) == text
        assert read_bytes(path, size + 1, error=DataError) == text.encode()
        if size:
            with pytest.raises(DataError, match="file"):
                read_bytes(path, size - 1, error=DataError)


@pytest.mark.parametrize(
    "what", ["absent", "fifo", "folder", "/dev/zero", "zero\0byte", "n" * 300, "half \ud800"]
)
def test_nothing_else_is_read(tmp_path, what):
    path = tmp_path / what
    {"fifo": os.mkfifo, "folder": os.mkdir}.get(what, lambda p: None)(path)
    with pytest.raises(DataError):
        read_bytes(path, 1 << 40, error=DataError)


@pytest.mark.parametrize("what", ["fifo", "folder", "file/below", "zero\0byte", "n" * 300])
def test_writing_never_waits(tmp_path, what):
    path = tmp_path / what
    (tmp_path / "file").touch()
    {"fifo": os.mkfifo, "folder": os.mkdir}.get(what, lambda p: None)(path)
    with pytest.raises(ConfigError):
        write_text(path, "text", choose="another file")
    assert (
        write_text(tmp_path / "file", "é\r\n", choose="another file").read_bytes()
        == b"\xc3\xa9\r\n"
    )


DEEP = 50


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, 2.5, null, "\\ud83d\\ude00"]}', {"a": [1, 2.5, None, "\U0001f600"]}),
        ('{"a": ' + "[" * DEEP + "]" * DEEP + "}", ...),
        ('{"digits in text": "' + "7" * 5000 + '"}', {"digits in text": "7" * 5000}),
    ],
)
def test_json_that_is_sound(tmp_path, text, value):
    (tmp_path / "a.json").write_text(text)
    parsed = read_json(tmp_path / "a.json", 10_000, error=DataError)
    assert value in (..., parsed) and parse_json(text, "here", error=DataError) == parsed


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"3",
        b"\xff\xfe",
        b'{"a": ' + b"1" * 5000 + b"}",
        b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"a":' * 100_000,
        b'{"a": "\\ud800"}',
    ],
)
def test_json_that_is_not(text):
    with pytest.raises(DataError, match=r"^here "):
        parse_json(text, "here", error=DataError)


def test_another_kind_and_hooks():
    assert parse_json("[1]", "here", error=DataError, kind=list) == [1]
    assert parse_json('{"a": 1}', "here", error=DataError, kind=list, object_pairs_hook=list) == [
        ("a", 1)
    ]


def test_counts_and_names():
    assert all(map(is_count, (0, 1, 2**63 - 1))) and not any(
        map(is_count, (-1, 2**63, True, 1.0, "1", None))
    )
    assert all(map(is_file_name, ("a", ".metadata", "..."))) and not any(
        map(is_file_name, ("", ".", "..", "a/b", "/a", "a\0", 3, None))
    )
