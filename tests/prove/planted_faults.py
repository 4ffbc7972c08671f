"""Plant each deliberate fault into a copy of the tree; the tests must find it.

    make prove ONLY=planted-faults [PROVE="--room data --room csrc"] [PROVE="--fault data-lock-kept"]

The faults are those of tests/planted_faults/*.toml. A fault is found when tests fail that pass
without it. Those that `found_by` names run first, then all others. A fault with `campaign` is found
by that campaign alone; at most ten have one. A fault whose text is no longer in its file is out of
date, which `make test` finds: rewrite it for the code that replaced it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAULTS = ROOT / "tests" / "planted_faults"
LOOKED_FOR = "tests/prove/test_planted_faults.py"  # fails wherever a fault is planted
LIMIT_S = 1800
MOST_BY_CAMPAIGN = 10


@dataclass(frozen=True)
class Fault:
    """Planted fault: `old`, whole lines that occur once in `file`, become `new`.

    found_by  tests that find it: paths, or node ids, of pytest
    campaign  the campaign whose tests they are; "": `make test`
    """

    name: str
    file: str
    what: str
    old: str
    new: str
    found_by: tuple[str, ...] = ()
    campaign: str = ""

    @property
    def room(self) -> str:
        return self.name.partition("-")[0]


def faults() -> list[Fault]:
    found = []
    for file in sorted(FAULTS.glob("*.toml")):
        for entry in tomllib.loads(file.read_text())["fault"]:
            found.append(Fault(**{**entry, "found_by": tuple(entry.get("found_by", ()))}))
    return found


def outdated(fault: Fault, root: Path = ROOT) -> str:
    """Return why a fault cannot be planted or no test named; "" when both can."""
    if gone := [test for test in fault.found_by if not (root / test.partition("::")[0]).exists()]:
        return f"{', '.join(gone)} does not exist"
    try:
        text = "\n" + (root / fault.file).read_text()
    except FileNotFoundError:
        return f"{fault.file} is gone"
    lines, anywhere = text.count("\n" + fault.old), text.count(fault.old)
    if lines != 1 or anywhere != 1:
        return f"its text is {lines} times whole lines of {fault.file}, {anywhere} times in it"
    return ""


def copy_tree(folder: Path) -> None:
    """Copy what git tracks, in its present state, with what was built."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for built in [
        *(ROOT / "megatron").rglob("*.so"),
        *ROOT.glob("megatron/**/*.pyc"),
        *ROOT.glob("tests/**/*.pyc"),
    ]:
        target = folder / built.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built, target)


def build(fault: Fault, folder: Path, environ: dict[str, str]) -> str:
    """Compile the part of csrc/ that contains the fault; return the output if it failed."""
    command = (
        "build_kernels --target host"
        if fault.file.startswith("csrc/kernels/")
        else "build_ext --inplace --force"
    )
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", *command.split()],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
    )
    return f"does not compile: {done.stderr[-500:]}" if done.returncode else ""


def plant(fault: Fault, suite: str) -> tuple[str, str]:
    """Plant a fault; return ("found", by which tests), ("MISSED", ...) or ("OUT OF DATE", why)."""
    if reason := outdated(fault):
        return "OUT OF DATE", reason
    with tempfile.TemporaryDirectory(prefix="planted-") as temporary:
        folder = Path(temporary, "tree")
        copy_tree(folder)
        target = folder / fault.file
        target.write_text(target.read_text().replace(fault.old, fault.new))
        environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        environ |= {"PYTHONPATH": str(folder), "TMPDIR": temporary}
        # With build_ext; the host library is built separately.
        environ["MEGATRON_KERNELS_TARGETS"] = "none"
        if fault.file.startswith("csrc/") and (reason := build(fault, folder, environ)):
            return "OUT OF DATE", reason
        rest = [suite] if not fault.campaign else []
        for paths in filter(None, [list(fault.found_by), rest]):
            named = ["--campaign", fault.campaign] if fault.campaign else []
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "pytest",
                    "-x",
                    "-q",
                    "--tb=no",
                    "-p",
                    "no:cacheprovider",
                    f"--ignore={LOOKED_FOR}",
                    *named,
                    *paths,
                ],
                cwd=folder,
                env=environ,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
            failed = [
                line.split()[1]
                for line in done.stdout.splitlines()
                if line.startswith(("FAILED ", "ERROR "))
            ]
            if done.returncode == 1 and failed:
                return "found", failed[0]
            if done.returncode not in (0, 1, 5):
                return (
                    "MISSED",
                    f"pytest could not run {paths}: {(done.stdout + done.stderr)[-500:]}",
                )
    return "MISSED", fault.what


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--room", action="append", help="faults of this room alone; repeatable")
    parser.add_argument("--fault", action="append", help="this fault alone; repeatable")
    parser.add_argument(
        "--suite", default="tests", help="the tests that may find what `found_by` did not"
    )
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    chosen = [
        fault
        for fault in faults()
        if (not options.room or fault.room in options.room)
        and (not options.fault or fault.name in options.fault)
    ]
    wrong = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        verdicts = pool.map(lambda fault: plant(fault, options.suite), chosen)
        for fault, (verdict, note) in zip(chosen, verdicts, strict=True):
            wrong += verdict in ("MISSED", "OUT OF DATE")
            where = f" (campaign {fault.campaign})" if fault.campaign else ""
            print(f"{verdict:12}{fault.name}{where}: {note}", flush=True)
    campaigns = sum(bool(fault.campaign) for fault in chosen)
    print(
        f"{len(chosen) - wrong} of {len(chosen)} planted faults found, {campaigns} of them by "
        "campaigns alone"
    )
    return 1 if wrong or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
