"""Batch ramp-up and run length, against a step-by-step count and Megatron's floating-point rule.

Also the counters of a run.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.model.gpt import model_sizes
from megatron.training.run.schedules import BatchSchedule, Progress, run_costs
from tests.helpers.tiny import tiny

ramps = st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 5), st.integers(1, 500))


def ramp_up(end, start, increment, samples):
    ramp = (start, increment, samples)
    return BatchSchedule.from_config(tiny(global_batch_size=end, rampup_batch_size=ramp))


@given(ramps, st.integers(0, 800))
def test_ramp_up_is_the_start_plus_whole_shares(ramp, consumed):
    start, steps, increment, samples = ramp
    end = start + steps * increment
    schedule = ramp_up(end, start, increment, samples)
    expected = end
    if consumed < samples:
        # As many increments as whole shares of samples / steps fit into the consumed samples.
        expected = start + increment * max(
            k for k in range(steps + 1) if k * samples <= consumed * steps
        )
    assert schedule.global_batch_size(consumed) == expected


@given(ramps, st.integers(0, 60), st.integers(0, 700))
def test_closed_forms_equal_counting_steps(ramp, iterations, begin):
    start, steps, increment, samples = ramp
    schedule = ramp_up(start + steps * increment, start, increment, samples)
    consumed = begin
    for _ in range(iterations):
        consumed += schedule.global_batch_size(consumed)
    assert schedule.samples_after(iterations, begin) == consumed
    assert schedule.iterations_until(consumed, begin, full_steps=True) == iterations
    assert schedule.iterations_until(consumed, begin, full_steps=False) == iterations
    if iterations:
        assert schedule.iterations_until(consumed - 1, begin, full_steps=True) == iterations - 1
        assert schedule.iterations_until(consumed + 1, begin, full_steps=False) == iterations + 1


def test_a_ramp_up_of_a_thousand_million_steps_takes_no_time():
    schedule = ramp_up(4, 2, 2, 10**12)
    assert schedule.samples_after(10**9) == 2 * 10**9
    assert schedule.iterations_until(10**12, full_steps=True) == 10**12 // 2


def test_costs_are_those_of_all_tokens_and_the_time_is_that_of_the_rest():
    """A GPT of two layers by hand: 12 h^2 + 13 h parameters each, embeddings, and a last norm.

    Each weight of a product takes 6 FLOPs per token, and attention 12 s h per layer.
    """
    layers = 2
    h = 16
    s = 8
    vocabulary = 24
    config = tiny(
        num_layers=layers,
        hidden_size=h,
        seq_length=s,
        vocab_size=vocabulary,
        train_iters=10,
        rampup_batch_size=(2, 2, 4),
    )
    total = run_costs(config, model_sizes(config))
    assert total.parameters == layers * (12 * h * h + 13 * h) + (vocabulary + s + 2) * h
    assert total.tokens == (2 * 2 + 8 * 4) * s
    assert total.tokens_per_parameter == total.tokens / total.parameters
    each = 6 * (layers * 12 * h * h + vocabulary * h) + layers * 12 * s * h
    assert total.flops == each * total.tokens
    assert (total.seconds, total.node_hours) == (None, None)
    done = Progress(iteration=4, consumed_samples=12, consumed_tokens=50)  # shorter sequences
    rest = run_costs(config, model_sizes(config), 3, done).at(2.0, done.consumed_tokens)
    assert rest.tokens == 50 + 6 * 4 * s and rest.seconds == 6 * 4 * s / 2
    assert rest.node_hours == pytest.approx(3 * 6 * 4 * s / 2 / 3600)


def test_skipped_steps_count_as_iterations_but_do_not_move_the_schedule():
    progress = Progress()
    for skipped in (True, False, True, False, False):
        progress.advance(4, 8)
        progress.count(4, 8, skipped=skipped)
    assert (progress.iteration, progress.consumed_samples, progress.consumed_tokens) == (5, 20, 160)
    assert progress.skipped_iterations == 2
    scheduled = (progress.scheduled_iterations, progress.scheduled_samples)
    assert (*scheduled, progress.scheduled_tokens) == (3, 12, 96)


@given(st.integers(0, 3000))
def test_batch_sizes_by_tokens(consumed):
    """Megatron-LM's rule: the size of the last threshold that the samples have reached."""
    config = tiny(global_batch_size=None, step_batch_size_schedule="0:4 1K:6, 9.6K:2")
    schedule = BatchSchedule.from_config(config)
    assert config.batch.global_batch_size == schedule.global_batch_size_at_end == 2
    expected = 4 if consumed < 125 else 6 if consumed < 1200 else 2
    assert schedule.global_batch_size(consumed) == expected
    samples = consumed
    for _ in range(50):
        samples += schedule.global_batch_size(samples)
    assert schedule.samples_after(50, consumed) == samples
    assert schedule.iterations_until(samples, consumed, full_steps=True) == 50
    assert schedule.iterations_until(samples - 1, consumed, full_steps=True) == 49
