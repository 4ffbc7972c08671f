"""Tests that need a CUDA or ROCm device: its kernels, its communication library, its memory.

They are skipped without one. The reference is the CPU in fp32 (or float64), which the other tests
compare with closed forms and other libraries. benchmarks/parity.py has the tolerances of training
and their reasons, and compares where there is no pytest.
"""

from __future__ import annotations

import importlib.util
import types
from itertools import product

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import parity
from benchmarks.parity import CAPTURED, LOSS, NO_DROPOUT, NORM, ON_CPU, PRECISION
from megatron.config import Config
from megatron.data.sampler import Separation, make_micro_batch
from megatron.kernels.ops.attention import REFERENCES, AttentionParameters
from megatron.layers import ring
from megatron.layers.attention_blocked import Weigher
from megatron.layers.attention_fused import flash_attention, torch_attention
from megatron.layers.attention_unfused import PLAIN, Scoring
from megatron.layers.context import ParameterFactory, normal
from megatron.layers.positions import Alibi, Documents, alibi_slopes
from megatron.layers.ring_flash import Flash
from megatron.model.gpt import build_chunks
from megatron.parallel.keyed_random import seeded
from megatron.parallel.layout import Layout
from megatron.parallel.topology import Group, Topology
from tests.engine.test_offload import assert_offloading_changes_nothing
from tests.helpers.launching import TINY

# processes that import torch on a cold file system
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DEVICE = torch.device("cuda", 0)


def needs_devices(number):
    if torch.cuda.device_count() < number:
        pytest.skip(f"needs two devices; this machine shows {torch.cuda.device_count()}")


def train(folder, arguments, ranks=1, env=None):
    """Train the tiny model in new processes: forked ones have DeepSpeed set up for the CPU."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    return parity.train(
        folder / f"metrics{len(list(folder.iterdir()))}.jsonl", [*TINY, *arguments], ranks, env
    )


def compare(actual, expected, loss, norm):
    assert actual.keys() == expected.keys()
    for iteration, record in actual.items():
        assert record["skipped"] == 0
        assert record["lm_loss"] == pytest.approx(expected[iteration]["lm_loss"], rel=loss)
        assert record["grad_norm"] == pytest.approx(expected[iteration]["grad_norm"], rel=norm)


@pytest.fixture(scope="module")
def cpu_run(tmp_path_factory):
    arguments, env = ON_CPU
    return train(tmp_path_factory.mktemp("cpu"), [*NO_DROPOUT, *arguments], env=env)


PAIR = ["--pipeline-model-parallel-size", "2"]


@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        ("fp32", []),
        ("bf16", []),
        ("fp16", []),
        ("bf16", "--tensor-model-parallel-size 2 --sequence-parallel".split()),
        ("fp16", "--tensor-model-parallel-size 2 --recompute-granularity full".split()),
        ("fp16", PAIR),
        ("bf16", [*PAIR, "--enable-zbh1-pipeline"]),
        ("fp16", [*PAIR, "--num-layers-per-virtual-pipeline-stage", "1"]),
        ("fp16", ["--zero-stage", "1"]),
        ("bf16", ["--zero-stage", "0"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_training_follows_the_cpu(tmp_path, cpu_run, precision, layout):
    """Training follows the CPU, with threads that read ahead, pin memory and copy."""
    ranks = 2 if layout else 1
    needs_devices(ranks)
    arguments = [*NO_DROPOUT, *PRECISION[precision], *layout, "--num-workers", "2"]
    compare(train(tmp_path, arguments, ranks), cpu_run, LOSS[precision], NORM[precision])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "layout",
    [[], ["--recompute-granularity", "full"], ["--tensor-model-parallel-size", "2"]],
    ids=["plain", "recompute", "tensor"],
)
def test_captured_passes_have_the_bits_and_the_memory_of_eager_ones(tmp_path, layout, precision):
    ranks = 2 if "2" in layout else 1
    needs_devices(ranks)
    wide = "--hidden-size 512 --seq-length 256 --max-position-embeddings 256 --train-iters 6"
    fixed = ["--attention-dropout", "0", "--deterministic-mode"]
    arguments = [*fixed, *PRECISION[precision], *layout, *wide.split()]
    eager = train(tmp_path, arguments, ranks)
    captured = train(tmp_path, [*arguments, *CAPTURED], ranks)
    for iteration, record in captured.items():
        for name in ("lm_loss", "grad_norm"):
            assert record[name] == eager[iteration][name]
    # three messages of 0.5 MB beside activations and state of 100 MB
    assert captured[6]["memory_bytes"] <= 1.05 * eager[6]["memory_bytes"]


def test_phases_of_a_recorded_step_are_measured_on_the_device(tmp_path):
    for iteration, record in train(tmp_path, ["--timeline-interval", "2"]).items():
        measured = {phase for phase, of in record.get("phases_ms", {}).items() if of["min"] > 0}
        expected = {"forward", "backward", "optimizer"} if iteration % 2 == 0 else set()
        assert measured >= expected and bool(measured) == bool(expected)
        assert record["stage_memory_bytes"] == [record["memory_bytes"]]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_resumed_run_continues_with_the_same_masks(tmp_path, precision):
    """A resumed run continues with the same dropout masks as the uninterrupted run."""
    arguments = [*PRECISION[precision], "--hidden-dropout", "0.2", "--attention-dropout", "0.2"]
    uninterrupted = train(
        tmp_path, [*arguments, "--save", str(tmp_path / "saved"), "--save-interval", "2"]
    )
    rest = train(tmp_path, [*arguments, "--load", str(tmp_path / "saved"), "--load-tag", "2"])
    assert sorted(rest) == [3, 4]
    # Some kernels add in no fixed order; a mask of another key would change the loss by per cents.
    compare(rest, {i: uninterrupted[i] for i in rest}, 1e-3, 1e-2)


def test_a_checkpoint_of_a_device_loads_on_the_cpu(tmp_path, cpu_run):
    """A checkpoint of a device loads on the CPU, also from bf16: it has the fp32 weights."""
    train(
        tmp_path, [*NO_DROPOUT, "--bf16", "--save", str(tmp_path / "saved"), "--save-interval", "2"]
    )
    arguments, env = ON_CPU
    rest = train(
        tmp_path,
        [*NO_DROPOUT, *arguments, "--load", str(tmp_path / "saved"), "--load-tag", "2"],
        env=env,
    )
    assert sorted(rest) == [3, 4]
    compare(rest, {i: cpu_run[i] for i in rest}, LOSS["bf16"], NORM["bf16"])


def test_offloaded_state_arrives_and_leaves_in_time():
    """Buckets are large enough for their transfers to be under way when the host is far ahead."""
    assert_offloading_changes_nothing(DEVICE, elements=3_000_000)


@pytest.mark.parametrize(
    "segments", [None, [np.array([10, 1, 3, 19]), np.array([5, 16])]], ids=["eod", "packed"]
)
@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize("positions", ["learned_absolute", "rope", "alibi"])
def test_loss_and_gradients_of_a_model(positions, recompute, segments):
    """Loss and gradients match the CPU in fp32. The same weights are drawn on any device."""
    config = Config.create(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        seq_length=32,
        vocab_size=60,
        make_vocab_size_divisible_by=8,
        init_method_std=0.1,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        swiglu=True,
        position_embedding_type=positions,
        reset_attention_mask=True,
        recompute_granularity=recompute,
    )
    tokens = torch.randint(0, 60, (2, 33), generator=torch.Generator().manual_seed(1)).numpy()
    results = []
    for device in ("cpu", DEVICE):
        topology = Topology.from_layout(Layout(), 0, device=torch.device(device))
        model = build_chunks(config, topology)["0"]
        batch = make_micro_batch(
            tokens, separation=Separation(0, reset_attention_mask=True), segments=segments
        ).to(device)
        loss = model(batch, None)
        loss.backward()
        results.append((loss.item(), {n: p.grad.cpu() for n, p in model.named_parameters()}))
    (loss, gradients), (loss_there, gradients_there) = results
    assert loss_there == pytest.approx(loss, rel=1e-5)
    for name, gradient in gradients.items():
        assert (gradients_there[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name


@pytest.mark.parametrize(("shape", "dim"), [((5000, 2000), 0), ((2000, 5000), 1)])
def test_weights_drawn_in_pieces_are_those_of_a_cpu(shape, dim):
    """Weights drawn in pieces equal the CPU's.

    Ten million elements are copied in several pieces while others are drawn.
    """
    there, here = (
        ParameterFactory(1, 1, 4, torch.device(d)).create("w", shape, dim, normal(0.02))
        for d in (DEVICE, "cpu")
    )
    assert torch.equal(there.cpu(), here)


CASES = pytest.mark.parametrize(
    ("groups", "alibi", "documents"), [*product([8, 2], [False, True], [False, True])]
)


def attention_case(groups, alibi, documents, d=64, heads=8):
    """Return q, k, v in float64 on the CPU, their ALiBi slopes, and lengths of documents.

    The size is one that no kernel divides evenly.
    """
    s = 200
    b = 2
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(s, b, n, d, generator=generator, dtype=torch.float64)
        for n in (heads, groups, groups)
    )
    lengths = np.array([70, 130, 16, 1, 2, 48, 64, 69]) if documents else None
    return q, k, v, Alibi(alibi_slopes(heads)) if alibi else None, lengths


def documents_on(device, lengths):
    """Return the documents of two samples."""
    return Documents(
        torch.tensor([0, *lengths.cumsum()], dtype=torch.int32, device=device), lengths, 2
    )


def run_attention(core, case, dtype, device, scoring=PLAIN):
    """Return output and gradients of q, k and v, in float64 on the CPU."""
    q, k, v = (x.detach().to(device, dtype, copy=True).requires_grad_() for x in case[:3])
    alibi = case[3]
    lengths = case[4]
    documents = None if lengths is None else documents_on(device, lengths)
    alibi = None if alibi is None else Alibi(alibi.slopes.to(device))
    out = core(q, k, v, scoring._replace(alibi=alibi, documents=documents))
    weights = torch.arange(out.numel(), dtype=torch.float64).cos().view(out.shape)
    out.backward(weights.to(device, dtype))
    return [x.detach().cpu().double() for x in (out, q.grad, k.grad, v.grad)]


def close(actual, expected, tolerance):
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).norm() / b.norm() < tolerance


# Relative to the norm of the whole: a few roundings of the format. ALiBi's bias is rounded to the
# format too.
@CASES
@pytest.mark.parametrize(
    ("core", "dtype", "tolerance"),
    [
        ("torch", torch.float32, 1e-5),
        ("torch", torch.bfloat16, 2e-2),
        ("torch", torch.float16, 3e-3),
        ("flash", torch.bfloat16, 2e-2),
    ],
)
def test_attention(groups, alibi, documents, core, dtype, tolerance):
    case = attention_case(groups, alibi, documents)
    expected = run_attention(torch_attention, case, torch.float64, torch.device("cpu"))
    close(run_attention(core_of(core), case, dtype, DEVICE), expected, tolerance)


class AttentionOperators(TorchDispatchMode):
    """Record the names of torch's operators of attention, forward and backward."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if "attention" in name:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(torch.version.hip is not None, reason="ROCm has batches of documents")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("scoring", [PLAIN, Scoring(0.2, window=20)], ids=["all", "window"])
def test_torch_gets_all_documents_in_one_call(scoring, groups, head_dim):
    case = attention_case(groups, False, True, head_dim)
    expected = run_attention(torch_attention, case, torch.float64, torch.device("cpu"), scoring)
    with AttentionOperators() as seen:
        actual = run_attention(torch_attention, case, torch.bfloat16, DEVICE, scoring)
    close(actual, expected, 2e-2)
    assert seen.names == ["_flash_attention_forward", "_flash_attention_backward"]


@pytest.mark.parametrize("alibi", [False, True])
def test_cudnn_makes_no_plans_for_shapes_that_change(alibi):
    """Neither batches of documents nor passes without gradients are cuDNN's."""
    q, k, v, bias, lengths = attention_case(8, alibi, True)
    q, k, v = (x.to(DEVICE, torch.bfloat16).requires_grad_() for x in (q, k, v))
    bias = None if bias is None else Alibi(bias.slopes.to(DEVICE))
    with AttentionOperators() as seen:
        scoring = Scoring(alibi=bias, documents=documents_on(DEVICE, lengths))
        torch_attention(q, k, v, scoring).sum().backward()
        with torch.no_grad():
            torch_attention(q, k, v, Scoring(alibi=bias))
    assert len(seen.names) >= 3 and not any("cudnn" in name for name in seen.names)


def core_of(backend):
    """Return attention by torch or by flash_attn, which may be missing."""
    if backend == "flash":
        pytest.importorskip("flash_attn")
    return flash_attention if backend == "flash" else torch_attention


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("backend", ["torch", "flash", None])
def test_a_ring_of_one_place(monkeypatch, backend, groups, documents):
    """Its softmax is merged of rectangles: two are causal and one is seen as a whole."""
    core_of(backend)
    nothing = types.SimpleNamespace(wait=lambda: torch.zeros((), device=DEVICE))
    monkeypatch.setattr(ring.Ring, "rotate", lambda self, x: nothing)

    def attend(q, k, v, scoring):
        parameters = AttentionParameters(8 // groups, q.shape[-1] ** -0.5)
        flash = Flash(backend, parameters.share, parameters.scale) if backend else None
        weigher = Weigher(REFERENCES, None, parameters)
        of = ring.Ring(Group((0,), 0), 1, 1, weigher, scoring.documents, flash)
        return ring._Ring.apply(of, q.unflatten(2, (-1, parameters.share)), k, v).flatten(2, 3)

    case = attention_case(groups, False, documents)
    expected = run_attention(torch_attention, case, torch.float64, torch.device("cpu"))
    close(run_attention(attend, case, torch.bfloat16, DEVICE), expected, 2e-2)


@pytest.mark.parametrize("core", ["torch", "flash"])
def test_documents_are_attended_to_without_waiting_for_the_device(core):
    """Attention to documents never waits for the device, with dropout, forward and backward.

    Any synchronisation raises while the test runs.
    """
    attend = core_of(core)
    batch = make_micro_batch(
        np.zeros((2, 201), np.int64),
        segments=[np.array([70, 131]), np.array([16, 1, 2, 48, 64, 69])],
    ).pin_memory()
    q, k, v = (torch.randn(200, 2, n, 64, device=DEVICE, dtype=torch.bfloat16) for n in (8, 2, 2))
    q.requires_grad_()
    for strict in (False, True):  # the first pass may set up the kernels
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        try:
            moved = batch.to(DEVICE)
            assert moved.cu_seqlens is not None and moved.document_lengths is not None
            documents = Documents(moved.cu_seqlens, moved.document_lengths, 2)
            attend(q, k, v, Scoring(documents=documents, dropout=0.1)).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("core", ["torch", "flash"])
def test_attention_dropout_is_a_function_of_its_key(core, documents):
    attend = core_of(core)
    q, k, v = (torch.randn(64, 2, 4, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    cut = documents_on(DEVICE, np.array([20, 44, 1, 2, 60, 1])) if documents else None
    before = torch.cuda.get_rng_state(DEVICE)
    outputs = []
    for seed in (5, 5, 6):
        with seeded(DEVICE, seed):
            outputs.append(attend(q, k, v, Scoring(documents=cut, dropout=0.3)))
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    assert torch.equal(torch.cuda.get_rng_state(DEVICE), before)
