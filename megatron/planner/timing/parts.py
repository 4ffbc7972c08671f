"""What a step's seconds are made of, as the pipeline rank spends them that computes longest."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megatron.planner.stage import StageSeconds

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.pipeline.clock import PipelineRun

PARTS = (
    "forward", "backward", "recompute", "tensor messages", "bubble", "pipeline messages", "data-parallel", "optimizer",
    "host",
)  # fmt: skip
"""forward, backward    computations of the passes
recompute            computations of recomputation, within backward passes
tensor messages      waiting for tensor-parallel collectives in all passes
bubble               neither computing nor waiting for a message that is under way
pipeline messages    waiting for messages between stages that have been made
data-parallel        gradients and weights that no pass hides, tied embedding and norms included
optimizer            the update
host                 what the host adds to each layer's pass and to a step"""


def busiest_rank(run: PipelineRun) -> int:
    """The pipeline rank that computes longest, the first of equals."""
    return max(range(len(run.busy)), key=lambda rank: (run.busy[rank], -rank))


def parts_of_step(
    config: Config, stages: Sequence[StageSeconds], run: PipelineRun, after: Mapping[str, float]
) -> dict[str, float]:
    """Seconds of each of PARTS. after: those of the last three, without what the host adds to passes."""
    rank, micro_batches = busiest_rank(run), config.num_micro_batches()
    own = stages[rank :: config.parallel.pipeline_model_parallel_size]
    passes = {
        "forward": sum(s.forward.compute for s in own),
        "backward": sum(s.backward.compute + s.weight.compute for s in own),
        "recompute": sum(s.backward.again for s in own),
        "tensor messages": sum(s.forward.waited + s.backward.waited + s.weight.waited for s in own),
        "host": sum(sum(s.overhead) for s in own),
    }
    total = micro_batches * sum(passes.values())
    # Where ranks share cores, the clock makes passes longer than they are by themselves.
    stretched = micro_batches * (run.busy[rank] / total if total else 1.0)
    found = {name: stretched * seconds for name, seconds in passes.items()}
    found["pipeline messages"] = run.message_wait[rank]
    found["bubble"] = max(0.0, run.makespan - run.busy[rank] - run.message_wait[rank])
    for name, seconds in after.items():
        found[name] = found.get(name, 0.0) + seconds
    return {name: found[name] for name in PARTS}
