"""Campaign of hostile input: a few of its cases, and its detection of planted failures."""

import itertools

import pytest

from tests.prove import hostile, hostile_files
from tests.prove.hostile import Bench, Case

pytestmark = pytest.mark.slow

# Targets that start quickly and whose files are made quickly.
CHEAP = [
    target
    for target in hostile.TARGETS
    if target[2] == "sources" or target[0] in ("tools/show_placement.py", "tools/show_schedule.py")
]
PLANTED = {
    "TRACEBACK: MemoryError": "bytearray(5 << 30)",
    "HANG": "import time; time.sleep(1000)",
    "CODE RUN: posix.mkdir": "import pickle, sys; pickle.load(open(sys.argv[1], "
    "'rb')); sys.exit(2)",
    "CODE RUN: a command ran": "import os, sys; os.system(sys.argv[2])",
}


@pytest.mark.timeout(180)  # the first case makes each kind of files
def test_a_few_cases(tmp_path):
    few = itertools.islice(hostile.cases(("files", "flags")), 3)
    counts, failures = hostile.campaign(2, few, tmp_path, targets=CHEAP)
    verdicts = sorted(verdict for _, verdict in counts.elements())
    assert not failures and verdicts == ["accepted", "refused", "refused"]


@pytest.mark.parametrize(("signature", "code"), PLANTED.items(), ids=PLANTED)
def test_what_may_not_happen_is_a_failure(signature, code, tmp_path):
    bench = Bench(tmp_path, 0.5 if signature == "HANG" else hostile.LIMIT_S)
    script = tmp_path / "planted.py"
    script.write_text(code)
    words = ["{f}/file", "mkdir {f}/RAN"]

    def plant(folder):
        (folder / "file").write_bytes(hostile_files.payload(folder))
        return ""

    verdict, reported, _ = bench.run(Case(str(script), [words], damage=plant))
    assert verdict == "FAILED" and reported.startswith(signature), reported


def test_a_signal_and_a_traceback_are_failures_and_a_refusal_is_none():
    frame = f'  File "{hostile.ROOT}/megatron/data/x.py", line 7, in read\n    x\n'
    trace = f"Traceback (most recent call last):\n{frame}ValueError: no\n"
    assert hostile.judge(-6, "") == "SIGNAL: SIGABRT"
    assert hostile.judge(1, trace) == "TRACEBACK: ValueError: x.py:read < megatron/data/x.py:read"
    assert hostile.judge(2, "error: --x is wrong") == hostile.judge(0, "") == ""


def test_processes_with_other_files_that_end_well_are_a_failure(tmp_path):
    bench = Bench(tmp_path)
    script = tmp_path / "planted.py"
    script.write_text("import os, sys; sys.exit(2 if os.path.exists('file') else 0)")

    def plant(folder):
        for name in ("0", "1"):
            (folder / name).mkdir()
        (folder / "1" / "file").touch()
        return "1/file: new"

    case = Case(str(script), [[], []], ({}, {}), damage=plant, folders=("0", "1"))
    assert bench.run(case)[:2] == ("FAILED", "TRAINED: 1/file")
