"""Models of Hugging Face: transformers computes the same before and after, on any layout."""

import functools
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint.families import FAMILIES
from megatron.checkpoint.huggingface_config import read_model
from megatron.checkpoint.huggingface_load import load_engine, matrix_of
from megatron.checkpoint.huggingface_save import export
from megatron.checkpoint.settings import plain
from megatron.config import Config
from megatron.data.sampler import make_micro_batch
from megatron.model.gpt import hidden_state
from tests.helpers.hugging_face import CASES, SAMPLES, computed, identical, make, tokens
from tests.helpers.processes import run_processes
from tests.helpers.text import one_process
from tests.helpers.training import TrainingJob, assemble, local_shards

LAYOUTS = {
    2: dict(expert_model_parallel_size=2, zero_stage=3),
    4: dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True),
}
# Each family is cut on four ranks. Uncut: test_float64.py.
RUNS = [
    *((2, case) for case, (kind, _) in CASES.items() if FAMILIES[kind].experts),
    *((4, case) for case in CASES if case != "llama-larger"),
    (2, "qwen2_moe+lora"),
    *((4, f"{case}+lora") for case in ("gpt2", "llama31", "pythia", "qwen2")),
]
LORA = dict(lora_rank=3, lora_alpha=5.0)
USUAL = {(2, "mixtral"), (2, "qwen2_moe+lora"), (4, "gpt2+lora"), (4, "llama31+lora")}
USUAL |= {(4, case) for case in "gpt2 llama3 qwen3 olmo2 mixtral qwen2_moe gemma2 bloom".split()}
USUAL |= {(4, case) for case in "phi3 glm4_moe apertus gpt_oss qwen3_next deepseek_v3".split()}
MARKED = [
    run if run in USUAL else pytest.param(*run, marks=pytest.mark.campaign("kills")) for run in RUNS
]
RATE = 1.0


def config_of(folder, world, **more):
    settings = {n: v for n, v in plain(read_model(folder)[1]).items() if v is not None}
    dropouts = dict(hidden_dropout=0.0, attention_dropout=0.0)
    layout = dict(world_size=world, **LAYOUTS[world])
    if world == 4 and settings.get("num_experts"):
        layout |= dict(expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    step = dict(optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0, lr=RATE)
    each = SAMPLES // LAYOUTS[world].get("expert_model_parallel_size", 1)
    batch = dict(micro_batch_size=each, global_batch_size=SAMPLES, make_vocab_size_divisible_by=8)
    return Config.create(**settings | dropouts | layout | step | batch | more)


def run(rank, world, folders):
    return [one(Path(source), Path(target), world) for source, target in folders]


def one(source, target, world):
    """Load a model, compute, write it, take a step, compute again and write it again."""

    targets = ("self_attention", "dense_*" if world == 4 else "shared_experts")
    more = dict(LORA, lora_target=targets) if target.name.endswith("+lora") else {}
    job = TrainingJob(config_of(source, world, seq_length=tokens().shape[1] - 1, **more))
    config = job.config
    topology = job.topology
    engine = job.engine
    chunks = job.chunks
    divided = config.engine.zero_stage == 3
    load_engine(source, engine, topology, config)
    engine.wait_for_weights()
    before = local_shards(chunks.parameters())
    samples = tokens(config.model.vocab_size).split(config.batch.micro_batch_size)
    batch = make_micro_batch(samples[topology.data.rank].numpy())

    def logits():
        (chunk,) = chunks.values()
        chunk.eval()
        with torch.no_grad():
            hidden = None
            if not topology.pipeline.is_first:
                shape, dtype = hidden_state(config)
                hidden = torch.empty(shape, dtype=dtype)
                dist.recv(hidden, topology.pipeline.ranks[0])
            if not topology.pipeline.is_last:
                dist.send(chunk(batch, hidden), topology.pipeline.ranks[1])
                return None
            local = chunk.logits(batch, hidden)  # [s, b, vocabulary/tp]
        chunk.train()
        shards = [torch.empty_like(local) for _ in range(topology.tensor.size)]
        if topology.tensor.size > 1:
            dist.all_gather(shards, local, group=topology.tensor.handle)
        else:
            shards = [local]
        full = torch.cat(shards, -1)[..., : config.model.vocab_size]
        return full.transpose(0, 1).contiguous().numpy()

    first = logits()
    writing = dict(arriving=engine.arriving, on_all=divided)
    export(target / "before", config, topology, chunks, **writing)
    chunks.train()
    losses = job.executor.train([batch], loss_scale=engine.loss_scale)
    loss = float(losses[0]) if losses else None
    engine.step(RATE)
    export(target / "after", config, topology, chunks, **writing)
    engine.wait_for_weights()
    return {
        "logits": first,
        "later": logits(),
        "loss": loss,
        "data": topology.data.rank,
        "before": before,
        "after": local_shards(chunks.parameters()),
    }


def close(actual, expected, what, tolerance=1e-5):
    scale = max(1.0, float(np.abs(expected).max()))
    assert np.abs(actual - expected).max() <= tolerance * scale, what


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the folder and the results of all ranks by case, which are computed once."""

    @functools.cache
    def of_world(world, usual):
        root = tmp_path_factory.mktemp(f"world-{world}")
        cases = [case for n, case in RUNS if n == world and ((n, case) in USUAL) == usual]
        made = [make(case.removesuffix("+lora"), root / case / "source") for case in cases]
        folders = [
            (str(source), str(root / case)) for source, case in zip(made, cases, strict=True)
        ]
        ranks = zip(*run_processes(world, run, world, folders), strict=True)
        return {case: (root / case, list(each)) for case, each in zip(cases, ranks, strict=True)}

    return of_world


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "case"), MARKED)
def test_transformers_computes_the_same(results, world, case):
    target, ranks = results(world, (world, case) in USUAL)[case]
    source = target / "source"
    logits, loss, gradients = computed(source)
    last = {rank["data"]: rank for rank in ranks if rank["logits"] is not None}
    first, later = (
        np.concatenate([last[i][when] for i in sorted(last)]) for when in ("logits", "later")
    )
    close(first, logits, "logits")
    assert abs(np.mean([rank["loss"] for rank in last.values()]) - loss) <= 1e-5 * max(1.0, loss)

    # plain gradient descent: the step is the gradient
    before, after = (assemble([rank[when] for rank in ranks]) for when in ("before", "after"))
    if case.endswith("+lora"):
        changed = {name for name in before if not np.array_equal(before[name], after[name])}
        assert changed == {name for name in before if name.endswith("lora_b")}
        close(later, computed(source, target / "after" / "adapter")[0], "logits with adapters")
        before = {}
    for name, ours in gradients_by_their_names(source, before, after).items():
        largest = max(float(np.abs(g).max()) for g in gradients.values())
        assert np.abs(ours - gradients[name]).max() <= 1e-5 * max(largest, 1e-2), name

    # byte for byte what was loaded, and what was trained computes the same there
    identical(source, target / "before")
    close(later, computed(target / "after")[0], "logits after a step")
    loads_without_a_warning(target / "after")


MUP = dict(
    use_mup=True,
    mup_base_hidden_size=16,
    mup_base_num_layers=1,
    mup_embedding_mult=3.0,
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=tokens().shape[1] - 1,
    vocab_size=tokens().max().item() + 1,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    init_method_std=0.3,
)


@pytest.mark.slow
def test_transformers_computes_the_same_as_mup(tmp_path):
    """All factors of muP are in the weights, which transformers reads as those of a GPT-2."""

    model = one_process(**MUP)
    config = model.config
    chunks = model.chunks
    export(tmp_path / "model", config, model.topology, chunks)
    batch = make_micro_batch(tokens(config.model.vocab_size).numpy())
    with torch.no_grad():
        output = chunks["0"].eval().logits(batch, None)[..., : config.model.vocab_size]
    scores = output.transpose(0, 1).contiguous().numpy()
    assert scores.std() > 0.1
    close(scores, computed(tmp_path / "model")[0], "scores")


def gradients_by_their_names(source, before, after):
    kind, model = read_model(source)
    gradients = {}
    for name, value in before.items():
        gradient = torch.from_numpy((value - after[name]) / RATE)
        matrix = matrix_of(FAMILIES[kind], model, name, tuple(gradient.shape))
        gradients |= dict(zip(matrix.counts, map(np.asarray, matrix.cut(gradient)), strict=True))
    return gradients


def loads_without_a_warning(folder):
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
