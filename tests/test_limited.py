"""Replies of a child process that has been taken over: errors of the project's types, no waiting."""

import sys

import pytest

from megatron import limited
from megatron.errors import DataError


def taken_over(_):
    """Return a handler that answers each request itself, with the messages in it."""

    def send(messages):
        connection = sys._getframe(1).f_locals["connection"]
        while True:
            for message in messages:
                connection.send_bytes(message)
            messages = connection.recv()[2]

    return send


@pytest.mark.slow
def test_what_is_no_reply_is_refused(monkeypatch):
    process = limited.LimitedProcess(f"{__name__}:taken_over", None, "this template")
    for reply in (b"\xff{", b"[]", b"3"):
        with pytest.raises(DataError, match="this template"):
            process.ask([reply, b""], 0)
    assert process.ask([b'["value", 3]', b""], 0) == 3
    monkeypatch.setattr(limited, "_WAITING", 0.01)
    with pytest.raises(limited.LimitError, match="this template"):
        process.ask([b'["value", 3]'], 0)  # one part of a reply
