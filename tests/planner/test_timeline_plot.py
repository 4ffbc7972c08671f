"""Pictures of a step, read back from the figure."""

import sys

import pytest

from megatron.errors import ConfigError
from megatron.pipeline.clock import Boundaries, Pipeline, StageTimes, run_pipeline
from megatron.planner.timeline_plot import plot_timeline


def a_run(schedule="1f1b", size=4, chunks=1, micro_batches=6):
    stages = size * chunks
    times = StageTimes((0.01,) * stages, (0.02,) * stages, (0.01,) * stages)
    boundaries = Boundaries(((0.001, 0.001),) * stages, ((0.001, 0.001),) * stages)
    return run_pipeline(Pipeline(schedule, size, chunks, micro_batches, times, boundaries))


@pytest.fixture
def figures(monkeypatch):
    """Return the figures drawn, which stay open until the test ends."""
    from matplotlib import pyplot

    drawn = []
    close = pyplot.close
    # matplotlib before 3.9 closes "all" when it changes its backend
    monkeypatch.setattr(pyplot, "close", lambda one: drawn.append(one) if one != "all" else None)
    yield drawn
    for figure in drawn:
        close(figure)


@pytest.mark.slow
@pytest.mark.parametrize("schedule, chunks", [("zb-h1", 1), ("interleaved", 2)])
def test_bars_are_the_passes(tmp_path, figures, schedule, chunks):
    run = a_run(schedule, chunks=chunks)
    plot_timeline(run, tmp_path / "new" / "timeline.png")
    assert (tmp_path / "new" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    (panel,) = figures[0].axes
    lengths = {}
    for bar in panel.patches:
        rank = bar.get_y() + bar.get_height() / 2
        lengths[rank] = lengths.get(rank, 0.0) + bar.get_width()
    assert lengths == pytest.approx(dict(enumerate(run.busy)))
    assert {text.get_text() for text in panel.texts} == {str(i) for i in range(6)}


@pytest.mark.slow
def test_a_long_step_is_drawn_at_its_ends(tmp_path, figures):
    run = a_run(micro_batches=200)
    plot_timeline(run, tmp_path / "timeline.png")
    first, last = figures[0].axes
    assert first.get_xlim()[0] == 0.0 and last.get_xlim()[1] == pytest.approx(
        run.makespan, rel=0.01
    )
    assert len(first.patches) + len(last.patches) < 4 * 2 * 200 / 2


@pytest.mark.slow
def test_what_cannot_be_drawn(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="timeline.nothing"):
        plot_timeline(a_run(), tmp_path / "timeline.nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/timeline.png"):
        plot_timeline(a_run(), tmp_path / "file" / "timeline.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="matplotlib"):
        plot_timeline(a_run(), tmp_path / "timeline.png")
