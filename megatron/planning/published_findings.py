"""What Dash et al. found without giving numbers, and what the time model says of it: sweeps over one choice each."""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from megatron.config.command_line import parse_plan
from megatron.model.formulas import paper_flops
from megatron.planning.published import SEQ_LENGTH, VOCABULARY
from megatron.planning.published_table import Seconds, estimated_seconds
from megatron.planning.table import Table

if TYPE_CHECKING:
    from megatron.planning.cluster import Cluster


def finding_table(cluster: Cluster, seconds: Seconds = estimated_seconds) -> Table:
    """TFLOP/s of a GCD, as they count them, on one replica with micro-batch 1; whether it fits is not asked."""

    def rate(model: str, tp: int, pp: int, sequences: int, more: str = "") -> float:
        argv = (
            f"--preset gpt-{model} --fp16 --make-vocab-size-divisible-by {1024 // tp} --rank-order tp-dp-pp "
            f"--device-order 0,1,2,3,4,5,6,7 --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} "
            f"--micro-batch-size 1 --global-batch-size {sequences} --world-size {tp * pp} {more}"
        ).split()
        config = parse_plan(argv).model
        flops = paper_flops(sequences, SEQ_LENGTH, config.num_layers, config.hidden_size, VOCABULARY)
        return flops / (tp * pp * seconds(argv, cluster) * 1e12)

    def sweep(values: Iterable[tuple[str, float]]) -> str:
        return ", ".join(f"{name}: {value:.1f}" for name, value in values)

    stages = (8, 16, 32, 48)
    return Table("findings without numbers", ("published", "varied", "predicted TFLOP/s per GCD"), [
        ("tensor parallelism belongs inside a node", "175B, PP 16, 640 sequences, TP",
         sweep((str(tp), rate("175b", tp, 16, 640)) for tp in (2, 4, 8, 16, 32))),
        ("more micro-batches raise throughput", "175B, TP 4 x PP 16, micro-batches",
         sweep((str(m), rate("175b", 4, 16, m)) for m in (40, 80, 160, 320, 640))),
        ("with a fixed batch throughput falls with the stages", "175B, TP 4, 128 sequences, PP",
         sweep((str(pp), rate("175b", 4, pp, 128)) for pp in stages)),
        ("with the batch scaled along it stays flat", "175B, TP 4, 8 sequences for each stage, PP",
         sweep((str(pp), rate("175b", 4, pp, 8 * pp)) for pp in stages)),
        ("FlashAttention 2 gives up to about 30 %", "1.4B, 640 sequences on a GCD, and 22B, PP 8: with, without",
         sweep((f"{name}{' without' if more else ''}", rate(name.lower(), 1, pp, 640, more))
               for name, pp in (("1.4B", 1), ("22B", 8)) for more in ("", "--attention-backend unfused"))),
    ])
