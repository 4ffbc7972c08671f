"""Pictures of a simulated schedule: lanes of text for a terminal, and a plot."""
from __future__ import annotations

from pathlib import Path

from megatron.errors import ConfigError
from megatron.pipeline.instructions import Instruction, Op, Schedule
from megatron.pipeline.simulate import Timeline

_COLOURS = {
    Op.FORWARD: "#4878b0",
    Op.BACKWARD: "#5a9e6f",
    Op.BACKWARD_INPUT: "#5a9e6f",
    Op.BACKWARD_WEIGHT: "#d9a441",
}
_NAMES = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward, input",
    Op.BACKWARD_WEIGHT: "backward, weights",
}


def label(instruction: Instruction, schedule: Schedule) -> str:
    """The operation's letter, the micro-batch and, where there are several, the chunk: F3, or F3.1."""
    chunk = f".{instruction.stage // schedule.pipeline_size}" if schedule.chunks > 1 else ""
    return f"{instruction.op.value}{instruction.micro_batch}{chunk}"


def text_lanes(schedule: Schedule, timeline: Timeline) -> str:
    """One line per rank; time runs to the right in steps of the shortest computation, and dots are waiting."""
    spans = [span for rank in timeline.ranks for span in rank]
    step = min((span.end - span.start for span in spans if span.end > span.start), default=1.0)
    width = max(len(label(span.instruction, schedule)) for span in spans) + 1
    lines = []
    for rank, of_rank in enumerate(timeline.ranks):
        line = ""
        for span in of_rank:
            line += "." * (round(span.start / step) * width - len(line))
            cell = label(span.instruction, schedule)
            line += cell.ljust(max(width, round(span.end / step) * width - len(line)), "-")[:-1] + " "
        line += "." * (round(timeline.makespan / step) * width - len(line))
        lines.append(f"rank {rank:>2} |{line}|")
    return "\n".join(lines)


def plot(schedule: Schedule, timeline: Timeline, path: Path) -> None:
    """Draw the ranks' computations over time to an image file; later chunks are lighter. Needs matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("a plot needs matplotlib: pip install matplotlib, or leave out --plot") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    makespan = timeline.makespan
    figure, axes = pyplot.subplots(figsize=(min(24.0, 3 + 0.28 * makespan), 1.6 + 0.45 * len(schedule)))
    for rank, spans in enumerate(timeline.ranks):
        for instruction, start, end in spans:
            shade = 1 - 0.6 * (instruction.stage // schedule.pipeline_size) / schedule.chunks
            axes.barh(
                rank, end - start, left=start, height=0.9, color=_COLOURS[instruction.op], alpha=shade,
                edgecolor="white", linewidth=0.8,
            )  # fmt: skip
            axes.text(
                (start + end) / 2, rank, str(instruction.micro_batch), ha="center", va="center", fontsize=7,
                color="white" if shade > 0.75 else "black", clip_on=True,
            )  # fmt: skip
    used = dict.fromkeys(span.instruction.op for spans in timeline.ranks for span in spans)
    axes.legend(
        handles=[Patch(color=_COLOURS[op], label=_NAMES[op]) for op in _NAMES if op in used],
        loc="lower right", bbox_to_anchor=(1, 1), borderpad=0, ncol=len(used), frameon=False, fontsize=8,
    )  # fmt: skip
    axes.set(xlim=(0, makespan), xlabel="time", ylabel="pipeline rank", yticks=range(len(schedule)))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"{schedule.name}: {schedule.pipeline_size} ranks, {schedule.chunks} chunk{'s' * (schedule.chunks > 1)}, "
        f"{schedule.micro_batches} micro-batches, bubble {timeline.bubble_fraction:.1%}",
        loc="left", fontsize=9,
    )  # fmt: skip
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
