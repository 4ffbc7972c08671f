"""What a search leaves behind for its user: the best layout, its command, what is as good, a table and a picture."""
from __future__ import annotations

import shlex
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from megatron.drawing import pyplot, save
from megatron.errors import ConfigError
from megatron.jobs.candidates import GIB, Enumeration
from megatron.jobs.measured import CONFIRM, Trial, measured, noise_of, ranked, rivals, written
from megatron.jobs.setup import Setup
from megatron.planner.table import Table
from megatron.untrusted import write_text

FOLDER = "report"
_FILES = ("trials.md", "best.txt", "trajectory.png")


class Report:
    """A search as far as it went. trials: by number; ranked: layouts with figures, the best first."""

    def __init__(self, setup: Setup, found: Enumeration, trials: Mapping[int, Trial]) -> None:
        self._setup, self._found, self._objective = setup, found, setup.args.objective
        self._trials = [trials[number] for number in sorted(trials)]
        self._layouts = measured(self._trials, self._objective)
        self.ranked = ranked(self._trials, self._objective)

    def summary(self) -> list[str]:
        """Say in sentences what came of it. No layout is called better than another within the noise."""
        kinds = Counter(t.result.said for t in self._trials if t.result.status and not t.result.step_s)
        again, lines = sum(trial.by == CONFIRM for trial in self._trials), list[str]()
        if self.ranked:
            best, noise = self.ranked[0], noise_of(self._layouts)
            near = ", ".join(f"{one.candidate.key} ({one.numbers})" for one in rivals(self.ranked, noise))
            lines += [
                f"Best: {best.candidate.key} ({best.numbers}, {best.spread}): {written(best.cost, self._objective)}, "
                f"{best.step_s:.4g} s a step.", f"As good as it within the noise, for trials of one layout scatter by "
                f"some {100 * noise:.1f} %: {near or 'none'}.",
            ]  # fmt: skip
        lines.append(f"{len(self._layouts)} of {len(self._found.candidates):,} layouts were tried, searched by "
                     f"{self._setup.searched_by}; {again} trial(s) measured leading ones again. Without valid figures: "
                     f"{', '.join(f'{n} {kind}' for kind, n in kinds.most_common()) or 'none'}.")  # fmt: skip
        return lines

    def write(self) -> list[Path]:
        """Write the report into FOLDER, in place of an earlier one; the files. Without matplotlib or Optuna trials.md
        says why there is no picture. Raises ConfigError where nothing can be written."""
        folder, parts = self._setup.out / FOLDER, [f"# {self._setup.space.title}"]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in _FILES:
                (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror or error}: choose another --out folder") from error
        files = list[Path]()
        if self.ranked:
            files.append(write_text(folder / "best.txt", self.command() + "\n", choose="another --out folder"))
            parts.append(f"The best layout for a real run:\n\n```\n{self.command()}\n```")
            try:
                files.append(self._picture(folder / "trajectory.png"))
                parts.append("![trajectory](trajectory.png)")
            except (ConfigError, ImportError, RuntimeError, ValueError) as error:
                parts.append(f"No picture: {error}")
        parts[1:1] = ["\n".join(f"- {line}" for line in self.summary())]
        text = "\n\n".join([*parts, self._table().markdown()]) + "\n"
        return [write_text(folder / "trials.md", text, choose="another --out folder"), *files]

    def _table(self) -> Table:
        """Layouts with figures, the best first, and trials without."""
        rows = [
            (one.numbers.partition(" ")[2], one.candidate.key, written(one.cost, self._objective), one.spread,
             f"{one.step_s:.4g}", f"{one.candidate.step_s or 0:.4g}",
             f"{max(t.result.memory_bytes or 0 for t in one.trials) / GIB:.2f}", one.trials[0].by)
            for one in self.ranked
        ]  # fmt: skip
        for trial in self._trials:
            if trial.result.status and not trial.result.step_s:
                reason = " ".join((trial.result.reason or "").split()).replace("|", "/")
                rows.append((str(trial.number), trial.candidate.key, trial.result.said, reason, "", "", "", trial.by))
        heads = ("trials", "layout", "value", "measured", "s/step", "planner's s/step", "GiB", "chosen by")
        return Table("", heads, rows)

    def _picture(self, path: Path) -> Path:
        """Every trial in its order with the best so far."""
        plot = pyplot(install="'megatron-frontier[tune]'")
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        hours = self._objective == "node_hours"
        study = optuna.create_study(direction="minimize" if hours else "maximize")
        for trial in self._trials:
            if trial.result.step_s:
                cost = trial.candidate.cost(trial.result.step_s, self._objective)
                study.add_trial(optuna.trial.create_trial(value=cost * 1e9 / 3600 if hours else 1 / cost))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna calls it experimental
            label = "node-hours for a billion tokens" if hours else "tokens per second"
            optuna.visualization.matplotlib.plot_optimization_history(study, target_name=label)
        return save(plot.gcf(), path)

    def command(self) -> str:
        """One line for a shell that runs the best layout: by torchrun, or as a step of a Slurm job, its devices bound
        to tasks as in the launch scripts."""
        candidate, cluster = self.ranked[0].candidate, self._setup.cluster
        program = ["pretrain_gpt.py", *candidate.flags]
        if self._setup.place.launcher != "slurm":
            return shlex.join(["torchrun", f"--nproc-per-node={candidate.processes}", *program])
        each = candidate.processes // candidate.nodes
        words = ["srun", "-N", str(candidate.nodes), "-n", str(candidate.processes), f"--ntasks-per-node={each}"]
        if cluster is not None:
            words += ["-c", str(cluster.cpus_per_task)]
            words += ["--gpus-per-task=1", "--gpu-bind=closest"] if cluster.device_type == "cuda" else []
        return shlex.join([*words, "python", "-u", *program])
