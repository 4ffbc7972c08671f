"""Steps that are skipped because loss or gradients are not finite, and when a run does nothing else."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.config import Config
from megatron.data.batch import MicroBatch
from megatron.engine.engine import StepResult
from megatron.parallel import collectives
from megatron.parallel.topology import Topology
from megatron.training.report.metrics import TokenWeights


@dataclass(frozen=True)
class StepUnderWay:
    """A step that the device may not have done yet: what is needed to count it when its figures are here.

    iteration, consumed_..., samples    as of the end of the step; `samples` are its own
    loss                                this rank's part of the mean loss, see local_loss
    micro_batches, losses, weights      of this rank, to find out why it is skipped
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    samples: int
    learning_rate: float
    loss: torch.Tensor | None
    micro_batches: Sequence[MicroBatch]
    losses: Sequence[torch.Tensor]
    weights: TokenWeights | None


class SkipRules:
    """--max-consecutive-skips. A step that is not skipped costs nothing here.

    A loss that is not finite spoils the gradients that come from it (vocabulary_loss.py), so that the engine's verdict,
    on which all ranks agree, is about losses, too.

    consecutive   skipped steps in a row
    first, scale  the first of these that can be run again as it was, and its loss scale: no weight moves while steps
                  are skipped, but the scale does
    """

    def __init__(self, config: Config, topology: Topology) -> None:
        precision = config.precision
        self.limit = config.training.max_consecutive_skips
        self.scale_falls = precision.fp16 and not precision.loss_scale
        self._topology, self._lowest = topology, precision.min_loss_scale
        self.reset()

    def reset(self) -> None:
        """Begin to count anew: a step was taken, or the run went back to a checkpoint."""
        self.consecutive, self.scale = 0, 0.0
        self.first: StepUnderWay | None = None

    def are_too_many(self, under_way: StepUnderWay, result: StepResult) -> bool:
        """Count the step that gave `result`, at the latest before the weights are changed again; whether it is the
        --max-consecutive-skips'th skipped one in a row. In fp16 not while the scale can still fall and the losses are
        finite: then there was nothing wrong but the scale. All ranks call it."""
        if not result.skipped:
            self.reset()
            return False
        self.consecutive += 1
        if result.loss_scale != self.scale:
            self.first, self.scale = under_way, result.loss_scale
        if not self.limit or self.consecutive < self.limit:
            return False
        return not self.scale_falls or result.loss_scale <= self._lowest or self._bad_anywhere(under_way.losses)

    def _bad_anywhere(self, losses: Sequence[torch.Tensor]) -> bool:
        bad = torch.zeros((), dtype=torch.int32, device=self._topology.device)
        for loss in losses:
            bad += ~torch.isfinite(loss)
        return bool(collectives.all_reduce(bad, self._topology.world, dist.ReduceOp.MAX))
