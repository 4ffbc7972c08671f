"""Tests of data write hundreds of small files, for which no disk has to turn."""

import os

import pytest


@pytest.fixture(autouse=True, scope="module")
def without_waiting_for_the_disk():
    """Leave out the waits for the disk, which only a power cut would make visible."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield
