"""Counters of a run."""
from megatron.training.run.batches import Progress


def test_skipped_steps_count_as_iterations_but_do_not_move_the_schedule():
    progress = Progress()
    for skipped in (True, False, True, False, False):
        progress.advance(4, 8)
        progress.count(4, 8, skipped=skipped)
    assert (progress.iteration, progress.consumed_samples, progress.consumed_tokens) == (5, 20, 160)
    assert progress.skipped_iterations == 2
    assert progress.schedule_position == (3, 12, 96)
