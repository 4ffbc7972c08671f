"""Trace against independent sources: the papers' formulas, modules' sizes, and real runs."""

import dataclasses
import json
import resource
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.kernels.cost import Attention, Product
from megatron.model.gpt import model_sizes
from megatron.parallel import gradient_accumulator
from megatron.planner import trace as traces
from megatron.planner.events import Alloc, Free, Pass, Recomputed
from megatron.planner.memory import changes, find_peak
from megatron.planner.recorder import record
from megatron.planner.stage import stage_flops, stage_passes, stages_of
from megatron.planner.trace import that_counts, trace
from tests.helpers.examples import examples
from tests.planner.timing.configs import RECOMPUTE, configs, run


# Ranks share a key and value head. An autograd function is recomputed.
@example(
    config=run("--num-query-groups 1 --recompute-granularity full --tensor-model-parallel-size 2"),
    device="cpu",
)
@example(config=run("--recompute-granularity selective"), device="cpu")
@example(
    config=run(
        "--multi-latent-attention --q-lora-rank 24 --qk-head-dim 24 --qk-pos-emb-head-dim 16",
        "--v-head-dim 20 --attention-backend blocked --recompute-granularity selective",
    ),
    device="cpu",
)
@examples(6)
@given(config=configs(), device=st.sampled_from(["cuda", "cpu"]))
def test_flops_are_those_of_the_model(config, device):
    """FLOPs equal those of the model's matrices and attention exactly: all are whole numbers.

    The vocabulary is the padded one, whose padding is multiplied too.
    """
    stages = stages_of(config)
    if config.kernels.attention_backend == "unfused":
        return  # counted below
    model = traces.sized(config).model
    recompute = config.recompute
    batch = config.batch.global_batch_size
    tensor_size = config.parallel.tensor_model_parallel_size
    # each of fewer key and value heads than ranks is computed on several
    groups = max(model.num_key_value_heads, tensor_size)
    vocabulary = model.padded_vocab_size(tensor_size)
    model = dataclasses.replace(model, vocab_size=vocabulary, num_key_value_heads=groups)
    sizes = model_sizes(dataclasses.replace(config, model=model))

    def flops(recompute):
        of_stages = (
            stage_flops(trace(config, device), stage, recompute=recompute) for stage in stages
        )
        ranks = tensor_size * config.parallel.data_parallel_size
        return sum(sum(each.values()) for each in of_stages) * ranks * config.num_micro_batches()

    assert flops(recompute=False) == sizes.flops_per_token() * model.seq_length * batch
    layers = [size for stage in stages for size in stage.recomputed]
    extra = sizes.recompute_flops_per_token(recompute, layers)
    assert flops(recompute=True) == extra * model.seq_length * batch


@pytest.mark.parametrize(
    ("device", "backend", "more"),
    [
        ("cuda", "fused", ""),
        ("cuda", "blocked", RECOMPUTE[1]),
        ("cpu", "fused", RECOMPUTE[2]),
        ("cpu", "blocked", RECOMPUTE[3]),
    ],
)
def test_a_layer_with_a_window_counts_its_keys(device, backend, more):
    """Every third layer sees 512 keys, the others 100: 4 FLOPs for a key, a head and its entries.

    Kernels of torch do not show the window: it is counted from the shapes of the blocks.
    """
    window = "--window-size 99 0 --window-attn-skip-freq 3 --attention-dropout 0.0"
    sizes = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"
    config = run(f"--attention-backend {backend} {window} {sizes} {more}")
    passes = [
        (of.times, of.of, of.recompute)
        for stage in stages_of(config)
        for runs in stage_passes(trace(config, device), stage).values()
        for of in runs
    ]

    def flops(recompute):
        return sum(
            times
            * sum(
                o.flops for o in of.computations(recompute=recomputed) if isinstance(o, Attention)
            )
            for times, of, repeated in passes
            for recomputed in (
                (None,) if repeated and recompute else () if repeated else (recompute,)
            )
        )

    once = 4 * 512 * (6 * 100 + 2 * 512) * 256 / 2
    assert flops(recompute=False) == 3 * once
    assert flops(recompute=True) == (once if more else 0)


def test_memory_of_a_window_grows_with_the_sequence_alone():
    """Four times the sequence takes four times the memory of attention's passes, not sixteen."""

    def most(seq):
        window = "--window-size 63 0 --attention-backend blocked --attention-dropout 0.0"
        config = run(f"--seq-length {seq} {window}")
        layer = trace(config, "cpu").layer
        return find_peak(changes(layer.forward.steps, 1, {}))[0].sum()

    assert most(2048) < 4.2 * most(512)


def test_explicit_attention_is_recomputed_as_far_as_its_weights():
    """torch stops before the product with the values, whose result no gradient needs."""
    flags = "--recompute-granularity selective --tensor-model-parallel-size 2"
    config = run("--attention-backend unfused", flags)
    backward = trace(config, "cuda").layer.backward
    of_scores = 2 * 512 * 512 * 256  # without the values, on two ranks
    assert backward.flops(recompute=True) == of_scores / 2


@pytest.mark.parametrize(
    ("device", "more"),
    [
        ("cpu", ""),
        ("cuda", "--recompute-granularity full --micro-batch-size 2"),
        ("cpu", "--attention-backend unfused --swiglu"),
        (
            "cuda",
            "--recompute-granularity selective --recompute-modules core_attn mlp_act layernorm",
        ),
        (
            "cuda",
            "--sequence-parallel --tp-comm-overlap --position-embedding-type rope "
            "--fp32-residual-connection",
        ),
    ],
)
def test_what_is_taken_is_given_back(device, more):
    """All tensors are freed after a backward pass, whole or split."""
    traced = trace(run(f"--tensor-model-parallel-size 2 {more}"), device)
    for module in (traced.embedding, traced.layer, traced.recompute, traced.head):
        if module is not None:
            assert not live_tensors(module.forward, module.backward)
            halves = Pass(module.inputs.steps + module.weights.steps, ())
            assert not live_tensors(halves)


def live_tensors(*passes):
    """Return the bytes of the tensors alive after these passes, by tensor number."""
    live = {}
    for each in passes:
        for step in each.steps:
            if isinstance(step, Alloc):
                live[step.id] = step.bytes
            elif isinstance(step, Free):
                live.pop(step.id, None)
    return live


def test_a_layer_that_is_recomputed_keeps_its_input_alone():
    """A recomputed layer keeps only its input; it hands on its output, kept by its neighbour."""
    config = run("--recompute-granularity full --tensor-model-parallel-size 2")
    hidden = 512 * 256 * 2
    recompute = trace(config, "cuda").recompute
    assert (
        recompute is not None
        and sum(live_tensors(recompute.forward).values()) == hidden == recompute.hands_on
    )
    plain = trace(run("--tensor-model-parallel-size 2"), "cuda").layer
    last = 2 * 512 * 256 * 1024 / 2  # its last product, whose result no gradient needs
    assert recompute.backward.flops(recompute=True) == plain.forward.flops() - last


@pytest.mark.parametrize(
    ("t", "sequence", "count"), [(1, "", 32), (8, "", 8 + 24 / 8), (8, "--sequence-parallel", 4)]
)
def test_a_layer_keeps_what_korthikanti_et_al_count(t, sequence, count):
    """A layer keeps the bytes of Korthikanti et al. (arXiv 2205.05198), equations 1, 2 and 4.

    They are 34 s b h, (10 + 24/t) s b h and 34/t s b h bytes without scores; 2 of them are masks,
    which are functions of keys here.
    """
    sizes = f"--hidden-size 1024 --tensor-model-parallel-size {t}"
    config = run("--hidden-dropout 0 --attention-dropout 0", sizes, sequence)
    layer = trace(config, "cuda").layer
    tokens = 512
    assert sum(live_tensors(layer.forward).values()) == pytest.approx(
        count * tokens * 1024, rel=0.01
    )


DEPENDS = """
--hidden-size 512
--swiglu
--seq-length 1024
--normalization rmsnorm
--micro-batch-size 2
--tensor-model-parallel-size 2
--fp16 --no-bf16
--vocab-size 5000
--fp32-residual-connection
--no-bias-gelu-fusion
--untie-embeddings-and-output-weights
--recompute-granularity selective
--reset-position-ids
--main-grads-dtype bf16
"""


@pytest.mark.parametrize("more", DEPENDS.strip().splitlines())
def test_what_a_trace_depends_on_gives_another(more):
    """Settings that affect a trace give another trace; others give the same."""
    plain = trace(run(), "cuda")
    changed = trace(run(more), "cuda")
    assert changed is not plain and any(
        getattr(changed, name) is not getattr(plain, name)
        for name in ("embedding", "layer", "head")
    )
    sizes = "--num-layers 4 --world-size 4 --global-batch-size 16 --zero-stage 0"
    same = run(sizes, "--lr 0.0003 --init-method-std 0.01 --seed 7")
    assert trace(same, "cuda") is plain


def plain_of(module):
    passes = (module.forward, module.backward, module.inputs, module.weights)
    return module.parameters, module.hands_on, [(p.steps, p.labels) for p in passes]


def test_the_torch_here_does_not_decide_what_a_gpu_does(monkeypatch):
    """A trace of a GPU is that of a torch with all that the code can use.

    Before 2.8 torch lacks sums of products in fp32, and before 2.9 logarithms of attention that a
    ring can use; 2.10 has no rule for such a sum without data.
    """
    config = that_counts(run("--context-parallel-size 2 --attention-dropout 0"), "layer")
    now = record(config, "cuda", "layer")
    addmm = torch.addmm

    def older(*args, **options):
        if "out_dtype" in options:
            raise TypeError("addmm() got an unexpected keyword argument 'out_dtype'")
        return addmm(*args, **options)

    monkeypatch.setattr(torch, "addmm", older)
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    gradient_accumulator._adds_in_fp32.cache_clear()
    then = record(config, "cuda", "layer")
    assert plain_of(then) == plain_of(now)
    sums = [work for work in then.backward.computations() if isinstance(work, Product)]
    assert any(work.moved for work in sums)


def test_files_of_traces_depend_on_all_code_that_makes_them():
    config = that_counts(run("--num-experts 4 --tensor-model-parallel-size 2"), "layer")
    ran = set()
    before = sys.gettrace()
    sys.settrace(lambda frame, *_: ran.add(frame.f_code.co_filename))
    try:
        for kind in ("embedding", "layer"):
            record(config, "cuda", kind)
    finally:
        sys.settrace(before)
    package = traces._PACKAGE
    ours = {Path(name) for name in ran if name.startswith(f"{package}/")}
    sources = [package / source for source in traces._SOURCES]
    assert ours and not {path for path in ours if not {path, *path.parents} & {*sources}}


def test_a_file_has_the_whole_trace_and_a_broken_one_none(tmp_path, monkeypatch):
    config = run("--tensor-model-parallel-size 2 --recompute-granularity full")
    monkeypatch.setenv(traces.FOLDER, str(tmp_path))

    def fresh():
        traces._folder.cache_clear()
        monkeypatch.setattr(traces, "_modules", {})
        monkeypatch.setattr(traces, "_traces", {})
        recompute = trace(config, "cuda").recompute
        assert recompute is not None
        return recompute

    try:
        made = fresh()
        read = fresh()
        files = sorted(tmp_path.rglob("*.json"))
        assert len(files) == 4 and plain_of(made) == plain_of(read)
        assert any(isinstance(step, Recomputed) for step in read.backward.steps)
        for file in files:
            file.write_text(json.dumps(json.loads(file.read_text()))[:-10])
        assert plain_of(fresh()) == plain_of(made)
        for file in tmp_path.rglob("*.json"):
            file.unlink()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # as on a full disk
        try:
            assert plain_of(fresh()) == plain_of(made)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert not any(path.is_file() for path in tmp_path.rglob("*"))
    finally:
        traces._folder.cache_clear()


def test_a_head_without_sharded_parameters_has_no_padding():
    config = run("--tensor-model-parallel-size 2 --vocab-size 500")
    head = trace(config, "cuda").head
    assert head.padding(2) > 0
    assert dataclasses.replace(head, parameters=()).padding(2) == 0


def test_to_ask_a_tensor_for_its_device_is_no_work():
    """Asking a tensor for its device is no work.

    Tensors without data on a CPU answer such questions by operators: a CPU has about as many
    kernels as a GPU.
    """
    config = run("--hidden-dropout 0.0 --attention-dropout 0.0")
    counts = [
        sum(1 for _ in trace(config, device).layer.forward.computations())
        for device in ("cuda", "cpu")
    ]
    assert counts[1] <= 1.5 * counts[0]
