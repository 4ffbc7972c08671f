"""Parameters without a model: given gradients let any layout be compared with whole tensors.

A toy has every kind of parameter that the engine tells apart: cut along each dimension, replicated,
with partial gradients, tied over stages, padded, with and without weight decay, of odd sizes.
"""

import functools
import zlib
from dataclasses import dataclass

import numpy as np
import torch

from megatron.config import Config
from megatron.config.io import CheckpointConfig as ToyCheckpoint  # noqa: F401
from megatron.parallel.sharding import attach, shard, sharding_of


@dataclass(frozen=True)
class Spec:
    name: str
    shape: tuple[int, ...]
    stage: int  # of two; the tied one is on both
    dim: int | None = None
    padded: int | None = None
    partial_gradient: bool = False
    tied: bool = False
    decay: bool = True


SPECS = (
    Spec("embed", (10, 3), 0, dim=0, padded=16, tied=True),
    Spec("up", (8, 6), 0, dim=0),
    Spec("up.bias", (8,), 0, dim=0, decay=False),
    Spec("norm", (7,), 0, partial_gradient=True, decay=False),
    Spec("down", (5, 8), 1, dim=1),
    Spec("mixed", (3, 2, 5), 1),
    Spec("final.norm", (3,), 1, decay=False),
)
SHAPES = {s.name: s.shape for s in SPECS}
CLIP = 0.5
DECAY = 0.1
EPS = 1e-4
LR = 1e-2
MICRO_BATCHES = 3


def full(name, *key):
    """Draw the global tensor of a parameter by `key`, fp32; no key: its initial weights."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr((name, *key)).encode()))
    return torch.randn(SHAPES[name], generator=generator)


FIELDS = dict(
    num_layers=2,
    hidden_size=3,
    num_attention_heads=1,
    seq_length=4,
    vocab_size=10,
    micro_batch_size=1,
    global_batch_size=6,
    lr=LR,
    weight_decay=DECAY,
    clip_grad=CLIP,
    adam_beta2=0.95,
    adam_eps=EPS,
    initial_loss_scale=1024.0,
    hysteresis=1,
    zero_reduce_bucket_size=40,
    zero_allgather_bucket_size=40,
    overlap_param_gather=False,
    log_num_zeros_in_grad=True,
    log_params_norm=True,
)
PRECISIONS = {
    "fp32": {},
    "bf16": dict(bf16=True),
    "bf16sums": dict(bf16=True, main_grads_dtype="bf16"),
    "fp16": dict(fp16=True),
}


def config(precision="fp32", zero_stage=1, **fields):
    """Return settings of an engine, of torch's AdamW; precision bf16sums: gradient sums too."""
    if not fields.keys() & {"optimizer", "exp_avg_dtype"}:
        fields = {"optimizer_implementation": "torch", **fields}
    return Config.create(**{**FIELDS, **PRECISIONS[precision], "zero_stage": zero_stage, **fields})


def local(full, p):
    """Return this rank's part of a global tensor, padded with zeros to the local shape."""
    s = sharding_of(p)
    out = torch.zeros(p.shape, dtype=full.dtype)
    shard = full[tuple(slice(o, o + n) for o, n in zip(s.offset, s.extent, strict=True))]
    out[tuple(slice(0, n) for n in s.extent)] = shard
    return out


def build(topology):
    """Build the chunk of this rank, with fp32 parameters."""
    chunk = torch.nn.Module()
    for spec in SPECS:
        stages = (
            (0, topology.pipeline.size - 1)
            if spec.tied
            else (min(spec.stage, topology.pipeline.size - 1),)
        )
        if topology.pipeline.rank not in stages:
            continue
        partial = spec.partial_gradient and topology.tensor.size > 1
        sharding = shard(
            spec.name,
            spec.shape,
            spec.dim,
            topology.tensor.rank,
            topology.tensor.size,
            padded=spec.padded,
            partial_gradient=partial,
            tied=spec.tied,
            decay=spec.decay,
        )
        p = attach(torch.nn.Parameter(torch.empty(sharding.shape)), sharding, topology.tensor.size)
        p.data = local(full(spec.name), p)
        chunk.register_parameter(spec.name.replace(".", "_"), p)
    return torch.nn.ModuleDict({str(topology.pipeline.rank): chunk})


def micro_gradient(name, step, data_rank, micro_batch):
    """Return the whole gradient of one micro-batch, already divided by their number.

    Some elements are always zero.
    """
    zero = full(name, "zeros") < -0.5
    return (
        full(name, "gradient", step, data_rank, micro_batch).masked_fill(zero, 0.0) / MICRO_BATCHES
    )


def terms(spec, full, tensor_size, pipeline_size):
    """Split the whole gradient into terms of the tensor ranks, or of the first and last stage."""
    count = tensor_size if spec.partial_gradient else min(pipeline_size, 2) if spec.tied else 1
    if count == 1:
        return [full]
    first = 0.25 * full
    return [first, *[(full - first) / (count - 1)] * (count - 1)]


def gradient(p, topology, step, micro_batch):
    """Return the gradient that a backward pass leaves on this rank.

    Where several ranks hold terms of a sum, return this rank's term.
    """
    spec = next(s for s in SPECS if s.name == sharding_of(p).name)
    full = micro_gradient(spec.name, step, topology.data.rank, micro_batch)
    addends = terms(spec, full, topology.tensor.size, topology.pipeline.size)
    if len(addends) == 1:
        return local(full, p)
    return local(
        addends[topology.tensor.rank if spec.partial_gradient else -int(topology.pipeline.is_last)],
        p,
    )


def backward(engine, topology, step):
    """Run all micro-batches of one step, as the executor does."""
    for m in range(MICRO_BATCHES):
        for p in engine.chunks.parameters():
            g = (gradient(p, topology, step, m) * engine.loss_scale).to(p.dtype)
            p.grad = g if p.grad is None else p.grad + g
        engine._gradients.collect()


def same(g):
    return g


def summed_gradients(
    layout,
    step,
    rounded=same,
    added=same,
):
    """Return the whole gradient of all ranks of (tensor, pipeline, data), float64.

    rounded  effect of the working precision on the gradient of one micro-batch on one rank
    added    effect of the sums' format on each: over micro-batches, over replicas, over the ranks
             of a model
    """
    tensor, pipeline, data = layout

    def total(values):
        return functools.reduce(lambda a, b: added(a + b), values)

    def of_replica(spec, replica, rank):
        micro_gradients = (
            micro_gradient(spec.name, step, replica, m) for m in range(MICRO_BATCHES)
        )
        return total(
            rounded(terms(spec, g, tensor, pipeline)[rank]).double() for g in micro_gradients
        )

    sums = {}
    for spec in SPECS:
        ranks = range(len(terms(spec, micro_gradient(spec.name, step, 0, 0), tensor, pipeline)))
        sums[spec.name] = total(
            total(of_replica(spec, d, rank) for d in range(data)) for rank in ranks
        )
    return sums


class Reference:
    """AdamW of torch on whole tensors in float64, unsharded and without DeepSpeed."""

    def __init__(self):
        self.weights = {s.name: full(s.name).double().requires_grad_() for s in SPECS}
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [self.weights[s.name] for s in SPECS if s.decay], "weight_decay": DECAY},
                {
                    "params": [self.weights[s.name] for s in SPECS if not s.decay],
                    "weight_decay": 0.0,
                },
            ],
            lr=LR,
            betas=(0.9, 0.95),
            eps=EPS,
            foreach=False,
            fused=False,
        )

    def step(
        self,
        gradients,
        lr,
        weight_decay=DECAY,
        clip=CLIP,
    ):
        """Clip and update; return the norm before clipping."""
        self.optimizer.param_groups[0]["weight_decay"] = weight_decay
        for name, w in self.weights.items():
            w.grad = gradients[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), clip).item()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return norm

    def check(self, state, atol):
        """Compare the weights of a state with these."""
        for name, w in self.weights.items():
            np.testing.assert_allclose(
                state[f"master.{name}"], w.detach().numpy(), rtol=0, atol=atol, err_msg=name
            )

    def moments(self, name):
        return self.optimizer.state[self.weights[name]]


def state_pieces(engine):
    """Return {"master.NAME": [(global offset, values)]} of this rank's optimizer; moments alike."""
    out = {}
    for f in engine.fragments():
        for kind, flat in {"master": f.master, **f.moments}.items():
            shards = [(offset, view.float().cpu().numpy().copy()) for offset, view in f.real(flat)]
            out.setdefault(f"{kind}.{f.sharding.name}", []).extend(shards)
    return out


def weight_pieces(engine):
    """Return {NAME: [(global offset, values)]} of the working weights."""
    out = {}
    for p in engine.chunks.parameters():
        s = sharding_of(p)
        real = p.detach()[tuple(slice(0, n) for n in s.extent)]
        out.setdefault(s.name, []).append((s.offset, real.float().cpu().numpy().copy()))
    return out


def by_location(shards):
    """Return pieces by name and offset."""
    return {(name, offset): x for name, some in shards.items() for offset, x in some}


def state_by_place(engine):
    return by_location(state_pieces(engine))


def assert_same(actual, expected):
    """Compare arrays by name, to the bit."""
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(actual[name], values, err_msg=str(name))


def assemble(ranks, shapes=SHAPES):
    """Assemble whole tensors of these shapes from all ranks' pieces.

    Every element must be present, and equal in all copies.
    """
    tensors = {}
    for of_rank in ranks:
        for key, shards in of_rank.items():
            name = key.split(".", 1)[1] if key not in shapes else key
            out = tensors.setdefault(key, np.full(shapes[name], np.nan))
            for offset, values in shards:
                region = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
                known = out[region]
                assert np.all(np.isnan(known) | (known == values)), f"ranks disagree on {key}"
                out[region] = values
    for key, values in tensors.items():
        assert not np.isnan(values).any(), f"nobody holds all of {key}"
    return tensors
