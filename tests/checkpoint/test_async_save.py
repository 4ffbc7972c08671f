"""Background saves copy one moment's state, run one at a time, and report errors on all ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint import saver_cases
from tests.engine import toy
from tests.helpers.processes import run_processes

pytestmark = pytest.mark.slow
NAMES = ["consistent", "waits", "fails_in_the_background", "two_runs"]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root: Path = tmp_path_factory.mktemp("async")
    return run_processes(2, saver_cases.on_two, str(root), NAMES)


def assert_same(found: list[Any], expected: list[Any]) -> None:
    a, b = toy.assemble(found), toy.assemble(expected)
    assert a.keys() == b.keys()
    for name in b:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_the_copy_is_of_the_moment_it_was_asked_for(two: Any) -> None:
    found = [r["consistent"] for r in two]
    assert_same([f["loaded"]["state"] for f in found], [f["before"]["state"] for f in found])
    changed, before = (
        toy.assemble([f["after"] for f in found]),
        toy.assemble([f["before"]["state"] for f in found]),
    )
    assert any((changed[name] != before[name]).any() for name in before), (
        "training went on meanwhile"
    )
    for f in found:
        assert f["loaded"]["scalars"] == f["before"]["scalars"] and f["loaded"]["client"] == {
            "n": 1
        }
        assert f["same"], "the file is that of a synchronous save, to the byte"


def test_a_checkpoint_appears_with_its_commit(two: Any) -> None:
    for f in (r["consistent"] for r in two):
        (there,) = f["early"].pop("there")
        assert re.fullmatch(r"iter_0000005\.[0-9a-f]{8}\.tmp", there)
        assert f["early"] == {"none": None, "pending": True, "written": False}
        assert (
            f["there"] == ["iter_0000005", "latest_checkpointed_iteration.txt"] and not f["pending"]
        )
        assert f["saved"] == (5, True, True)


def test_one_at_a_time(two: Any) -> None:
    found = [r["waits"] for r in two]
    tracker = "latest_checkpointed_iteration.txt"
    for f in found:
        assert "iter_0000001" in f["after second"] and "iter_0000002" not in f["after second"]
        assert f["last"] == 2 and f["there"] == ["iter_0000001", "iter_0000002", tracker]
        assert (
            f["in the end"] == [f"iter_000000{i}" for i in (1, 2, 3, 4)] + [tracker]
            and f["tracker"] == "4\n"
        )
    assert_same([f["loaded"]["state"] for f in found], [f["states"][1] for f in found])


def test_a_thread_that_fails(two: Any) -> None:
    first, second = (r["fails_in_the_background"] for r in two)
    assert first == second
    before = ["iter_0000001", "latest_checkpointed_iteration.txt"]
    for text in (first["message"], first["second"]):
        assert "rank 1: OSError: [Errno 28]" in text and "iter_0000002" in text
    assert (first["there"], first["tracker"], first["pending"], first["then pending"]) == (
        before,
        "1\n",
        False,
        False,
    )
    assert first["in the end"] == ["iter_0000003", before[1]] and first["at last"] == "3\n"


def test_two_runs_in_one_folder(two: Any) -> None:
    """A job and its requeued copy save in one folder.

    One of them fails, and only the other's files appear.
    """
    found = [r["two_runs"] for r in two]
    for f in found:
        assert "iter_0000003." in f["error"] and ".tmp" in f["error"]
        assert f["there"] == ["iter_0000003", "latest_checkpointed_iteration.txt"]
        assert f["loaded"]["client"] == {"run": "second"}
    assert_same([f["loaded"]["state"] for f in found], [f["expected"] for f in found])
