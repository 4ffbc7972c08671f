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
from tests.tools import measured

BATCH = 8
SEQUENCE = measured.SEQUENCE
WORLD = 2
TIMES = (0.9, 0.5, 0.40, 0.44, 0.42, 0.41)
WARM_UP = 2
ITERATIONS = 4
FLAGS = (
    f"--preset tiny --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} "
    f"--tensor-model-parallel-size {WORLD} --global-batch-size {BATCH}"
).split()
ASKED = parse_args(trial_flags(tuple(FLAGS), ITERATIONS + WARM_UP), WORLD)


def records():
    """Return the records of an undisturbed run."""
    return measured.records(json.loads(json.dumps(ASKED.to_dict())), TIMES, device="cpu")


def read(folder, of):
    return read_result(measured.write(folder, of) / "metrics.jsonl", ASKED, WARM_UP)


def change(event, number, **fields):
    """Change fields of the `number`th record of an event."""

    def changed(of):
        chosen = [at for at, record in enumerate(of) if record["event"] == event][number]
        return [{**record, **fields} if at == chosen else record for at, record in enumerate(of)]

    return changed


def steps(**fields):
    """Change fields of every step."""
    return lambda of: [{**r, **fields} if r["event"] == "iteration" else r for r in of]


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
        (steps(global_batch_size=16), "sequences"),
        (lambda of: [r for r in of if r.get("iteration") != 4], ""),
        (lambda of: [of[0], *of], "2"),
        (lambda of: of[1:], "0"),
        (steps(skipped=1), ""),
        (steps(step_time_s=math.nan), ""),
        (change("iteration", 3, step_time_s="fast"), ""),
        (change("iteration", 3, global_batch_size=None), ""),
    ],
)
def test_what_contradicts_itself_or_what_was_asked_for_is_invalid(tmp_path, tamper, words):
    result = read(tmp_path, tamper(records()))
    assert result.status == INVALID and words in str(result.reason), result


def test_skipped_steps_and_losses_that_are_not_finite_are_left_out(tmp_path):
    of = change("iteration", 3, nan=1)(change("iteration", 4, skipped=1)(records()))
    result = read(tmp_path, change("iteration", 0, skipped=1)(of))
    assert (result.status, result.steady) == (DONE, 2) and "2 step(s) skipped" in result.notes
    assert result.step_s == statistics.median((TIMES[2], TIMES[5]))
    assert result.memory_bytes == of[-2]["memory_bytes"]


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
