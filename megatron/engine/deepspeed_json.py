"""The configuration handed to DeepSpeed: what the user passes through, under what this engine
decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.config import Config

_NEVER = 10**9


def deepspeed_json(config: Config, partition_size: int, elements: int) -> dict[str, Any]:
    """The JSON for one engine.

    partition_size  ranks over which DeepSpeed partitions the optimizer
    elements        parameters of this rank; no communication buffer is larger than they need

    What is said here of batch sizes, of the format of gradients and of the loss scale are
    stand-ins: the Engine has its own.
    """
    batch, engine, precision = config.batch, config.engine, config.precision
    accumulation = max(1, batch.global_batch_size // (batch.micro_batch_size * partition_size))
    even = elements + elements % 2
    decided: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": batch.micro_batch_size * accumulation * partition_size,
        "gradient_clipping": float(config.optimizer.clip_grad),
        "steps_per_print": _NEVER,
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 1,
            "reduce_bucket_size": min(int(engine.zero_reduce_bucket_size) or even, even),
            "allgather_bucket_size": min(_even(int(engine.zero_allgather_bucket_size)), even),
            # The Engine reduces, in the buckets that the parameter groups are, and overlaps that
            # itself.
            "overlap_comm": False,
            "contiguous_gradients": True,
            # The order of parameters in the flat buffers is the order of the parameter groups.
            "round_robin_gradients": False,
        },
        "fp16": {"enabled": bool(precision.fp16), "loss_scale": 1.0},
        "bf16": {"enabled": bool(precision.bf16)},
    }
    if precision.fp16 or precision.bf16:
        decided["data_types"] = {"grad_accum_dtype": "fp32"}
    return merged(engine.extra or {}, decided)


def _even(n: int) -> int:
    return max(2, n - n % 2)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings, section by section; where they disagree `above` holds.

    >>> merged({"a": 1, "s": {"x": 1, "y": 2}}, {"s": {"x": 5}})
    {'a': 1, 's': {'x': 5, 'y': 2}}
    """
    out = dict(below)
    for key, value in above.items():
        under = out.get(key)
        out[key] = (
            merged(under, value)
            if isinstance(under, Mapping) and isinstance(value, Mapping)
            else value
        )
    return out
