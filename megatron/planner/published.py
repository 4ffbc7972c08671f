"""Published results of Dash et al. (arXiv 2312.12705) on Frontier, for comparison."""

from __future__ import annotations

from dataclasses import dataclass

SEQ_LENGTH = 2048
VOCABULARY = 51200


@dataclass(frozen=True)
class Published:
    """Published results of one model.

    percent      percentage of 191.5 TFLOP/s, the fp16 peak of an MI250X GCD
    tflops       hardware TFLOP/s per GCD by `formulas.paper_flops`, including recomputation
    weak, strong (GCDs, efficiency) of the largest run
    per_replica, total
                 sequences per replica in weak scaling, and over all replicas in strong scaling
    replica_gcds GCDs per replica: tensor size x pipeline size
    tensor_size  GCDs that share a layer
    """

    name: str
    num_layers: int
    hidden_size: int
    tflops: float
    percent: float
    per_replica: int
    replica_gcds: int
    tensor_size: int
    total: int | None = None
    weak: tuple[int, float] | None = None
    strong: tuple[int, float] | None = None

    @property
    def pipeline_size(self) -> int:
        return self.replica_gcds // self.tensor_size


MODELS = (
    Published("22b", 48, 6144, 73.5, 38.38, 640, 8, 1),
    Published("175b", 96, 12288, 69.2, 36.14, 640, 64, 4, 8000, (1024, 1.0), (1024, 0.8993)),
    Published("1t", 128, 25600, 61.2, 31.96, 1600, 512, 8, 8016, (3072, 1.0), (3072, 0.8705)),
)


def published(num_layers: int | None, hidden_size: int | None) -> Published | None:
    """Return the results for the model with these sizes; None if there are none.

    >>> published(96, 12288).name
    '175b'
    """
    return next(
        (m for m in MODELS if (m.num_layers, m.hidden_size) == (num_layers, hidden_size)), None
    )
