"""Checks of the settings of parallel.py."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.config.checks import Problems, check, multiple, nearest_multiples
from megatron.config.parallel import SIZES, TILE, V_SHAPED, layout_counts
from megatron.config.settings import Sections, all_options

CONFLICTS = """
    zero_stage=0 zero_shard_size: nothing is sharded
    zero_stage=0 zero_state_shard_size: nothing is sharded
    zero_stage=3 pipeline_model_parallel_size: ZeRO-3 has one pipeline stage, --zero-stage 2 many
"""
NEEDED = """
    num_experts  expert_model_parallel_size
    recompute_granularity=selective  recompute_modules
    recompute_granularity=full  recompute_method
    cp_comm_type=a2a+p2p  hierarchical_context_parallel_sizes
"""


@check("tensor_model_parallel_size")
def _tensor_parallel(config: Sections) -> Problems:
    names = ["num_attention_heads", "ffn_hidden_size"]
    groups = config.model.num_key_value_heads
    size = config.parallel.tensor_model_parallel_size
    # if there are fewer groups than ranks, each group is on several ranks
    if groups and groups != config.model.num_attention_heads and size % groups:
        names.append("num_key_value_heads")
    if config.parallel.sequence_parallel:
        names.append("seq_length")
    for name in names:
        remedy = ", or another tensor-parallel size"
        if name == "seq_length":
            remedy = ", another tensor-parallel size, or no --sequence-parallel"
        yield from multiple(config, name, "tensor_model_parallel_size", remedy)


@check("num_layers", "pipeline_model_parallel_size")
def _pipeline(config: Sections) -> Problems:
    parallel = config.parallel
    layers = config.model.num_layers
    pp = parallel.pipeline_model_parallel_size
    per_chunk = parallel.num_layers_per_virtual_pipeline_stage
    if parallel.pipeline_layout is not None:
        yield from _layout(config)
    elif per_chunk is not None:
        yield from _interleaving(layers, pp, per_chunk)
    elif layers < pp:
        yield (
            f"--num-layers {layers} is less than the {pp} stages of --pipeline-model-parallel-size "
            f"{pp}: each stage needs a layer, so use at most {layers} stages"
        )
    if parallel.num_chunks > 1 and pp == 1:
        yield (
            "interleaved chunks need a --pipeline-model-parallel-size of at least 2: drop the "
            "interleaving"
        )


@check("num_layers", "pipeline_model_parallel_size", "pipeline_schedule")
def _schedule(config: Sections) -> Problems:
    if any(_pipeline.problems(config)):
        return  # the number of chunks is not known
    parallel = config.parallel
    name = parallel.pipeline_schedule
    chunks = parallel.num_chunks
    stages = parallel.num_stages
    if name is None or parallel.pipeline_model_parallel_size == 1:
        return
    flag = f"--pipeline-schedule {name}"
    if name in V_SHAPED and chunks != 2:
        remedy = (
            "drop --num-layers-per-virtual-pipeline-stage"
            if parallel.pipeline_layout is None
            else f"give --pipeline-layout {2 * parallel.pipeline_model_parallel_size} counts"
        )
        yield f"{flag} has two chunks per pipeline rank, not {chunks}: {remedy}"
    elif name == "interleaved" and chunks == 1:
        yield (
            f"{flag} needs several chunks per pipeline rank: add "
            "--num-layers-per-virtual-pipeline-stage, or give --pipeline-layout "
            f"{2 * parallel.pipeline_model_parallel_size} counts"
        )
    elif name in ("1f1b", "zb-h1") and chunks > 1:
        yield f"{flag} has one chunk per pipeline rank: drop it or the chunks"
    elif name in V_SHAPED and config.model.num_layers < stages:
        yield (
            f"--num-layers {config.model.num_layers} is less than the {stages} stages of {flag}: "
            "each pipeline rank has two, and each stage needs a layer"
        )


def _layout(config: Sections) -> Problems:
    layers = config.model.num_layers
    pp = config.parallel.pipeline_model_parallel_size
    per_chunk = config.parallel.num_layers_per_virtual_pipeline_stage
    flag = f"--pipeline-layout '{config.parallel.pipeline_layout}'"
    counts = layout_counts(config.parallel.pipeline_layout or "")
    if counts is None:
        yield f"{flag} is not a list of layer counts of at least 1, such as 3,4,4,3"
        return
    if len(counts) % pp:
        yield (
            f"{flag} has {len(counts)} stages, not a multiple of --pipeline-model-parallel-size "
            f"{pp}"
        )
    if sum(counts) != layers:
        yield f"{flag} has {sum(counts)} layers in all, but --num-layers is {layers}"
    if per_chunk is not None and set(counts) != {per_chunk}:
        yield (
            f"{flag} contradicts --num-layers-per-virtual-pipeline-stage {per_chunk}: the layout "
            "alone is enough"
        )


def _interleaving(layers: int, pp: int, per_chunk: int) -> Problems:
    if layers % (pp * per_chunk) == 0 and layers // (pp * per_chunk) >= 2:
        return
    valid = [n for n in range(1, layers // (2 * pp) + 1) if layers % (pp * n) == 0]
    text = (
        f"--num-layers-per-virtual-pipeline-stage {per_chunk} does not divide {layers} layers into "
        f"two or more equal chunks on each of {pp} pipeline ranks"
    )
    if valid:
        near = sorted(sorted(valid, key=lambda n: abs(n - per_chunk))[:2])
        yield f"{text}: use {' or '.join(map(str, near))}"
    else:
        yield (
            f"{text}: no number of layers per chunk fits; use {nearest_multiples(layers, 2 * pp)} "
            "layers, or "
            f"--pipeline-layout with {2 * pp} counts"
        )


@check("world_size", *SIZES, "expert_tensor_parallel_size")
def _world(config: Sections) -> Problems:
    world = config.parallel.world_size
    tp, pp, cp, ep = (config.get(name) for name in SIZES)
    model = (
        f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp}"
        f"{f' x --context-parallel-size {cp}' if cp > 1 else ''}"
    )
    if world % (tp * pp * cp):
        yield (
            f"{world} processes are not a multiple of {model} = {tp * pp * cp}: start "
            f"{nearest_multiples(world, tp * pp * cp)} processes, or change the sizes"
        )
    elif world // pp % config.parallel.expert_ranks:
        etp = config.parallel.expert_tensor_parallel_size
        stage = math.lcm(tp * cp, etp * ep)
        whole = etp > 1 and world // pp % ep == 0
        yield (
            f"--expert-tensor-parallel-size {etp} x --expert-model-parallel-size {ep} = "
            f"{etp * ep} does not divide the {world // pp} ranks of a pipeline stage "
            f"({world} processes, {pp} stage{'s' * (pp > 1)}): start "
            f"{nearest_multiples(world, pp * stage)} processes, "
            f"{'give --expert-tensor-parallel-size 1, ' * whole}or change the sizes"
        )


@check("expert_model_parallel_size", "expert_tensor_parallel_size")
def _expert_parallel(config: Sections) -> Problems:
    parallel = config.parallel
    size = parallel.expert_model_parallel_size
    experts = config.model.num_experts
    if size % (each := parallel.expert_ranks_per_node or 1):
        yield f"--expert-ranks-per-node {each} does not divide --expert-model-parallel-size {size}"
    if experts is not None and experts % size:
        yield (
            f"--num-experts {experts} is not a multiple of --expert-model-parallel-size {size}: "
            f"use {nearest_multiples(experts, size)}"
        )
    tensor = parallel.tensor_model_parallel_size
    expert_tensor = parallel.expert_tensor_parallel_size
    if tensor % expert_tensor and expert_tensor % tensor:
        yield (
            f"--expert-tensor-parallel-size {expert_tensor} is neither a divisor nor a multiple of "
            f"--tensor-model-parallel-size {tensor}: use 1 or {tensor}"
        )


@check("zero_stage", "data_parallel_size", "context_parallel_size", "expert_tensor_parallel_size")
def _zero(config: Sections) -> Problems:
    parallel = config.parallel
    engine = config.engine
    group_size = parallel.data_parallel_size * parallel.context_parallel_size
    of = "the number of data-parallel ranks, context-parallel ones included"
    each = group_size
    for name in ("zero_state_shard_size", "zero_shard_size"):
        if (size := config.get(name)) > 0 and each % size:
            sizes = ", ".join(str(n) for n in range(1, each + 1) if each % n == 0)
            yield f"{config.written(name)} does not divide {of}: use one of {sizes}"
        elif size > 0:
            of = f"--zero-state-shard-size {size}"
            each = size
    size = engine.zero_shard_size * parallel.tensor_model_parallel_size
    experts = parallel.expert_ranks
    if size > 0 and size % experts and experts % size:
        yield (
            f"--zero-shard-size {engine.zero_shard_size} shards over {size} ranks of a stage, which "
            f"is neither a multiple nor a divisor of the {experts} ranks that hold all experts "
            "(--expert-tensor-parallel-size x --expert-model-parallel-size): change one of them"
        )


@check("context_parallel_size", "cp_comm_type")
def _context_parallel(config: Sections) -> Problems:
    model = config.model
    parallel = config.parallel
    size = parallel.context_parallel_size
    kind = parallel.cp_comm_type
    levels = parallel.hierarchical_context_parallel_sizes
    if kind == "a2a+p2p" and (len(levels) != 2 or math.prod(levels) != size):
        yield (
            f"--cp-comm-type a2a+p2p with --context-parallel-size {size} needs "
            "--hierarchical-context-parallel-sizes A P: ranks that exchange heads, and the size of "
            f"the ring, with A x P = {size}, not {' '.join(map(str, levels)) or 'none'}"
        )
        return
    if size == 1:
        return
    heads = {"p2p": 1, "a2a": size}.get(kind) or levels[0]
    tensor = parallel.tensor_model_parallel_size
    rows = math.lcm(2 * size, size * (tensor if parallel.sequence_parallel else 1))
    if model.seq_length is not None and model.seq_length % rows:
        yield (
            f"--seq-length {model.seq_length} is not a multiple of {rows}, which "
            f"--context-parallel-size {size} needs: use {nearest_multiples(model.seq_length, rows)}"
        )
    attention_heads = model.num_attention_heads
    if heads > 1 and attention_heads is not None and attention_heads % (tensor * heads):
        yield (
            f"--num-attention-heads {attention_heads} is not a multiple of "
            f"tensor-parallel size {tensor} x {heads} ranks that exchange heads: use "
            "--cp-comm-type p2p, or other sizes"
        )
    if heads < size:
        for limit, remedy in ring_limits(config, size // heads):
            yield f"{limit}: use --cp-comm-type a2a{remedy and ', or '}{remedy}"


def ring_limits(config: Sections, ring_size: int) -> Iterator[tuple[str, str]]:
    """Yield limits of ring attention that a2a does not have.

    Each comes with a remedy other than a2a, or ''.
    """
    length = config.model.seq_length
    dropout = config.model.attention_dropout
    if config.kernels.attention_backend in ("unfused", "local"):
        yield (
            f"--attention-backend {config.kernels.attention_backend} stores all scores, which "
            "does not work on a ring",
            "--attention-backend auto",
        )
    if config.optimizer.qk_clip:
        yield "--qk-clip does not work on a ring", ""
    if not dropout:
        return
    default = all_options()["attention_dropout"].default
    flag = f"--attention-dropout {dropout}{' (the default)' if dropout == default else ''}"
    if config.data.reset_attention_mask:
        yield f"{flag} with --reset-attention-mask does not work on a ring", "--attention-dropout 0"
    step = 2 * ring_size * TILE
    if length is not None and length % step:
        yield (
            f"{flag} on a ring of {ring_size} ranks needs a --seq-length that is a multiple of "
            f"{step}, not {length}",
            f"--attention-dropout 0, or --seq-length {nearest_multiples(length, step)}",
        )


@check()
def _device_order(config: Sections) -> Problems:
    order = config.parallel.device_order
    if order is not None and sorted(order) != list(range(len(order))):
        yield (
            f"--device-order {','.join(map(str, order))} does not name each device of a node once: "
            f"{len(order)} devices are numbered 0 to {len(order) - 1}"
        )


@check("recompute_modules")
def _recompute_modules(config: Sections) -> Problems:
    modules = config.recompute.recompute_modules
    of_experts = [name for name in modules if name.startswith("moe")]
    if of_experts and config.model.num_experts is None:
        yield f"--recompute-modules {' '.join(of_experts)} needs --num-experts"
    if len(of_experts) > 1:
        yield "--recompute-modules moe recomputes moe_act, too: leave moe_act out"


@check("recompute_num_layers", "num_layers", "pipeline_model_parallel_size")
def _recompute_layers(config: Sections) -> Problems:
    parallel = config.parallel
    recompute = config.recompute
    number = recompute.recompute_num_layers
    layers = config.model.num_layers
    if recompute.recompute_granularity != "full":
        return
    if number > layers:
        yield f"--recompute-num-layers {number} is more than --num-layers {layers}"
    elif recompute.recompute_method == "block" and parallel.pipeline_layout is None:
        most = -(-layers // parallel.num_stages)
        if number > most:
            yield (
                f"--recompute-num-layers {number} is more than the {most} layers of a stage: use "
                f"{most}, or --recompute-method uniform"
            )
