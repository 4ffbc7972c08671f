"""Training of one small GPT twice: through the whole stack on any layout, and by plain torch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.config import Config
from megatron.config.pieces import load_pieces
from megatron.data.sampler import MicroBatch, make_micro_batch
from megatron.parallel.layout import DEFAULT_ORDER
from megatron.parallel.sharding import kind_of, sharding_of
from megatron.parallel.topology import Topology
from tests.helpers.groups import join
from tests.helpers.plain_optimizers import PLAIN, clip_plainly

# eps is larger than the default: where a gradient is nearly zero, Adam divides rounding errors by
# it.
BASE: dict[str, Any] = dict(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=16,
    max_position_embeddings=16,
    vocab_size=50,
    make_vocab_size_divisible_by=8,
    micro_batch_size=1,
    global_batch_size=8,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    lr=1e-2,
    weight_decay=0.1,
    clip_grad=0.5,
    adam_beta2=0.95,
    adam_eps=1e-3,
    init_method_std=0.1,
    seed=7,
    zero_reduce_bucket_size=9000,  # a layer has 12,704 elements: several buckets for each chunk
)
STEPS = 3
"""Adam's moments are used from the second step on. Each step costs the processes of a layout
hundreds of messages.
"""


_NOT_OF_THE_MODEL = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "cp_comm_type",
    "hierarchical_context_parallel_sizes",
    "sequence_parallel",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "expert_ranks_per_node",
    "moe_shared_expert_overlap",
    "tp_comm_overlap",
    "num_layers_per_virtual_pipeline_stage",
    "pipeline_schedule",
    "pipeline_layout",
    "rank_order",
    "zero_",  # stage and sizes
    "recompute",
    "gradient_accumulation_fusion",
    "bf16",
    "fp16",
    "initial_loss_scale",
    "loss_scale_window",
    "hysteresis",
    "main_grads_dtype",
)


def configured(fields: dict[str, Any], world_size: int) -> Config:
    """Return BASE with other fields; the field `pieces` names a file as --pieces does."""
    rest = {name: value for name, value in fields.items() if name != "pieces"}
    config = Config.create(**{**BASE, **rest, "world_size": world_size})
    return (
        dataclasses.replace(config, pieces=load_pieces(fields["pieces"]))
        if "pieces" in fields
        else config
    )


def model_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that change the numbers; the others change only how they are computed."""
    return {name: value for name, value in fields.items() if not name.startswith(_NOT_OF_THE_MODEL)}


def batches(
    config: Config, step: int, data_rank: int = 0, packed: bool = False
) -> list[MicroBatch]:
    """Return the micro-batches of one data-parallel rank.

    Rank r has samples r * b to (r + 1) * b - 1 of every b * dp samples, where b is the micro-batch
    size and dp the data-parallel size. With `packed` the documents are pieces of packed samples,
    which are full, end in one token of padding, or end in a whole document of padding.
    """
    model = config.model
    batch = config.batch
    dp = config.parallel.data_parallel_size
    b = batch.global_batch_size
    s = model.seq_length
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, model.vocab_size, (b, s + 1), generator=generator)
    # If the first token were repeated, both would have the same hidden state with rotary positions,
    # and rounding would decide which of the two an expert has no room for.
    tokens[:, 1] += (tokens[:, 1] == tokens[:, 0]).long()
    tokens[:, 1] %= model.vocab_size
    mask = (torch.rand(b, s, generator=generator) > 0.2).float()
    documents = (torch.rand(b, s, generator=generator) < 0.15).long().cumsum(1)
    starts = torch.zeros(b, s, dtype=torch.long)
    for i in range(1, s):
        starts[:, i] = torch.where(documents[:, i] != documents[:, i - 1], i, starts[:, i - 1])
    positions = (
        torch.arange(s) - starts if config.data.reset_position_ids else torch.arange(s).expand(b, s)
    )
    lengths = [np.bincount(row)[row[0] :] for row in documents.numpy()]
    segments = [
        (n + (np.arange(len(n)) == len(n) - 1), n, n[:-1])[i % 3] for i, n in enumerate(lengths)
    ]
    out = []
    for first in range(data_rank * batch.micro_batch_size, b, batch.micro_batch_size * dp):
        rows = slice(first, first + batch.micro_batch_size)
        number = step * b + first
        if packed:
            out.append(
                make_micro_batch(tokens[rows].numpy(), segments=segments[rows], first_sample=number)
            )
            continue
        joined = np.concatenate(lengths[rows]) if config.data.reset_attention_mask else None
        out.append(
            MicroBatch(
                tokens=tokens[rows, :-1],
                labels=tokens[rows, 1:],
                loss_mask=mask[rows],
                position_ids=positions[rows],
                cu_seqlens=None
                if joined is None
                else torch.from_numpy(np.append(0, joined.cumsum()).astype(np.int32)),
                first_sample=number,
                document_lengths=joined,
            )
        )
    return out


_UNKNOWN = -2


@contextlib.contextmanager
def routes() -> Iterator[dict[tuple[str, int], np.ndarray]]:
    """Record the experts [s, b, k] of each token, by router and first sample, in this context.

    A recomputation must choose the same.
    """
    experts_by_call: dict[tuple[str, int], np.ndarray] = {}
    from megatron.layers.expert_router import Router

    forward = Router.forward

    def recorded(self: Any, x: Any, call: Any) -> Any:
        weights, experts = forward(self, x, call)
        key = self.name, call.dropout.sample
        chosen = experts.numpy().reshape(-1, x.shape[1], experts.shape[1])
        if (cp := self.context.context_parallel) is not None:  # other ranks know the rest
            length = len(chosen) * cp.size
            full = np.full((length, *chosen.shape[1:]), _UNKNOWN)
            full[cp.positions(length, x.device).numpy()] = chosen
            chosen = full
        assert key not in experts_by_call or np.array_equal(experts_by_call[key], chosen), key
        experts_by_call[key] = chosen.copy()
        return weights, experts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "forward", recorded)
        yield experts_by_call


_SHARED = " of neighbours"


def local_shards(parameters: Any) -> dict[str, tuple[tuple[int, ...], np.ndarray]]:
    """Return {global name: (global offset, real values)} of this rank's parameters.

    A tensor part of which neighbouring ranks share consists of two parameters; the shared one gets
    a different name.
    """
    shards = {}
    for p in parameters:
        s = sharding_of(p)
        real = p.detach()[tuple(slice(0, n) for n in s.extent)]
        name = s.name if s.copies == 1 else f"{s.name}{_SHARED}"
        shards[name] = (s.offset, real.float().numpy().copy())
    return shards


def assemble(ranks: list[dict[str, tuple[tuple[int, ...], np.ndarray]]]) -> dict[str, np.ndarray]:
    """Assemble full parameters from the shards of all ranks; copies must agree exactly."""
    parameters: dict[str, np.ndarray] = {}
    for name in sorted({n.removesuffix(_SHARED) for rank in ranks for n in rank}):
        both = name, f"{name}{_SHARED}"
        shards = [rank[n] for rank in ranks for n in both if n in rank]
        shape = tuple(max(o[d] + v.shape[d] for o, v in shards) for d in range(shards[0][1].ndim))
        out = np.full(shape, np.nan, dtype=np.float32)
        for offset, values in shards:
            box = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
            seen = ~np.isnan(out[box])
            assert np.array_equal(out[box][seen], values[seen]), (
                f"copies of {name} differ between ranks"
            )
            out[box] = values
        assert not np.isnan(out).any(), f"{name} is not covered by the ranks"
        parameters[name] = out
    return parameters


@functools.cache
def _joined(
    tensor: int, pipeline: int, order: str, owners: Sequence[int], **sizes: int
) -> Topology:
    """Join groups once for all jobs of a layout: a process cannot create dozens of them."""
    return join(tensor, pipeline, order=order, owners=owners, **sizes)


class TrainingJob:
    """Model, engine and executor of this rank of run_processes, as a run builds them."""

    def __init__(self, config: Config, topology: Topology | None = None, **options: Any) -> None:
        from megatron.engine.engine import Engine, build_executor
        from megatron.model.gpt import build_chunks, layer_context
        from megatron.model.stages import stage_owners

        parallel = config.parallel
        owners = stage_owners(config)
        self.config = config
        self.topology = topology or _joined(
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            parallel.rank_order or DEFAULT_ORDER,
            () if owners[-1] == len(set(owners)) - 1 else owners,  # round-robin
            context_parallel_size=parallel.context_parallel_size,
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
            zero_shard_size=config.engine.zero_shard_size,
            zero_state_shard_size=config.engine.zero_state_shard_size,
            expert_ranks_per_node=parallel.expert_ranks_per_node or 1,
        )
        late = config.engine.zero_stage == 3
        self.context = layer_context(config, self.topology, late=late, **options)
        self.chunks = build_chunks(config, self.topology, self.context)
        self.chunks.train()
        self.engine = Engine(config, self.topology, self.chunks)
        self.executor = build_executor(config, self.topology, self.chunks, self.engine)

    def train(self, step: int, packed: bool = False) -> float:
        """Run the passes of a step; return the mean loss over all replicas."""
        micro_batches = batches(self.config, step, self.topology.replica, packed)
        losses = self.executor.train(micro_batches, loss_scale=self.engine.loss_scale)
        total = torch.zeros(1, dtype=torch.float64)
        if losses:
            first = torch.stack([loss.reshape(-1)[0] for loss in losses])  # without components
            total += first.double().mean() / self.topology.data.size
        if self.topology.world.size > 1:
            # Only last stages contribute; all tensor ranks of one have the same loss.
            dist.all_reduce(total)
        return total.item() / self.topology.tensor.size

    def step(self) -> Any:
        o = self.config.optimizer
        return self.engine.step(o.lr, decoupled_lr=o.decoupled_lr)

    def parameters(self) -> dict[str, tuple[tuple[int, ...], np.ndarray]]:
        self.engine.wait_for_weights()
        return local_shards(self.chunks.parameters())


def train_in_process(
    rank: int,
    fields: dict[str, Any],
    steps: int = STEPS,
    poison: tuple[int, int] | None = None,
    packed: bool = False,
) -> dict[str, Any]:
    """Train on one rank through the whole stack; call it by run_processes with the world size.

    poison  (step, rank): in this step, an element of a gradient of this rank becomes infinite
            before the optimizer step

    Return {"history": (loss, gradient norm, whether the step was skipped, loss scale) of each step,
    "parameters": this rank's shards, "skipped": number of skipped steps}. A process may do several
    runs, one after another.
    """
    # A gradient is changed after the backward passes: it must not be in flight by then.
    job = TrainingJob(
        configured(fields | ({"overlap_grad_reduce": False} if poison else {}), dist_world_size())
    )
    engine = job.engine
    history = []
    for step in range(steps):
        loss = job.train(step, packed)
        before = job.parameters() if poison else None
        if poison and poison[0] == step:
            gradient = engine.gradient(next(job.chunks.parameters()))
            if poison[1] == rank:
                gradient.view(-1)[3] = float("inf")
        scale = engine.loss_scale
        result = job.step()
        if before is not None and result.skipped:
            after = job.parameters()
            assert all(np.array_equal(before[n][1], after[n][1]) for n in before), (
                "a skipped step moved a weight"
            )
        if step == 0:
            engine.check_copies()
        history.append((loss, result.grad_norm, result.skipped, scale))
    return {
        "history": history,
        "parameters": job.parameters(),
        "skipped": engine.skipped_steps,
    }


def dist_world_size() -> int:
    import os

    return int(os.environ["WORLD_SIZE"])


def kind_of_parameter(p: torch.Tensor) -> str:
    return kind_of(sharding_of(p).name, sharding_of(p).global_shape)


class Unsharded:
    """Value of "full_parameters" in groups of one parameter each, in the order of `names`."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @property
    def group_of(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    def __call__(self, flats: list[torch.Tensor], change: Any, dtype: Any = None) -> None:
        for name, values in zip(self.names, flats, strict=True):
            values.copy_(change(name, values))


def scales_of_mup(config: Config, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return muP's factors of a parameter's learning rate and epsilon, by name and sizes.

    The rate of a hidden matrix is Adam's, or Muon's with updates of norm sqrt(max(out, in)).
    """
    m = config.model
    if not m.use_mup:
        return 1.0, 1.0
    eps = m.mup_base_hidden_size / m.hidden_size
    if not name.startswith("layers."):
        return 1.0, eps
    eps *= m.mup_base_num_layers / m.num_layers
    if len(shape) == 1 or name.endswith(("bias", "router.weight", "gate.weight")):
        return 1.0, eps
    h = m.mup_base_hidden_size
    d = m.mup_base_head_dim or 1
    ffn = m.mup_base_ffn_hidden_size
    for infix, width in (
        (".experts.", m.moe_ffn_hidden_size),
        (".shared_experts.", m.moe_shared_expert_intermediate_size),
    ):
        if infix in name:
            ffn = ffn * (width or 0) // (m.ffn_hidden_size or 1)
    heads = m.mup_base_num_attention_heads
    groups = m.mup_base_num_key_value_heads
    base_out, base_in = {
        "query_key_value": ((heads + 2 * groups) * d, h),
        "dense": (h, heads * d),
        "dense_h_to_4h": (ffn, h),
        "dense_4h_to_h": (h, ffn),
    }[name.split(".")[-2]]
    out, inputs = shape[-2:]
    if config.optimizer.optimizer == "muon":
        growth = out * base_in * max(base_out, base_in) / (base_out * inputs * max(out, inputs))
        return growth**0.5, eps
    return base_in / inputs, eps


def train_plainly(
    fields: dict[str, Any], steps: int = STEPS, packed: bool = False
) -> dict[str, Any]:
    """Run the same training in this process by torch alone, in fp32.

    There is no engine, no executor and no process group. Return {"history": (loss, gradient norm)
    of each step, "parameters": {name: values}}.
    """
    from megatron.model.gpt import build_chunks
    from megatron.parallel.layout import Layout
    from megatron.parallel.topology import Topology

    config = configured(model_fields(fields), 1)
    topology = Topology.from_layout(Layout(), 0, device=torch.device("cpu"))
    (model,) = build_chunks(config, topology).values()
    model.train()
    routers = [module for module in model.modules() if type(module).__name__ == "Router"]
    o = config.optimizer
    takes_full = getattr(config.pieces.optimizer, "full_parameters", None)
    unsharded = Unsharded()
    groups = []
    for p in filter(lambda p: p.requires_grad, model.parameters()):
        s = sharding_of(p)
        full = takes_full is not None and takes_full(s.name, s.global_shape)
        unsharded.names += [s.name] * full
        decay = o.weight_decay if s.decay else 0.0
        rate, eps = scales_of_mup(config, s.name, s.global_shape)
        ends = s.name in ("embedding.word_embeddings.weight", "output_layer.weight")
        groups.append(
            {
                "params": [p],
                "lr": (o.decoupled_lr if ends else o.lr) * rate,
                "weight_decay": decay / rate,
                "full_parameters": unsharded if full else None,
                "eps": o.adam_eps * eps,
            }
        )
    optimizer: torch.optim.Optimizer
    if config.pieces.optimizer is not None:
        optimizer = config.pieces.optimizer(groups, o)
    elif o.optimizer in PLAIN:
        optimizer = PLAIN[o.optimizer](groups, config)
    else:
        betas = (o.adam_beta1, o.adam_beta2)
        optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=betas, eps=o.adam_eps, foreach=False)
    history = []
    for step in range(steps):
        micro_batches = batches(config, step, packed=packed)
        total = 0.0
        if routers:
            model.context.experts.loss_scale = 1 / len(micro_batches)
        for batch in micro_batches:
            loss = model(batch, None).reshape(-1)[0] / len(micro_batches)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()
        for word in o.clip_grad_by_kind or ():
            kind, limit = word.split("=")
            of_kind = [p for p in model.parameters() if kind_of_parameter(p) == kind]
            assert torch.nn.utils.clip_grad_norm_(of_kind, float(limit)) > float(limit)
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_grad)
        optimizer.step()
        if o.qk_clip:
            clip_plainly(model, o)
        optimizer.zero_grad()
        for router in routers:
            if router.expert_bias is not None and router.weight.requires_grad:
                rate = config.model.moe_router_bias_update_rate
                router.expert_bias += rate * torch.sign(router.load.mean() - router.load)
            if router.last_load is not None:
                router.last_load.copy_(router.load)
            router.load.zero_()
        history.append((total, norm))
    return {
        "history": history,
        "parameters": {n: v for n, (_, v) in local_shards(model.parameters()).items()},
    }
