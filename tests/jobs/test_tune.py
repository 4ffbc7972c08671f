"""tools/tune.py: searches without processes, killed anywhere; first output; real trials."""

import dataclasses
import json
import re

import numpy as np
import pytest

from megatron.data.file_lock import FolderClaim
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.errors import ConfigError
from megatron.jobs import tune as module
from megatron.jobs.result import DONE, OUT_OF_MEMORY, STOPPED, Ending, valid_losses
from megatron.jobs.runner import TIME
from megatron.jobs.setup import make_setup
from megatron.jobs.space import SPACES
from megatron.jobs.trial_statistics import CONFIRM
from megatron.jobs.tune import BUDGET, EXHAUSTED, NODES, summary
from megatron.metrics_file import read_records
from megatron.planner.cluster import GIB
from tests.jobs.fake_runner import FakeRunner, no_files, search, setup, truth
from tools import tune

# The second of two layouts needs gigabytes for its weights.
SPACE = """
title = "tiny"
flags = ["--num-layers", "1", "--num-attention-heads", "4", "--seq-length", "32",
         "--vocab-size", "128", "--global-batch-size", "8", "--num-workers", "0", "--lr", "1e-4"]
[parameters]
tp = [1, 2]
mbs = [1, 2]
[derived]
processes = "1"
hidden-size = "32 if mbs == 2 else 8192"
[constraints]
"two of the four" = "tp == 1"
[trial]
iterations = 3
warm_up = 1
"""


def trial_records(tuner):
    return [
        (t.number, t.candidate.key, t.by, t.result.step_s) for _, t in sorted(tuner.trials.items())
    ]


def confirmations(tuner):
    return [t.number for t in tuner.trials.values() if t.by == CONFIRM]


@pytest.fixture(autouse=True)
def made(monkeypatch):
    no_files(monkeypatch)


# -- a search --------------------------------------------------------------------------------------


def test_every_candidate_once_and_the_best_is_the_best(tmp_path):
    tuner, why = search(setup(tmp_path, prior=False))
    assert why == EXHAUSTED and len(tuner.finished) == 12 == len(tuner.trials)
    assert len({t.candidate.key for t in tuner.trials.values()}) == 12
    assert tuner.ranked[0].candidate.key == "mbs=4,seed=1" and len(tuner.ranked) == 11


def test_node_hours_prefer_few_nodes(tmp_path):
    """Minimising node-hours prefers few nodes.

    The fastest layout needs four nodes, the others one.
    """

    def larger(c):
        return dataclasses.replace(c, nodes=4) if c.key == "mbs=4,seed=1" else c

    for objective, best in (("tokens_per_s", True), ("node_hours", False)):
        runner = FakeRunner(hosts=("n1", "n2", "n3", "n4"))
        tuner, _ = search(setup(tmp_path / objective, "--objective", objective), runner, larger)
        assert (tuner.ranked[0].candidate.key == "mbs=4,seed=1") is best


@pytest.mark.parametrize(
    "words",
    [
        ("--max-trials", "5", "--confirm", "2"),
        pytest.param(
            ("--search", "deephyper", "--max-trials", "7"), marks=pytest.mark.campaign("search")
        ),
    ],
)
def test_killed_at_any_turn_and_started_again_it_is_as_if_it_had_not_been(
    tmp_path, words, monkeypatch
):
    if slow := words[0] == "--search":
        pytest.importorskip(words[1])
        monkeypatch.setattr("megatron.jobs.search._FIRST", 4)

    def noisy(values):
        outcome = truth(values)
        scatter = 0.001 * (7 * values["number"] % 5)
        return outcome if isinstance(outcome, Ending) else 1 + 0.01 * outcome + scatter

    undisturbed, why = search(setup(tmp_path / "whole", *words), runner := FakeRunner(noisy))
    turns = range(1, runner.turn, 7 if slow else 1)
    for turn in turns:
        tuning = setup(tmp_path / f"cut{turn}", *words)
        first, _ = search(tuning, FakeRunner(noisy, stop=lambda now, turn=turn: now == turn))
        second, ended = search(tuning, resumed := FakeRunner(noisy))
        assert trial_records(second) == trial_records(undisturbed) and ended == why, turn
        assert len(first.finished + second.finished) == len(trial_records(undisturbed)), turn
        assert sum(what == "start" for what, _ in resumed.log) == len(second.finished)


def test_what_was_complete_though_nobody_noted_it_counts(tmp_path):
    tuning = setup(tmp_path, "--max-trials", "3")
    search(tuning)
    (tuning.out / "trials/0003/result.json").unlink()
    tuner, why = search(tuning, runner := FakeRunner())
    assert runner.log == [] and why == BUDGET and tuner.trials[3].result.step_s


def test_side_by_side_on_nodes_of_their_own_and_a_large_one_is_not_passed_by(
    tmp_path,
):
    def larger(c):
        return dataclasses.replace(c, nodes=4 if c.index == 4 else 1 + c.index % 2)

    tuner, why = search(
        setup(tmp_path), runner := FakeRunner(hosts=[f"n{i}" for i in range(5)], turns=4), larger
    )
    starts = [number for what, number in runner.log if what == "start"]
    assert why == EXHAUSTED and starts == sorted(starts) and len(starts) == 12
    assert runner.turn < 12 * 4, "some ran at the same time"
    assert next(t.number for t in tuner.trials.values() if t.candidate.nodes == 4) == 5


def test_nothing_starts_that_would_not_end_in_time(tmp_path):
    tuner, why = search(
        setup(tmp_path), runner := FakeRunner(turns=10, left_s=lambda turn: 35.5 - turn)
    )
    assert why == TIME and len(tuner.finished) == 3 and runner.turn == 30


def test_out_of_memory_rules_out_what_needs_no_less(tmp_path):
    def sized(c):
        return dataclasses.replace(c, memory_bytes=float(c.values["mbs"] or 0) * GIB)

    def small(values):
        return Ending(OUT_OF_MEMORY, "too much") if values["mbs"] > 2 else truth(values)

    tuner, why = search(setup(tmp_path), FakeRunner(small), sized)
    tried = [t.candidate.values["mbs"] for t in tuner.trials.values()]
    assert why == EXHAUSTED and tried.count(4) == 1 and 8 not in tried and len(tried) == 7


def test_failed_trials_run_again_where_the_budget_has_room(tmp_path):
    def bad(values):
        return Ending("crash", "exit code 1") if values["number"] in (2, 4) else 1.0

    search(setup(tmp_path, "--max-trials", "5"), FakeRunner(bad))
    tuner, why = search(
        setup(tmp_path, "--max-trials", "4", "--retry-failed"), runner := FakeRunner()
    )
    assert why == BUDGET and runner.log == [("start", 2), ("end", 2)]
    tuner, _ = search(
        setup(tmp_path, "--max-trials", "5", "--retry-failed"), runner := FakeRunner()
    )
    assert runner.log == [("start", 4), ("end", 4)] and all(
        trial.result.step_s for trial in tuner.trials.values()
    )


def test_leading_layouts_are_measured_again_and_how_many_may_change(tmp_path):
    """Leading layouts are measured again, up to a limit that may change.

    Layouts are within 1 % of each other; a search resumed with more trials has another best layout
    to confirm.
    """

    def flat(values):
        return 1 + 0.001 * values["number"]

    for most, confirm, ended in ((4, 0, 4), (4, 2, 2), (4, 1, 0), (6, 1, 3), (6, 3, 2)):
        tuner, why = search(
            setup(tmp_path, "--max-trials", str(most), "--confirm", str(confirm)), FakeRunner(flat)
        )
        assert len(tuner.finished) == ended and why == BUDGET, (most, confirm)
    assert confirmations(tuner) == [5, 6, 9, 10, 11]
    assert len({t.candidate.key for t in tuner.trials.values() if t.by != CONFIRM}) == 6, (
        "none is proposed again"
    )
    # Layouts that differ widely leave no doubt.
    assert confirmations(search(setup(tmp_path / "clear", "--confirm", "3"))[0]) == []


def test_what_a_dead_node_ended_runs_again_and_too_few_nodes_are_another_start_s(
    tmp_path,
):
    def larger(c):
        return dataclasses.replace(c, nodes=2 if c.index > 2 else 1)

    runner = FakeRunner(hosts=("n1", "n2", "n3"), die=((1, "n2"),))
    tuner, why = search(setup(tmp_path / "one"), runner, larger)
    assert why == EXHAUSTED and len(tuner.finished) == 12 and ("lost", 2) in runner.log
    assert [number for what, number in runner.log if what == "start"].count(2) == 2
    runner = FakeRunner(hosts=("n1", "n2", "n3"), die=((5, "n1"), (5, "n2")))
    tuner, why = search(setup(tmp_path / "few", "--confirm", "2"), runner, larger)
    assert why == NODES and 3 <= len(tuner.finished) < 12
    tuner, why = search(
        setup(tmp_path / "few", "--confirm", "2"), FakeRunner(hosts=("n1", "n2", "n3")), larger
    )
    done = [t for t in tuner.trials.values() if t.by != CONFIRM and t.result.status]
    assert why == EXHAUSTED and len(done) == 12


def test_a_folder_of_another_search_or_of_none_is_refused(tmp_path):
    search(setup(tmp_path, "--max-trials", "2"))
    with pytest.raises(ConfigError, match="seed was 0, now it is 1"):
        search(setup(tmp_path, "--seed", "1"))
    for name, text in (
        ("result.json", '{"status": "failed", "reason": 3}'),
        ("point.json", '{"key": ["mbs=1,seed=0"], "by": "x"}'),
        ("result.json", "{"),
    ):
        original = (tmp_path / "out/trials/0001" / name).read_text()
        (tmp_path / "out/trials/0001" / name).write_text(text)
        with pytest.raises(ConfigError, match="0001"):
            search(setup(tmp_path))
        (tmp_path / "out/trials/0001" / name).write_text(original)
    assert len(search(setup(tmp_path))[0].finished) == 10


def test_nothing_is_called_better_that_lies_within_the_noise(tmp_path):
    """A difference within the noise is not called better, in the log and at the end.

    Trials of a layout scatter by 2 % before any repetition: 3 % is within two deviations of a
    difference.
    """
    for seconds, near in ((1.03, True), (1.2, False)):
        messages = []
        tuning = setup(tmp_path / f"{seconds}", "--max-trials", "2")
        runner = FakeRunner(lambda values, s=seconds: 1.0 if values["number"] == 2 else s)
        tuner, _ = search(tuning, runner, say=messages.append)
        (line,) = [line for line in messages if line.startswith("trial 2") and "tokens/s" in line]
        assert ("trial 1 within the noise" in line) is near and "best so far: trial 2" in line
        best, rest = summary(tuner)[:2]
        assert "mbs=1,seed=1 (trial 2" in best and "512 tokens/s" in best
        assert ("mbs=1,seed=0 (trial 1)" in rest) is near


# -- its words -------------------------------------------------------------------------------------


@pytest.fixture
def space(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(SPACE)
    return path


@pytest.fixture
def words(space, tmp_path):
    """Return the command line of a search in that space."""
    words = f"--space {space} --no-prior --search optuna --seed 1 --processes 2"
    return [*words.split(), "--out", str(tmp_path / "out")]


def call(capsys, *words):
    code = tune.main(words)
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_dry_run_of_a_described_machine(tmp_path, capsys):
    space = tmp_path / "tp.toml"
    space.write_text(
        'cluster = "frontier"\nflags = ["--preset", "gpt-22b", "--global-batch-size", '
        '"128"]\n[parameters]\ntp = [1, 2, 4, 8, 16]\n[derived]\nprocesses = "tp * pp"\n'
    )
    code, text = call(
        capsys, "--space", str(space), "--nodes", "4", "--dry-run", "--max-trials", "20"
    )
    assert code == 0, text
    for expected in ("tp=8", "--preset gpt-22b", "--cluster frontier", "at most 3 trials"):
        assert expected in text, expected
    assert text.index(" tp=4 ") < text.index(" tp=2 ") < text.index(" tp=1 "), (
        "the fastest by the planner first"
    )


# The words of a command line => what the message names.
MISTAKES = """
--space nowhere => nowhere
--space two-cores => tools/calibrate.py
--space two-cores --no-prior --walltime soon => --walltime soon
--space two-cores --no-prior --parallel 2 => --launcher slurm
--space two-cores --no-prior --launcher local --nodes 2 => --nodes
--space paper-175b --launcher slurm => --hosts-file
--space paper-175b --launcher slurm --processes 4 --dry-run => --tasks-per-node
--space paper-175b --hosts-file /nowhere => /nowhere
--space two-cores --no-prior --launcher slurm --report-only => --nodes
--space two-cores --no-prior --report-only => no trials
--space two-cores --no-prior --dry-run --report-only => --report-only
--space two-cores --cluster frontier --headroom 200% => --headroom 200%
--space two-cores --no-prior --dry-run -- --train-iters 5 => --iterations
--space learning-rate --no-prior --dry-run => tokens_per_s
--space learning-rate --no-prior --dry-run --objective valid_loss => --data-path
--space learning-rate --no-prior --dry-run --objective valid_loss --iterations 3 -- --mock-data => --iterations
--space two-cores --no-prior --dry-run --objective valid_loss => two-cores
"""


@pytest.mark.parametrize("line", ["=> --space FILE|NAME", *MISTAKES.strip().splitlines()])
def test_mistakes_end_with_what_to_do(capsys, tmp_path, line):
    words, message = line.split("=> ")
    words = words.split()
    if words:
        words[2:2] = ["--search", "optuna", "--out", str(tmp_path / "out")]
    code, text = call(capsys, *words)
    assert code == 2 and text.startswith("error: ") and message in text, text
    assert not (tmp_path / "out").exists()


def test_hosts_of_a_file(capsys, tmp_path):
    hosts = tmp_path / "hosts"
    words = ["--space", "paper-175b", "--hosts-file", str(hosts), "--search", "optuna"]
    hosts.write_text("n1\nn2\nn1\n")
    code, text = call(capsys, *words)
    assert code == 2 and str(hosts) in text and "n1" in text
    hosts.write_text("\n".join(f"n{i}" for i in range(12)))
    tuning = make_setup(tune.build_parser().parse_args(words), [])
    assert (
        tuning.target.hosts == tuple(f"n{i}" for i in range(12)) and tuning.machine.max_nodes == 12
    )
    assert (tuning.target.launcher, tuning.target.parallel) == ("slurm", 12)
    assert tuning.machine.processes_per_node == 8
    assert tuning.machine.cluster and tuning.machine.cluster.name == "frontier" and tuning.prior


@pytest.mark.parametrize(
    ("why", "done", "code"), [("", 1, 1), (TIME, 1, 3), (TIME, 0, 4), ("SIGTERM", 0, 3)]
)
def test_exit_codes_of_what_has_no_best(words, monkeypatch, capsys, why, done, code):
    """Exit codes of searches without a best trial: one that started none would do so again."""

    def ends(runner, source):
        source.finished = ["0001"] * done
        source.why = BUDGET
        return why

    monkeypatch.setattr(module.Runner, "run", ends)
    assert call(capsys, *words)[0] == code


def test_one_tuner_at_a_time(words, tmp_path, capsys):
    claim = FolderClaim(tmp_path / "out", "the folder")
    claim.take(print)
    code, text = call(capsys, *words)
    claim.release()
    assert code == 2 and f"--out {tmp_path / 'out'}" in text


def results(out):
    return [json.loads(path.read_text()) for path in sorted(out.glob("trials/*/result.json"))]


@pytest.mark.slow
def test_the_lowest_validation_loss_at_a_token_budget_wins(tmp_path, monkeypatch, capsys):
    """The command of docs/tuning.md on a tiny model goes on; again it has nothing to do."""
    # test_report.py covers the pictures.
    monkeypatch.setattr("megatron.jobs.tune._picture", lambda _, path: path)
    random = np.random.RandomState(1)
    with IndexedDatasetWriter(tmp_path / "text", np.uint16) as writer:
        for _ in range(40):
            writer.add_document(random.choice(16, 200, p=np.arange(1, 17) / 136))
    space = (SPACES / "learning-rate.toml").read_text()
    for name, values in (("lr", "[1e-6, 3e-3, 3e-2]"), ("gbs", "[4, 8]")):
        space = re.sub(rf"^{name} = .*$", f"{name} = {values}", space, flags=re.MULTILINE)
    (tmp_path / "small.toml").write_text(space.replace("valid_samples = 256", "valid_samples = 16"))
    flags = "--split 80,20,0 --tokenizer-type NullTokenizer --vocab-size 16 --num-layers 1"
    flags += " --hidden-size 16 --seq-length 16"
    words = f"--space {tmp_path}/small.toml --objective valid_loss --tokens 1000 --search optuna"
    words += f" --out {tmp_path}/out -- --data-path {tmp_path}/text {flags}"
    line = ["--max-trials", "2", *words.split()]
    code, text = call(capsys, "--max-trials", "1", *line[2:])
    assert code == 0 and len(results(tmp_path / "out")) == 1, text
    code, text = call(capsys, *line)
    all_results = results(tmp_path / "out")
    assert code == 0 and len(all_results) == 2, text
    assert not list(tmp_path.glob("out/trials/*/attempt-*")), "nothing is run again"
    for number, result in enumerate(all_results, 1):
        folder = tmp_path / f"out/trials/{number:04}"
        values = json.loads((folder / "point.json").read_text())["values"]
        records = read_records(folder / "metrics.jsonl")
        losses = valid_losses(records)
        if result["status"] == DONE:
            # 4 parts of as many steps, which together have at least 1000 tokens, each with an
            # evaluation
            steps = 4 * -(-1000 // (4 * values["gbs"] * 16))
            assert records[-1]["iteration"] == steps and len(losses) == 4
            assert result["loss"] == losses[-1]
        else:
            assert result["kind"] == STOPPED
    best = min((r["loss"], n) for n, r in enumerate(all_results, 1) if r["status"] == DONE)[1]
    key = json.loads((tmp_path / f"out/trials/{best:04}/point.json").read_text())["key"]
    assert f"Best: {key}" in text and (tmp_path / "out/report/best.txt").is_file()
    code, text = call(capsys, *line)
    assert code == 0 and f"Best: {key}" in text and len(results(tmp_path / "out")) == 2
