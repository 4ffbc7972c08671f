"""Settings of the processes: how the work is divided, and how they find each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.option import MOST_LAYERS, MOST_PROCESSES, option

SCHEDULES = ("1f1b", "interleaved", "zb-h1")  # pipeline/orders.py
# Which direction varies fastest over the ranks, which next, which slowest; the first is Megatron's.
RANK_ORDERS = ("tp-dp-pp", "tp-pp-dp", "dp-tp-pp", "dp-pp-tp", "pp-tp-dp", "pp-dp-tp")


@dataclass(frozen=True)
class ParallelConfig:
    """Tensor, sequence, pipeline and data parallel sizes, and the launch."""

    title: ClassVar[str] = "parallelism and launch"

    tensor_model_parallel_size: int = option(
        1, "Processes that share each layer.", at_least=1, at_most=MOST_PROCESSES
    )
    pipeline_model_parallel_size: int = option(
        1, "Processes that share the layers as stages.", at_least=1, at_most=MOST_PROCESSES
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None,
        "Interleave: each process holds several chunks of this many layers; none: one chunk.",
        at_least=1,
        at_most=MOST_LAYERS,
        none_word=True,
    )
    pipeline_layout: str | None = option(
        None,
        "Layers of each stage in order of the stages, such as 3,4,4,3; twice as many numbers as "
        "processes of the "
        "pipeline interleave two chunks each.",
        metavar="N,N,...",
        flags=("--pipeline-layout", "--num-layer-list"),
    )
    virtual_pipeline_model_parallel_size: int = option(
        1, "Chunks (virtual stages) of each process.", internal=True
    )
    sequence_parallel: bool = option(
        False,
        "Divide norms, dropout and the residual stream over the tensor-parallel processes along "
        "the sequence.",
        off_flags=("--no-sequence-parallel",),
    )
    enable_zbh1_pipeline: bool = option(False, "Zero-bubble (ZB-H1) pipeline schedule.")
    async_tensor_model_parallel_allreduce: bool = option(
        True,
        "Overlap the all-reduce of input gradients with the weight gradient.",
        flags=(),
        off_flags=(
            "--no-async-tensor-model-parallel-allreduce",
            "--disable-async-tensor-model-parallel-allreduce",
        ),
    )
    tp_comm_overlap: bool = option(
        False,
        "Cut the products of tensor-parallel layers into chunks of tokens and send one chunk's "
        "message behind "
        "the product of the next.",
        off_flags=("--no-tp-comm-overlap",),
    )
    tp_comm_overlap_chunks: int = option(
        4,
        "Chunks of --tp-comm-overlap; fewer where a chunk would have under 256 tokens.",
        at_least=2,
    )
    distributed_backend: str | None = option(
        None,
        "Communication library.",
        choices=("nccl", "gloo"),
        value_names={"rccl": "nccl"},
        hint="use nccl on a GPU, which is RCCL on ROCm, and gloo on a CPU",
        derived="nccl (RCCL on ROCm) on a GPU, gloo on a CPU",
    )
    distributed_timeout_minutes: float = option(
        # a year
        10.0,
        "A collective that takes longer ends the job.",
        above=0,
        at_most=525600,
        metavar="MINUTES",
    )
    rank_order: str | None = option(
        None,
        "Directions over ranks, the fastest first. auto: the cheapest on --cluster.",
        choices=RANK_ORDERS,
        value_names={"auto": None},
        shortcuts={"--use-tp-pp-dp-mapping": "tp-pp-dp"},
        hint="or auto",
        derived="the cheapest with --cluster, else tp-dp-pp",
    )
    device_order: tuple[int, ...] | None = option(
        None,
        "Devices of a node in the order of its ranks, such as 0,1,6,7,2,3,4,5.",
        at_least=0,
        at_most=4096,
        metavar="N,N,...",
        derived="the cheapest with --cluster, else the launcher's",
    )
    cluster: str | None = option(
        None,
        "Machine by whose links ranks are placed: a known name or a TOML file; none: leave ranks "
        "as launched.",
        metavar="NAME|FILE",
        none_word=True,
        derived="variable MEGATRON_CLUSTER",
    )
    local_rank: int | None = option(
        None,
        "Rank on the node; the launcher knows it.",
        flags=("--local_rank", "--local-rank"),
        at_least=0,
        at_most=MOST_PROCESSES,
    )
    master_addr: str | None = option(
        None, "Address of rank 0; the launcher knows it.", metavar="HOST"
    )
    master_port: int | None = option(
        None, "Port of rank 0; the launcher knows it.", at_least=1, at_most=65535
    )
    world_size: int = option(
        None,
        "Number of processes; only for --print-config, a launcher knows it.",
        at_least=1,
        at_most=MOST_PROCESSES,
        derived="the launcher, else one replica",
    )
    data_parallel_size: int = option(1, "Replicas of the model.", internal=True)

    @property
    def num_chunks(self) -> int:
        """Chunks (virtual stages) that each process holds; 1 when not interleaved."""
        return self.virtual_pipeline_model_parallel_size

    @property
    def num_stages(self) -> int:
        """Stages in all: processes of the pipeline times chunks."""
        return self.pipeline_model_parallel_size * self.num_chunks

    @property
    def schedule(self) -> str:
        """'1f1b', 'interleaved' or 'zb-h1'."""
        if self.enable_zbh1_pipeline:
            return "zb-h1"
        return "interleaved" if self.num_chunks > 1 else "1f1b"


@dataclass(frozen=True)
class RecomputeConfig:
    """Which activations are computed again in the backward pass instead of being kept."""

    title: ClassVar[str] = "recomputation"

    recompute_granularity: str | None = option(
        None,
        "Recompute whole layers, or only --recompute-modules of them.",
        choices=("full", "selective"),
        flags=("--recompute-granularity", "--activations-checkpoint-granularity"),
        shortcuts={"--checkpoint-activations": "full", "--recompute-activations": "selective"},
    )
    recompute_modules: tuple[str, ...] = option(
        None,
        "What --recompute-granularity selective makes again: core_attn the scores of attention; "
        "mlp_act the "
        "output of the activation function, layernorm that of the norms, each for a percent of a "
        "step or less.",
        choices=("core_attn", "mlp_act", "layernorm"),
        metavar="MODULE ...",
        derived="core_attn",
    )
    recompute_method: str | None = option(
        None,
        "uniform: groups of recompute-num-layers layers; block: that many first layers of each "
        "stage.",
        choices=("uniform", "block"),
        derived="uniform with full recomputation",
        flags=("--recompute-method", "--activations-checkpoint-method"),
        implies={"--activations-checkpoint-method": {"recompute_granularity": "full"}},
    )
    recompute_num_layers: int = option(
        1,
        "Layers of a group (uniform) or of a stage (block).",
        at_least=1,
        at_most=MOST_LAYERS,
        flags=(
            "--recompute-num-layers",
            "--checkpoint-num-layers",
            "--activations-checkpoint-num-layers",
        ),
    )


@dataclass(frozen=True)
class EngineConfig:
    """The DeepSpeed engine."""

    title: ClassVar[str] = "DeepSpeed engine"

    zero_stage: int = option(
        1,
        "0: every replica keeps the whole optimizer state. 1: it is divided over the replicas.",
        choices=(0, 1),
        shortcuts=dict.fromkeys(
            ("--use-distributed-optimizer", "--overlapped-distributed-optimizer"), 1
        ),
        hint="stages 2 and 3 do not go with a pipeline; use --zero-stage 1 with more tensor or "
        "pipeline parallelism",
    )
    overlap_grad_reduce: bool = option(
        True,
        "Reduce gradients over the replicas while backward passes run.",
        flags=("--overlap-grad-reduce",),
        off_flags=("--no-overlap-grad-reduce",),
    )
    overlap_param_gather: bool = option(
        True,
        "Gather updated weights from the replicas while forward passes run.",
        flags=("--overlap-param-gather",),
        off_flags=("--no-overlap-param-gather",),
    )
    zero_reduce_bucket_size: int = option(
        0,
        "Most elements reduced, and gathered, in one message; 0: a million for each replica, at "
        "least 4 million.",
        at_least=0,
        at_most=10**12,
        flags=("--zero-reduce-bucket-size", "--ddp-bucket-size"),
    )
    zero_allgather_bucket_size: int = option(
        50_000_000,
        "Elements gathered in one message.",
        at_least=0,
        at_most=10**12,
        inert="weights are gathered in the buckets in which gradients are reduced",
    )
    deepspeed: bool = option(
        False, "Accepted for existing scripts; the engine is always DeepSpeed."
    )
    deepspeed_config: str | None = option(
        None,
        "DeepSpeed JSON that is merged into this configuration.",
        flags=("--deepspeed_config", "--deepspeed-config"),
        metavar="FILE",
    )
    extra: dict[str, object] = option(  # noqa: RUF009
        dict, "Entries of the DeepSpeed JSON that the engine gets as they are.", flags=()
    )
