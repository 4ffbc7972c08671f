"""Memory and work of a step by counting: against closed forms, the schedules' own bounds and real parameters."""
from __future__ import annotations

import pytest

from megatron.config import Config
from megatron.model import formulas
from megatron.pipeline.schedule import build_schedule, peak_activations
from megatron.planning import step_work as step_work_module
from megatron.planning.memory import memory_of_ranks, parameters_of_rank
from megatron.planning.step_work import step_work

SMALL = dict(
    num_layers=16, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=1000, bf16=True,
    make_vocab_size_divisible_by=8,
)


def small(tp: int = 1, pp: int = 1, dp: int = 1, m: int = 8, **more: object) -> Config:
    sizes = dict(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, world_size=tp * pp * dp)
    return Config.create(**{**SMALL, **sizes, "global_batch_size": dp * m, **more})


def layer_bytes(config: Config) -> float:
    return formulas.layer_activation_bytes(config.model, 1, 2)


@pytest.mark.parametrize(("schedule", "options"), [
    ("1f1b", {}),
    ("interleaved", dict(num_layers_per_virtual_pipeline_stage=2)),
    ("zb-h1", dict(enable_zbh1_pipeline=True)),
])
@pytest.mark.parametrize("m", [1, 3, 8, 10, 40])
def test_as_many_activations_as_the_schedule_holds(schedule, options, m):
    """The last rank also keeps the output layer's; the schedule's own count is of pairs (micro-batch, chunk)."""
    config = small(pp=4, m=m, **options)
    chunks = config.parallel.num_chunks
    held = peak_activations(build_schedule(schedule, 4, chunks, m))
    per_chunk = 16 // (4 * chunks) * layer_bytes(config)
    for rank, count in zip(memory_of_ranks(config)[:-1], held, strict=False):
        assert rank.activations == pytest.approx(count * per_chunk)


@pytest.mark.parametrize(("p", "v", "m"), [(4, 1, 8), (4, 2, 8), (4, 4, 16), (2, 4, 6), (8, 2, 16)])
def test_the_first_rank_in_closed_form(p, v, m):
    """1F1B: p micro-batches. Interleaved: 2 (p - 1) + (v - 1) p + 1 chunks (Narayanan et al. 2021, section 2.2.2)."""
    config = small(pp=p, m=m, **({} if v == 1 else dict(num_layers_per_virtual_pipeline_stage=16 // (p * v))))
    in_flight = p if v == 1 else 2 * (p - 1) + (v - 1) * p + 1
    assert memory_of_ranks(config)[0].activations == pytest.approx(in_flight * 16 // (p * v) * layer_bytes(config))


def test_recomputation():
    plain, full = small(pp=4), small(pp=4, recompute_granularity="full")
    group = small(pp=4, recompute_granularity="full", recompute_num_layers=4)
    block = small(pp=4, recompute_granularity="full", recompute_method="block", recompute_num_layers=3)
    inputs = 32 * 64 * 2  # [s, b, h] in bf16
    assert memory_of_ranks(plain)[0].activations == 4 * 4 * layer_bytes(plain)
    assert memory_of_ranks(full)[0].activations == 4 * 4 * inputs
    assert memory_of_ranks(group)[0].activations == 4 * inputs
    assert memory_of_ranks(block)[0].activations == 4 * (3 * inputs + layer_bytes(plain))
    again = small(pp=4, recompute_granularity="selective", recompute_modules=("mlp_act", "layernorm"))
    # 12 of 32 bytes per token and h (Korthikanti et al. 2022 count 34 with dropout masks), beside fp32 statistics.
    saved = memory_of_ranks(plain)[0].activations - memory_of_ranks(again)[0].activations
    assert saved == 4 * 4 * 32 * 64 * 12


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, dict(num_layers_per_virtual_pipeline_stage=2)])
def test_parameters_of_all_ranks_are_the_model_and_its_copies(tp, options):
    config = small(tp=tp, pp=4, **options)
    model, vocabulary = config.model, config.model.padded_vocab_size(tp)
    held = tp * sum(parameters_of_rank(config, rank) for rank in range(4))
    layer = formulas.layer_parameters(model)
    copies = (tp - 1) * (16 * (layer.row_biases + layer.norms) + 2 * 64 + formulas.position_parameters(model))
    assert held == formulas.total_parameters(model, vocabulary) + vocabulary * 64 + copies


def test_states_are_18_bytes_for_a_parameter_and_zero_divides_12_of_them():
    for dp, zero, moments in ((1, 1, 12), (4, 1, 3), (4, 0, 12)):
        config = small(dp=dp, zero_stage=zero)
        (rank,) = memory_of_ranks(config)
        n = parameters_of_rank(config, 0)
        assert (rank.weights, rank.gradients, rank.optimizer) == (2 * n, 4 * n, moments * n)
    (rank,) = memory_of_ranks(small(bf16=None, optimizer="sgd"))
    assert (rank.weights, rank.gradients, rank.optimizer) == (4 * n, 4 * n, 4 * n)


def test_parameters_are_those_of_the_built_model():
    import torch

    from megatron.model.gpt import build_chunks
    from megatron.parallel.topology import Layout, Topology

    config = small(pp=4, num_layers_per_virtual_pipeline_stage=2)
    for rank in range(4):
        chunks = build_chunks(config, Topology.from_layout(Layout(pipeline=4), rank, device=torch.device("cpu")))
        assert sum(p.numel() for p in chunks.parameters()) == parameters_of_rank(config, rank)


# -- work --------------------------------------------------------------------------------------------------------------

HEADLESS = dict(vocab_size=1, make_vocab_size_divisible_by=1)  # next to no output layer: all stages are alike


@pytest.mark.parametrize(("p", "v", "m"), [(4, 1, 8), (4, 2, 8), (2, 4, 6), (8, 2, 32), (1, 1, 5)])
def test_bubble_in_closed_form(p, v, m):
    """(p - 1) / (v m) of the working time (Narayanan et al. 2021, section 2.2), where m is a multiple of p."""
    options = {} if v == 1 else dict(num_layers_per_virtual_pipeline_stage=16 // (p * v))
    work = step_work(small(pp=p, m=m, **options, **HEADLESS))
    idle = (p - 1) / (v * m)
    assert work.bubble == pytest.approx(idle / (1 + idle), abs=2e-3)
    assert work.imbalance < 1e-3 and work.recomputed == 0


@pytest.mark.parametrize("options", [
    {}, dict(recompute_granularity="full"), dict(recompute_granularity="selective"),
    dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=2),
])  # fmt: skip
def test_hardware_flops_are_those_of_the_log_line(options):
    """formulas.hardware_flops_per_token has them without a schedule."""
    config = small(tp=2, pp=4, m=6, **options)
    work = step_work(config)
    layers = 8 if config.recompute.recompute_method == "block" else None
    vocabulary = config.model.padded_vocab_size(2)
    expected = formulas.hardware_flops_per_token(
        config.model, config.recompute.recompute_granularity, layers, vocabulary
    )
    assert work.hardware == pytest.approx(expected * 32 * 6 / 2)
    assert work.model == pytest.approx(formulas.model_flops_per_token(config.model, vocabulary) * 32 * 6 / 2)
    assert work.useful == pytest.approx((1 - work.bubble) * (1 - work.imbalance) * (1 - work.recomputed))


def test_the_output_layer_makes_the_last_stage_the_busiest():
    work = step_work(small(pp=4, m=400, vocab_size=12 * 64 * 4))  # a head of about four layers beside four layers
    head, layer = 2 * 64 * 12 * 64 * 4, formulas.layer_flops(small().model)
    assert work.imbalance == pytest.approx(1 - (16 * layer + head) / (4 * (4 * layer + head)))
    assert 0 < work.bubble < 0.02


def test_zero_bubble_has_less_of_it():
    plain, zero = small(pp=4, **HEADLESS), small(pp=4, enable_zbh1_pipeline=True, **HEADLESS)
    assert step_work(zero).bubble < 0.6 * step_work(plain).bubble


@pytest.mark.parametrize("options", [
    dict(pp=4),
    dict(pp=4, num_layers_per_virtual_pipeline_stage=2),
    dict(pp=4, num_layers_per_virtual_pipeline_stage=1),
    dict(pp=8, num_layers_per_virtual_pipeline_stage=1, recompute_granularity="full"),
    dict(pp=4, enable_zbh1_pipeline=True),
    dict(pp=4, pipeline_layout="2,6,4,4", vocab_size=20_000),
])
def test_long_steps_are_as_if_simulated_to_their_end(options, monkeypatch):
    config = small(m=10 * options["pp"], **options)
    short_cut = step_work(config)
    monkeypatch.setattr(step_work_module, "_ROUNDS", 1000)
    whole = step_work(config)
    assert short_cut.makespan == pytest.approx(whole.makespan, rel=1e-12)
    assert short_cut.useful == pytest.approx(whole.useful, rel=1e-12)
    assert short_cut.imbalance == pytest.approx(whole.imbalance, rel=1e-9)


# -- against the tensors of a run --------------------------------------------------------------------------------------

RUN = dict(num_layers=4, hidden_size=128, vocab_size=512, bf16=True, global_batch_size=8, zero_reduce_bucket_size=0)


def held_after_a_step(rank: int, fields: dict[str, object]) -> int:
    """Bytes of all tensors that are alive on a rank after an optimizer step, shared memory counted once."""
    import gc

    import torch

    from megatron.engine.engine import Engine
    from megatron.model.gpt import build_chunks, hidden_dtype, hidden_shape, layer_context, stages_of
    from megatron.pipeline.executor import Executor
    from tests.helpers.groups import join
    from tests.helpers.training import BASE, batches, dist_world_size

    config = Config.create(**{**BASE, **fields, "world_size": dist_world_size()})
    parallel = config.parallel
    topology = join(parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size)
    context = layer_context(config, topology)
    chunks = build_chunks(config, topology, context)
    engine = Engine(config, topology, chunks)
    executor = Executor(
        topology, stages_of(chunks), parallel.schedule, parallel.num_chunks, hidden_shape(config), hidden_dtype(config),
        context.weight_gradients, before_training=engine.begin,
    )
    executor.train(batches(config, 0, topology.data.rank), loss_scale=engine.loss_scale)
    engine.wait_for_weights()
    engine.step(config.optimizer.lr)
    engine.wait_for_weights()
    gc.collect()
    storages: dict[int, int] = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor):
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("zero", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_states_are_what_a_rank_holds_after_a_step(zero):
    """Weights, gradients, masters and moments; what else is alive then (masks, partial sums) is a percent of them."""
    from tests.helpers.processes import run_processes
    from tests.helpers.training import BASE

    fields = {**RUN, "pipeline_model_parallel_size": 2, "zero_stage": zero}
    predicted = memory_of_ranks(Config.create(**{**BASE, **fields, "world_size": 4}))
    found = run_processes(4, held_after_a_step, fields)
    for rank, held in enumerate(found):
        expected = predicted[rank // 2]  # data-parallel ranks count fastest
        assert held == pytest.approx(expected.weights + expected.gradients + expected.optimizer, rel=0.02)
