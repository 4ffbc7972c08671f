"""Passes that are replayed are those that run eagerly, to the bit, and keep the rules of a capture.

On a CPU a rehearsal replays operators in place of a graph: the rest is what a GPU runs.
"""

import dataclasses
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.config import Config
from megatron.data.sampler import make_micro_batch
from megatron.engine.engine import build_executor
from megatron.engine.gradients import to_accumulator
from megatron.errors import ConfigError
from megatron.kernels import choose
from megatron.layers.transformer import TransformerLayer
from megatron.metrics_file import read_records
from megatron.model.gpt import build_chunks, layer_context
from megatron.parallel.gradient_accumulator import GradientAccumulator
from megatron.parallel.topology import Topology
from megatron.pipeline import captured
from megatron.pipeline.captured import Captures, Pool
from megatron.pipeline.executor import Executor
from megatron.program import pretrain
from tests.helpers.processes import SETUP_LIMIT_S, run_processes
from tests.helpers.tiny import tiny
from tests.parity.cases import (
    BLOCKED,
    CHEAP,
    DROPOUT,
    FULL,
    LLAMA,
    SELECTIVE,
    UNFUSED,
    layout,
    train,
)

WARM_UP = 2
STEPS = 4
MICRO_BATCHES = 4
CAPTURED = dict(cuda_graph_impl="local", cuda_graph_warmup_steps=WARM_UP)

# Masks of each micro-batch and step: those of a recorded one would be others.
IN_BLOCKS = dict(fused=True, **BLOCKED, **DROPOUT)

CASES = [
    layout(micro_batch_size=2, recompute=CHEAP, **IN_BLOCKS),
    layout(pp=2),
    # weight gradients wait while other micro-batches run; and only some passes are split
    layout(pp=2, schedule="zb-v", **IN_BLOCKS),
    layout(pp=2, schedule="dualpipev"),
]
CAMPAIGN = [
    layout(tp=2, sp=True, bf16=True, fused=True, **UNFUSED, **DROPOUT),
    layout(bf16=True),
    layout(**LLAMA),
    layout(recompute=CHEAP, fp16=True, initial_loss_scale=2.0**10),
    layout(dp=2, recompute=FULL, fused=True, **LLAMA),
    layout(pp=2, schedule="interleaved", **LLAMA),
    layout(zero=0),
    layout(recompute=FULL),
    layout(recompute=SELECTIVE),
    layout(cpu_offload=True),
    layout(qk_clip=True),
    layout(tp=2, tp_comm_overlap=True, bf16=True),
    layout(cp=2, cp_comm_type="a2a", **IN_BLOCKS),
    layout(dp=2, recompute=CHEAP),
    layout(dp=2, recompute=FULL, bf16=True, **IN_BLOCKS),
    layout(tp=2, sp=True, pp=2, schedule="zb-h1"),
    layout(tp=2, sp=True, dp=2, bf16=True, **LLAMA),
    layout(tp=2, pp=2, schedule="interleaved", recompute=SELECTIVE, **IN_BLOCKS),
    layout(pp=2, dp=2, schedule="zb-h1", recompute=CHEAP),
    layout(pp=2, schedule="zb-h1", **IN_BLOCKS),
    layout(pp=4, schedule="zb-h1"),
    layout(pp=2, schedule="v-half", bf16=True),
    layout(pp=4, schedule="interleaved"),
]


def passes(rank, cases):
    """Run each case eagerly and captured; return both, and how often a layer's code ran in each."""
    calls = [0]
    forward = TransformerLayer.forward

    def counting(*args, **options):
        calls[0] += 1
        return forward(*args, **options)

    def run(fields):
        calls[0] = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TransformerLayer, "forward", counting)
            (result,) = train(rank, [fields], STEPS)
        return result, calls[0]

    results = []
    for fields in cases:
        eager, calls_eager = run(fields)
        captured, calls_captured = run(fields | CAPTURED)
        results.append((eager, captured, calls_eager, calls_captured))
    return results


def in_progress(rank, size, fields):
    """Return of how many layers a rank keeps the activations of 1F1B at the most.

    Of as many micro-batches as there are stages from its own on (Narayanan et al., arXiv
    2104.04473, section 2.2).
    """
    stages = fields["pipeline_model_parallel_size"]
    stage = rank * stages // size
    return min(MICRO_BATCHES, stages - stage) * fields["num_layers"] // stages


def check(case, ranks):
    name, size, fields = case
    for rank, (eager, replayed, calls_eager, calls_captured) in enumerate(ranks):
        assert replayed["history"] == eager["history"]
        for name_of, (_, values) in eager["parameters"].items():
            np.testing.assert_array_equal(replayed["parameters"][name_of][1], values, name_of)
        warm_up = calls_eager * WARM_UP // STEPS
        if "1f1b" in name and "uniform" not in name:  # which runs layers again
            # As many micro-batches have memory of their own as in an eager run.
            assert calls_captured == warm_up + in_progress(rank, size, fields)
        assert warm_up < calls_captured < calls_eager


@pytest.mark.slow
@pytest.mark.timeout(SETUP_LIMIT_S)
@pytest.mark.parametrize("size", [1, 2])
def test_replayed_passes_give_the_bits_of_eager_ones(size):
    cases = [case for case in CASES if case[1] == size]
    ranks = run_processes(size, passes, [fields for *_, fields in cases], timeout_s=SETUP_LIMIT_S)
    for number, case in enumerate(cases):
        check(case, [rank[number] for rank in ranks])


@pytest.mark.campaign("parity")
@pytest.mark.timeout(SETUP_LIMIT_S)
@pytest.mark.parametrize("case", CAMPAIGN, ids=[name for name, *_ in CAMPAIGN])
def test_any_layout_replays_the_bits_of_eager_passes(case):
    check(case, [rank for (rank,) in run_processes(case[1], passes, [case[2]], timeout_s=600)])


def resumed(rank, folder):
    """Return losses and norms of an eager run, and of a captured one that was interrupted."""
    fields = dict(global_batch_size=2, train_iters=8, eval_interval=3, eval_iters=1)
    runs = [
        {},
        CAPTURED | dict(save=folder, exit_interval=4),
        CAPTURED | dict(load=folder),
    ]
    figures = []
    for number, changes in enumerate(runs):
        metrics = Path(folder, f"{number}.jsonl")
        pretrain(tiny(**fields, hidden_dropout=0.0, **changes, metrics_file=str(metrics)))
        figures.append([(r["lm_loss"], r["grad_norm"]) for r in read_records(metrics, "iteration")])
    return figures


@pytest.mark.slow
def test_an_interrupted_captured_run_has_the_bits_of_an_eager_one(tmp_path):
    ((eager, first, rest),) = run_processes(1, resumed, str(tmp_path))
    assert len(first) == len(rest) == 4
    assert first + rest == eager


class Live(TorchDispatchMode):
    """Count the bytes of living results of operators, as torch's allocators would.

    before  tensors that do not count
    """

    def __init__(self, before):
        super().__init__()
        self.peak = 0
        self._known = {}
        for x in before:
            self._see(x, 0)

    def _see(self, x, size):
        storage = x.untyped_storage()
        self._known.setdefault(storage._cdata, (StorageWeakRef(storage), size))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self._known = {key: one for key, one in self._known.items() if not one[0].expired()}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self._see(x, x.untyped_storage().nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._known.values()))
        return out


def peak_of_a_step(layers, records):
    """Return the largest number of bytes of the passes of one micro-batch."""
    config = Config.create(
        num_layers=layers,
        hidden_size=64,
        num_attention_heads=4,
        seq_length=64,
        vocab_size=256,
        micro_batch_size=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_backend="blocked",
        bf16=True,
        **(CAPTURED if records else {}),
    )
    topology = Topology.create()
    chunks = build_chunks(config, topology).to(torch.bfloat16).train()
    for p in chunks.parameters():
        p.gradient_accumulator = GradientAccumulator(p, torch.zeros(p.shape))
        p.register_post_accumulate_grad_hook(to_accumulator)
    engine = types.SimpleNamespace(
        begin=None, pass_ends=None, wait_for_weights=lambda: None, first_trained={}
    )
    run = build_executor(config, topology, chunks, engine)
    batches = [make_micro_batch(torch.randint(256, (2, 65)).numpy())]
    for _ in range(WARM_UP):
        run.train(batches)
    sums = [p.gradient_accumulator.total for p in chunks.parameters()]
    with Live([*chunks.parameters(), *sums]) as live:
        run.train(batches)
    return live.peak


def test_a_recorded_pass_keeps_what_an_eager_one_keeps(monkeypatch):
    """A recorded pass takes at most what a layer keeps more, whatever the number of layers.

    Recorded as for a graph, where memory is free when its tensor is: a rehearsal keeps all.
    """
    monkeypatch.setattr(captured, "_repeated", lambda *_: None)
    (eager, recorded), (eager_of_4, recorded_of_4) = (
        [peak_of_a_step(layers, records) for records in (False, True)] for layers in (2, 4)
    )
    of_a_layer = (eager_of_4 - eager) / 2
    assert recorded_of_4 - eager_of_4 == recorded - eager
    assert 0 < recorded - eager < of_a_layer


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor


class Stage(torch.nn.Module):
    """A stage whose part `inner` does as `function` does."""

    def __init__(self, function):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.inner = Inner(function)

    def forward(self, batch, hidden):
        return self.inner(batch.x * self.weight).sum()


class Inner(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def executor(stage):
    """Return an executor that captures the second step."""
    topology = Topology.create()
    message = (4,), torch.float32
    stages = {0: (stage, stage)}
    pool = Pool(topology.device, topology.flight, message)
    captures = Captures(stages, 0, pool, 1, lambda: None)
    return Executor(topology, {0: stage}, "1f1b", message, captures=captures)


RULES = {
    "_local_scalar_dense": lambda x: x * x.detach().sum().item(),
    "nonzero": lambda x: x[x.detach().nonzero().flatten()],
    "index": lambda x: x[x > 0],
    "bernoulli_": lambda x: torch.nn.functional.dropout(x, 0.5),
}


@pytest.mark.parametrize("operator", RULES)
def test_what_cannot_be_captured_is_named_with_its_layer(operator):
    run = executor(Stage(RULES[operator]))
    batch = Batch(torch.ones(4))
    run.train([batch])
    with pytest.raises(ConfigError, match=rf"(?s)forward pass of stage 0.*{operator}.*inner"):
        run.train([batch])


def test_gradients_leave_while_the_last_backward_pass_runs():
    """The backward pass of the last micro-batch runs eagerly, so that messages overlap with it."""
    events = []

    class Between(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            events.append("between")
            return gradient

    stage = Stage(lambda x: Between.apply(x) * stage.second)
    stage.second = torch.nn.Parameter(torch.ones(4))
    for name, p in stage.named_parameters():
        p.gradient_accumulator = GradientAccumulator(
            p, torch.zeros(4), lambda _, name=name: events.append(name)
        )
        p.register_post_accumulate_grad_hook(to_accumulator)
    run = executor(stage)
    for _ in range(3):
        events.clear()
        run.train([Batch(torch.ones(4))] * 2)
    assert events == ["second", "weight", "second", "between", "weight"]


def test_a_micro_batch_of_another_shape_is_refused():
    run = executor(Stage(lambda x: x))
    for _ in range(2):
        run.train([Batch(torch.ones(4))])
    with pytest.raises(ConfigError, match=r"x of .*\[3, 4\].*\[4\]"):
        run.train([Batch(torch.ones(3, 4))])


@dataclasses.dataclass(frozen=True)
class Divided(Batch):
    document_lengths: Any


def test_documents_of_a_data_set_are_refused_in_the_first_step():
    """Their lengths are on the host: a replay would repeat those of the first micro-batch."""
    run = executor(Stage(lambda x: x))
    with pytest.raises(ConfigError, match="document_lengths"):
        run.train([Divided(torch.ones(4), np.array([1, 3]))])


TINY = dict(
    num_layers=1,
    hidden_size=8,
    num_attention_heads=1,
    seq_length=8,
    cuda_graph_impl="local",
)


def test_masks_by_torch_are_refused():
    config = Config.create(vocab_size=8, attention_backend="blocked", **TINY)
    topology = Topology.create()
    context = dataclasses.replace(layer_context(config, topology), fusions=choose.NONE)
    chunks = build_chunks(config, topology, context)
    with pytest.raises(ConfigError, match=r"--hidden-dropout 0\.1.*attention_block.*bias_dropout"):
        build_executor(config, topology, chunks, None)
