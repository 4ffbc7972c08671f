"""`make gpu-check`: the steps started, cut and repeated within a budget, and the report."""

import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import bench, gpu_check, parity, results, sides, workloads
from tests.helpers.clock import VirtualClock
from tests.helpers.launching import ROOT

TAKES = {"fast": 10.0, "slow": 100.0, "other": 20.0}


class Machine:
    """Machine whose steps take virtual time.

    `codes`: exit codes; `says`: text for the log; `played`: (name, limit) of each step run.
    """

    def __init__(self, folder):
        self.folder = folder
        self.clock = VirtualClock()
        self.codes = dict.fromkeys(TAKES, 0)
        self.says = dict.fromkeys(TAKES, "fine\n")
        self.played: list[tuple[str, float]] = []
        self.stopped = ""

    def play(self, commands, log, limit_s):
        name = commands[0][0]
        self.played.append((name, limit_s))
        log.write_text(self.says[name])
        if name == self.stopped:
            raise KeyboardInterrupt
        self.clock.advance(min(TAKES[name], limit_s))
        return self.codes[name] if TAKES[name] <= limit_s else None

    def check(
        self,
        budget,
        *,
        foreseen=TAKES,
        device="gpu",
        sources="one",
        only=(),
        fresh=False,
        **more,
    ):
        """Call the check once: whether nothing failed, and the verdicts in the report.

        `played` covers this call alone.
        """
        self.played = []
        steps = [
            gpu_check.Step(name, f"the {name} one", s, ((name, "a b"),), **more)
            for name, s in foreseen.items()
        ]
        times = {"clock": self.clock, "say": lambda line: None}
        check = gpu_check.CheckStep(
            self.folder, budget, device, sources, self.play, fresh=fresh, **times
        )
        good = check.run(steps, only)
        return good, {name: step["verdict"] for name, step in self.report().items()}

    def report(self):
        return {
            step["name"]: step
            for step in json.loads((self.folder / "report.json").read_text())["steps"]
        }


@pytest.fixture
def here(tmp_path):
    return Machine(tmp_path)


def test_a_budget_is_kept_and_the_next_call_goes_on(here):
    """A budget of 60 s skips the step that takes 100 s; the next call runs only that step."""
    assert here.check(60) == (True, {"fast": "passed", "slow": "not done", "other": "passed"})
    # Four times the expected time, but no more than the time left.
    assert here.played == [("fast", 40), ("other", 50)]
    assert here.check(120) == (True, dict.fromkeys(TAKES, "passed"))
    assert here.played == [("slow", 120)]
    assert here.check(120)[0] and not here.played
    assert here.check(120, only=["fast"])[0] and [name for name, _ in here.played] == ["fast"]
    for change in ({"fresh": True}, {"device": "another gpu"}):
        here.check(1000, **change)
        assert [name for name, _ in here.played] == list(TAKES)


def test_what_was_cut_comes_last_and_gets_all_that_is_left(here):
    foreseen = {"slow": 20.0, "fast": 30.0, "other": 20.0}
    assert here.check(105, foreseen=foreseen) == (
        True,
        {"slow": "cut", "fast": "not done", "other": "passed"},
    )
    assert here.played == [("slow", 80), ("other", 25)]
    here.check(60, foreseen=foreseen)
    assert here.played == [("fast", 60)]  # 80 s were not enough: with 50 s it is not started
    assert here.report()["slow"]["verdict"] == "cut"
    assert here.check(150, foreseen=foreseen) == (True, dict.fromkeys(foreseen, "passed"))
    assert here.played == [("slow", 150)]


def test_a_failure_is_repeated_when_sources_have_changed(here):
    here.codes["fast"] = 3
    assert here.check(1000) == (False, {"fast": "FAILED", "slow": "passed", "other": "passed"})
    assert not here.check(1000)[0] and not here.played
    here.codes["fast"] = 0
    assert here.check(1000, sources="two")[0] and [name for name, _ in here.played] == ["fast"]
    assert {step["sources"] for step in here.report().values()} == {"one", "two"}


def test_an_interruption_leaves_a_report(here):
    here.stopped = "slow"
    with pytest.raises(KeyboardInterrupt):
        here.check(1000)
    assert {name: step["verdict"] for name, step in here.report().items()} == {
        "fast": "passed",
        "slow": "cut",
    }
    here.stopped = ""
    here.check(1000)
    assert [name for name, _ in here.played] == ["other", "slow"]


def test_what_cannot_be_done_has_its_reason_and_no_failure(here):
    good, verdicts = here.check(1000, cannot="no such package")
    assert good and set(verdicts.values()) == {"not done"} and not here.played
    assert "no such package" in (here.folder / "REPORT.md").read_text()


def test_what_only_skips_proves_nothing(here):
    for line, verdict in (
        ("3 failed, 71 passed, 2 skipped in 9 s", "passed"),
        ("71 skipped in 9 s", "not done"),
        ("", "not done"),
    ):
        here.says["fast"] = f"$ python -m pytest\n{line}\n"
        outcome = here.check(1000, foreseen={"fast": 10.0}, proof=gpu_check.TESTED, fresh=True)
        assert outcome == (True, {"fast": verdict})


# ---- figures -------------------------------------------------------------------------------------


def test_the_share_of_the_peak_is_in_the_figures():
    """The share of the peak is in the figures.

    The step does in one second the work that an H100 SXM does in half a second by its data sheet,
    989.4 TFLOP/s.
    """
    case = workloads.cuda_cases(80 * 2**30)[0]
    keys = [(case, side) for side in case.sides[:2]]
    seconds = case.flops / 989.4e12 * 2
    outcomes = {key: [sides.SideOutcome(step_s=[seconds])] for key in keys}
    for gpu, text in (("NVIDIA H100 80GB HBM3", "tokens/s (MFU 50.0 %)"), ("another", "tokens/s")):
        table = results.rate_table(bench.rows_of(keys, outcomes, {}, 1, gpu))
        first, second = gpu_check.rates("", [[["a"], ["b"]], table]).split("; ")
        assert first == f"ours {case.tokens / seconds:,.0f} {text}" and second.startswith(
            "ours, torch's kernels"
        )


# ---- the steps -----------------------------------------------------------------------------------

GPU = {
    "device": "cuda",
    "count": 1,
    "target": "cuda",
    "arch": "sm_90",
    "memory_bytes": 80 * 2**30,
    "driver": "1",
    "compiler, cuda": "nvcc",
}
CPU = {
    "device": "cpu",
    "count": 0,
    "target": "host",
    "arch": "x86-64-v3",
    "memory_bytes": 2**34,
    "driver": "",
    "compiler, host": "c++",
}


@pytest.mark.parametrize("facts", [GPU, CPU], ids=["gpu", "cpu"])
def test_every_flag_of_a_step_is_one_of_its_program(facts):
    for step in gpu_check.steps_of(facts, Path("out")):
        for program, *words in step.commands:
            if program.startswith("benchmarks/"):
                flags = [word for word in words if word.startswith("--")]
                texts = (ROOT / program).read_text() + (ROOT / "benchmarks/shared.py").read_text()
                assert all(f'"{flag}"' in texts for flag in flags), (program, flags)


def test_what_does_not_fit_or_has_no_compiler_cannot_be_done(
    monkeypatch,
):
    monkeypatch.setattr(gpu_check, "lacks", lambda *names: "")
    excluded = {
        step.name for step in gpu_check.steps_of(GPU | {"count": 2}, Path("out")) if step.cannot
    }
    assert not excluded
    small = {name: value for name, value in GPU.items() if name != "compiler, cuda"} | {
        "arch": "sm_1"
    }
    small["memory_bytes"] = 16 * 2**30  # 1.3B takes 18 bytes a parameter
    excluded = {step.name for step in gpu_check.steps_of(small, Path("out")) if step.cannot}
    assert excluded == {"kernels", "bandwidth", "numerics", "MFU", "G2", "lost-rank"}


def test_correctness_mfu_and_the_peers_come_within_ten_minutes():
    """Steps that a GPU session must answer come first, also where kernels are still to be built.

    What takes two ranks comes next on two devices, and last on one.
    """
    first = ["extensions", "kernels", "parity", "MFU", "G1", "G2"]
    several = ["ranks", "lost-rank"]
    alone, two = (
        gpu_check.steps_of(GPU | {"count": count, "arch": "sm_1"}, Path("out")) for count in (1, 2)
    )
    assert [step.name for step in alone[:6]] == first
    assert 5 + sum(step.seconds for step in alone[:6]) <= 600
    assert [step.name for step in alone[-2:]] == several
    assert [step.name for step in two[:8]] == [*first, *several]


def test_the_furthest_step_counts():
    expected = {i: {"loss": 5.0, "skipped": 0} for i in (1, 2)}
    for records, off in (
        (expected, 0.0),
        ({**expected, 2: {"loss": 5.5, "skipped": 0}}, 0.1),
        ({**expected, 2: {"loss": 5.0, "skipped": 1}}, float("inf")),
        ({**expected, 2: {"loss": None, "skipped": 0}}, float("inf")),
        ({1: expected[1]}, float("inf")),
    ):
        assert parity.furthest(records, expected, "loss") == pytest.approx(off)


# ---- processes -----------------------------------------------------------------------------------

HIDES = """
import os, signal, sys
if os.fork() == 0:
    os.setsid()
    open(sys.argv[1], "w").write(str(os.getpid()))
signal.pause()
"""
# The time limit expires once the process in its own session has reported its number.
ENDS = """
import subprocess
from pathlib import Path
from benchmarks.gpu_check import adopt_orphans, play
adopt_orphans()
waits, told = subprocess.Popen.wait, []
def wait(process, timeout=None):
    if told:
        return waits(process, timeout)
    told.append(Path({pipe!r}).read_text())
    raise subprocess.TimeoutExpired("", timeout)
subprocess.Popen.wait = wait
assert play([("-c", {code!r}, {pipe!r})], Path({log!r}), 60.0) is None
print(*told)
"""


@pytest.mark.campaign("benchmarks")
def test_a_cut_step_leaves_no_process(tmp_path):
    os.mkfifo(tmp_path / "pid")
    code = ENDS.format(code=HIDES, pipe=str(tmp_path / "pid"), log=str(tmp_path / "log"))
    pid = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


# The others are tests.
REHEARSED = (
    "extensions kernels parity MFU idle host-waits bandwidth W0 memory prediction ranks lost-rank"
).split()


@pytest.mark.campaign("benchmarks")
def test_without_a_gpu_every_step_is_rehearsed(tmp_path):
    """The rehearsal fails on no machine: what cannot be done here says why."""
    steps = gpu_check.steps_of(CPU, tmp_path)
    assert {step.name for step in steps} == {*REHEARSED, "numerics", "tests"}
    command = [sys.executable, "benchmarks/gpu_check.py", "--budget", "1h"]
    command += ["--output", str(tmp_path), "--only", *REHEARSED]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=True)
    steps = json.loads((tmp_path / "report.json").read_text())["steps"]
    cannot = {step.name for step in gpu_check.steps_of(CPU, tmp_path) if step.cannot}
    verdicts = {step["name"]: step["verdict"] for step in steps}
    assert verdicts == {
        name: "not done" if name in cannot else "passed" for name in ["device", *REHEARSED]
    }


def test_a_kit_is_put_in_its_places(tmp_path, monkeypatch):
    """Packed kernels and extensions come into the tree, and packed packages first on the path.

    Not those for another version of Python.
    """
    kit = tmp_path / "kit"
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "before")
    assert not gpu_check.use_kit(kit, root) and os.environ["PYTHONPATH"] == "before"
    library = Path("megatron", "kernels", "lib", "libmegatron-cuda-sm_90.so")
    for path in (kit / "built" / library, kit / "site" / "packed_here.py"):
        path.parent.mkdir(parents=True)
        path.write_text("17")
    label = {"python": "2.7", "machine": platform.machine(), "kernels": ""}
    (kit / "kit.json").write_text(json.dumps(label))
    assert "2.7" in gpu_check.use_kit(kit, root) and not (root / library).exists()
    label["python"] = f"{sys.version_info[0]}.{sys.version_info[1]}"
    (kit / "kit.json").write_text(json.dumps(label))
    assert gpu_check.use_kit(kit, root)
    assert (root / library).read_text() == "17"
    spec = importlib.util.find_spec("packed_here")
    assert spec and spec.origin == str(kit / "site" / "packed_here.py")
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(kit / "site"), "before"]
