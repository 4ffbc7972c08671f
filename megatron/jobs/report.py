"""What a search leaves behind for its user: how sure its best is, tables, pictures by Optuna, and the best as a command
line and as a script."""
from __future__ import annotations

import csv
import dataclasses
import io
import shlex
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.config.command_line import parse_args, parse_plan, scan
from megatron.drawing import pyplot, save
from megatron.errors import ConfigError, MegatronError
from megatron.jobs.candidates import GIB, Enumeration
from megatron.jobs.layouts import CONFIRM, Layout, Trial, cost, layouts_of, noise_of, ranked, within_noise, written
from megatron.jobs.result import Result
from megatron.jobs.setup import Setup
from megatron.jobs.space import value_text
from megatron.planner.cluster import Cluster, write_cluster
from megatron.planner.search.script import Origin, site_script
from megatron.planner.table import Table
from megatron.untrusted import write_text

FOLDER = "report"
_LEAST = 8  # layouts with figures, with fewer trees find whatever they are asked for
_FILES = ("trials.md", "trials.csv", "best.txt", "best.sbatch", "trajectory.png", "parameters.png", "importance.png")


class Report:
    """A search as far as it went. trials: by number."""

    def __init__(self, setup: Setup, found: Enumeration, trials: Mapping[int, Trial]) -> None:
        self._setup, self._found, self._objective = setup, found, setup.args.objective
        self._trials = [trials[number] for number in sorted(trials)]
        self._layouts, self._ranked = layouts_of(self._trials), ranked(self._trials, self._objective)
        self._noise = noise_of(self._layouts)

    @property
    def best(self) -> Layout | None:
        return self._ranked[0] if self._ranked else None

    # -- what came of it -----------------------------------------------------------------------------------------------

    def summary(self) -> list[str]:
        """Say it in sentences. No layout is called better than another within the noise."""
        ended = [trial for trial in self._trials if trial.result is not None]
        again = sum(trial.by == CONFIRM for trial in ended)
        lines = [*self._about_best(), f"{len(self._layouts)} of {len(self._found.candidates):,} layouts were tried, "
                 f"searched by {self._setup.searched_by}; {again} trial(s) measured leading ones again."]  # fmt: skip
        kinds = Counter(t.result.said for t in ended if t.result is not None and t.step_s is None)
        if kinds:
            lines.append("Without valid figures: " + ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()) + ".")
        if len(ended) < len(self._trials):
            lines.append(f"Not finished: {len(self._trials) - len(ended)} trial(s).")
        pairs = [(one.candidate.step_s, one.step_s) for one in self._ranked if one.candidate.step_s and one.step_s]
        if pairs:
            errors = [abs(predicted / measured - 1) for predicted, measured in pairs]
            lines.append(f"The planner's steps are {_percent(statistics.median(errors))} off in the median, "
                         f"{_percent(max(errors))} at most.")  # fmt: skip
        return lines

    def _about_best(self) -> Iterator[str]:
        """The best, beside the next one and the planner's first, and whether that is more than noise."""
        best, objective = self.best, self._objective
        if best is None or best.step_s is None:
            yield "No layout has valid figures: there is no best layout."
            return
        steady = sum(t.result.steady for t in best.runs if t.result is not None)
        apart = "" if best.apart is None else f", measured {len(best.runs)} times, {_percent(best.apart)} apart"
        yield (f"Best: {best.candidate.key} ({best.numbers}{apart}): {written(best.cost(objective), objective)}, "
               f"{best.step_s:.4g} s a step over {steady} steady steps.")  # fmt: skip
        for one in self._layouts:
            if one.failures and (one is best or one.candidate.key == best.candidate.key or one.runs):
                said = ", ".join(f"trial {t.number}: {t.result.said if t.result else ''}" for t in one.failures)
                yield f"{one.candidate.key} failed in {len(one.failures)} of its {len(one.trials)} trials ({said})."
        estimates = [c for c in self._found.candidates if c.step_s is not None]
        first = min(estimates, key=lambda c: (cost(c.step_s or 0.0, c, objective), c.index), default=None)
        planned = next((one for one in self._ranked if first is not None and one.candidate.key == first.key), None)
        for what, other in (("The next", (*self._ranked, None)[1]), ("The planner's first", planned)):
            if other is not None and other is not best:
                near = within_noise(other, best, self._noise, objective)
                yield (f"{what}, {other.candidate.key} ({other.numbers}): "
                       f"{_percent(other.cost(objective) / best.cost(objective) - 1)} dearer, " + (
                           "within the noise: it may be as good, and a larger --confirm measures both again"
                           if near else "more than noise explains"
                       ) + f" (trials of one layout scatter by some {_percent(self._noise)}).")  # fmt: skip

    # -- files ---------------------------------------------------------------------------------------------------------

    def write(self) -> list[Path]:
        """Write the report into FOLDER, in place of an earlier one; the files, the summary first. What cannot be had
        (pictures without matplotlib or Optuna, of too few trials, what a library fails at) is left out, and trials.md
        says why. Raises ConfigError where nothing can be written."""
        folder = self._setup.out / FOLDER
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in _FILES:
                (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror or error}: choose another --out folder") from error
        # First what no library's mood can keep from being written.
        files = [_saved(folder / "trials.csv", self._csv()), *self._write_best(folder)]
        remarks = list[str]()
        try:
            files += self._draw(folder, remarks)
        except (ConfigError, ImportError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError,
                ValueError) as error:  # fmt: skip
            remarks.append(f"No more pictures: {' '.join(f'{type(error).__name__}: {error}'.split())}")
        return [_saved(folder / "trials.md", self._markdown(remarks, files)), *files]

    def _markdown(self, remarks: Sequence[str], files: Sequence[Path]) -> str:
        parts = [f"# {self._setup.space.title}", "\n".join(f"- {line}" for line in [*self.summary(), *remarks])]
        if self.best is not None:
            parts.append(f"The best layout for a real run:\n\n```\n{self.command()}\n```")
            parts += [f"It still needs, as more flags behind these:\n\n{needs}" for needs in [self._lacking()] if needs]
        parts += [f"![{path.stem}]({path.name})" for path in files if path.suffix == ".png"]
        rows = [
            (one.numbers.partition(" ")[2], one.candidate.key, written(one.cost(self._objective), self._objective),
             f"{one.step_s:.4g}", "-" if one.apart is None else _percent(one.apart),
             "-" if not one.candidate.step_s else f"{one.candidate.step_s:.4g}",
             f"{max(t.result.memory_bytes or 0 for t in one.runs if t.result) / GIB:.2f}", one.trials[0].by)
            for one in self._ranked
        ]  # fmt: skip
        heads = ("trials", "layout", "value", "s/step", "apart", "planner's s/step", "GiB", "chosen by")
        failed = [(f"{t.number}", t.candidate.key, t.result.said, " ".join((t.result.reason or "").split())[:160])
                  for t in self._trials if t.result is not None and t.step_s is None]  # fmt: skip
        unfit = Table("Trials without valid figures", ("trial", "layout", "ended", "reason"), failed)
        for table in (Table("Valid layouts, the best first", heads, rows), unfit, rejections(self._found)):
            if table.rows:
                safe = [tuple(cell.replace("|", "\\|") for cell in row) for row in table.rows]
                parts.append(f"## {table.title}\n\n{Table(table.title, table.columns, safe).markdown()}")
        return "\n\n".join(parts) + "\n"

    def _csv(self) -> str:
        text = io.StringIO()
        rows = [self._row(trial) for trial in self._trials]
        if rows:
            writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        return text.getvalue()

    def _row(self, trial: Trial) -> dict[str, Any]:
        """Unrounded; None where there is no figure. A parameter may have the name of a column."""
        candidate, result = trial.candidate, trial.result
        hours = None if trial.step_s is None else cost(trial.step_s, candidate, "node_hours") * 1e9 / 3600
        row = {
            "trial": trial.number, "by": trial.by, "state": result.said if result else "not finished",
            **dataclasses.asdict(result or Result("")), "processes": candidate.processes, "nodes": candidate.nodes,
            "tokens_per_step": candidate.tokens, "node_hours_per_gtoken": hours, "predicted_step_s": candidate.step_s,
            "predicted_memory_bytes": candidate.memory_bytes, "started": trial.started, "ended": trial.ended,
            "hosts": " ".join(trial.hosts),
        }  # fmt: skip
        return {f"{p.name} " if p.name in row.keys() - {"nodes", "processes"} else p.name:
                value_text(candidate.values.get(p.name)) for p in self._setup.space.parameters} | row  # fmt: skip

    def _draw(self, folder: Path, remarks: list[str]) -> list[Path]:
        """Every trial in its order with the best so far, the objective against each parameter, and what the parameters
        are worth (functional ANOVA, Hutter, Hoos, Leyton-Brown 2014), by Optuna."""
        plot = pyplot(install="'megatron-frontier[tune]'")
        import optuna
        from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
        from optuna.visualization import matplotlib as figures

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        hours = self._objective == "node_hours"
        study, label = optuna.create_study(direction="minimize" if hours else "maximize"), "tokens per second"
        label = "node-hours for a billion tokens" if hours else label
        kinds = dict[str, BaseDistribution]()
        for p in self._setup.space.parameters:
            numbers = [value for value in p.values if type(value) is int]
            if len({repr(c.values[p.name]) for c in self._found.candidates}) > 1:
                whole = len(numbers) == len(p.values)
                kinds[p.name] = IntDistribution(min(numbers), max(numbers)) if whole else CategoricalDistribution(
                    [value_text(value) for value in p.values])  # fmt: skip
        for trial in self._trials:
            if trial.step_s is not None:
                found = cost(trial.step_s, trial.candidate, self._objective)
                params = {name: trial.candidate.values[name] for name in kinds}
                params = {n: v if isinstance(kinds[n], IntDistribution) else value_text(v) for n, v in params.items()}
                study.add_trial(optuna.trial.create_trial(
                    params=params, distributions=kinds, value=found * 1e9 / 3600 if hours else 1 / found))  # fmt: skip
        if not study.trials:
            return []
        drawings: dict[str, Callable[[], Any]] = {
            "trajectory.png": lambda: figures.plot_optimization_history(study, target_name=label)}  # fmt: skip
        if kinds:
            drawings["parameters.png"] = lambda: figures.plot_slice(study, target_name=label)
        if kinds and len(self._ranked) >= _LEAST:
            fanova = optuna.importance.FanovaImportanceEvaluator(seed=0)
            shares = ", ".join(f"{name} {100 * part:.0f} %" for name, part in fanova.evaluate(study).items())
            remarks.append(f"Part of the variance that a parameter explains alone (fANOVA): {shares}")
            drawings["importance.png"] = lambda: figures.plot_param_importances(study, evaluator=fanova)
        made = list[Path]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna calls all of them experimental
            for name, draw in drawings.items():
                draw()
                made.append(save(plot.gcf(), folder / name))
        return made

    # -- the best ------------------------------------------------------------------------------------------------------

    def command(self) -> str:
        """One line for a shell that runs the best layout: by torchrun, or as a step of a Slurm job, its devices bound
        to tasks as in the launch scripts."""
        assert self.best is not None, "there is one"
        candidate, cluster = self.best.candidate, self._setup.cluster
        program = ["pretrain_gpt.py", *candidate.flags]
        if self._setup.place.launcher != "slurm":
            return shlex.join(["torchrun", f"--nproc-per-node={candidate.processes}", *program])
        each = candidate.processes // candidate.nodes
        words = ["srun", "-N", str(candidate.nodes), "-n", str(candidate.processes), f"--ntasks-per-node={each}"]
        if cluster is not None:
            words += ["-c", str(cluster.cpus_per_task)]
            words += ["--gpus-per-task=1", "--gpu-bind=closest"] if cluster.device_type == "cuda" else []
        return shlex.join([*words, "python", "-u", *program])

    def _write_best(self, folder: Path) -> list[Path]:
        """best.txt, and under Slurm on a described machine best.sbatch."""
        best, cluster = self.best, self._setup.cluster
        if best is None:
            return []
        files = [_saved(folder / "best.txt", self.command() + "\n")]
        if cluster is not None and self._setup.place.launcher == "slurm":
            flags = list(best.candidate.flags)
            config = parse_plan([*flags, "--world-size", str(best.candidate.processes)])
            preset = scan(flags).flags.get("--preset", [None])[0]
            origin = Origin(f"the best that tools/tune.py measured in {self._setup.space.name}", "best.sbatch")
            script = site_script(flags, config, preset, cluster, None, origin, [*self._about_best()][:1])
            if script is not None:
                files.append(_saved(folder / "best.sbatch", script))
                files[-1].chmod(0o755)
        return files

    def _lacking(self) -> str:
        """What a run needs beside the flags of the best layout."""
        assert self.best is not None, "there is one"
        try:
            parse_args(self.best.candidate.flags, self.best.candidate.processes)
        except ConfigError as error:
            return str(error)
        return ""


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _saved(path: Path, text: str) -> Path:
    return write_text(path, text, choose="another --out folder")


def rejections(found: Enumeration) -> Table:
    counted = sorted(found.rejections.items(), key=lambda item: -item[1][0])
    rows = [(f"{count:,}", reason, example) for reason, (count, example) in counted]
    return Table("Combinations that are no layouts", ("how many", "why", "for example"), rows)


def update_cluster(cluster: Cluster, metrics: Sequence[Path], out: Path, warm_up: int) -> str:
    """Write the machine with its figures corrected by these runs into `out`; says what came of that. Raises ConfigError
    for a file that cannot be written."""
    from megatron.planner.calibration.refine import read_run, refined_by, render

    if out.exists() and Path(cluster.path).exists() and Path(cluster.path).samefile(out):
        raise ConfigError(f"--update-cluster {out}: it is the description that the predictions of this search rest on: "
                          "choose another file")  # fmt: skip
    runs, left_out = [], list[str]()
    for path in metrics:
        try:
            runs.append(read_run(path, warm_up))
        except MegatronError as error:
            left_out.append(f"left out: {error}")
    if not runs:
        return "\n".join([f"--update-cluster {out}: not written, for no trial can be used", *left_out[:5]])
    corrected, outcome = refined_by(cluster, runs)
    write_cluster(corrected, out, "Figures corrected by the step times of trials of tools/tune.py; [sources] say by "
                  "which factors.")  # fmt: skip
    return "\n".join([render(outcome), *left_out[:5], f"{out}: {cluster.name}, corrected by {len(runs)} layout(s)"])
