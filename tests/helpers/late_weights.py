"""ZB-V, but with all weight gradients at the end, those of the last stages after the others."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron.pipeline.orders import Op, passes_of_rank, v_shaped


def late_weights(pipeline_size: int, chunks: int, micro_batches: int, rank: int) -> Any:
    rows = passes_of_rank("zb-v", pipeline_size, chunks, micro_batches, rank)
    last = np.where(rows[:, 0] == Op.BACKWARD_WEIGHT, 1 + rows[:, 1], 0)
    return rows[np.argsort(last, kind="stable")]


late_weights.stage_owners = v_shaped  # type: ignore[attr-defined]
PIECES = {"schedule": late_weights}
