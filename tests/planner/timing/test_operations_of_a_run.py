"""Traces against the operations of a run: every matrix product and tensor-parallel message."""

import itertools
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.data.sampler import MicroBatch
from megatron.kernels.choose import AttentionFeatures, choose_attention
from megatron.kernels.cost import Attention, Product
from megatron.parallel import collectives
from megatron.planner import stage as stages
from megatron.planner.events import Post, Wait
from megatron.planner.trace import trace
from tests.helpers.processes import run_processes
from tests.helpers.training import TrainingJob
from tests.planner.layouts import planned

SIZES = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 512 --vocab-size 500 "
    "--make-vocab-size-divisible-by 8 --global-batch-size 2 --cross-entropy-chunk-tokens 200"
)
LLAMA = (
    "--num-key-value-heads 2 --swiglu --normalization rmsnorm --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 "
    "--attention-dropout 0"
)
# Positions of the factors.
PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}


def key(m, n, k, batch):
    """Return the key of a product; autograd may transpose a batched one: [n, k] x [k, m]."""
    return (m, n, k, 1) if batch == 1 else (min(m, n), max(m, n), k, batch)


class Products(TorchDispatchMode):
    """Count the matrix products of this thread by (m, n, k, batch).

    Attention's own kernels are one operator each.
    """

    def __init__(self, batched):
        super().__init__()
        self.batched = batched
        self.order = []
        self.counts = Counter()
        self.attention = Counter()

    @classmethod
    def _should_skip_dynamo(cls):
        # Otherwise each process would import torch's compiler, for seconds, only to keep it out of
        # here.
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in PRODUCTS and (self.batched or name in ("mm", "addmm")):
            a, b = (args[i] for i in PRODUCTS[name])
            batch = a.shape[0] if a.dim() == 3 else 1
            made = key(a.shape[-2], b.shape[-1], a.shape[-1], batch)
            self.counts[made] += 1
            self.order.append(("product", made))
        if name.startswith("_scaled_dot_product"):
            self.attention["backward" if "backward" in name else "forward"] += 1
        return func(*args, **(kwargs or {}))


def ran(rank, cases):
    """Return this rank's products and messages in a step of two micro-batches, for each case."""
    return [_ran(TrainingJob(planned(case))) for case in cases]


def _ran(job):
    config = job.config
    s = config.model.seq_length
    b = config.batch.micro_batch_size
    tokens = torch.randint(
        0, config.model.vocab_size, (b, s + 1), generator=torch.Generator().manual_seed(1)
    )
    batch = MicroBatch(
        tokens[:, :-1], tokens[:, 1:], torch.ones(b, s), torch.arange(s).expand(b, s), None, 0
    )
    seen = Products(batched=backend(config) == "unfused")
    with messages_of(job.topology.tensor, seen.order), seen:
        job.executor.train([batch, batch])
    sent = Counter(event[1:3] for event in seen.order if event[0] == "post")
    return dict(seen.counts), dict(sent), dict(seen.attention), seen.order


@contextmanager
def messages_of(group, order):
    """Return ("post", collective, bytes, number) and ("wait", number) of a group, in `order`."""
    original_start = collectives.start
    original_all_reduce = collectives.all_reduce

    def post(call, size):
        number = sum(event[0] == "post" for event in order)
        order.append(("post", call, size, number))
        return number

    def start(call, of, size, *args, **kwargs):
        work = original_start(call, of, size, *args, **kwargs)
        if of is not group:
            return work
        number = post(call.decode(), size)
        wait = work.wait
        return SimpleNamespace(wait=lambda: (order.append(("wait", number)), wait()))

    def all_reduce(x, of, *args):
        if of is group and of.size > 1:
            order.append(("wait", post("all_reduce", x.nbytes)))
        return original_all_reduce(x, of, *args)

    with mock.patch.multiple(collectives, start=start, all_reduce=all_reduce):
        yield


def listed(config, rank):
    """Return the same from the trace."""
    traced = trace(config, "cpu")
    products = Counter()
    sent = Counter()
    attention = Counter()
    for of_rank in stages.stages_of(config)[rank :: config.parallel.pipeline_model_parallel_size]:
        for run in itertools.chain(*stages.stage_passes(traced, of_rank).values()):
            for operation in run.of.computations():
                if isinstance(operation, Product):
                    products[key(*operation[:4])] += 2 * run.times
                elif isinstance(operation, Attention):
                    attention["backward" if operation.backward else "forward"] += 2 * run.times
            for message in run.of.messages():
                sent[message.kind, message.bytes] += 2 * run.times
    return dict(products), dict(sent), dict(attention) if backend(config) == "torch" else {}


def backend(config):
    features = AttentionFeatures.of_layer(config, 0)
    return choose_attention(
        config.kernels, None, config.precision.dtype_name, config.model.seq_length, features
    )


def listed_in_order(config):
    """Return products, messages and waits in the order of the trace.

    There is one stage without recomputation.
    """
    events = []
    posts = 0
    (only,) = stages.stages_of(config)
    passes = stages.stage_passes(trace(config, "cpu"), only)
    of_step = 2 * [*passes["forward"], *passes["backward"]]
    for of in [run.of for run in of_step for _ in range(run.times)]:
        numbers = {}
        for step in of.steps:
            if isinstance(step, Product):
                events.append(("product", key(*step[:4])))
            elif isinstance(step, Post):
                events.append(("post", step.message.kind, step.message.bytes, posts))
                numbers[step.number], posts = posts, posts + 1
            elif isinstance(step, Wait):
                events.append(("wait", numbers[step.number]))
    return events


FULL = "--recompute-granularity full"
SELECTIVE = "--recompute-granularity selective"
CHUNKS = "--num-layers-per-virtual-pipeline-stage 1"


TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
SP = f"{TP2} --sequence-parallel"
OVERLAP = "--tp-comm-overlap"
# By processes.
CASES = {
    1: [
        LLAMA,
        f"--attention-backend unfused {SELECTIVE}",
        f"{FULL} --recompute-num-layers 3 --attention-backend fused",
        f"{SELECTIVE} --recompute-modules mlp_act layernorm --no-gradient-accumulation-fusion",
    ],
    2: [
        TP2,
        f"{SP} {LLAMA}",
        f"{SP} {FULL}",
        f"{SP} {OVERLAP} --tp-comm-overlap-chunks 3",
        f"{TP2} {OVERLAP} --micro-batch-size 2 --global-batch-size 4 --bf16 --no-async-tensor-model-parallel-allreduce",
        f"{PP2} {LLAMA} {CHUNKS}",
        f"{PP2} {CHUNKS} {FULL} --recompute-method block",
        f"{PP2} --enable-zbh1-pipeline {FULL}",
        f"{PP2} --pipeline-layout 1,3 {FULL} --recompute-num-layers 2",
    ],
    4: [f"{PP2} {SP} --enable-zbh1-pipeline"],
}


@pytest.mark.slow
@pytest.mark.parametrize("processes", CASES)
def test_a_step_multiplies_and_sends_what_the_trace_says(processes):
    runs = [f"{SIZES} --world-size {processes} {case}" for case in CASES[processes]]
    ranks = run_processes(processes, ran, runs)
    for i, case in enumerate(runs):
        config = planned(case)
        pipeline = config.parallel.pipeline_model_parallel_size
        explicit = backend(config) == "unfused"  # autograd orders its products
        for rank, of_cases in enumerate(ranks):
            *counts, order = of_cases[i]
            for actual, expected in zip(
                counts, listed(config, rank * pipeline // processes), strict=True
            ):
                assert actual == expected, f"rank {rank} of {case}"
            if pipeline == 1 and not config.recompute.recompute_granularity and not explicit:
                assert order == listed_in_order(config), f"rank {rank} of {case}"
