"""Steps that are skipped because loss or gradients are not finite, and the end of a run that does nothing else."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.config import Config
from megatron.data.batch import MicroBatch
from megatron.engine.engine import StepResult
from megatron.errors import TrainingError
from megatron.parallel import collectives
from megatron.parallel.topology import Topology
from megatron.training.diagnosis import diagnose

if TYPE_CHECKING:
    from megatron.training.metrics import TokenWeights
    from megatron.training.run import Run, StepUnderWay


class SkipRules:
    """--max-consecutive-skips. A step that is not skipped costs nothing here.

    A loss that is not finite spoils the gradients that come from it (vocabulary_loss.py), so that the engine's verdict,
    on which all ranks agree, is about losses, too.
    """

    def __init__(self, config: Config, topology: Topology) -> None:
        precision = config.precision
        self.consecutive = 0
        self._topology, self._limit = topology, config.training.max_consecutive_skips
        self._dynamic = precision.fp16 and not precision.loss_scale
        self._lowest = precision.min_loss_scale
        self._step, self._scale = 0, math.nan
        self._micro_batches: Sequence[MicroBatch] = ()
        self._weights: TokenWeights | None = None

    def reset(self) -> None:
        """Begin to count anew: a step was taken, or the run went back to a checkpoint."""
        self.consecutive, self._scale, self._micro_batches = 0, math.nan, ()

    def after_step(self, run: Run, under_way: StepUnderWay, result: StepResult) -> None:
        """Count the step that gave `result`, at the latest before the weights are changed again. All ranks call it.

        Raises TrainingError on every rank when it is the --max-consecutive-skips'th skipped one in a row. In fp16 not
        while the scale can still fall and the losses are finite: then there was nothing wrong but the scale.
        """
        if not result.skipped:
            self.reset()
            return
        self.consecutive += 1
        step = under_way.iteration
        if result.loss_scale != self._scale:
            # The first of those that can be run again as they were: no weight moves while steps are skipped.
            self._scale, self._step, self._micro_batches = result.loss_scale, step, under_way.micro_batches
            self._weights = under_way.weights
        if not self._dynamic:
            run.reporter.say(
                f"WARNING: iteration {step} is skipped: loss or gradients are not finite ({self.consecutive} in a row)"
            )
        if not self._limit or self.consecutive < self._limit:
            return
        if self._dynamic and result.loss_scale > self._lowest and not self._bad_anywhere(under_way.losses):
            return
        self._end(run, step)

    def _bad_anywhere(self, losses: Sequence[torch.Tensor]) -> bool:
        bad = torch.zeros((), dtype=torch.int32, device=self._topology.device)
        if losses:
            bad += (~torch.isfinite(torch.stack([loss.float() for loss in losses]))).any()
        return bool(collectives.all_reduce(bad, self._topology.world, dist.ReduceOp.MAX))

    def _end(self, run: Run, step: int) -> None:
        run.reporter.say(f"iteration {self._step} is run again, to find where values cease to be finite")
        run.engine.clear_gradients()  # of the step that follows: its passes may be on their way
        found = diagnose(run, self._micro_batches, self._scale, self._weights)
        first = step - self.consecutive + 1
        of_scale = f", the first at the loss scale {self._scale:g}" if self._dynamic else ""
        run.reporter.metrics.write("not_finite", iteration=self._step, skipped_since=first, first=found)
        raise TrainingError(
            f"loss or gradients were not finite in {self.consecutive} steps in a row, {first} to {step} "
            f"(--max-consecutive-skips {self._limit}); no weight moved since. The first bad value of step "
            f"{self._step}{of_scale}: {found}. Go back to an earlier checkpoint with --load-tag, leave the data out, "
            f"lower --lr, or take the node out of the job"
        )
