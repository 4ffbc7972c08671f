"""Proof of the tuner: every layout of a space measured, searches replayed in that table, and two real tuning runs.

    python benchmarks/tuner.py [--folder runs/tuner] [--fresh]           everything, about half an hour on two cores
    python benchmarks/tuner.py --stages replay --seeds 20                again from what the folder has

calibrate  tools/calibrate.py measures this machine for the planner; no layout is run in it
sweep      tools/tune.py --search exhaustive tries every layout of the space; further passes (--passes) try all of them
           again in random orders, so that what drifts in an hour is not taken for what a layout does
replay     each search, with the planner's prior and without, in the table that the sweep made, with several seeds: the
           number of trials until one is of a layout whose truth is within 3 % of the best (benchmarks/tuner_table.py
           says what the truth is, and what a trial tells), and what is named when leading layouts have been measured
           again by no, 3 or 5 more trials
live       tools/tune.py itself, with the prior for a quarter of the trials and without it for half, each with --confirm

Limits: with the prior a quarter of the space, without it half, by every Bayesian search and with every seed; the exit
code is 1 where one does not hold. Stages that were stopped go on where they were; --fresh begins anew.

A virtual machine's cores are not always equally fast: the seconds of a product of fixed size, before and after each
stage, say how fast they were. Nothing else is corrected by them.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from predict import probe  # noqa: E402
from tuner_replay import HALF, QUARTER, SEARCHES, Replay, replay_all  # noqa: E402
from tuner_report import as_json, replay_table, rows_of, sweep_summary  # noqa: E402
from tuner_table import OBJECTIVE, Table, measured_in  # noqa: E402

from megatron.calibration.processes import environment  # noqa: E402
from megatron.planning.cluster import load_cluster  # noqa: E402
from megatron.planning.search.command import headroom_bytes  # noqa: E402
from megatron.planning.search.judging import GIB  # noqa: E402
from megatron.tuning.candidates import enumerate_candidates  # noqa: E402
from megatron.tuning.journal import NAME as JOURNAL  # noqa: E402
from megatron.tuning.journal import read_journal  # noqa: E402
from megatron.tuning.layouts import best_layout  # noqa: E402
from megatron.tuning.search.optimizer import missing  # noqa: E402
from megatron.tuning.space import Machine, Space  # noqa: E402
from megatron.tuning.space_file import load_space  # noqa: E402
from megatron.tuning.types import Candidate, Trial  # noqa: E402

HEADROOM = "10%"
STAGES = ("calibrate", "sweep", "replay", "live")


LIVE = {"live-prior": (True, QUARTER), "live-no-prior": (False, HALF)}
"""Folders of the real tuning runs: whether the planner's prior is used, and the part of the space that they may try."""


class Proof:
    """A folder in which the stages leave what the later ones need."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.folder: Path = arguments.folder.resolve()
        self.space = load_space(arguments.space)
        self.given = arguments
        self.cluster, self.table_file = self.folder / "machine.toml", self.folder / "table.json"
        self.figures_file = self.folder / "figures.json"
        self.record: dict[str, Any] = json.loads(self.figures_file.read_text()) if self.figures_file.exists() else {}
        self.fails: list[str] = []

    def run(self, stages: Sequence[str]) -> None:
        """The stages in order; the machine's speed is noted around each, and figures.json written after it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        by_name: dict[str, Callable[[], None]] = {
            "calibrate": self.calibrate, "sweep": self.sweep, "replay": self.replay, "live": self.live
        }  # fmt: skip
        for stage in stages:
            before, begin = probe(), time.monotonic()
            by_name[stage]()
            took, speeds = time.monotonic() - begin, [before, probe()]
            self.record.setdefault("stages", {})[stage] = {"seconds": took, "probe_s": speeds}
            shown = ", ".join(f"{1e3 * s:.2f} ms" for s in speeds)
            print(f"{stage}: {took / 60:.1f} minutes; the fixed product took {shown} before and after\n", flush=True)
            self.figures_file.write_text(json.dumps(self.record, indent=1) + "\n")

    # -- calibrate -----------------------------------------------------------------------------------------------------

    def calibrate(self) -> None:
        """Measure this machine over the shapes of the space's model, as a user does before tuning."""
        if self.cluster.exists():
            print(f"calibrate: {self.cluster} is there")
            return
        command = [sys.executable, str(ROOT / "tools" / "calibrate.py"), "-o", str(self.cluster), "--processes",
                   str(self.given.processes), "--minutes", str(self.given.minutes), *self.space.flags]  # fmt: skip
        subprocess.run(command, cwd=ROOT, env=environment(os.environ, 0, 1, "0"), check=True)

    # -- sweep ---------------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Try every layout in each pass, and write the table."""
        for number in range(1, self.given.passes + 1):
            listed = number == 1 or self.given.layouts is not None
            how = ["--search", "exhaustive"] if listed else ["--search", "random", "--seed", str(number)]
            self._tune(f"pass{number}", [*how, "--no-prior", "--confirm", "0"], self.given.layouts)
        table = self._measured_table()
        table.write(self.table_file)
        missed = [c.key for c in table.candidates if any(c.key not in measured for measured in table.passes)]
        if missed:
            self.fails.append(f"sweep: {len(missed)} layouts were not tried in every pass: {', '.join(missed)}")
        self.record["sweep"] = sweep_summary(table)
        print(f"\n{self.record['sweep']}", flush=True)

    def _tune(self, name: str, flags: Sequence[str], trials: int | None) -> list[Trial]:
        """The trials of one run of tools/tune.py, by number; it goes on where an earlier call was stopped."""
        command = [sys.executable, str(ROOT / "tools" / "tune.py"), "--space", self.given.space, "--objective",
                   OBJECTIVE, "--cluster", str(self.cluster), "--processes", str(self.given.processes), "--launcher",
                   "local", "--headroom", HEADROOM, "--out", str(self.folder / name), *flags]  # fmt: skip
        command += [] if trials is None else ["--max-trials", str(trials)]
        print(f"{name}: {' '.join(command[1:])}", flush=True)
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code:
            raise SystemExit(f"{name}: tools/tune.py ended with exit code {code}")
        return self._trials(name)

    def _trials(self, name: str) -> list[Trial]:
        return list(read_journal(self.folder / name / JOURNAL).trials.values())

    def _measured_table(self) -> Table:
        """Every layout of the space (with --layouts those that were tried in all passes), and what the passes found."""
        passes = [
            measured_in(self.folder / name, self._trials(name), self.space.warm_up)
            for name in (f"pass{number}" for number in range(1, self.given.passes + 1))
        ]
        candidates = list(candidates_of(self.space, self.cluster, self.given.processes))
        if self.given.layouts is not None:
            tried = set.intersection(*(set(measured) for measured in passes))
            candidates = [candidate for candidate in candidates if candidate.key in tried]
        placed = tuple(dataclasses.replace(candidate, index=index) for index, candidate in enumerate(candidates))
        return Table(self.space.title, self.space.parameters, placed, tuple(passes))

    def table(self) -> Table:
        if not self.table_file.exists():
            raise SystemExit(f"{self.table_file} is not there: let the stage sweep make it")
        return Table.read(self.table_file)

    # -- replay --------------------------------------------------------------------------------------------------------

    def replay(self) -> None:
        """Every search with every seed; prints the table of trials."""
        table = self.table()

        def ended(replay: Replay) -> None:
            prior = "prior" if replay.search.prior else "no prior"
            print(f"  {replay.search.label}, {prior}, seed {replay.seed}: {replay.found_at(table)}", flush=True)

        self.fails += [
            f"replay: {label} was left out, for {' and '.join(missing(name))} is not installed"
            for name, label in {search.name: search.label for search in SEARCHES}.items() if missing(name)
        ]  # fmt: skip
        replays = replay_all(table, range(self.given.seeds), SEARCHES, len(os.sched_getaffinity(0)), ended)
        rows = rows_of(table, replays)
        shown = f"{sweep_summary(table)}\n\n{replay_table(table, rows)}"
        print(f"\n{shown}", flush=True)
        (self.folder / "replay.md").write_text(shown + "\n")
        self.record["replay"] = as_json(table, rows)
        self.fails += [
            f"replay: {row.search.label} {'with' if row.search.prior else 'without'} a prior took {row.trials} trials, "
            f"at most {row.allowed} were allowed" for row in rows if not row.holds
        ]  # fmt: skip

    # -- live ----------------------------------------------------------------------------------------------------------

    def live(self) -> None:
        """Tune for real with a part of the trials, and judge by the sweep's truth."""
        table = self.table()
        place, near = {candidate.key: candidate.index for candidate in table.candidates}, table.near()
        for name, (prior, part) in LIVE.items():
            allowed = len(table.candidates) // part
            how = ["--search", "auto", "--confirm", str(self.given.confirm), *([] if prior else ["--no-prior"])]
            ended = self._tune(name, how, allowed)
            searched = [trial for trial in ended if not trial.confirms]
            tried = [place[trial.candidate.key] for trial in searched]
            found = next((number for number, index in enumerate(tried, 1) if index in near), None)
            named, before = (self._named(trials) for trials in (ended, searched))
            regret = table.regret(place[named])
            self.record[name] = {
                "tried": tried, "allowed": allowed, "found_at": found, "named": named, "regret": regret,
                "confirming": len(ended) - len(searched), "named_before": before,
                "regret_before": table.regret(place[before]),
            }  # fmt: skip
            print(f"{name}: within 3 % at trial {found} of {allowed}; named {named}, {100 * regret:.1f} % from the "
                  f"sweep's best, after {len(ended) - len(searched)} trials that measured again; before them {before}",
                  flush=True)  # fmt: skip
            if found is None:
                self.fails.append(f"{name}: no layout within 3 % of the best in {allowed} trials")

    def _named(self, trials: Sequence[Trial]) -> str:
        best = best_layout(trials, OBJECTIVE)
        assert best is not None, "tools/tune.py says by its exit code when there is none"
        return best.candidate.key


def candidates_of(space: Space, path: Path, processes: int) -> tuple[Candidate, ...]:
    """As tools/tune.py lists them for this machine, each with the planner's prediction."""
    cluster = load_cluster(path)
    machine = Machine(cluster, processes, 1, cluster.memory_gib * GIB - headroom_bytes(HEADROOM, cluster))
    return enumerate_candidates(space, (), machine, predict=True).candidates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "tuner")
    parser.add_argument("--fresh", action="store_true", help="remove what an earlier call left in the folder")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--space", default="two-cores", help="preset or file (default two-cores)")
    parser.add_argument("--processes", type=int, default=4, help="of a trial (default 4)")
    parser.add_argument("--minutes", type=float, default=1.0, help="of calibrating")
    parser.add_argument("--passes", type=int, default=2, help="measurements of each layout (default 2)")
    parser.add_argument("--seeds", type=int, default=5, help="of each search that is replayed (default 5)")
    parser.add_argument("--confirm", type=int, default=3, help="of the live runs: as tools/tune.py has it (default 3)")
    parser.add_argument("--layouts", type=int, metavar="N", help="sweep only the first so many, to try this program")
    arguments = parser.parse_args()
    if arguments.layouts is not None and "live" in arguments.stages:
        parser.error("--layouts measures a part of the space, by which live runs cannot be judged: leave live out")
    if arguments.layouts is not None and arguments.layouts < QUARTER:
        parser.error(f"--layouts {arguments.layouts}: at least {QUARTER}, of which one is a quarter")
    if Path(arguments.space).is_file():
        arguments.space = str(Path(arguments.space).resolve())
    if arguments.fresh:
        shutil.rmtree(arguments.folder, ignore_errors=True)
    proof = Proof(arguments)
    proof.run([stage for stage in STAGES if stage in arguments.stages])
    for failed in proof.fails:
        print(f"does not hold: {failed}", file=sys.stderr)
    sys.exit(1 if proof.fails else 0)


if __name__ == "__main__":
    main()
