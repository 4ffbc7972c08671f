"""Agreement between ranks: figures, decisions and texts that all of them must share.

Four processes run all cases one after another, over several layouts.
"""

import dataclasses
import itertools
import math
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.config import Config
from megatron.data.sampler import MicroBatch, MicroBatchStream, Share
from megatron.errors import ConfigError
from megatron.kernels import choose, library, measured_times
from megatron.model.gpt import build_chunks
from megatron.model.stages import stage_owners
from megatron.parallel.layout import Layout, LayoutSizes
from megatron.parallel.topology import Topology
from megatron.training.report.events import StepRecord
from megatron.training.report.metrics import (
    FlopRates,
    Interval,
    Peak,
    counted,
    local_loss,
)
from megatron.training.run.evaluation import mean_loss
from megatron.training.run.generate import Sampling, generate
from megatron.training.run.host import (
    agree_on_times,
    check_kernels,
    masks_on_this_node,
    share_cores,
)
from megatron.training.run.process import Signals
from megatron.training.run.stopping import Agreement, StopRules
from tests.helpers.groups import join
from tests.helpers.processes import run_processes
from tests.helpers.text import GPT, PROMPTS, TextModel, one_process
from tests.helpers.tiny import tiny

pytestmark = pytest.mark.slow

RANKS = 4


# -- agreement -------------------------------------------------------------------------------------


def agree(topology, folder):
    """Return the sizes sent and the answers: with nothing on, one step late, and at once."""
    sent = []
    plain = dist.all_reduce

    def counted(x, *args, **kwargs):
        sent.append(x.numel())
        return plain(x, *args, **kwargs)

    agreement = Agreement(topology)
    on = [False]
    rank = topology.rank
    value = [10 + topology.rank]
    agreement.add("signal", lambda: value[0], lambda: on[0])
    # A decision of rank 1 does not count.
    agreement.add_first("save", lambda: rank == 1, lambda: on[0])
    agreement.add_first("late", lambda: rank == 0, lambda: on[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counted)
        agreement.post()
        answers = [dict(agreement.read())]
        on[0] = True
        word = torch.zeros(1)
        if rank == 0:  # the others ask when it is done: no rank waits for another
            agreement.post()
            for other in range(1, RANKS):
                dist.send(word, other)
        else:
            dist.recv(word, 0)
            agreement.post()
        value[0] = 99
        answers += [dict(agreement.read()), dict(agreement.read()), dict(agreement.now())]
        agreement.post()
        agreement.read()
        return [*answers, dict(agreement.read())], sent


def stop(topology, folder):
    """Look for a kill switch that the others have from the start, and rank 0 from the second time."""
    switch = Path(folder if topology.rank else f"{folder}/stop")
    flags = SimpleNamespace(exit_interval=None, kill_switch_file=str(switch))
    agreement = Agreement(topology)
    rules = StopRules(SimpleNamespace(training=flags), agreement, Signals(enabled=False))
    seen = [rules.check(1, agreement.now())]
    if topology.rank == 0:
        switch.touch()
    return [reason is not None for reason in (*seen, rules.check(2, agreement.now()))]


# -- figures ---------------------------------------------------------------------------------------

# Bytes held by each rank, too close for single precision to tell apart; ranks 2 and 3 hold the
# most.
HELD = (2**52 - 1, 2**40, 2**52 + 3, 2**52 + 3)
RESERVED = (2**52, 2**52 + 7, 2**52 + 6, 2**52 + 6)


def figures(topology, folder):
    """Return the figures.

    Only the last stage has losses, equal on its tensor ranks. Those of the third step are not
    finite; the next has a micro-batch without a token in the loss, and the last no others.
    """
    losses = []
    if topology.pipeline.is_last:
        losses = [torch.tensor(10.0 * topology.data.rank + i) for i in range(4)]
    weights = torch.tensor([0.1, 0.2, 0.3, 0.8])
    mine = local_loss(losses, None, topology)
    weighted = local_loss(losses, weights, topology)
    interval = Interval(topology, FlopRates(RANKS, 8, 1.0, 1.0), tiny())
    for iteration, loss in ((1, mine), (2, weighted)):
        interval.steps.append(StepRecord(iteration, 0, 0, 8, 0.1, loss, False))
    # of two nodes, in whose energy the others have no part
    energy = (20.0, 0.0, 40.0, 0.0)[topology.rank]
    interval.meter = SimpleNamespace(used_j=lambda: energy)
    partly = [loss * (i != 1) for i, loss in enumerate(losses)]  # no token in that micro-batch
    partial_loss = local_loss(partly, None, topology)
    mask = torch.tensor([[1.0], [0.0], [1.0], [1.0]])
    masked = [MicroBatch(*[x] * 4, None, 0) for x in mask]
    unfinished = [
        StepRecord(3, 0, 0, 8, 0.1, None if mine is None else mine * math.nan),
        StepRecord(4, 0, 0, 8, 0.1, partial_loss, counted=counted(masked, None, topology)),
        StepRecord(5, 0, 0, 8, 0.1, partial_loss, counted=counted(masked[1:2], None, topology)),
    ]
    return interval.reduce(HELD[topology.rank], RESERVED[topology.rank], unfinished)


def loss_of(first_sample):
    return 1.0 + 0.37 * first_sample**1.5


def tokens_of(first_sample):
    return first_sample % 5


class MaskedStream(MicroBatchStream):
    """Stream without content whose loss mask has as many ones as tokens_of says."""

    def take(self, n):
        masks = torch.arange(5)
        return [
            dataclasses.replace(b, loss_mask=(masks < tokens_of(b.first_sample)).float())
            for b in super().take(n)
        ]


def evaluate(topology, folder):
    def forward(batches):
        return (
            [torch.tensor(loss_of(b.first_sample)) for b in batches]
            if topology.pipeline.is_last
            else []
        )

    def measure(per_token):
        stream = MaskedStream(
            None, Share(3, topology.data.rank, topology.data.size), consumed_samples=12
        )
        batches = (stream.take(2) for _ in range(3))
        return mean_loss(forward, batches, topology, per_token=per_token)

    return measure(False), measure(True)


# -- kernels and cores -----------------------------------------------------------------------------

MODEL = dict(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=16, vocab_size=50)
LARGE = 2**63 - 1
# paths, fingerprints, whether all choose alike
LIBRARIES = {
    "none": ([None] * RANKS, [0] * RANKS, True),
    "equal": (["/l.so"] * RANKS, [LARGE] * RANKS, True),
    "missing": (["/l.so", "/l.so", None, "/l.so"], [LARGE, LARGE, 0, LARGE], True),
    "choices": (["/l.so"] * RANKS, [5] * RANKS, False),
}


def kernels(topology, folder):
    """Return this rank's message from check_kernels for each case of LIBRARIES."""
    messages = {}
    for name, (paths, prints, alike) in LIBRARIES.items():
        with pytest.MonkeyPatch.context() as patch:
            path = paths[topology.rank]
            host = (
                library.KernelLibrary(None, "", "", "nobody built one")
                if path is None
                else (library.KernelLibrary(Path(path), "host", "x86-64-v3", "", object()))
            )
            patch.setattr(library, "find", lambda device_type, host=host: host)
            patch.setattr(
                library,
                "fingerprint",
                lambda _, fingerprint=prints[topology.rank]: fingerprint,
                raising=False,
            )
            faster = choose.EVERY_TYPE if alike or topology.rank > 0 else ()
            patch.setattr(choose, "HOST_FASTER", dict.fromkeys(choose.OPERATORS, faster))
            config = Config.create(**MODEL, tensor_model_parallel_size=2, world_size=RANKS)
            try:
                check_kernels(config, topology)
                messages[name] = ""
            except ConfigError as error:
                messages[name] = str(error)
    return messages


def times(topology, folder):
    """Return whether the kernel of a norm is chosen, and the attention, on CPUs of several kinds.

    Of rank 0's measurement both are the opposite of the others'.
    """
    fused, blocks = (2.0, 1.0) if topology.rank == 0 else (1.0, 2.0)
    seconds = {
        "layer_norm float32": {"fused": fused, "torch": 1.5},
        "attention float32 512": {"128": blocks, "torch": 1.5},
    }
    try:
        measured_times.agree(measured_times.MeasuredTimes(seconds))
        agree_on_times(topology)
        chosen = choose.faster_on_host("layer_norm", "float32")
        return chosen, choose.fastest_attention("float32", 512)
    finally:
        measured_times.forget()


def bound_cores(topology, folder):
    mine = os.sched_getaffinity(0)
    rank = topology.rank
    cores = sorted(mine)
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    # It must not keep the others waiting.
    before = os.environ.pop("OMP_NUM_THREADS") if rank == 0 else ""
    try:
        masks = masks_on_this_node(os.sched_getaffinity(0))
        return masks, "OMP_NUM_THREADS" in share_cores(torch.device("cpu"), RANKS)
    finally:
        os.environ.update({"OMP_NUM_THREADS": before} if before else {})
        os.sched_setaffinity(0, mine)


# -- text ------------------------------------------------------------------------------------------

GREEDY = Sampling(temperature=0)
NEW = 11  # the longest text then has 16 tokens, all positions of the model
SPLIT = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
LAYOUTS = (
    {**SPLIT, "rank_order": "pp-tp-dp"},
    dict(tensor_model_parallel_size=4, sequence_parallel=True),
    dict(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1),
    dict(pipeline_model_parallel_size=2, pipeline_schedule="v-half"),
)
EXPERTS = dict(num_experts=4, moe_layer_freq=(0, 1, 1, 1), moe_router_topk=2)
OF_EXPERTS = (
    SPLIT,
    dict(
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
    ),
)


def texts(topology, folder):
    """Generate greedily on each layout, without and with experts, and by sampling on the first."""
    generated = []
    for fields, sampling in (
        *((fields, GREEDY) for fields in LAYOUTS),
        (SPLIT, Sampling(seed=5)),
        *(({**EXPERTS, **fields}, GREEDY) for fields in OF_EXPERTS),
    ):
        config = Config.create(**{**GPT, **fields}, world_size=RANKS)
        split = Topology.create(sizes=LayoutSizes.of(config), owners=stage_owners(config))
        chunks = build_chunks(config, split)
        chunks.train()
        made = generate(
            TextModel(config, split, chunks), PROMPTS, max_new_tokens=NEW, sampling=sampling
        )
        generated.append([text.ids for text in made])
        assert all(chunk.training for chunk in chunks.values()), "left as it was found"
    return generated


# -- the processes ---------------------------------------------------------------------------------

CASES = (  # the case, tensor and pipeline size
    (agree, (1, 1)),
    (stop, (1, 1)),
    (figures, (2, 2)),
    (figures, (1, 2)),
    (evaluate, (1, 2)),
    (evaluate, (2, 1)),
    (kernels, (2, 1)),
    (times, (1, 1)),
    (bound_cores, (1, 1)),
    (texts, (1, 1)),
)


def do_all(rank, folder):
    made = {(1, 1): join()}
    results = []
    for case, sizes in CASES:
        if sizes not in made:
            made[sizes] = Topology.create(*sizes)
        results.append(case(made[sizes], folder))
    return results


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """Return a function that gives the ranks' results of a case on a layout."""
    ranks = run_processes(RANKS, do_all, str(tmp_path_factory.mktemp("ranks")))

    def of(case, tensor=1, pipeline=1):
        return [results[CASES.index((case, (tensor, pipeline)))] for results in ranks]

    return of


def test_ranks_get_the_largest_number_of_the_moment_they_were_asked_in_one_reduction(
    results_of,
):
    late, now = ({"signal": signal, "save": 0, "late": 1} for signal in (10 + RANKS - 1, 99))
    assert results_of(agree) == [([{}, late, {}, now, {}], [3, 3, 3])] * RANKS


def test_the_kill_switch_is_the_view_of_rank_0_alone(results_of):
    assert results_of(stop) == [[False, True]] * RANKS


@pytest.mark.parametrize(("tensor", "replicas"), [(2, 1), (1, 2)])
def test_losses_are_averaged_over_micro_batches_and_replicas(results_of, tensor, replicas):
    every = np.array([[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]])[:replicas]
    weighted = (every * [0.1, 0.2, 0.3, 0.8]).sum()
    for losses, memory in results_of(figures, tensor, 2):
        assert losses.pop() is None
        expected = [every.mean(), weighted, math.nan, every[:, [0, 2, 3]].mean()]
        np.testing.assert_allclose(losses, expected, rtol=1e-6)
        # Beside the losses, whatever their value, and exact.
        layout = Layout(tensor=tensor, pipeline=2, data=replicas)
        stage_sizes = [[], []]
        for rank, size in enumerate(HELD):
            stage_sizes[layout.coordinates(rank)[2]].append(size)
        assert memory == Peak(
            2**52 + 3, 2, 2**52 + 7, (max(stage_sizes[0]), max(stage_sizes[1])), 60.0
        )


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 2), (2, 1)])
def test_an_evaluation_is_the_mean_over_micro_batches_and_replicas(results_of, tensor, pipeline):
    # 3 iterations of 2 micro-batches of 3 samples from sample 12 on; two replicas alternate.
    firsts = [12 + 3 * i for i in range(3 * 2 * 2)]
    losses = np.array([loss_of(f) for f in firsts])
    tokens = np.array([tokens_of(f) for f in firsts])
    for plain, per_token in results_of(evaluate, tensor, pipeline):
        marked = losses[tokens > 0]
        assert 0 < len(marked) < len(losses)
        np.testing.assert_allclose(plain, (marked.mean(), len(marked)), rtol=1e-6)
        mean = (losses * tokens).sum() / tokens.sum()
        np.testing.assert_allclose(per_token, (mean, tokens.sum()), rtol=1e-6)


def test_ranks_with_different_kernels_stop_on_every_rank(results_of):
    messages = results_of(kernels, 2)
    assert messages == [messages[0]] * RANKS
    assert {name for name, text in messages[0].items() if not text} == {"none", "equal"}
    missing = messages[0]["missing"]
    choices = messages[0]["choices"]
    assert "rank 0-1, 3" in missing and "rank 2" in missing and "/l.so" in missing
    assert "nobody built one" in missing
    assert "MEGATRON_KERNELS_LIBRARY" in missing
    assert "rank 0" in choices and "rank 1-3" in choices and "bias_activation" in choices


def test_all_ranks_choose_by_the_times_of_the_first(results_of):
    assert results_of(times) == [(False, "128")] * RANKS


def test_processes_tell_each_other_their_cores(results_of):
    cores = sorted(os.sched_getaffinity(0))
    masks = [{cores[rank % len(cores)]} for rank in range(RANKS)]
    assert results_of(bound_cores) == [(masks, rank > 0) for rank in range(RANKS)]


def test_text_does_not_depend_on_the_layout(results_of):
    """One process is compared with plain forward passes in test_generate."""

    def alone(sampling, **fields):
        model = one_process(**GPT, **fields)
        return [
            text.ids for text in generate(model, PROMPTS, max_new_tokens=NEW, sampling=sampling)
        ]

    greedy = alone(GREEDY)
    of_experts = alone(GREEDY, **EXPERTS)
    drawn = alone(Sampling(seed=5))
    # The test can fail: the texts differ and do not repeat one token.
    assert len(set(map(tuple, greedy))) == 3 and drawn != alone(Sampling(seed=9))
    assert all(len(set(itertools.chain(*texts))) > 5 for texts in (greedy, of_experts))
    expected = [greedy] * len(LAYOUTS) + [drawn] + [of_experts] * len(OF_EXPERTS)
    assert results_of(texts) == [expected] * RANKS
