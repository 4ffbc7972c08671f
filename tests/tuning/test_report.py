"""The report of a search: its figures against sums by hand, its files as their users read them."""
from __future__ import annotations

import contextlib
import csv
import dataclasses
import math
import os
import random
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config.command_line import parse_args, parse_plan
from megatron.drawing import save
from megatron.errors import ConfigError
from megatron.planning.cluster import load_cluster
from megatron.tuning.report import importance, plots
from megatron.tuning.report.best import best_command
from megatron.tuning.report.importance import Importance, measured_importance, predicted_importance, worths
from megatron.tuning.report.tables import summary
from megatron.tuning.report.write import ReportContext, write_report
from megatron.tuning.types import DONE, FAILED, Candidate, Parameter, Result, Trial
from tests.helpers.preflight import accepted
from tests.tuning import made

PICTURES = {"trajectory.png", "parameters.png", "memory.png", "predicted.png", "importance.png"}


def context(count: int = 60, parameters: tuple[Parameter, ...] = made.PARAMETERS, **changes: Any) -> ReportContext:
    candidates, trials = made.trials(count, parameters=parameters)
    known: dict[str, Any] = dict(
        name="made", title="A made-up search", parameters=parameters, trials=trials, candidates=candidates,
        objective="tokens_per_s", search="chance", combinations=288, rejections=made.rejections(),
        capacity_bytes=8.0 * made.GIB,
    )  # fmt: skip
    return ReportContext(**(known | changes))


REFUSED = Importance({}, 0, "not asked for")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture is rendered and no forest grown: `whole` has both."""

    def put(figure: Any, path: Path) -> Path:
        plots.pyplot().close(figure)
        path.touch()
        return path

    monkeypatch.setattr("megatron.tuning.report.plots.save", put)
    monkeypatch.setattr("megatron.tuning.report.parameter_plot.save", put)
    monkeypatch.setattr("megatron.tuning.report.write.measured_importance", lambda _: REFUSED)
    monkeypatch.setattr("megatron.tuning.report.write.predicted_importance", lambda _: None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[ReportContext, Path, set[str]]:
    """A search, the folder of its report as users get it, and the files in that."""
    search, folder = context(), tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch, overlaps_are_found(patch, save):
        files = write_report(folder, search)
    assert files[0].name == "trials.md"
    return search, folder / "report", names(files)


def names(files: list[Path]) -> set[str]:
    return {path.name for path in files}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_everything_is_there_and_nothing_of_an_earlier_report(
    whole: tuple[ReportContext, Path, set[str]], tmp_path: Path
) -> None:
    search, folder, files = whole
    wanted = {"trials.md", "trials.csv", "importance.csv", "best.txt", "best.sh", *PICTURES}
    assert files == wanted == {path.name for path in folder.iterdir()}
    assert all((folder / picture).read_bytes().startswith(b"\x89PNG") for picture in PICTURES)
    shutil.copytree(folder, tmp_path / "report")
    # Of fewer trials: no importances, whose picture must not stay.
    fewer = dataclasses.replace(search, trials=search.trials[:8])
    assert names(write_report(tmp_path, fewer)) == wanted - {"importance.png"}
    assert {path.name for path in (tmp_path / "report").iterdir()} == wanted - {"importance.png"}
    found = measured_importance(fewer)
    assert found.layouts == len(fewer.valid) < importance.LEAST_LAYOUTS and found.refused is not None


def test_trials_csv_has_every_trial_with_its_figures(tmp_path: Path) -> None:
    whole = context()
    running = Trial(61, whole.candidates[3], "chance", "trials/0061", started=5.0)
    stopped = dataclasses.replace(running, number=62, ended=9.0)
    write_report(tmp_path, dataclasses.replace(whole, trials=[*whole.trials, running, stopped]))
    rows = rows_of(tmp_path / "report" / "trials.csv")
    assert [row["trial"] for row in rows] == [str(i) for i in range(1, 63)]
    assert [row["state"] for row in rows[-2:]] == ["running", "interrupted"]
    for row, trial in zip(rows, whole.trials, strict=False):
        assert trial.result is not None
        assert float(row["step_s"] or "nan") == (trial.result.step_s or pytest.approx(math.nan, nan_ok=True))
        assert row["recompute"] == trial.candidate.values["recompute"]
        assert row["state"] == (trial.result.kind if trial.result.status == FAILED else trial.result.status)
        if trial.valid:
            # One node, 4096 tokens a step.
            hours = float(row["step_s"]) * 1e9 / 4096 / 3600
            assert float(row["node_hours_per_gtoken"]) == pytest.approx(hours)


def test_a_variable_may_have_the_name_of_a_column(tmp_path: Path) -> None:
    whole = context(3)
    named = [dataclasses.replace(t, candidate=dataclasses.replace(t.candidate, values={"trial": 7, "nodes": 1}))
             for t in whole.trials]  # fmt: skip
    parameters = (Parameter("trial", (7, 8)), Parameter("nodes", (1, 2)))
    write_report(tmp_path, dataclasses.replace(whole, parameters=parameters, trials=named, candidates=[]))
    rows = rows_of(tmp_path / "report" / "trials.csv")
    assert [(row["trial"], row["variable trial"], row["nodes"]) for row in rows] == [
        ("1", "7", "1"), ("2", "7", "1"), ("3", "7", "1")
    ]  # fmt: skip


def test_no_digit_of_a_value_is_lost_in_csv_files(tmp_path: Path) -> None:
    """By which rows are put together again: 1.23457e-04 is none of the values."""
    whole = context(3)
    rates = (0.00012345678, 12345678.5, 2.0)
    named = [dataclasses.replace(c, values={"lr": lr}) for c, lr in zip(whole.candidates, rates, strict=False)]
    done = Result(DONE, step_s=1.0, steady=1)
    trials = [dataclasses.replace(t, candidate=c, result=done) for t, c in zip(whole.trials, named, strict=True)]
    parameters = (Parameter("lr", (0.00012345678, 2.0, 12345678.5)),)
    write_report(tmp_path, dataclasses.replace(whole, parameters=parameters, trials=trials, candidates=named))
    assert [float(row["lr"]) for row in rows_of(tmp_path / "report" / "trials.csv")] == [*rates]
    values = [float(row["value"]) for row in rows_of(tmp_path / "report" / "importance.csv")]
    assert values == sorted(rates)


def test_no_valid_trial(tmp_path: Path) -> None:
    whole = context(6)
    failed = [dataclasses.replace(t, result=Result(FAILED, "crash", "exit code | 1\nand more")) for t in whole.trials]
    broken = dataclasses.replace(whole, trials=failed)
    assert names(write_report(tmp_path, broken)) == {"trials.md", "trials.csv"}
    assert "\\| 1" in (tmp_path / "report" / "trials.md").read_text(), "what would end a cell of a table"
    assert names(write_report(tmp_path / "none", dataclasses.replace(whole, trials=[]))) == {"trials.md", "trials.csv"}


def test_what_a_library_fails_at_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary is written, and no error ends a search that has to go on."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("what nobody\nthought of")

    monkeypatch.setattr("megatron.tuning.report.plots.draw_memory", fail)
    monkeypatch.setattr("megatron.tuning.report.write.measured_importance", fail)
    files = write_report(tmp_path, context())
    assert names(files) >= {"trials.csv", "importance.csv", "best.txt", "trajectory.png", "predicted.png"}
    assert not names(files) & {"memory.png", "importance.png"}
    assert files[0].read_text().count("RuntimeError") >= 2


def test_without_the_planner(tmp_path: Path) -> None:
    plain = context()
    candidates = [dataclasses.replace(c, step_s=None, memory_bytes=None) for c in plain.candidates]
    trials = [dataclasses.replace(t, candidate=candidates[t.candidate.index]) for t in plain.trials]
    bare = dataclasses.replace(plain, candidates=candidates, trials=trials, capacity_bytes=None)
    assert names(write_report(tmp_path, bare)) >= PICTURES - {"predicted.png", "importance.png"}
    assert predicted_importance(bare) is None  # before any library is asked
    blind = [dataclasses.replace(t, result=dataclasses.replace(t.result, memory_bytes=None) if t.result else None)
             for t in trials]  # fmt: skip
    assert "memory.png" not in names(write_report(tmp_path, dataclasses.replace(bare, trials=blind)))


def test_missing_libraries_and_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.setattr("megatron.tuning.report.write.measured_importance", measured_importance)
    files = write_report(tmp_path, context())
    assert names(files) == {"trials.md", "trials.csv", "importance.csv", "best.txt", "best.sh"}
    text = files[0].read_text()
    assert "matplotlib" in text and "optuna" in text and "megatron-frontier[tune]" in text
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/report"):
        write_report(tmp_path / "file", context())


# -- sums --------------------------------------------------------------------------------------------------------------


def hand_made(rates: list[float | None], predicted: list[float]) -> ReportContext:
    """Layouts a=0, a=1, ... of one token a step on one node; None failed."""
    candidates = [Candidate(i, f"a={i}", {"a": i}, (), 1, 1, 1, step_s=1 / p) for i, p in enumerate(predicted)]
    trials = []
    for i, rate in enumerate(rates):
        result = Result(FAILED, "hang", "?") if rate is None else Result(DONE, step_s=1 / rate, steady=5)
        trials.append(Trial(i + 1, candidates[i], "chance", "", result=result))
    parameter = Parameter("a", tuple(range(len(predicted))))
    return ReportContext("x", "X", (parameter,), trials, candidates, "tokens_per_s", "chance")


def says(line: str, *words: str) -> None:
    """A line has these names and figures."""
    assert all(word in line for word in words), (line, words)


def test_gains_over_the_planners_first_and_the_median() -> None:
    lines = summary(hand_made([100.0, 125.0, None, 80.0], [110.0, 100.0, 90.0, 80.0]))
    says(lines[0], "a=1", "trial 2", "125 tokens/s", "0.008 s")
    says(lines[1], "a=0", "trial 1", "20.0 %")
    says(lines[2], "25.0 %", "a=0")
    says(lines[3], "25.0 %", "median of 3")
    says(lines[5], "1 hang")
    # 10 %, -20 % and 0 % off in rates: a step of 1/110 where it took 1/100 is 9.1 % off.
    says(lines[6], "9.1 %", "25.0 %", "67 %")


def test_node_hours_prefer_few_nodes() -> None:
    found = hand_made([100.0, 125.0], [1.0, 1.0])
    trials = [dataclasses.replace(t, candidate=dataclasses.replace(t.candidate, nodes=n)) for t, n in
              zip(found.trials, (1, 2), strict=True)]  # fmt: skip
    cheap = dataclasses.replace(found, trials=trials, objective="node_hours")
    assert cheap.best is not None and cheap.best.number == 1
    assert cheap.value(cheap.layouts[1]) == pytest.approx(2 / 125 * 1e9 / 3600)
    assert cheap.loss(cheap.layouts[1]) == pytest.approx(1 - 125 / 200)


def test_node_hours_are_compared_as_they_are_paid(tmp_path: Path) -> None:
    """80 tokens a second where the best has 100 are a quarter more node-hours, everywhere."""
    whole = dataclasses.replace(hand_made([100.0, 80.0], [1.0, 1.0]), objective="node_hours")
    for objective, change in (("node_hours", "+25.0 %"), ("tokens_per_s", "-20.0 %")):
        text = write_report(tmp_path, dataclasses.replace(whole, objective=objective))[0].read_text()
        assert f"| {change} | 0.0125 |" in text and f"| 1: {change} |" in text


def test_the_planner_s_order_is_judged_by_what_a_token_costs() -> None:
    """A step of ten times the tokens is longer by everybody's count. Here it is the faster one and was said not to be,
    and on four nodes the dearer one, as was said."""
    sizes, predicted, measured = (100, 1000), (0.8, 9.0), (1.0, 8.0)
    candidates = [Candidate(i, f"a={i}", {"a": i}, (), 1, (1, 4)[i], sizes[i], step_s=predicted[i]) for i in (0, 1)]
    trials = [Trial(i + 1, candidates[i], "", "", result=Result(DONE, step_s=measured[i], steady=1)) for i in (0, 1)]
    whole = ReportContext("x", "X", (Parameter("a", (0, 1)),), trials, candidates, "tokens_per_s", "chance")
    assert " 0 % " in plots.prediction_words(whole)
    cheap = dataclasses.replace(whole, objective="node_hours")
    assert " 100 % " in plots.prediction_words(cheap)


def repeated(outcomes: dict[int, list[float | str]]) -> ReportContext:
    """Layouts a=0, a=1, ... with the outcome of each of their trials: a rate, or how it failed."""
    whole = hand_made([None], [1.0] * len(outcomes))
    trials = list[Trial]()
    for turn in range(max(map(len, outcomes.values()))):
        for a, found in outcomes.items():
            if turn < len(found):
                rate = found[turn]
                result = Result(FAILED, rate, "?") if isinstance(rate, str) else Result(DONE, step_s=1 / rate, steady=5,
                                                                                        tokens_per_s=rate)  # fmt: skip
                by = "confirm" if turn else "chance"
                trials.append(Trial(len(trials) + 1, whole.candidates[a], by, "", result=result))
    return dataclasses.replace(whole, trials=trials)


def test_all_runs_of_a_layout_count_once_and_together(tmp_path: Path) -> None:
    whole = repeated({0: [100.0, 80.0], 1: [98.0, 97.0, 96.0], 2: [50.0]})
    lines = summary(whole)
    says(lines[0], "a=1", "2, 5, 6", "2.1 %", "97 tokens/s", "0.01031 s", "15")
    says(lines[1], "a=0", "1, 4", "8.4 %")
    (worth,) = worths(whole)
    assert [(v.valid, v.failed, v.loss) for v in worth.values] == [(1, 0, pytest.approx(1 - 8 / 9 / 0.97)),
                                                                   (1, 0, 0.0), (1, 0, pytest.approx(1 - 50 / 97))]
    files = write_report(tmp_path, whole)
    assert [(row["trial"], row["by"]) for row in rows_of(tmp_path / "report" / "trials.csv")] == [
        ("1", "chance"), ("2", "chance"), ("3", "chance"), ("4", "confirm"), ("5", "confirm"), ("6", "confirm")
    ]  # fmt: skip
    row = next(line for line in files[0].read_text().splitlines() if "| 2, 5, 6 |" in line)
    says(row, "| 97 |", "| 0.01031 |", "| 2.1 % |")
    # What would have been named after each trial: a=0 until it was measured again.
    assert [round(value) for _, value in plots._best_after_each(whole)] == [100, 100, 100, 98, 97, 97]


# -- importance --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_importances_are_the_variances_of_a_sum_of_effects() -> None:
    """Of log(cost) = 3 f(a) + f(b) on the whole grid the parts of variance are 9 : 1 : 0."""
    parameters = (Parameter("a", tuple(range(6))), Parameter("b", ("p", "q", "r", "s", "t", "u"), ordered=False),
                  Parameter("c", (False, True), ordered=False), Parameter("d", (7,)))  # fmt: skip
    candidates, trials = [], []
    for a in range(6):
        for j, b in enumerate("pqrstu"):
            for c in (False, True):
                key = f"a={a},b={b},c={c}"
                candidate = Candidate(len(candidates), key, {"a": a, "b": b, "c": c, "d": 7}, (), 1, 1, 1)
                cost = math.exp(3 * math.sin(2 * a) + math.sin(2 * j))
                candidates.append(candidate)
                trials.append(Trial(len(candidates), candidate, "", "", result=Result(DONE, step_s=cost, steady=1)))
    found = measured_importance(ReportContext("", "", parameters, trials, candidates, "tokens_per_s", ""))
    assert found.layouts == 72 and found.refused is None and list(found.shares) == ["a", "b", "c"]
    assert found.shares["a"] == pytest.approx(0.9, abs=0.05) and found.shares["b"] == pytest.approx(0.1, abs=0.05)
    assert found.shares["c"] < 0.02


def test_importances_are_refused_without_a_difference() -> None:
    almost = hand_made([5.0 + 1e-9 * i for i in range(9)], [1.0] * 9)
    assert measured_importance(almost).refused is not None
    same = hand_made([5.0] * 9, [1.0] * 9)
    assert measured_importance(same).refused is not None and predicted_importance(same) is None


# -- pictures ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def overlaps_are_found(patch: pytest.MonkeyPatch, then: Callable[[Any, Path], Path] | None) -> Iterator[list[str]]:
    """Pictures that are drawn within are looked at: titles, labels, legends and tick labels. Yields their names.

    then: what is done with each afterwards
    """
    from matplotlib.text import Text

    seen, drawn, draw = list[str](), list[Any](), Text.draw

    def note(text: Any, renderer: Any) -> None:
        draw(text, renderer)
        if text.get_visible() and text.get_text().strip():
            drawn.append(text)

    def check(figure: Any, path: Path) -> Path:
        drawn.clear()
        figure.canvas.draw()
        _no_overlaps(drawn, figure.canvas.get_width_height(), path.name)
        seen.append(path.name)
        if then is not None:
            return then(figure, path)
        plots.pyplot().close(figure)
        return path

    patch.setattr(Text, "draw", note)
    patch.setattr("megatron.tuning.report.plots.save", check)
    patch.setattr("megatron.tuning.report.parameter_plot.save", check)
    yield seen


def confirmed(count: int) -> ReportContext:
    """Its best layout was measured again."""
    again = context(count)
    more = [dataclasses.replace(t, number=100 + i, by="confirm") for i, t in enumerate(again.valid[0].runs, 1)]
    return dataclasses.replace(again, trials=[*again.trials, *more])


MANY = (*made.PARAMETERS[:2], Parameter("mbs", tuple(range(1, 18))))
ONE = (Parameter("mbs", (1, 2, 4, 8, 16, 32, 64)),)
LONG = pytest.mark.campaign("search")


@pytest.mark.slow
@pytest.mark.parametrize("search", [
    lambda: context(30, MANY, title=r"not $\cost{ mathematics"), pytest.param(lambda: context(12), marks=LONG),
    pytest.param(lambda: confirmed(100), marks=LONG),
    pytest.param(lambda: context(100, objective="node_hours"), marks=LONG),
    pytest.param(lambda: context(8, ONE), marks=LONG),
])  # fmt: skip
def test_no_text_of_a_picture_overlaps_another_or_leaves_it(
    search: Callable[[], ReportContext], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of searches of other sizes than that of `whole`, which was looked at too."""
    with overlaps_are_found(monkeypatch, None) as seen:
        write_report(tmp_path, search())
    assert set(seen) >= PICTURES - {"importance.png"}


def _no_overlaps(texts: list[Any], size: tuple[int, int], where: str) -> None:
    """Turned ones are left to the eye: their boxes are larger than they are."""
    boxes = [(text.get_text(), text.get_window_extent(), text.get_rotation() % 90 == 0) for text in texts]
    assert boxes, where
    for i, (words, box, straight) in enumerate(boxes):
        assert box.x0 > -2 and box.y0 > -2 and box.x1 < size[0] + 2 and box.y1 < size[1] + 2, (where, words)
        for other, another, other_straight in boxes[:i]:
            if straight and other_straight:
                assert not box.padded(-1).overlaps(another.padded(-1)), (where, words, other)


# -- the best layout ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_best_command_and_script_are_the_layout_that_was_tried(
    whole: tuple[ReportContext, Path, set[str]], tmp_path: Path
) -> None:
    """They say what is missing; with that the script starts it."""
    search, folder, _ = whole
    best = search.best
    assert best is not None
    words = shlex.split((folder / "best.txt").read_text())
    assert words[:3] == ["torchrun", "--nproc-per-node=8", "pretrain_gpt.py"]
    world = ["--world-size", "8"]
    assert parse_plan([*words[3:], *world]) == parse_plan([*best.candidate.flags, *world])
    assert not {"--train-iters", "--mock-data", "--metrics-file", "--timing-log-level"} & set(words)
    (tmp_path / "torchrun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    more = ["--lr", "1e-3", "--train-iters", "9", "--mock-data"]
    done = subprocess.run([folder / "best.sh", *more], capture_output=True, text=True,
                          env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=True)  # fmt: skip
    started = done.stdout.split("\n")[:-1]
    config = parse_args(started[started.index("pretrain_gpt.py") + 1 :], 8)
    assert config.batch.micro_batch_size == best.candidate.values["mbs"]
    assert "--lr" in (folder / "best.sh").read_text(), "what is missing"


def test_under_slurm_devices_are_bound() -> None:
    whole = context(launcher="slurm", tasks_per_node=8, cluster=load_cluster("frontier"))
    command = best_command(whole)
    assert command is not None and command.startswith(
        "srun -N 1 -n 8 --ntasks-per-node=8 -c 7 --gpus-per-task=1 --gpu-bind=closest python -u pretrain_gpt.py "
    )
    plain = best_command(dataclasses.replace(whole, cluster=None))
    assert plain is not None and plain.startswith("srun -N 1 -n 8 --ntasks-per-node=8 python -u pretrain_gpt.py ")


@pytest.mark.slow
def test_the_job_script_passes_the_preflight_check(tmp_path: Path) -> None:
    """As tests/tools/test_plan.py has it for the planner's choice."""
    flags = (*"--preset gpt-22b --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --micro-batch-size 1 "
             "--global-batch-size 128 --cluster frontier --rank-order tp-dp-pp".split(),)  # fmt: skip
    candidate = Candidate(0, "tp=2,pp=4", {"tp": 2}, flags, 128, 16, 128 * 2048)
    trial = made.trial(1, candidate, "planner", random.Random(0))
    result = Result(DONE, step_s=3.5, steady=5, tokens_per_s=128 * 2048 / 3.5)
    search = ReportContext("paper", "Paper", (Parameter("tp", (1, 2)),), [dataclasses.replace(trial, result=result)],
                           [candidate], "tokens_per_s", "deephyper", cluster=load_cluster("frontier"),
                           launcher="slurm", tasks_per_node=8)  # fmt: skip
    assert "best.sbatch" in names(write_report(tmp_path, search))
    script = tmp_path / "report" / "best.sbatch"
    assert "#SBATCH -N 16" in script.read_text()
    assert accepted(script, tmp_path)["tasks"] == 128


def test_numbers_of_pairs_agree_with_numpy() -> None:
    """The share of pairs in the right order, against ranks of all of them."""
    whole = context()
    found = np.array([(t.candidate.step_s, t.result.step_s) for t in whole.valid if t.result])
    signs = np.sign(found[:, None, :] - found[None, :, :])
    upper = np.triu_indices(len(found), 1)
    agree = (signs[..., 0] == signs[..., 1])[upper].mean()
    assert f" {100 * agree:.0f} % " in plots.prediction_words(whole)
