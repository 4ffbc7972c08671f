"""Results from metrics files as a run writes them, whole and tampered with."""

import json
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config import parse_args
from megatron.jobs.candidate_layouts import trial_flags
from megatron.jobs.result import DONE, INVALID, read_result

BATCH, SEQUENCE, WORLD = 8, 64, 2
TIMES = (0.9, 0.5, 0.40, 0.44, 0.42, 0.41)
WARM_UP, ITERATIONS = 2, 4
FLAGS = ("--preset", "tiny", "--tensor-model-parallel-size", "2", "--global-batch-size", "8")
ASKED = parse_args(trial_flags(FLAGS, ITERATIONS + WARM_UP), WORLD)


def records(times=TIMES):
    """Return the records of an undisturbed run."""
    start = dict(
        event="start",
        time=1000.0,
        iteration=0,
        config=json.loads(json.dumps(ASKED.to_dict())),
        device="cpu",
        layout=dict(world=WORLD, data=1),
    )
    steps = [
        dict(
            event="iteration",
            time=1000.0 + sum(times[:i]),
            iteration=i,
            consumed_samples=BATCH * i,
            global_batch_size=BATCH,
            step_time_s=step_s,
            samples_per_s=BATCH / step_s,
            tokens_per_s_per_device=BATCH * SEQUENCE / step_s / WORLD,
            memory_bytes=1000 + i,
            memory_rank=0,
            skipped=0,
            nan=0,
            loss_scale=1.0,
            grad_norm=1.0,
        )
        for i, step_s in enumerate(times, 1)
    ]
    end = dict(event="end", time=steps[-1]["time"], iteration=len(times), reason="done")
    return [start, *steps, end]


def write(path, of):
    path.write_text("".join(json.dumps(record) + "\n" for record in of))
    return path


def read(folder, of):
    return read_result(write(folder / "metrics.jsonl", of), ASKED, WARM_UP)


def test_figures_are_those_of_the_steady_steps(tmp_path):
    result = read(tmp_path, records())
    steady = TIMES[WARM_UP:]
    median = statistics.median(steady)
    assert (result.status, result.kind, result.reason) == (DONE, None, None), result
    assert result.step_s == median and result.steady == ITERATIONS
    assert result.spread == pytest.approx((max(steady) - min(steady)) / median)
    assert result.tokens_per_s == pytest.approx(BATCH * SEQUENCE / median)
    assert result.memory_bytes == 1000 + len(TIMES) and result.notes == ""


def change(event, number, **fields):
    """Change fields of the `number`th record of an event."""

    def changed(of):
        chosen = [at for at, record in enumerate(of) if record["event"] == event][number]
        return [{**record, **fields} if at == chosen else record for at, record in enumerate(of)]

    return changed


def setting(name, value):
    return lambda of: [{**of[0], "config": {**of[0]["config"], name: value}}, *of[1:]]


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (setting("micro_batch_size", 4), "micro_batch_size"),
        (setting("pipeline_model_parallel_size", 2), "pipeline_model_parallel_size"),
        (setting("zero_stage", 0), "zero_stage"),
        (setting("recompute_granularity", "full"), "recompute_granularity"),
        (change("start", 0, layout={"world": 4, "data": 2}), "4"),
        (
            lambda of: [
                {**r, "global_batch_size": 16} if r["event"] == "iteration" else r for r in of
            ],
            "sequences",
        ),
        (change("iteration", 3, consumed_samples=48), "24"),
        (change("iteration", 4, step_time_s=40.0), "clock"),
        (lambda of: [r for r in of if r.get("iteration") != 4], ""),
        (lambda of: [of[0], *of], "2"),
        (lambda of: of[1:], "0"),
        (lambda of: [{**r, "skipped": int(r["event"] == "iteration")} for r in of], ""),
        (
            lambda of: [
                {**r, "step_time_s": math.nan} if r["event"] == "iteration" else r for r in of
            ],
            "",
        ),
        (change("iteration", 3, step_time_s="fast"), ""),
        (change("iteration", 3, global_batch_size=None), ""),
    ],
)
def test_what_contradicts_itself_or_what_was_asked_for_is_invalid(tmp_path, tamper, words):
    result = read(tmp_path, tamper(records()))
    assert result.status == INVALID and words in str(result.reason), result


def test_skipped_steps_and_losses_that_are_not_finite_are_left_out(tmp_path):
    result = read(
        tmp_path, change("iteration", 3, nan=1)(change("iteration", 0, skipped=1)(records()))
    )
    assert (result.status, result.steady) == (DONE, 3) and "1 step(s) skipped" in result.notes
    assert result.step_s == statistics.median((TIMES[2], TIMES[4], TIMES[5]))


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=1),
)


@given(st.data())
def test_a_value_that_is_something_else_never_ends_the_tuner(tmp_path_factory, data):
    """A wrong value in a record never ends the tuner.

    It raises no exception, and gives figures only where the times are those of the run.
    """
    of = records()
    record = data.draw(st.sampled_from(of))
    name = data.draw(st.sampled_from(sorted(record)))
    record[name] = data.draw(
        VALUES
        if name != "config"
        else st.dictionaries(st.sampled_from(sorted(of[0]["config"])), VALUES)
    )
    result = read(tmp_path_factory.mktemp("odd"), of)
    if result.status == DONE:
        assert result.step_s is not None and min(TIMES) <= result.step_s <= max(TIMES)
        assert result.tokens_per_s == pytest.approx(BATCH * SEQUENCE / result.step_s)
