"""`make gpu-check`: test and measure this machine's GPUs within a time budget.

    make gpu-check [BUDGET=10m] [ONLY='kernels G1'] [VENV=FOLDER]
    python benchmarks/gpu_check.py [--budget 10m] [--only STEP ...] [--fresh] [--output runs/gpu]

The most valuable steps come first; with a single device, steps for several come last. Each step is
a separate process, whose output goes to STEP.log; REPORT.md and report.json are written after each.
A step starts only if the remaining budget covers its expected time on one GPU, and is stopped
at four times that time. The same command continues: finished steps are not repeated, unless they
failed and sources have changed; stopped steps come last and get all remaining time; on another
device everything starts over. This program needs only Python, and lists the missing packages of
each step; what benchmarks/gpu_kit.py has packed into .gpu-kit is used. Without a GPU, it tests
itself by small steps on the CPU, and gives the reasons for skipped steps. Exit code 1 if a step
failed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import importlib.util
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.shared import ROOT, Table, markdown, parser, tables_of
from benchmarks.workloads import cuda_cases

KIT = ROOT / ".gpu-kit"
LABEL = "kit.json"
PASSED = "passed"
FAILED = "FAILED"
CUT = "cut"
NOT_DONE = "not done"
SMALL_S = 30.0  # expected time of a step on a CPU, even a busy one
GRACE_S = 10.0  # from SIGTERM to SIGKILL
LEEWAY = 4.0  # multiple of its expected time after which a step is stopped
_SUBREAPER = 36  # prctl(2): orphans below this process become its children
Result = dict[str, Any]
Play = Callable[[Sequence[Sequence[str]], Path, float], int | None]


def last_line(log: str, tables: list[Table]) -> str:
    """Return the last line that is not a table or command: most programs end with their figures."""
    lines = [
        line.strip()
        for line in log.splitlines()
        if line.strip() and not line.startswith(("|", "$ "))
    ]
    return lines[-1].strip("= ") if lines else ""


@dataclass(frozen=True)
class Step:
    """Step of the check.

    what      description for the report
    seconds   expected time
    commands  arguments of python, one after the other
    cannot    reason why this machine cannot run it
    proof     text in the log if something was proved: all tests may be skipped
    figures   function that summarizes its log and tables in one line for the report
    """

    name: str
    what: str
    seconds: float
    commands: tuple[tuple[str, ...], ...]
    cannot: str = ""
    proof: str = ""
    figures: Callable[[str, list[Table]], str] = last_line


class CheckStep:
    """Runs steps, and keeps the results of all calls on one device in a folder.

    budget_s   time limit of this call
    device     description; results of another device are discarded
    sources    digest of the sources that the steps run
    play       runs commands, as the function of that name
    fresh      whether to discard earlier results
    """

    def __init__(
        self,
        folder: Path,
        budget_s: float,
        device: str,
        sources: str,
        play: Play,
        *,
        fresh: bool = False,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], object] = print,
    ) -> None:
        self.folder = folder
        self.device = device
        self.sources = sources
        self._play = play
        self._clock = clock
        self._say = say
        self._budget_s = budget_s
        self._end = clock() + budget_s
        self.results: dict[str, Result] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            earlier = json.loads((folder / "report.json").read_text())
            if not fresh and earlier["device"] == device:
                self.results = {result["name"]: result for result in earlier["steps"]}

    def run(self, steps: Sequence[Step], only: Sequence[str] = ()) -> bool:
        """Run the unfinished steps, or those in `only`; return whether no step has failed."""
        chosen = (
            [step for step in steps if step.name in only]
            if only
            else [s for s in steps if not self._is_over(s)]
        )
        for step in sorted(chosen, key=lambda step: self._verdict(step) == CUT):
            why = step.cannot or self._no_time(step)
            try:
                if not why:
                    self._do(step)
                elif self._verdict(step) not in (CUT, FAILED):
                    self._keep(step, NOT_DONE, why)
            finally:
                self.write(steps)
            result = self.results[step.name]
            self._say(
                f"{step.name}: {result['verdict']}, {result['seconds']:.0f} s: "
                f"{why or said_of(result)}"
            )
        self.write(steps)
        return all(self._verdict(step) != FAILED for step in steps)

    def _verdict(self, step: Step) -> str | None:
        return self.results.get(step.name, {}).get("verdict")

    def _is_over(self, step: Step) -> bool:
        verdict = self._verdict(step)
        return verdict == PASSED or (
            verdict == FAILED and self.results[step.name]["sources"] == self.sources
        )

    def _no_time(self, step: Step) -> str:
        left = max(0.0, self._end - self._clock())
        needed = max(
            step.seconds, self.results[step.name]["seconds"] if self._verdict(step) == CUT else 0.0
        )
        how = "run the command again" if needed < self._budget_s else "give it a larger BUDGET"
        return f"{left:.0f} s are left, it takes about {needed:.0f}: {how}" if left < needed else ""

    def _do(self, step: Step) -> None:
        began = self._clock()
        left = self._end - began
        limit_s = left if self._verdict(step) == CUT else min(left, LEEWAY * step.seconds)
        try:
            self.take(
                step,
                self._play(step.commands, self.folder / f"{step.name}.log", limit_s),
                self._clock() - began,
            )
        except (KeyboardInterrupt, SystemExit):
            self._keep(step, CUT, "interrupted", self._clock() - began)
            raise

    def take(self, step: Step, code: int | None, seconds: float) -> None:
        """Record a step's exit code (None: stopped), its log, and the tables in log and folder."""
        log = (self.folder / f"{step.name}.log").read_text(errors="replace")
        # only the newest, because each run of some steps writes one
        written = sorted((self.folder / step.name).glob("*.md"))[-1:]
        tables = tables_of(
            "\n".join([log, *(path.read_text(errors="replace") for path in written)])
        )
        try:
            figures = step.figures(log, tables)
        except (ValueError, LookupError) as error:
            figures = f"figures not understood ({error})"
        more = {
            "tables": tables,
            "figures": figures if code == 0 or step.figures is not last_line else "",
        }
        if code == 0 and not re.search(step.proof, log, re.MULTILINE):
            self._keep(step, NOT_DONE, f"nothing was tested: {last_line(log, [])}", seconds)
        elif code:
            self._keep(
                step, FAILED, f"exit code {code}: {last_line(log, [])[:300]}", seconds, **more
            )
        else:
            reason = f"it had not ended after {seconds:.0f} s" if code is None else ""
            self._keep(step, CUT if reason else PASSED, reason, seconds, **more)

    def _keep(
        self, step: Step, verdict: str, reason: str, seconds: float = 0.0, **more: Any
    ) -> None:
        commands = [shlex.join((sys.executable, *words)) for words in step.commands]
        self.results[step.name] = {
            "name": step.name,
            "what": step.what,
            "verdict": verdict,
            "reason": reason,
            "seconds": round(seconds, 1),
            "figures": "",
            "tables": [],
            "commands": commands,
            "sources": self.sources,
            **more,
        }

    def write(self, steps: Sequence[Step]) -> None:
        """Write report.json and REPORT.md, with the steps in their order."""
        done = [self.results[step.name] for step in steps if step.name in self.results]
        record = {"device": self.device, "sources": self.sources, "steps": done}
        for name, text in (
            ("report.json", json.dumps(record, indent=1) + "\n"),
            ("REPORT.md", self.report(done)),
        ):
            (self.folder / f"{name}.new").write_text(text)
            (self.folder / f"{name}.new").replace(self.folder / name)

    def report(self, done: Sequence[Result]) -> str:
        """Return the report as Markdown."""
        text, overview = [f"# {self.device}", ""], [["step", "verdict", "s", "figures"]]
        for result in done:
            older = "" if result["sources"] == self.sources else f" (sources {result['sources']})"
            overview.append(
                [
                    result["name"],
                    result["verdict"] + older,
                    f"{result['seconds']:.0f}",
                    said_of(result),
                ]
            )
        text += [*markdown(overview), "", f"Sources {self.sources}.", ""]
        for result in done:
            failed = result["verdict"] == FAILED
            text += (
                [f"## {result['name']}: {result['what']}", ""] if failed or result["tables"] else []
            )
            if failed:
                log = (
                    (self.folder / f"{result['name']}.log").read_text(errors="replace").splitlines()
                )
                text += ["```", *log[-30:], "```", ""]
            for table in result["tables"]:
                text += [*markdown(table), ""]
        text += [
            "## To repeat",
            "",
            "`make gpu-check ONLY=STEP`, or from the root of the repository:",
            "",
            "```",
        ]
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        text.append(f"export PYTHONPATH={shlex.quote(os.pathsep.join([str(ROOT), *paths]))}")
        for result in done:
            text += (
                [f"# {result['name']}", *result["commands"]]
                if result["verdict"] != NOT_DONE
                else []
            )
        return "\n".join([*text, "```", ""])


def said_of(result: Result) -> str:
    return "; ".join(filter(None, (result["reason"], result["figures"])))


# ---- processes -----------------------------------------------------------------------------------


def play(commands: Sequence[Sequence[str]], log: Path, limit_s: float) -> int | None:
    """Run commands up to the first failure; return its exit code, 0, or None after a time-out."""
    end = time.monotonic() + limit_s
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with log.open("wb") as out:
        for words in commands:
            out.write(f"$ python {shlex.join(words)}\n".encode())
            out.flush()
            before = _children()
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
                return None
            finally:
                _end_all(before)
            if code:
                return code
    return 0


def adopt_orphans() -> None:
    """Adopt orphaned descendant processes of any session."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def _children() -> set[int]:
    children = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text(errors="replace").rpartition(")")[2].split()[1]) == os.getpid():
                children.add(int(path.parent.name))
    return children


def _end_all(but: set[int]) -> None:
    """Kill the processes that a step has left, and the orphans that appear then."""
    for _ in range(100):
        left = _children() - but
        if not left:
            return
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.05)


# ---- what is done --------------------------------------------------------------------------------


def self_test(log: str, tables: list[Table]) -> str:
    """Return how many operators agree with torch's."""
    verdicts = re.findall(r"^  \w+ +(ok|FAILED)  ", log, re.MULTILINE)
    return f"{verdicts.count('ok')} of {len(verdicts)} operators as torch's"


def shares(log: str, tables: list[Table]) -> str:
    """Return medians of each side's bytes/s relative to a copy; on a CPU, of time ratios."""
    head, *rows = next((table for table in tables if {"ours / copy", "both"} & {*table[0]}), [[]])
    columns = {
        name.removesuffix(" / copy"): i for i, name in enumerate(head) if name.endswith(" / copy")
    }
    values = {side: [float(row[i]) for row in rows if row[i]] for side, i in columns.items()}
    medians = [f"{side} {statistics.median(of):.2f}" for side, of in values.items() if of]
    if medians:
        return f"of a copy's bytes/s, median: {', '.join(medians)}"
    ratios = [float(row[head.index("both")]) for row in rows]
    return (
        f"torch's time over ours, median: {statistics.median(ratios):.2f}"
        if ratios
        else last_line(log, tables)
    )


def rates(log: str, tables: list[Table]) -> str:
    """Return each side's tokens/s, with the share of the peak if that is known."""
    head, *rows = next((table for table in tables if "tokens/s" in table[0]), [[]])
    records = [dict(zip(head, row, strict=False)) for row in rows]
    mfu = {row["side"]: f" (MFU {row['MFU']})" for row in records if row.get("MFU")}
    texts = [
        f"{row['side']} {row['tokens/s']} tokens/s{mfu.get(row['side'], '')}"
        for row in records
        if row["tokens/s"]
    ]
    return "; ".join(texts) or last_line(log, tables)


def speed(log: str, tables: list[Table]) -> str:
    """Return time, rate and MFU of the last interval in the log of a training."""
    lines = [line for line in log.splitlines() if line.startswith(" iteration ")]
    names = {
        "elapsed time per iteration (ms)": "ms a step",
        "tokens per gpu per second (tgs)": "tokens/s",
        "MFU": "MFU",
        "lm loss": "loss",
    }
    cells = dict(cell.split(":", 1) for cell in lines[-1].split("|") if ":" in cell)
    values = {name.strip(): value.strip() for name, value in cells.items()}
    return ", ".join(f"{label} {values[name]}" for name, label in names.items() if name in values)


TRAINS = (
    "torch numpy xxhash filelock deepspeed einops hjson msgpack packaging psutil pydantic tqdm"
).split()
EXTENSIONS = ("megatron.data._index_helpers", "megatron.pipeline._schedule_clock")
MODEL = (
    "--vocab-size 50304 --train-iters 8 --lr 1e-4 --bf16 --mock-data --log-interval 2 --eval-iters 0 "
    "--hidden-dropout 0 --attention-dropout 0"
)
ALONE = (
    f"{MODEL} --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
    "--max-position-embeddings 2048 --micro-batch-size 4 --global-batch-size 32"
)
ALONE_SMALL = (
    f"{MODEL} --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 2 --global-batch-size 4 "
    "--distributed-backend gloo"
)
TESTED = r"^(?:\d+ \w+, )*\d+ passed"
TESTS = "pytest pytest_timeout hypothesis torch numpy".split()


def lacks(*modules: str) -> str:
    """Return which modules are not installed, as a text; "" if all are."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def steps_of(facts: dict[str, Any], folder: Path) -> list[Step]:
    """Return all steps but the first, for a machine with these facts (machine.accelerator)."""
    gpu = facts["device"] == "cuda"
    target = facts["target"]
    arch = facts["arch"]

    def step(
        name: str,
        what: str,
        seconds: float,
        *commands: str,
        cannot: str = "",
        **more: Any,
    ) -> Step:
        """Return a step that takes `seconds` on a GPU.

        In `commands`, DEVICE and OUT stand for the device and the step's folder.
        """
        out = shlex.quote(str(folder / name))
        filled = [line.replace("DEVICE", facts["device"]).replace("OUT", out) for line in commands]
        return Step(
            name,
            what,
            seconds if gpu else SMALL_S,
            tuple(tuple(shlex.split(line)) for line in filled),
            cannot,
            **more,
        )

    def either(on_gpu: str, small: str = "") -> str:
        return on_gpu if gpu else small

    compiles = f"compiler, {target}" in facts
    built = any((ROOT / "megatron" / "kernels" / "lib").glob(f"libmegatron-{target}-*{arch}*.so"))
    no_kernels = "" if compiles or built else f"there is no compiler for {target}"
    # Some tests compare with the CPU's kernels, and skip without them.
    targets = [name for name in dict.fromkeys((target, "host")) if f"compiler, {name}" in facts]
    build = f"setup.py -q build_kernels --target {','.join(targets)} --arch {arch}"
    if lacks("setuptools", "pybind11"):  # which setup.py needs for its other parts
        build = f"""-c "import runpy; runpy.run_path('megatron/kernels/build.py')['make']({targets}, ['{arch}'])" """
    # Nodes are built for this torch and this Python; no kit contains them.
    nodes = """-c "import runpy; runpy.run_path('megatron/kernels/build.py')['make_nodes']()" """
    pytest = f"-m pytest -q {'' if lacks('xdist') else '-n 0'} {either('-m gpu')}"
    marked = [
        path
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text()
    ]
    files = " ".join(str(path.relative_to(ROOT)) for path in marked)
    numerics = f"{pytest} tests/kernels/numerics{either('', '/test_softmax.py')}"
    no_gpu = "torch sees no GPU" + (
        f", but there is a driver: {facts['driver']}" if facts["driver"] else ""
    )
    cases = {"G1": 120, "G2": 150, "G3": 150} if gpu else {"W0": 10}
    fit = {case.workload for case in cuda_cases(facts["memory_bytes"])} if gpu else {"W0"}
    trains = lacks(*TRAINS)
    shows = lacks(*TRAINS, "rich")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    extensions = all((ROOT / (name.replace(".", "/") + suffix)).exists() for name in EXTENSIONS)
    two = facts["count"] > 1
    *beside, largest = (
        step(
            name,
            f"training beside torch, workload {name}",
            seconds,
            f"benchmarks/bench.py --device DEVICE --only {name} --output OUT "
            + either("--rounds 1 --steps 5", "--quick --threads 1"),
            cannot=shows or ("" if name in fit else "it does not fit"),
            figures=rates,
        )
        for name, seconds in cases.items()
    )
    several = [
        step(
            "ranks",
            "training of two ranks beside the CPU's",
            140,
            "benchmarks/parity.py --device DEVICE --ranks 2 --output OUT",
            cannot=trains,
        ),
        step(
            "lost-rank",
            "a rank killed or stopped, and what the other says",
            150,
            "benchmarks/lost_rank.py --device DEVICE --output OUT",
            cannot=trains or ("needs two devices" if gpu and not two else ""),
        ),
    ]
    # On one GPU, the steps up to `beside` should end within 10 minutes, by these estimates.
    return [
        step(
            "extensions",
            "csrc's C++ extensions",
            5 if extensions else 40,
            *["setup.py -q build_ext --inplace"] * (not extensions),
            f"-c 'import {', '.join(EXTENSIONS)}'",
            cannot="" if extensions else lacks("setuptools", "pybind11"),
        ),
        step(
            "kernels",
            "built for the device, and once beside torch's",
            15 if built else 50,
            *[build] * compiles,
            *[nodes] * ("compiler, host" in facts),
            "tools/check_kernels.py --device DEVICE",
            cannot=no_kernels,
            figures=self_test,
        ),
        step(
            "parity",
            "training beside the CPU's, and resumed",
            60,
            "benchmarks/parity.py --device DEVICE --ranks 1 --output OUT",
            cannot=trains,
        ),
        step(
            "MFU",
            either("1.3B alone", "a small model alone"),
            25,
            f"pretrain_gpt.py {either(ALONE, ALONE_SMALL)} --metrics-file OUT/metrics.jsonl",
            cannot=trains or ("" if "G2" in fit or not gpu else "it does not fit"),
            figures=speed,
        ),
        *beside,
        *several * two,
        step(
            "idle",
            "gaps on the compute stream",
            45,
            "benchmarks/idle_gaps.py --device DEVICE --output OUT",
            cannot=trains,
        ),
        step(
            "host-waits",
            "where the host waits for the device",
            65 + 40 * two,
            "benchmarks/step_waits.py --device DEVICE --output OUT",
            cannot=trains,
        ),
        step(
            "bandwidth",
            "kernels beside a copy and torch's operators",
            150,
            "benchmarks/kernels.py --device DEVICE --quick --output OUT "
            + either("", "--busy --op rms_norm --dtype bfloat16"),
            cannot=no_kernels or lacks("torch", "numpy", "rich"),
            figures=shares,
        ),
        step(
            "numerics",
            "kernels against float64, in every shape",
            120,
            numerics,
            cannot=no_kernels or lacks(*TESTS),
            proof=TESTED,
        ),
        step(
            "tests",
            "those marked gpu",
            300,
            f"{pytest} {files}",
            cannot=either(lacks(*TESTS), no_gpu),
            proof=TESTED,
        ),
        largest,
        step(
            "memory",
            either("peak beside the dry run's", "closed form beside the dry run"),
            100,
            "benchmarks/memory_model.py --markdown --part "
            + either("device", "formulas --only '1 rank (cpu)'"),
            cannot=shows,
        ),
        step(
            "prediction",
            "a step, predicted and measured",
            180,
            "benchmarks/predict.py --folder OUT "
            f"{either('--set gpu', '--set tiny --minutes 0.02')}",
            cannot=trains,
        ),
        *several * (not two),
    ]


def digest() -> str:
    """Return a digest of the sources that the steps run, short enough to read."""
    digest_of_files = hashlib.sha256((ROOT / "setup.py").read_bytes())
    for room in ("megatron", "csrc", "benchmarks", "tests", "tools"):
        for path in sorted((ROOT / room).rglob("*")):
            if path.suffix in (".py", ".h", ".cpp", ".hpp", ".toml"):
                digest_of_files.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest_of_files.hexdigest()[:12]


def duration(text: str) -> float:
    """Return the seconds of a text such as 90s, 8m or 1h."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text}: write 90s, 8m or 1h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def use_kit(kit: Path, root: Path) -> str:
    """Use what gpu_kit.py has packed, if it is here and for this Python; return a line for the log."""
    try:
        label = json.loads((kit / LABEL).read_text())
    except (OSError, ValueError):
        return ""
    here = {"python": f"{sys.version_info[0]}.{sys.version_info[1]}", "machine": platform.machine()}
    if {name: label.get(name) for name in here} != here:
        return (
            f"{kit.name} is not used: it is for Python {label.get('python')} on "
            f"{label.get('machine')}, this is {here['python']} on {here['machine']}"
        )
    for path in kit.glob("built/**/*.so"):
        target = root / path.relative_to(kit / "built")
        if not target.exists() or target.read_bytes() != path.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            new = target.with_name(f"{target.name}.{os.getpid()}")
            shutil.copy2(path, new)
            new.replace(target)  # another process may have the old one mapped
    site = str(kit / "site")
    sys.path.insert(0, site)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH"))))
    sources = runpy.run_path(str(ROOT / "megatron" / "kernels" / "build.py"))["source_hash"]()
    older = (
        ""
        if label.get("kernels") == sources
        else "; its kernels are of other sources and are not used"
    )
    return f"{kit.name}: its packages, kernels and extensions are used{older}"


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    budget = "90s, 10m, 1h (default 10m)"
    made.add_argument("--budget", type=duration, default=600.0, metavar="TIME", help=budget)
    only = "run only these steps, even if they are done"
    made.add_argument("--only", nargs="+", default=[], metavar="STEP", help=only)
    made.add_argument("--fresh", action="store_true", help="discard results of earlier calls")
    made.add_argument("--output", type=Path, default=ROOT / "runs" / "gpu", metavar="FOLDER")
    options = made.parse_args(arguments)
    folder: Path = options.output.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        made.error(f"--output {folder}: {error.strerror}")
    os.chdir(ROOT)
    # a short path, so that the commands in the report can be copied
    folder = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    # an exception, so that started processes are ended
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    adopt_orphans()
    if line := use_kit(KIT, ROOT):
        print(line)
    began = time.monotonic()
    facts_file = folder / "device.json"
    first = Step(
        "device",
        "what computes here, and versions",
        5,
        (("benchmarks/machine.py", "device", str(facts_file)),),
    )
    code = play(first.commands, folder / "device.log", options.budget)
    seconds = time.monotonic() - began
    if code != 0:  # earlier results stay: they may be of this device
        print(
            (folder / "device.log").read_text(errors="replace"),
            "device: the budget ended while torch was imported"
            if code is None
            else "device: torch does not run here",
            file=sys.stderr,
        )
        return 1
    facts = json.loads(facts_file.read_text())
    kind = f"{facts['count']} x" if facts["count"] else "No GPU: a rehearsal on"
    device = f"{kind} {facts['name']}, torch {facts['torch']}"
    check = CheckStep(folder, options.budget - seconds, device, digest(), play, fresh=options.fresh)
    check.take(first, code, seconds)
    steps = [first, *steps_of(facts, folder)]
    if unknown := set(options.only) - {step.name for step in steps}:
        names = ", ".join(step.name for step in steps)
        made.error(f"--only {' '.join(sorted(unknown))}: the steps are {names}")
    print(device)
    good = check.run(steps, options.only)
    print(folder / "REPORT.md")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
