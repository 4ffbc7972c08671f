"""Campaign of hostile input: a few of its cases, and its detection of planted failures."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.prove import hostile, hostile_files
from tests.prove.hostile import Bench, Case

pytestmark = pytest.mark.slow

# Those that start quickly and whose files are made quickly.
CHEAP = [
    target
    for target in hostile.TARGETS
    if target[2] in ("sources", "legacy")
    or target[0] in ("tools/show_placement.py", "tools/show_schedule.py")
]
PLANTED = {
    "TRACEBACK: ValueError": "raise ValueError('x')",
    "TRACEBACK: MemoryError": "bytearray(5 << 30)",
    "HANG": "import time; time.sleep(1000)",
    "SIGNAL: SIGABRT": "import os; os.abort()",
    "CODE RUN: posix.mkdir": "import pickle, sys; pickle.load(open(sys.argv[1], "
    "'rb')); sys.exit(2)",
    "CODE RUN: a command ran": "import os, sys; os.system(sys.argv[2])",
}


@pytest.mark.timeout(180)  # the first case makes each kind of files
def test_a_few_cases(tmp_path: Path) -> None:
    few = itertools.islice(hostile.cases(("files", "flags")), 6)
    counts, found = hostile.campaign(0, few, tmp_path, targets=CHEAP)
    assert not found
    assert {kind: sum(verdicts.values()) for kind, verdicts in counts.items()} == {
        "files": 4,
        "flags": 2,
    }
    assert all(
        sum(verdicts[each] for verdicts in counts.values()) for each in ("accepted", "refused")
    )


@pytest.mark.parametrize(("signature", "code"), PLANTED.items(), ids=PLANTED)
def test_what_may_not_happen_is_a_failure(signature: str, code: str, tmp_path: Path) -> None:
    bench, script = (
        Bench(tmp_path, 0.5 if signature == "HANG" else hostile.LIMIT_S),
        tmp_path / "planted.py",
    )
    script.write_text(code)
    words = ["{f}/file", "mkdir {f}/RAN"]

    def plant(folder: Path) -> str:
        (folder / "file").write_bytes(hostile_files.payload(folder))
        return ""

    verdict, found, _ = bench.run(Case(str(script), [words], damage=plant))
    assert verdict == "FAILED" and found.startswith(signature), found


def test_a_refusal_and_a_success_are_none(tmp_path: Path) -> None:
    bench, script = Bench(tmp_path), tmp_path / "planted.py"
    script.write_text("import sys; sys.exit(int(sys.argv[1]))")
    assert [bench.run(Case(str(script), [[code]]))[:2] for code in "02"] == [
        ("accepted", ""),
        ("refused", ""),
    ]


def test_processes_with_other_files_that_end_well_are_a_failure(tmp_path: Path) -> None:
    bench, script = Bench(tmp_path), tmp_path / "planted.py"
    script.write_text("import os, sys; sys.exit(2 if os.path.exists('file') else 0)")

    def plant(folder: Path) -> str:
        for name in ("0", "1"):
            (folder / name).mkdir()
        (folder / "1" / "file").touch()
        return "1/file: new"

    case = Case(str(script), [[], []], ({}, {}), damage=plant, folders=("0", "1"))
    assert bench.run(case)[:2] == ("FAILED", "TRAINED: 1/file")
