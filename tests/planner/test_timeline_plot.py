"""What the pictures of a step show, read back from the figure."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.pipeline.clock import Boundaries, PipelineRun, StageTimes, run_pipeline
from megatron.planner.timeline_plot import plot_timeline


def a_run(schedule: str = "1f1b", size: int = 4, chunks: int = 1, micro_batches: int = 6) -> PipelineRun:
    stages = size * chunks
    times = StageTimes((0.01,) * stages, (0.02,) * stages, (0.01,) * stages)
    boundaries = Boundaries(((0.001, 0.001),) * size, ((0.001, 0.001),) * size)
    return run_pipeline(schedule, size, chunks, micro_batches, times, boundaries)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The figures drawn, which stay open until the test ends."""
    from matplotlib import pyplot

    drawn: list[Any] = []
    close = pyplot.close
    monkeypatch.setattr(pyplot, "close", drawn.append)
    yield drawn
    for figure in drawn:
        close(figure)


def bars(axes: Any) -> dict[str, float]:
    """Length of all bars by name of their kind, as the legend has it."""
    import matplotlib.colors

    names = {matplotlib.colors.to_hex(h.get_facecolor()): h.get_label() for h in axes.get_legend().legend_handles}
    lengths: dict[str, float] = {}
    for collection in axes.collections:
        name = names[matplotlib.colors.to_hex(collection.get_facecolor()[0])]
        for path in collection.get_paths():
            box = path.get_extents()
            lengths[name] = lengths.get(name, 0.0) + box.width
    return lengths


@pytest.mark.slow
@pytest.mark.parametrize("schedule, chunks", [("zb-h1", 1), ("interleaved", 2)])
def test_bars_are_the_passes(tmp_path: Path, figures: Any, schedule: str, chunks: int) -> None:
    run = a_run(schedule, chunks=chunks)
    plot_timeline(run, tmp_path / "new" / "timeline.png")
    assert (tmp_path / "new" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    panel, summary = figures[0].axes
    found = bars(panel)
    waiting = found.pop("message under way")
    unit = 1e-3  # of 24 x 30 ms the whole step is below two seconds
    assert sum(found.values()) * unit == pytest.approx(sum(run.busy))
    assert found["forward"] * unit == pytest.approx(6 * 4 * chunks * 0.01)
    # All but the waiting for a rank's last sends, which are behind its passes.
    assert 0 < waiting * unit <= sum(run.message_wait) + 1e-9
    shares = sum(patch.get_width() for patch in summary.patches)
    assert shares / 100 * run.makespan == pytest.approx(sum(run.busy) + sum(run.message_wait))
    numbers = {text.get_text() for text in panel.texts}
    assert numbers == {str(i) for i in range(6)}


@pytest.mark.slow
def test_what_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="timeline.nothing"):
        plot_timeline(a_run(), tmp_path / "timeline.nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/timeline.png"):
        plot_timeline(a_run(), tmp_path / "file" / "timeline.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="matplotlib"):
        plot_timeline(a_run(), tmp_path / "timeline.png")
