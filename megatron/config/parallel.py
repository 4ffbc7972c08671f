"""Settings for parallelism, recomputation, launch and engine."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.option import LAYERS, MOST_PROCESSES, PROCESSES, Range, option

# The parallel sizes other than data-parallel.
SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
V_SHAPED = ("zb-v", "v-half", "v-min", "dualpipev")
SCHEDULES = ("1f1b", "interleaved", "zb-h1", *V_SHAPED)  # pipeline/orders.py
# Orders of dimensions over the ranks, from fastest to slowest varying; the first is Megatron's.
RANK_ORDERS = ("tp-dp-pp", "tp-pp-dp", "dp-tp-pp", "dp-pp-tp", "pp-tp-dp", "pp-dp-tp")

TILE = 32
"""Attention kernels divide sequences at multiples of this many positions."""


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel sizes, schedule, placement and launch."""

    tensor_model_parallel_size: int = option(1, "Tensor-parallel size.", PROCESSES)
    pipeline_model_parallel_size: int = option(1, "Pipeline-parallel size.", PROCESSES)
    context_parallel_size: int = option(
        1,
        "Context-parallel size: number of ranks that share each sequence.",
        PROCESSES,
        flags="--context-parallel-size --ds-sequence-parallel-size",
        implies={"--ds-sequence-parallel-size": {"cp_comm_type": "a2a"}},
    )
    cp_comm_type: str = option(
        "p2p",
        "Communication of context-parallel attention. p2p: keys and values rotate over the ranks "
        "(ring attention). a2a: an all-to-all exchanges parts of the sequence for heads. a2a+p2p: "
        "both, see --hierarchical-context-parallel-sizes.",
        choices="p2p a2a a2a+p2p",
        hint="all layers use the same communication",
        derived="p2p, or a2a if a ring is impossible",
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] = option(
        (),
        "Two sizes for --cp-comm-type a2a+p2p: the number of neighbouring ranks that exchange "
        "heads, and the size of the ring. Their product is --context-parallel-size.",
        PROCESSES,
        metavar="N",
    )
    expert_model_parallel_size: int = option(
        1,
        "Expert-parallel size: number of ranks over which the experts of a layer are distributed. "
        "These are neighbouring ranks of a pipeline stage, whatever they are for attention.",
        PROCESSES,
        flags="--expert-model-parallel-size --moe-expert-parallel-size",
    )
    expert_ranks_per_node: int | None = option(
        None,
        "Number of ranks of an expert-parallel group on each node. A token is sent once to each "
        "node that has any of its experts, and from there to their ranks. 1: directly to their "
        "ranks. auto: the faster of both on --cluster.",
        PROCESSES,
        metavar="N|auto",
        value_names={"auto": None},
        derived="the faster of both with --cluster, else the number on the launcher's nodes, or 1 "
        "if nodes divide the groups unevenly",
    )
    expert_tensor_parallel_size: int = option(
        None,
        "Number of ranks over which each expert is divided: a divisor or multiple of the "
        "tensor-parallel size. 1: experts are not divided.",
        PROCESSES,
        derived="tensor-model-parallel-size",
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None,
        "Use the interleaved schedule with chunks of this many layers; none: one chunk per rank.",
        LAYERS,
        none_word=True,
    )
    pipeline_layout: str | None = option(
        None,
        "Number of layers in each pipeline stage, for example 3,4,4,3. With twice as many numbers "
        "as pipeline ranks, each rank holds two chunks; in a V the first rank those of the first "
        "and the last number.",
        metavar="N,N,...",
        flags="--pipeline-layout --num-layer-list",
    )
    virtual_pipeline_model_parallel_size: int = option(
        1, "Number of chunks (virtual stages) per pipeline rank.", internal=True
    )
    sequence_parallel: bool = option(
        False,
        "Shard norms, dropout and the residual stream along the sequence over the tensor-parallel "
        "ranks.",
    )
    pipeline_schedule: str | None = option(
        None,
        "Pipeline schedule. zb-h1, zb-v, v-half, v-min: split backward passes, to fill idle time. "
        "The last three and dualpipev place two chunks on each pipeline rank, in the shape of a V; "
        "with many ranks v-half needs half of the activations of 1f1b, v-min a third.",
        choices=SCHEDULES,
        value_names="1f1b-interleaved=interleaved interleaved1f1b=interleaved zbh1=zb-h1 zb1p=zb-h1 "
        "zero-bubble=zb-h1 zbv=zb-v zbv-formatted=zb-v zbvzerobubble=zb-v vhalf=v-half vmin=v-min",
        flags="--pipeline-schedule --pipeline-parallel-schedule",
        shortcuts="--enable-zbh1-pipeline=zb-h1",
        derived="interleaved with several chunks per rank, else 1f1b",
    )
    async_tensor_model_parallel_allreduce: bool = option(
        True,
        "Overlap the message that sums input gradients over the tensor-parallel ranks with the "
        "computation of weight gradients.",
        off_flags="--no-async-tensor-model-parallel-allreduce "
        "--disable-async-tensor-model-parallel-allreduce",
    )
    tp_comm_overlap: bool = option(
        False,
        "Overlap tensor-parallel communication with computation: split the matrix products into "
        "chunks of tokens, and communicate one chunk while the next is computed.",
    )
    tp_comm_overlap_chunks: int = option(
        4,
        "Number of chunks for --tp-comm-overlap. Fewer are used if a chunk would have fewer than "
        "256 tokens.",
        Range(2),
    )
    distributed_backend: str | None = option(
        None,
        "Communication backend.",
        choices="nccl gloo",
        value_names="rccl=nccl",
        hint="use nccl on a GPU, which is RCCL on ROCm, and gloo on a CPU",
        derived="nccl (RCCL on ROCm) on a GPU, gloo on a CPU",
    )
    distributed_timeout_minutes: float = option(
        10.0,
        "Time after which a collective fails and the job ends.",
        Range(above=0, at_most=525600),  # a year
        metavar="MINUTES",
    )
    rank_order: str | None = option(
        None,
        "Order of the parallel dimensions over the ranks, fastest-varying first. auto: the "
        "cheapest order on --cluster.",
        choices=RANK_ORDERS,
        value_names={"auto": None},
        shortcuts="--use-tp-pp-dp-mapping=tp-pp-dp",
        hint="choose one of these, or auto",
        derived="the cheapest with --cluster, else tp-dp-pp",
    )
    device_order: tuple[int, ...] | None = option(
        None,
        "Devices of a node in rank order, for example 0,1,6,7,2,3,4,5.",
        Range(0, 4096),
        metavar="N,N,...",
        derived="the cheapest with --cluster, else the launcher's",
    )
    cluster: str | None = option(
        None,
        "Machine whose links determine the placement of ranks: a known name or a TOML file. none: "
        "keep the launcher's order.",
        metavar="NAME|FILE",
        none_word=True,
        derived="variable MEGATRON_CLUSTER",
    )
    local_rank: int | None = option(
        None,
        "Local rank on the node. Set by the launcher.",
        Range(0, MOST_PROCESSES),
        flags="--local_rank --local-rank",
        one_start=True,
    )
    master_addr: str | None = option(
        None, "Address of rank 0. Set by the launcher.", metavar="HOST", one_start=True
    )
    master_port: int | None = option(
        None, "Port of rank 0. Set by the launcher.", Range(1, 65535), one_start=True
    )
    world_size: int = option(
        None,
        "Number of processes, for --print-config and --dry-run. Otherwise the launcher sets it.",
        PROCESSES,
        derived="set by the launcher, else tensor x pipeline x context-parallel size, or more for "
        "the experts",
        one_start=True,
    )
    data_parallel_size: int = option(
        1, "Data-parallel size: number of replicas with separate samples.", internal=True
    )

    @property
    def gradient_ranks(self) -> int:
        """Return the number of ranks that sum a parameter's gradients and share its ZeRO state.

        These are the context-parallel ranks of all replicas. For the parameters of experts, they
        are the ranks of a stage divided by `expert_ranks`.
        """
        return self.data_parallel_size * self.context_parallel_size

    @property
    def expert_ranks(self) -> int:
        """Return the number of ranks of a stage that hold all experts of a layer once."""
        return self.expert_tensor_parallel_size * self.expert_model_parallel_size

    @property
    def folded(self) -> bool:
        """Return whether experts are divided over other ranks than attention."""
        return self.expert_tensor_parallel_size != self.tensor_model_parallel_size

    @property
    def sequence_ranks(self) -> int:
        """Return the number of ranks over which the sequence is sharded between layers."""
        tensor = self.tensor_model_parallel_size if self.sequence_parallel else 1
        return tensor * self.context_parallel_size

    @property
    def head_ranks(self) -> int:
        """Return the number of context-parallel ranks that exchange sequence parts for heads.

        It is 1 with p2p, which exchanges none.
        """
        if self.cp_comm_type == "a2a":
            return self.context_parallel_size
        return self.hierarchical_context_parallel_sizes[0] if self.cp_comm_type != "p2p" else 1

    @property
    def ring_size(self) -> int:
        """Return the size of the ring over which context-parallel keys and values rotate."""
        return self.context_parallel_size // self.head_ranks

    @property
    def num_chunks(self) -> int:
        """Return the number of chunks (virtual stages) per pipeline rank."""
        return self.virtual_pipeline_model_parallel_size

    @property
    def num_stages(self) -> int:
        """Return the number of stages: pipeline ranks times chunks."""
        return self.pipeline_model_parallel_size * self.num_chunks

    @property
    def schedule(self) -> str:
        """Return the name of the pipeline schedule, one of SCHEDULES."""
        return self.pipeline_schedule or ("interleaved" if self.num_chunks > 1 else "1f1b")


@dataclass(frozen=True)
class RecomputeConfig:
    """Activation recomputation."""

    recompute_granularity: str | None = option(
        None,
        "Recompute whole layers (full), or only the modules named by --recompute-modules "
        "(selective).",
        choices="full selective",
        flags="--recompute-granularity --activations-checkpoint-granularity",
        shortcuts="--checkpoint-activations=full --recompute-activations=selective",
    )
    recompute_modules: tuple[str, ...] = option(
        ("core_attn",),
        "Modules to recompute with --recompute-granularity selective: core_attn (attention "
        "scores), mlp_act (output of the activation function), layernorm (output of the norms, "
        "but not of the one before experts). mlp_act and layernorm cost at most about 1 % of a "
        "step each. moe: whole layers of experts, with their messages; moe_act: output of the "
        "experts' activation function.",
        choices="core_attn mlp_act layernorm moe moe_act",
        metavar="MODULE ...",
    )
    recompute_method: str | None = option(
        None,
        "uniform: recompute groups of --recompute-num-layers layers. block: recompute that many "
        "layers at the start of each stage.",
        choices="uniform block",
        derived="uniform with --recompute-granularity full",
        flags="--recompute-method --activations-checkpoint-method",
        implies={"--activations-checkpoint-method": {"recompute_granularity": "full"}},
    )
    recompute_num_layers: int = option(
        1,
        "Number of layers per recomputed group (uniform), or per stage (block).",
        LAYERS,
        flags="--recompute-num-layers --checkpoint-num-layers --activations-checkpoint-num-layers",
    )


_SHARD = Range(-1, MOST_PROCESSES)
_SHARD_NAMES = {"world": 0, "node": -1}


@dataclass(frozen=True)
class EngineConfig:
    """DeepSpeed engine."""

    zero_stage: int = option(
        1,
        "ZeRO stage. 0: each data-parallel rank holds the whole optimizer state. 1: the state is "
        "sharded over the data-parallel ranks; 2: gradients, too; 3: weights, too (not with "
        "pipeline parallelism).",
        choices=(0, 1, 2, 3),
        shortcuts={
            "--use-distributed-optimizer": 1,
            "--overlapped-distributed-optimizer": 1,
            "--use-torch-fsdp2": 3,
        },
    )
    zero_shard_size: int = option(
        0,
        "Number of neighbouring data-parallel ranks over which ZeRO stages 2 and 3 shard gradients "
        "and weights; each such group holds a copy. world, 0: all; node, -1: those on a node.",
        _SHARD,
        value_names=_SHARD_NAMES,
    )
    zero_state_shard_size: int = option(
        0,
        "Number of neighbouring data-parallel ranks over which ZeRO shards the optimizer state, a "
        "multiple of --zero-shard-size. world, 0: all; node, -1: those on a node.",
        _SHARD,
        value_names=_SHARD_NAMES,
    )
    cpu_offload: bool = option(
        False,
        "Keep the optimizer state (master weights, moments) in host memory. Each step streams it "
        "through the device, two buckets at a time.",
        flags="--cpu-offload --cpu-optimizer --optimizer-cpu-offload "
        "--offload-optimizer-states --chunked-optimizer-state-offload",
    )
    overlap_grad_reduce: bool = option(
        True,
        "Reduce gradients over the data-parallel ranks while backward passes run.",
        flags="--overlap-grad-reduce",
    )
    overlap_param_gather: bool = option(
        True,
        "Gather updated weights from the data-parallel ranks while forward passes run.",
        flags="--overlap-param-gather",
    )
    zero_reduce_bucket_size: int = option(
        0,
        "Maximum number of elements per reduction or gather message; a larger parameter has a "
        "message of its own. 0: 1M per data-parallel rank (4M with ZeRO stage 3), at least 4M. "
        "Larger values than that have no effect.",
        Range(0, 10**12),
        flags="--zero-reduce-bucket-size --ddp-bucket-size",
    )
    zero_allgather_bucket_size: int = option(
        50_000_000,
        "Number of elements per gather message.",
        Range(0, 10**12),
        inert="weights are gathered in the buckets in which gradients are reduced",
    )
    deepspeed: bool = option(
        False, "Accepted for existing scripts. The engine is always DeepSpeed."
    )
    deepspeed_config: str | None = option(
        None,
        "DeepSpeed JSON to merge into this configuration.",
        flags="--deepspeed_config --deepspeed-config",
        metavar="FILE",
    )
    extra: dict[str, object] = option(  # noqa: RUF009
        dict, "Entries of the DeepSpeed JSON that are passed to the engine unchanged.", flags=""
    )


def layout_counts(layout: str) -> list[int] | None:
    """Return the layer counts of a pipeline layout such as '3,4,4,3'; None for anything else."""
    words = [word.strip() for word in layout.split(",")]
    if not all(word.isdecimal() and len(word) < 10 and int(word) > 0 for word in words):
        return None
    return [int(word) for word in words]


def even_counts(number: int, stages: int) -> list[int]:
    """Return how many of `number` layers each stage gets.

    Each stage gets number // stages layers. The remaining layers go, one each, to the stages just
    before the last.
    """
    each, left_over = divmod(number, stages)
    before_last = stages - 1
    return [each + (before_last - left_over <= stage < before_last) for stage in range(stages)]
