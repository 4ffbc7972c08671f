"""Reduction behind backward passes and gathering behind forward passes give the bits that they give without."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron.engine import weights as engine_weights
from megatron.engine.bucket_size import bucket_elements
from megatron.engine.buckets import Bucket
from megatron.engine.engine import Engine, StepResult
from megatron.engine.optimizer import parameter_groups, unique_parameters
from megatron.engine.weights import WeightGather
from megatron.engine.zero import scale_and_square
from megatron.errors import ConfigError
from megatron.parallel.sharding import Sharding
from megatron.parallel.topology import Group, Topology
from tests.engine import cases, toy
from tests.helpers.groups import join
from tests.helpers.processes import run_processes
from tests.helpers.training import BASE, train_in_process

MICRO_BATCHES = toy.MICRO_BATCHES


def contribute(engine: Engine, topology: Topology, step: int, micro_batch: int, skip: str = "") -> None:
    """What layers and hooks do in a backward pass; the last rank goes through the parameters the other way round."""
    parameters = list(engine.chunks.parameters())[:: 1 if topology.data.is_last else -1]
    for p in parameters:
        if p.sharding.name != skip:
            g = (toy.gradient(p, topology, step, micro_batch) * engine.loss_scale).to(p.dtype)
            p.gradient_sink.add(g)


def train(topology: Topology, precision: str, stage: int, overlap: bool, trouble: str = "") -> dict[str, Any]:
    """Four steps and their results, the buckets on their way before each, and the last state.

    trouble, in the third step   'missing': one rank has no gradient of `mixed`; 'infinite': one rank's `up.bias` is;
                                 'broken': it ends in the middle, on each rank elsewhere, and is done again
    """
    fields = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    engine = Engine(toy.config(precision, stage, **fields), topology, toy.build(topology))
    last, sent = topology.rank == topology.world.size - 1, []
    results: list[StepResult] = []
    for s in range(4):
        if s == 2 and trouble == "broken":
            engine.begin(MICRO_BATCHES)
            for m in range(MICRO_BATCHES - last):
                contribute(engine, topology, 50, m)
            engine.clear_gradients()
        engine.begin(MICRO_BATCHES)
        for m in range(MICRO_BATCHES):
            contribute(engine, topology, s, m, "mixed" if s == 2 and last and trouble == "missing" else "")
            if s == 2 and trouble == "infinite" and last and m == 0:
                for p in engine.chunks.parameters():
                    engine.gradient(p).view(-1)[0] = float("inf")
        sent.append((engine._gradients._sent, len(engine._gradients.buckets)))
        results.append(engine.step(cases.lr(s)))
    engine.wait_for_weights()
    return {
        "results": results, "sent": sent, "state": toy.state_pieces(engine), "weights": toy.weight_pieces(engine)
    }  # fmt: skip


def refused(topology: Topology) -> list[str]:
    """A gradient after the last one, and a second begin; nothing hangs afterwards."""
    engine = Engine(toy.config(), topology, toy.build(topology))
    messages = []

    def passes(count: int) -> None:
        for m in range(count):
            contribute(engine, topology, 0, m % MICRO_BATCHES)

    engine.begin(MICRO_BATCHES)
    passes(MICRO_BATCHES)
    engine.step(toy.LR)
    for wrong in (lambda: passes(1), lambda: engine.begin(MICRO_BATCHES)):
        engine.begin(MICRO_BATCHES)
        passes(MICRO_BATCHES)
        try:
            wrong()
        except ConfigError as error:
            messages.append(str(error))
        engine.clear_gradients()
    engine.begin(MICRO_BATCHES)
    passes(MICRO_BATCHES)
    engine.step(toy.LR)
    return messages


def on_two(rank: int) -> dict[str, Any]:
    topology = join()
    out: dict[str, Any] = {
        f"1x1x2 {p} {z} {overlap}": train(topology, p, z, overlap) for p, z in cases.ALL for overlap in (True, False)
    }
    for trouble in ("missing", "infinite", "broken"):
        for p in ("fp32", "bf16"):
            out |= {f"{trouble} {p} {o}": train(topology, p, 1, o, trouble) for o in (True, False)}
    return out | {"refused": refused(topology)}


def on_four(rank: int) -> dict[str, Any]:
    join(2, 1)
    tensor_data, pipe_data = Topology.create(2, 1), Topology.create(1, 2)
    torch.set_num_threads(1)
    out: dict[str, Any] = {}
    for o in (True, False):
        out |= {f"2x1x2 {p} {z} {o}": train(tensor_data, p, z, o) for p, z in (("fp32", 1), ("bf16", 1))}
        out |= {f"1x2x2 {p} {z} {o}": train(pipe_data, p, z, o) for p, z in (("fp32", 1), ("bf16", 1), ("fp16", 0))}
    return out


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = {}
    for n, body in ((2, on_two), (4, on_four)):
        ranks = run_processes(n, body)
        out.update({name: [r[name] for r in ranks] for name in ranks[0]})
    return out


def same_bits(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> None:
    for x, y in zip(a, b, strict=True):
        assert x["results"] == y["results"] == a[0]["results"]
        for what in ("state", "weights"):
            assert x[what].keys() == y[what].keys()
            for key, pieces in x[what].items():
                for (place, values), (other, others) in zip(pieces, y[what][key], strict=True):
                    assert place == other
                    np.testing.assert_array_equal(values, others, err_msg=key)


LAYOUTS = [f"1x1x2 {p} {z}" for p, z in cases.ALL]
LAYOUTS += ["2x1x2 fp32 1", "2x1x2 bf16 1", "1x2x2 fp32 1", "1x2x2 bf16 1", "1x2x2 fp16 0"]
TROUBLES = [f"{trouble} {p}" for trouble in ("missing", "infinite", "broken") for p in ("fp32", "bf16")]


@pytest.mark.parametrize("name", [*LAYOUTS, *TROUBLES])
def test_overlapped_is_the_same(runs: dict[str, list[Any]], name: str) -> None:
    overlapped, plain = runs[f"{name} True"], runs[f"{name} False"]
    same_bits(overlapped, plain)
    assert [r.skipped for r in overlapped[0]["results"]] == [False, False, "infinite" in name, False]
    for rank in overlapped:
        (first, count), *others = rank["sent"]
        assert count >= 2 and first == 0, "the first step counts"
        late = [sent for sent, _ in others if sent < count]
        assert len(late) == ("missing" in name and rank is overlapped[-1]), "all are on their way before step()"
    assert all(sent == 0 for rank in plain for sent, _ in rank["sent"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_overlapped_equals_adamw_in_float64(runs: dict[str, list[Any]], name: str) -> None:
    """Bounds and their reasons are those of test_engine; there is a step more, and the first has another rate."""
    sizes, precision, _ = name.split()
    factor = 1024.0 if precision == "fp16" else 1.0
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float64)
    reference, layout = toy.Reference(), tuple(map(int, sizes.split("x")))
    for s in range(4):
        gradients = toy.mean_gradients(layout, s, lambda g: (g * factor).to(dtype).double() / factor)  # type: ignore[arg-type]
        norm = reference.step(gradients, cases.lr(s))
        assert runs[f"{name} True"][0]["results"][s].grad_norm == pytest.approx(norm, rel=2e-6)
    state = toy.assemble([r["state"] for r in runs[f"{name} True"]])
    for key, w in reference.weights.items():
        np.testing.assert_allclose(state[f"master.{key}"], w.detach().numpy(), rtol=0, atol=3e-6, err_msg=key)


def test_a_broken_step_leaves_no_trace(runs: dict[str, list[Any]]) -> None:
    same_bits(runs["broken fp32 True"], runs["1x1x2 fp32 1 True"])


@pytest.mark.parametrize("overlap", [True, False])
def test_missing_gradient_counts_as_zero(runs: dict[str, list[Any]], overlap: bool) -> None:
    """What that rank's sum was in the step before must not come again."""
    reference = toy.Reference()
    for s in range(4):
        gradients = toy.mean_gradients((1, 1, 2), s)
        if s == 2:
            lacking = [toy.micro_gradient("mixed", s, 1, m).double() for m in range(MICRO_BATCHES)]
            gradients["mixed"] -= torch.stack(lacking).sum(0) / 2
        norm = reference.step(gradients, cases.lr(s))
        assert runs[f"missing fp32 {overlap}"][0]["results"][s].grad_norm == pytest.approx(norm, rel=2e-6)


def test_gradients_after_the_last_are_refused(runs: dict[str, list[Any]]) -> None:
    for late, twice in runs["refused"]:
        assert "got a gradient more than the 3 that 3 micro-batches" in late and "--no-overlap-grad-reduce" in late
        assert "call Engine.step() after every Executor.train()" in twice


@pytest.mark.parametrize("fields", [{"enable_zbh1_pipeline": True, "bf16": True}])
def test_gpt_overlapped_is_the_same(fields: dict[str, Any]) -> None:
    """Weight gradients that wait, of a tied embedding, of autograd: all arrive through hooks and sinks."""
    fields |= {"pipeline_model_parallel_size": 2}
    runs = [
        run_processes(4, train_in_process, {**fields, "overlap_grad_reduce": o, "overlap_param_gather": o}, 3)
        for o in (True, False)
    ]
    for a, b in zip(*runs, strict=True):
        assert a["history"] == b["history"]
        for name, (_, values) in a["parameters"].items():
            np.testing.assert_array_equal(values, b["parameters"][name][1], err_msg=name)


# -- gathering ---------------------------------------------------------------------------------------------------------


class Late:
    """Weights that are not there before they are waited for."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self._values = bucket, bucket.weights.clone()
        bucket.weights.fill_(float("nan"))

    def wait(self) -> None:
        self._bucket.weights.copy_(self._values)


def buckets_of(parameters: list[torch.nn.Parameter]) -> list[Bucket]:
    """One for each parameter, which becomes a view of it."""
    found = []
    for p in parameters:
        flat = torch.cat([p.detach().view(-1), torch.zeros(p.numel() % 2)])
        p.data = flat[: p.numel()].view(p.shape)
        found.append(Bucket([p], torch.zeros_like(flat), flat, 0, 2))
    return found


@pytest.mark.parametrize("fields", [{}, {"untie_embeddings_and_output_weights": True, "swiglu": True}])
def test_gpt_waits_for_each_weight_before_it_is_used(fields: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight is NaN until it is waited for; loss and logits must be those of weights that are there."""
    from megatron.config import Config
    from megatron.model.gpt import build_chunks
    from tests.helpers.training import batches

    config = Config.create(**{**BASE, **fields, "num_layers": 2, "world_size": 1})
    (chunk,) = build_chunks(config, Topology.create(), None).values()
    chunk.eval()
    batch = batches(config, 0)[0]
    parameters = unique_parameters(chunk)
    with torch.no_grad():
        loss, logits = chunk(batch, None), chunk.logits(batch, None)
        monkeypatch.setattr(engine_weights, "gather_from_owners", lambda bucket, _: [Late(bucket)])
        gather = WeightGather(buckets_of(parameters), Group((0, 1), 0), [chunk], overlap=True)
        gather.start()
        assert all(p.isnan().any() for p in parameters), "nothing is waited for before it is needed"
        chunk.word_embeddings(batch.tokens)
        assert chunk.layers[0].mlp is not None and any(p.isnan().any() for p in chunk.layers[0].parameters())
        assert torch.equal(chunk(batch, None), loss)
        gather.start()
        assert torch.equal(chunk.logits(batch, None), logits)
        assert not any(p.isnan().any() for p in parameters)
        gather.start()
        gather.wait()
        assert not any(p.isnan().any() for p in parameters)


def test_any_module_waits_for_all_of_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_weights, "gather_from_owners", lambda bucket, _: [Late(bucket)])
    chunk = torch.nn.Linear(3, 2)
    gather = WeightGather(buckets_of(list(chunk.parameters())), Group((0, 1), 0), [chunk], overlap=True)
    gather.start()
    assert chunk.weight.isnan().any()
    assert not chunk(torch.ones(3)).isnan().any()
    alone = WeightGather(buckets_of(list(chunk.parameters())), Group((0, 1), 0), [chunk], overlap=False)
    alone.start()
    assert not chunk.weight.isnan().any()


@pytest.mark.parametrize("whole", [True, False])
def test_a_state_dict_waits(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the model as of a module within: what is saved must not be the weights of the step before."""
    monkeypatch.setattr(engine_weights, "gather_from_owners", lambda bucket, _: [Late(bucket)])
    chunks = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(3, 2))])
    gather = WeightGather(buckets_of(list(chunks.parameters())), Group((0, 1), 0), chunks, overlap=True)
    gather.start()
    assert all(p.isnan().any() for p in chunks.parameters())
    found = (chunks if whole else chunks[0][0]).state_dict()
    assert found and not any(value.isnan().any() for value in found.values())


# -- norm --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[1], [65536], [65537, 3, 0], [200_000, 70_000]])
def test_squares_by_torch(sizes: list[int]) -> None:
    """A block adds 65,536 squares in fp32 in many short sums: less than what 16 roundings (6e-8 each) come to."""
    tensors = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in sizes]
    expected = sum(float((t.double() / 4).square().sum()) for t in tensors)
    assert float(scale_and_square(tensors, 0.25)) == pytest.approx(expected, rel=1e-6)
    tensors[-1 if sizes[-1] else 0][-1] = float("nan")
    assert scale_and_square(tensors, 1.0).isnan()


# -- buckets -----------------------------------------------------------------------------------------------------------


def parameter(name: str, *shape: int, decay: bool = True, tied: bool = False) -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.zeros(shape))
    p.sharding = Sharding(name, shape, (0,) * len(shape), shape, decay=decay, tied=tied)  # type: ignore[attr-defined]
    return p


def test_groups_are_cut_in_the_order_of_the_backward_pass() -> None:
    ps = [parameter("e", 100, tied=True), parameter("n", 3, decay=False)]
    ps += [parameter(f"w{i}", size) for i, size in enumerate((4, 4, 30, 4, 5))]

    def names(elements: int | None) -> list[list[str]]:
        groups = parameter_groups(ps, 0.1, elements)
        assert [g["weight_decay"] for g in groups] == [0.1] * (len(groups) - 1) + [0.0]
        return [[p.sharding.name for p in g["params"]] for g in groups]

    assert names(None) == [["w4", "w3", "w2", "w1", "w0"], ["e"], ["n"]]
    assert names(9) == [["w4", "w3"], ["w2"], ["w1", "w0"], ["e"], ["n"]]
    assert names(1) == [["w4"], ["w3"], ["w2"], ["w1"], ["w0"], ["e"], ["n"]]


def test_bucket_sizes() -> None:
    assert [bucket_elements(0, n) for n in (2, 4, 64, 9408)] == [4_000_000, 4_000_000, 64_000_000, 9_408_000_000]
    assert [bucket_elements(50_000_000, n) for n in (2, 9408)] == [4_000_000, 50_000_000]


def test_what_a_rank_holds_of_a_bucket() -> None:
    """Numbers instead of gradients; seven elements and one of padding over two ranks."""
    a, b, c = parameter("a", 3), parameter("b", 2), parameter("c", 2)
    line = torch.arange(8.0)
    for rank, held in ((0, [(0, 3), (3, 4), (4, 4)]), (1, [(0, 0), (0, 1), (1, 3)])):
        bucket = Bucket([a, b, c], line, torch.zeros(8), rank, 2)
        assert [bucket.held(p) for p in (a, b, c)] == held
        assert bucket.gradient(b).tolist() == [3.0, 4.0]
        assert [part.tolist() for part in bucket.reduced([a, b, c])] == ([[0, 1, 2, 3]] if rank == 0 else [[4, 5, 6]])
        assert [part.tolist() for part in bucket.reduced([a, c])] == ([[0, 1, 2]] if rank == 0 else [[5, 6]])
        bucket.reduced([a, c])[0].add_(0.0)
        assert bucket.reduced([a])[:1] == [] or bucket.reduced([a])[0].data_ptr() == line.data_ptr()
