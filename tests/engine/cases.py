"""Cases that the processes of the engine tests run."""

import pytest
import torch

import megatron.engine.engine as engine_module
import megatron.engine.optimizer as optimizer_module
from megatron.engine.engine import Engine
from megatron.errors import ConfigError
from megatron.kernels.choose import Fusions
from megatron.kernels.ops.optimizer import FusedAdamW
from megatron.parallel.topology import Topology
from tests.engine import toy
from tests.helpers.groups import join

STEPS = 3


def lr(step):
    return toy.LR * (step + 1)


def weight_decay(step):
    return toy.DECAY * (step + 1)


def build(topology, precision, zero_stage=1, fused=False, **fields):
    """Build an engine with torch's optimizer, or with FusedAdamW.

    That uses torch's operators where no kernels are loaded.
    """
    fields = {**fields, "optimizer_implementation": "auto"} if fused else fields
    config = toy.config(precision, zero_stage, **fields)
    if not fused:
        return Engine(config, topology, toy.build(topology))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_module, "choose_fusions", lambda *_: Fusions(optimizer=True))
        engine = Engine(config, topology, toy.build(topology))
    assert isinstance(engine._basic, FusedAdamW)
    return engine


def step(engine, topology, s):
    toy.backward(engine, topology, s)
    return engine.step(lr(s), weight_decay=weight_decay(s))


def train(topology, precision, zero_stage, fused=False):
    """Return masters before the first step, each step's result, and everything after the last."""
    engine = build(topology, precision, zero_stage, fused)
    out = {"start": toy.state_pieces(engine), "results": []}
    for s in range(STEPS):
        if s == 1:  # gradients that are thrown away leave no trace
            toy.backward(engine, topology, 99)
            engine.clear_gradients()
        out["results"].append(step(engine, topology, s))
    return out | {"state": toy.state_pieces(engine), "weights": toy.weight_pieces(engine)}


def bad_gradient(topology, precision, zero_stage, name, **fields):
    """Give the last rank that holds `name` an infinite gradient in the second of three steps."""
    engine = build(topology, precision, zero_stage, **fields)
    results = []
    before = None
    for s in range(STEPS):
        toy.backward(engine, topology, s)
        if s == 1:
            before = toy.state_pieces(engine)
            victim = topology.rank == topology.world.size - 1
            for p in engine.chunks.parameters():
                if victim and p.sharding.name == name:
                    engine.gradient(p).view(-1)[0] = float("inf")
        results.append(engine.step(lr(s)))
        if s == 1:
            after = toy.state_pieces(engine)
            scale = engine.loss_scale
    return {
        "results": results,
        "before": before,
        "after": after,
        "scale": scale,
        "skipped_steps": engine.skipped_steps,
        "state": toy.state_pieces(engine),
        "scalars": engine.scalars(),
    }


def bad_gradient_on_host(topology, precision):
    """Run the same under an optimizer that cannot skip a step by itself, as a user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            engine_module,
            "build_optimizer",
            lambda groups, *_: torch.optim.SGD(groups, momentum=0.9),
        )
        return bad_gradient(topology, precision, 1, "mixed", optimizer="sgd")


def scale_grows(topology):
    """Run fp16 with plain SGD; the loss scale doubles after every step."""
    sgd = dict(optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0)
    engine = build(topology, "fp16", **sgd, loss_scale_window=1, initial_loss_scale=64.0)
    scales = []
    for s in range(2):
        toy.backward(engine, topology, s)
        scales.append(engine.step(0.5).loss_scale)
    return {"scales": scales, "state": toy.state_pieces(engine)}


def unequal_groups(topology, precision):
    """Return the whole model's state after two steps without clipping.

    Do the same for a model whose last stage has only parameters with weight decay.
    """
    states = []
    for lacks in (False, True):
        chunks = toy.build(topology)
        if lacks and topology.pipeline.is_last:
            for chunk in chunks.values():
                del chunk._parameters["final_norm"]
        engine = Engine(toy.config(precision, clip_grad=0.0), topology, chunks)
        for s in range(2):
            step(engine, topology, s)
        states.append(toy.state_pieces(engine))
    return states


def no_parameters(topology):
    """Train with a last stage that has none, and with parameters that are frozen too late."""
    messages = []
    for missing in (True, False):
        chunks = toy.build(topology)
        if missing and topology.pipeline.is_last:
            for chunk in chunks.values():
                chunk._parameters.clear()
        try:
            engine = Engine(toy.config(), topology, chunks)
            chunks.requires_grad_(False)
            step(engine, topology, 0)
        except ConfigError as error:
            messages.append(str(error))
    return messages


# -- reduction behind backward passes, gathering behind forward passes -----------------------------


def contribute(engine, topology, step, micro_batch, skip=""):
    """Add gradients as layers and hooks do in a backward pass.

    The last rank goes through the parameters in reverse order.
    """
    parameters = list(engine.chunks.parameters())[:: 1 if topology.data.is_last else -1]
    for p in parameters:
        if p.sharding.name != skip:
            g = (toy.gradient(p, topology, step, micro_batch) * engine.loss_scale).to(p.dtype)
            p.gradient_accumulator.add(g)


def overlapped(topology, precision, stage, overlap, trouble=""):
    """Return the results of four steps, the buckets in flight before each, and the last state.

    trouble, in the third step   'missing': one rank has no gradient of `mixed`; 'infinite': one
                                 rank's `up.bias` is; 'broken': the step stops in the middle, at a
                                 different point on each rank, and is repeated
    """
    fields = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    engine = build(topology, precision, stage, **fields)
    last = topology.rank == topology.world.size - 1
    sent = []
    results = []
    for s in range(4):
        if s == 2 and trouble == "broken":
            engine.begin(toy.MICRO_BATCHES)
            for m in range(toy.MICRO_BATCHES - last):
                contribute(engine, topology, 50, m)
            engine.clear_gradients()
        engine.begin(toy.MICRO_BATCHES)
        for m in range(toy.MICRO_BATCHES):
            contribute(
                engine, topology, s, m, "mixed" if s == 2 and last and trouble == "missing" else ""
            )
            if s == 2 and trouble == "infinite" and last and m == 0:
                for p in engine.chunks.parameters():
                    engine.gradient(p).view(-1)[0] = float("inf")
        order = engine.plan.order
        sent.append((sum(map(engine._gradients._sums.was_sent, order)), len(order)))
        results.append(engine.step(lr(s)))
    engine.wait_for_weights()
    return {
        "results": results,
        "sent": sent,
        "state": toy.state_pieces(engine),
        "weights": toy.weight_pieces(engine),
    }


def refused(topology):
    """Refuse betas for SGD, a gradient after the last one, and a second begin.

    Nothing hangs afterwards.
    """
    messages = []
    sgd = build(topology, "fp32", optimizer="sgd")
    toy.backward(sgd, topology, 0)
    try:
        sgd.step(0.1, betas=(0.9, 0.95))
    except ConfigError as error:
        messages.append(str(error))
    engine = build(topology, "fp32")

    def passes(count):
        for m in range(count):
            contribute(engine, topology, 0, m % toy.MICRO_BATCHES)

    engine.begin(toy.MICRO_BATCHES)
    passes(toy.MICRO_BATCHES)
    engine.step(toy.LR)
    for wrong in (lambda: passes(1), lambda: engine.begin(toy.MICRO_BATCHES)):
        engine.begin(toy.MICRO_BATCHES)
        passes(toy.MICRO_BATCHES)
        try:
            wrong()
        except ConfigError as error:
            messages.append(str(error))
        engine.clear_gradients()
    engine.begin(toy.MICRO_BATCHES)
    passes(toy.MICRO_BATCHES)
    engine.step(toy.LR)
    return messages


# -- all of it -------------------------------------------------------------------------------------

PRECISIONS = ("fp32", "bf16", "fp16")
BOTH = (True, False)
# Tensor x pipeline x data; precision; ZeRO stage; FusedAdamW in place of torch's.
TRAINED = """
    1x1x1 fp32 1, 1x1x1 bf16 1, 1x1x1 fp16 1,
    1x1x2 fp32 0, 1x1x2 fp32 1, 1x1x2 bf16 1, 1x1x2 fp16 0, 1x1x2 fp16 1,
    1x1x2 bf16sums 0, 1x1x2 bf16sums 1, 1x1x2 fp32 0 fused, 1x1x2 bf16 1 fused, 1x1x2 fp16 1 fused,
    2x2x1 fp32 1, 2x2x1 fp16 1, 2x2x1 bf16sums 1 fused, 2x2x1 fp32 1 fused,
    2x1x2 fp32 1, 2x1x2 bf16sums 1, 2x1x2 fp16 0, 1x2x2 bf16 0, 1x2x2 fp16 1
"""
OVERLAPPED = """
    1x1x2 fp32 0, 1x1x2 bf16 1, 1x1x2 fp16 1, 2x1x2 bf16 1, 1x2x2 fp32 1, 1x2x2 fp16 0
"""
BAD = """
    2x2x1 fp32 1, 2x2x1 bf16 1 fused, 2x2x1 fp16 1 fused, 1x2x2 bf16 1, 1x2x2 fp16 0
"""
TROUBLES = ("missing fp32", "infinite bf16", "broken bf16")


def names(text):
    return [name.strip() for name in text.split(",")]


def parse(name):
    layout, precision, stage, *fused = name.split()
    tensor, pipeline, data = map(int, layout.split("x"))
    return (tensor, pipeline, data), precision, int(stage), bool(fused)


def on_layouts(size):
    """Run the cases of a world of this size."""
    join()
    topologies = {}
    out = {}
    for kind, text in (("", TRAINED), ("overlap ", OVERLAPPED), ("bad ", BAD)):
        for name in names(text):
            (tensor, pipeline, data), precision, stage, fused = parse(name)
            if tensor * pipeline * data != size:
                continue
            sizes = tensor, pipeline
            if sizes not in topologies:
                topologies[sizes] = Topology.create(*sizes)
            topology = topologies[sizes]
            if not kind:
                out[name] = train(topology, precision, stage, fused)
            elif kind == "bad ":
                victim = "mixed" if tensor > 1 else "down"
                out[kind + name] = bad_gradient(topology, precision, stage, victim, fused=fused)
            else:
                for on in BOTH:
                    out[f"{kind}{name} {on}"] = overlapped(topology, precision, stage, on)
    return out


def on_one(rank):
    out = on_layouts(1)
    topology = Topology.create()
    optimizers = dict(
        sgd=dict(optimizer="sgd", sgd_momentum=0.9),
        lion=dict(optimizer="lion"),
        ademamix=dict(optimizer="ademamix"),
    )
    for p in PRECISIONS:
        for name, fields in optimizers.items():
            out[f"bad {name} {p}"] = bad_gradient(topology, p, 1, "mixed", **fields)
        out[f"bad host {p}"] = bad_gradient_on_host(topology, p)
    return out | {"scale grows": scale_grows(topology)}


def on_two(rank):
    out = on_layouts(2)
    topology = Topology.create()
    for trouble in TROUBLES:
        kind, p = trouble.split()
        out |= {f"overlap {trouble} {on}": overlapped(topology, p, 1, on, kind) for on in BOTH}
    return out | {"refused": refused(topology)}


def on_four(rank):
    out = on_layouts(4)
    both = Topology.create(2, 2)
    out["no parameters"] = no_parameters(both)
    return out | {f"unequal groups {p}": unequal_groups(both, p) for p in PRECISIONS}
