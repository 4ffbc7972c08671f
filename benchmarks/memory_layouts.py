"""Layouts in which memory model and dry run, or dry run and runs, are compared.

SHAPES and drawn are those of the first comparison; the others are runs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from megatron.config import Config
from megatron.config.parallel import V_SHAPED
from megatron.errors import ConfigError

Fields = dict[str, Any]
SMALL: Fields = dict(
    num_layers=8,
    hidden_size=512,
    num_attention_heads=8,
    seq_length=1024,
    max_position_embeddings=1024,
    vocab_size=8000,
    bf16=True,
    global_batch_size=64,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
LLAMA: Fields = dict(
    swiglu=True,
    add_bias_linear=False,
    num_key_value_heads=4,
    position_embedding_type="rope",
    normalization="rmsnorm",
    untie_embeddings_and_output_weights=True,
)
FULL: Fields = dict(recompute_granularity="full")
SELECTIVE: Fields = dict(recompute_granularity="selective")


def _layout(tp: Any = 1, pp: Any = 1, dp: Any = 1, **more: Any) -> dict[str, Any]:
    sizes = dict(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, world_size=tp * pp * dp
    )
    return {**SMALL, **sizes, **more}


@dataclass(frozen=True)
class Shape:
    """Configuration of a job on a kind of device, "gpu" or "cpu"."""

    name: str
    device: str
    fields: dict[str, Any] = field(hash=False)

    def config(self) -> Config:
        return Config.create(**self.fields)


def _shapes() -> tuple[Shape, ...]:
    sp = dict(sequence_parallel=True)
    chunk = dict(num_layers_per_virtual_pipeline_stage=1)
    untied = dict(untie_embeddings_and_output_weights=True)
    fp16: Fields = dict(fp16=True, bf16=None)
    alibi = dict(position_embedding_type="alibi")
    sharded: Fields = dict(zero_stage=3, zero_shard_size=2, recompute_num_layers=2)
    block: Fields = dict(recompute_method="block", recompute_num_layers=2)
    stored: Fields = dict(attention_backend="unfused", attention_dropout=0.1)
    uneven: Fields = dict(num_layers=16, pipeline_layout="1,2,3,2,3,1,2,2")
    gpu = {
        "DP 4, ZeRO 3 within 2, full by 2": _layout(dp=4, **sharded, **FULL),
        "DP 8, fp16": _layout(dp=8, **fp16),
        "DP 2, fp32": _layout(dp=2, bf16=None),
        "PP 8": _layout(pp=8),
        "PP 8, 1 micro-batch": _layout(pp=8, global_batch_size=1),
        "PP 8, 2 chunks, 39 micro-batches": _layout(
            pp=8, num_layers=16, global_batch_size=39, **chunk
        ),
        "PP 4, layers 3,2,2,1": _layout(pp=4, pipeline_layout="3,2,2,1"),
        "PP 4, 2 uneven chunks": _layout(pp=4, **uneven),
        "PP 2, full block of 2": _layout(pp=2, **block, **FULL),
        "no output chunks": _layout(cross_entropy_chunk_tokens=0, micro_batch_size=8),
        "ALiBi, GQA": _layout(num_key_value_heads=2, micro_batch_size=2, **alibi),
        "full, ALiBi, scores stored": _layout(**alibi, **stored, **FULL),
        "PP 2, RMSNorm beside an fp32 residual": _layout(
            pp=2, fp32_residual_connection=True, **{**LLAMA, "hidden_dropout": 0.1}
        ),
        "RMSNorm of torch": _layout(norm_implementation="torch", **LLAMA),
        "cross entropy of torch": _layout(cross_entropy_loss_fusion=False),
        "TP 8, SP, PP 2, untied, padded": _layout(tp=8, pp=2, vocab_size=8001, **untied, **sp),
        "norm before the residual": _layout(
            tp=2, apply_residual_connection_post_layernorm=True, **sp, **LLAMA
        ),
    }
    cpu = {
        "1 rank": _layout(),
        "fp32, DP 2": _layout(dp=2, bf16=None),
        "fp32, 512 tokens": _layout(bf16=None, seq_length=512),
        "PP 2, full, fp16": _layout(pp=2, **fp16, **FULL),
        "fp16, dropout": _layout(hidden_dropout=0.1, attention_dropout=0.1, **fp16),
        "fp16, SwiGLU, GQA, RoPE": _layout(**fp16, **LLAMA),
    }
    listed = [("gpu", gpu), ("cpu", cpu)]
    return tuple(
        Shape(name, device, fields) for device, group in listed for name, fields in group.items()
    )


SHAPES = _shapes()


def drawn(seed: int) -> Shape:
    """Draw a layout that the configuration allows."""
    draw = random.Random(seed)
    while True:
        shape = Shape(f"drawn {seed}", "gpu" if draw.random() < 0.8 else "cpu", _fields(draw))
        try:
            shape.config()
        except ConfigError:
            continue
        return shape


def _fields(draw: random.Random) -> dict[str, Any]:
    one_of = draw.choice
    chance = draw.random
    tensor = one_of((1, 2, 4))
    pipeline = one_of((1, 2, 4))
    data = one_of((1, 2, 4))
    context = one_of((1, 1, 2))
    micro_batch = one_of((1, 2))
    tokens = one_of((1024, 1024, 8192))
    fields: dict[str, Any] = {
        **SMALL,
        **(LLAMA if chance() < 0.5 else {}),
        "hidden_size": one_of((256, 512)),
        "seq_length": tokens,
        "max_position_embeddings": tokens,
        "tensor_model_parallel_size": tensor,
        "sequence_parallel": tensor > 1 and chance() < 0.7,
        "tp_comm_overlap": tensor > 1 and chance() < 0.5,
        "pipeline_model_parallel_size": pipeline,
        "context_parallel_size": context,
        "world_size": tensor * pipeline * context * data,
        "zero_stage": one_of((0, 1, 2, 2) if pipeline > 1 else (0, 1, 2, 3)),
        "micro_batch_size": micro_batch,
        "global_batch_size": micro_batch * data * one_of((1, 2, 3, 5, 9, 22)),
        "attention_backend": one_of(("auto", "auto", "auto", "unfused", "blocked")),
        "hidden_dropout": one_of((0.0, 0.0, 0.1)),
        "gradient_accumulation_fusion": chance() < 0.8,
    }
    modules = ["core_attn", "mlp_act", "layernorm"]
    if chance() < 0.3:
        experts = one_of((1, 2, 4))
        each = one_of((1, 2, tensor))
        fields |= dict(num_experts=4, moe_router_topk=2, expert_model_parallel_size=experts)
        fields |= dict(expert_tensor_parallel_size=each)
        modules += ["moe_act", "moe"]
    if pipeline > 1:
        fields |= one_of(
            (
                {},
                dict(pipeline_schedule=one_of(("zb-h1", *V_SHAPED))),
                dict(num_layers_per_virtual_pipeline_stage=1),
            )
        )
    chosen = tuple(draw.sample(modules, one_of((1, 2))))
    return fields | one_of(
        (
            {},
            dict(SELECTIVE, recompute_modules=chosen),
            dict(SELECTIVE, recompute_modules=chosen),
            dict(FULL, recompute_num_layers=one_of((1, 2))),
            dict(FULL, recompute_method="block"),
        )
    )


COMMON: Fields = dict(
    num_layers=4,
    vocab_size=8000,
    global_batch_size=2,
    micro_batch_size=1,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
LARGE: Fields = dict(
    hidden_size=1024,
    num_attention_heads=16,
    seq_length=1024,
    max_position_embeddings=1024,
    ffn_hidden_size=4096,
)
SMALLER: Fields = dict(
    hidden_size=512,
    num_attention_heads=8,
    seq_length=1024,
    max_position_embeddings=1024,
    ffn_hidden_size=2048,
)
"""Sizes of the model that is subtracted. They are large enough that its peak memory is that of
training, not of the program's start, and that the matrix library's own buffers, which are not
tensors, have their full size in both models: in bf16 they are some 10 MiB smaller at a hidden size
of 256 than at 512, and grow no more from there on."""


_SHORT: Fields = dict(seq_length=256, max_position_embeddings=256)
SHARED: dict[str, Any] = {**LARGE, **_SHORT, "num_layers": 8}
SHARED_SMALLER: dict[str, Any] = {**SMALLER, **_SHORT}
"""Sizes with few tokens, so that what ZeRO divides is most of the difference."""


@dataclass(frozen=True)
class MemoryRun:
    """Run with the fields of COMMON, `large` and `fields`; the baseline has `smaller`, not `large`.

    processes  number of ranks
    limit      largest allowed error, as a fraction of the measured value
    """

    name: str
    processes: int
    fields: dict[str, Any] = field(hash=False)
    large: dict[str, Any] = field(default_factory=LARGE.copy, hash=False)
    smaller: dict[str, Any] = field(default_factory=SMALLER.copy, hash=False)
    limit: float = 0.10


def _zero(name: str, processes: int, **fields: Any) -> MemoryRun:
    """Return a run in fp32: a CPU without bf16 instructions would take many times as long."""
    fields["global_batch_size"] = 2 * processes
    return MemoryRun(name, processes, fields, SHARED, SHARED_SMALLER, limit=0.03)


_B = dict(bf16=True)
_SP = dict(sequence_parallel=True)
_PP2 = dict(pipeline_model_parallel_size=2, global_batch_size=4)
_FOLDED = dict(
    tensor_model_parallel_size=2,
    expert_model_parallel_size=4,
    expert_tensor_parallel_size=1,
    num_experts=8,
    moe_router_topk=2,
    global_batch_size=4,
)
RUNS = (
    MemoryRun("bf16", 1, {**_B}),
    MemoryRun("fp32", 1, {}),
    MemoryRun("full recomputation", 1, {**_B, **FULL}),
    MemoryRun("micro-batch 2", 1, {**_B, "micro_batch_size": 2, "global_batch_size": 4}),
    _zero("DP 2, ZeRO 1", 2, zero_stage=1),
    _zero("DP 2, ZeRO 2", 2, zero_stage=2),
    _zero("DP 2, ZeRO 3", 2, zero_stage=3),
    _zero("DP 4, ZeRO 3 within 2", 4, zero_stage=3, zero_shard_size=2),
    MemoryRun("TP 2, SP", 2, {**_B, **_SP, "tensor_model_parallel_size": 2}),
    MemoryRun("PP 2", 2, {**_B, **_PP2}),
    *(
        MemoryRun(f"PP 2, {s}", 2, {**_B, **_PP2, "pipeline_schedule": s})
        for s in ("zb-h1", "v-half")
    ),
    MemoryRun("PP 4", 4, {**_B, **_PP2, "pipeline_model_parallel_size": 4}),
    MemoryRun("TP 2, PP 2", 4, {**_B, **_PP2, "tensor_model_parallel_size": 2}),
    MemoryRun("experts, EP 4 over TP 2, SP, and DP 2", 4, {**_B, **_FOLDED, **_SP}),
)
_GPT2 = {
    **SMALLER,
    **dict(num_layers=12, hidden_size=768, num_attention_heads=12, ffn_hidden_size=3072),
}
_WORK = dict(vocab_size=50304, micro_batch_size=4, global_batch_size=8)
DEVICE_RUNS = (
    MemoryRun("124M, bf16", 1, {**_B, **_WORK}, _GPT2),
    MemoryRun("124M, bf16, full recomputation", 1, {**_B, **_WORK, **FULL}, _GPT2),
    MemoryRun("124M, fp32", 1, {**_WORK}, _GPT2),
)
"""Runs on one GPU, where the allocator's peak counts tensors alone and needs no baseline."""


_HELD: Fields = dict(
    num_layers=6,
    hidden_size=256,
    num_attention_heads=4,
    seq_length=512,
    max_position_embeddings=512,
    micro_batch_size=4,
    global_batch_size=8,
)
_EXPERTS = {**_HELD, **dict(num_layers=4, num_experts=8, moe_router_topk=2, ffn_hidden_size=768)}
_GATED = {**_HELD, **dict(swiglu=True, normalization="rmsnorm", position_embedding_type="rope")}
_LONG = dict(seq_length=2048, max_position_embeddings=2048)
_WIDE = dict(hidden_size=512, micro_batch_size=2, global_batch_size=4)
PROCESSES = (
    MemoryRun("ZeRO 1", 2, {"zero_stage": 1}, _HELD),
    MemoryRun("ZeRO 1, 2,048 tokens", 2, {**_LONG, "micro_batch_size": 1}, _HELD),
    MemoryRun("ZeRO 2, gated", 2, {"zero_stage": 2}, _GATED),
    MemoryRun("ZeRO 3, gated", 2, {"zero_stage": 3}, _GATED),
    MemoryRun("PP 2, gated", 2, {"pipeline_model_parallel_size": 2}, _GATED),
    MemoryRun(
        "full recomputation", 2, {**FULL, "micro_batch_size": 8, "global_batch_size": 16}, _HELD
    ),
    MemoryRun("8 experts, ZeRO 1", 2, {}, _EXPERTS),
    MemoryRun("8 experts, ZeRO 3", 2, {"zero_stage": 3}, _EXPERTS),
    MemoryRun("8 experts, EP 2", 2, {"expert_model_parallel_size": 2}, _EXPERTS),
    MemoryRun("8 experts, PP 2", 2, {"pipeline_model_parallel_size": 2}, _EXPERTS),
    MemoryRun("hidden size 512, CP 2, gated", 2, {**_WIDE, "context_parallel_size": 2}, _GATED),
    MemoryRun("one process", 1, {"global_batch_size": 4}, _HELD),
)
"""Ordinary runs, whose processes are compared with what the dry run predicts that they hold."""
