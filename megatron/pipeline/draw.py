"""A simulated schedule as lanes of text for a terminal."""
from __future__ import annotations

from megatron.pipeline.instructions import Instruction, Schedule
from megatron.pipeline.replay import Timeline


def label(instruction: Instruction, schedule: Schedule) -> str:
    """The operation's letter, the micro-batch and, where there are several, the chunk: F3, or F3.1."""
    chunk = f".{instruction.stage // schedule.pipeline_size}" if schedule.chunks > 1 else ""
    return f"{instruction.op.letters}{instruction.micro_batch}{chunk}"


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

