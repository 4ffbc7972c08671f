"""Attention of parts of a sequence on several ranks, against the formula in float64."""

import dataclasses
import itertools
import sys
from collections import Counter

import pytest
import torch

from megatron.config import Config
from megatron.kernels.choose import ALL, NONE
from megatron.layers.attention import CoreAttention
from megatron.layers.attention_unfused import Scoring
from megatron.layers.context import CallContext
from megatron.layers.context_parallel import ContextParallel
from megatron.layers.positions import alibi_slopes
from megatron.layers.ring import Ring, attend
from megatron.parallel.flight import FlightRecorder
from megatron.parallel.keyed_random import DropoutKey
from megatron.parallel.topology import Group
from tests.helpers import flash_attn
from tests.helpers.fusions import context
from tests.helpers.groups import join
from tests.helpers.processes import run_processes
from tests.layers.test_attention import dense, documents_of

S = 32
B = 2
D = 8
LAYOUTS = (1, 2, 4)  # of four ranks, how many exchange heads
# heads, key-value heads, and settings of the model
MODELS = {
    "plain": (4, 4, {}),
    "grouped": (8, 2, {}),
    "multi-query": (4, 1, {}),
    "window": (4, 2, dict(window_size=(9, 0))),
    "short window": (4, 4, dict(window_size=(1, 0))),
    "cap": (4, 4, dict(attention_logit_softcapping=0.5)),
    "alibi": (4, 4, dict(position_embedding_type="alibi")),
    "documents": (4, 2, dict(documents=True)),
    "documents, window, alibi": (
        4,
        4,
        dict(documents=True, window_size=(5, 0), position_embedding_type="alibi"),
    ),
    "scale": (4, 4, dict(softmax_scale=0.7)),
}
# What the kernels of a backend cannot do, as choose_attention knows.
_NEITHER = {"position_embedding_type"}
LACKING = {"torch": _NEITHER | {"window_size", "attention_logit_softcapping"}, "flash": _NEITHER}
LENGTHS = ((3, 1, 14, 2, 12), (20, 12))


def formula(q, k, v, kind):
    """Return softmax(q k^T) v of whole sequences in float64."""
    scoring = Scoring(
        scale=kind.get("softmax_scale"),
        cap=kind.get("attention_logit_softcapping", 0.0),
        window=kind.get("window_size", (S,))[0],
    )
    slopes = alibi_slopes(q.shape[2]) if "position_embedding_type" in kind else None
    return dense(q, k, v, slopes, LENGTHS if "documents" in kind else [[S]] * B, scoring)


def core(
    context_parallel,
    name,
    length=S,
    fused=False,
    dropout=0.0,
    backend="blocked",
):
    """Return the attention of a model of MODELS, and the arguments of its calls."""
    heads, groups, kind = MODELS[name]
    config = Config.create(
        num_layers=1,
        hidden_size=heads * D,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        seq_length=length,
        max_position_embeddings=length,
        vocab_size=8,
        micro_batch_size=B,
        attention_dropout=dropout,
        **{key: value for key, value in kind.items() if key != "documents"},
    )
    of_layer = context(ALL if fused else NONE, context_parallel=context_parallel)
    documents = documents_of(LENGTHS) if kind.get("documents") else None
    key = DropoutKey(5, 6) if dropout else None
    attention = CoreAttention(of_layer, config, 0)
    attention.attention = backend
    return attention, CallContext(None, documents, key)


def tensors(name, dtype, length=S):
    """Return q, k, v and the gradient of the output, of whole sequences."""
    heads, groups, _ = MODELS[name]
    generator = torch.Generator().manual_seed(3)
    shapes = [(length, B, n, D) for n in (heads, groups, groups, heads)]
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.to(dtype) for x in drawn]


def run(context_parallel, name, dtype, length=S, **more):
    """Return output and gradients of this rank's rows."""
    attention, call = core(context_parallel, name, length, **more)
    full = tensors(name, dtype, length)
    rows = (
        torch.arange(length)
        if context_parallel is None
        else context_parallel.positions(length, torch.device("cpu"))
    )
    q, k, v, dout = (x[rows] for x in full)
    for x in (q, k, v):
        x.requires_grad_()
    out = attention(call, q, k, v)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def are_close(actual, expected, tolerance, what):
    for name, x, exact in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        error = (x.double() - exact.double()).abs().max().item()
        assert error < tolerance, (what, name, error)


def all_models(rank):
    """Compare each model with the formula: in float64, and in fp32 with kernels.

    Also with each backend of a ring that can compute it, in float64.
    """
    topology = join(context_parallel_size=4)
    for heads, name in itertools.product(LAYOUTS, MODELS):
        context_parallel = ContextParallel(topology.context, heads, attend)
        rows = context_parallel.positions(S, torch.device("cpu"))
        q, k, v, dout = tensors(name, torch.float64)
        for x in (q, k, v):
            x.requires_grad_()
        out = formula(q, k, v, MODELS[name][2])
        out.backward(dout)
        expected = [x[rows] for x in (out.detach(), q.grad, k.grad, v.grad) if x is not None]
        are_close(run(context_parallel, name, torch.float64), expected, 1e-12, (heads, name))
        are_close(
            run(context_parallel, name, torch.float32, fused=True),
            expected,
            5e-6,
            (heads, name, "fp32"),
        )

        for backend, lacking in LACKING.items():
            if heads == 4 or lacking & MODELS[name][2].keys():
                continue
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(sys.modules, "flash_attn.flash_attn_interface", flash_attn.module())
                actual = run(context_parallel, name, torch.float64, backend=backend)
            are_close(actual, expected, 1e-12, (heads, name, backend))


@pytest.mark.slow
def test_parts_of_attention_are_the_formula():
    run_processes(4, all_models)


def dropped(rank):
    """Compare with one process under dropout, whose masks come from the same positions."""
    topology = join(context_parallel_size=2)
    length = 128
    for heads, fused in itertools.product((1, 2), (False, True)):
        context_parallel = ContextParallel(topology.context, heads, attend)
        rows = context_parallel.positions(length, torch.device("cpu"))
        some, full = (
            run(of, "grouped", torch.float32, length, fused=fused, dropout=0.3)
            for of in (context_parallel, None)
        )
        are_close(some, [x[rows] for x in full], 1e-5, (heads, fused))


@pytest.mark.slow
def test_masks_of_dropout_are_those_of_one_process():
    run_processes(2, dropped)


class Messages(FlightRecorder):
    """Adds up the bytes of messages and of collectives by name, each once."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()
        self.order = []

    def enter(self, name, kind, size_bytes, *rest, **more):
        # A message is entered when it is posted and when it is waited for; a collective has a
        # sequence number only then.
        if not more.get("sequence"):
            self.order.append(name.decode())
            self.bytes[name.decode()] += size_bytes
        return super().enter(name, kind, size_bytes, *rest, **more)


def kept_and_sent(rank, backend):
    """Return what attention keeps, and what is sent in the forward and in the backward pass.

    Also the order of messages and of the work of the steps in the forward pass.

    The rows of a rank are 16 in all cases: the sequences grow with the ranks.
    """
    results = []
    work = Ring.rectangles
    for size, heads in ((1, 1), (2, 1), (4, 1), (4, 4)):
        messages = Messages()
        length = 16 * size
        group = dataclasses.replace(join(context_parallel_size=size).context, flight=messages)
        context_parallel = ContextParallel(group, heads, attend) if size > 1 else None
        attention, call = core(context_parallel, "plain", length, backend=backend)
        rows = (
            slice(0, 16)
            if context_parallel is None
            else context_parallel.positions(length, torch.device("cpu"))
        )
        q, k, v, dout = (x[rows].clone() for x in tensors("plain", torch.float32, length))
        for x in (q, k, v):
            x.requires_grad_()
        saved = {}

        def keep(x, saved=saved):
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        def rectangles(ring, *step, messages=messages):
            messages.order.append("work")
            return work(ring, *step)

        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(Ring, "rectangles", rectangles)
            out = attention(call, q, k, v)
        forward = dict(messages.bytes)
        order = list(messages.order)
        messages.bytes.clear()
        out.backward(dout)
        results.append((sum(saved.values()), forward, dict(messages.bytes), order))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["blocked", "torch"])
def test_memory_of_a_rank_is_flat_and_messages_are_those_of_the_formula(backend):
    for (alone, *_), two, four, exchanged in run_processes(4, kept_and_sent, backend):
        assert two[0] == four[0] == alone
        rows = 16
        heads = MODELS["plain"][0]
        pair = 2 * rows * B * heads * D  # elements of keys and values
        for ranks, (_, forward, backward, order) in ((2, two), (4, four)):
            # posted before the work of a step, and waited for behind it
            assert order == ["exchange", "work", "exchange"] * (ranks - 1) + ["work"]
            # in fp32 e + 4 is twice e; a message is posted, and waited for
            assert forward == {"exchange": 2 * (ranks - 1) * pair * 4}
            assert backward == {"exchange": 2 * (ranks - 1) * pair * (4 + 4)}
        # 2 H + 2 G elements of each row, of which a quarter stays
        assert exchanged[1] == exchanged[2] == {"all_to_all": 2 * pair * 4}


@pytest.mark.parametrize("heads", [1, 2, 3, 6])
def test_rows_of_all_ranks_are_the_sequence(heads):
    """Each position is on one rank, in chunks that make causal attention even."""
    length = 6 * 6 * 4
    size = 6
    ranks = [ContextParallel(Group(range(size), rank), heads) for rank in range(size)]
    rows = [of.positions(length, torch.device("cpu")) for of in ranks]
    assert torch.equal(torch.cat(rows).sort()[0], torch.arange(length))
    for group in range(size // heads):  # the ranks of a group see as many keys as those of any
        seen = sum(int((rows[group * heads + i] + 1).sum()) for i in range(heads))
        assert seen == length * (length + 1) // 2 * heads // size
