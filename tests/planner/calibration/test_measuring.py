"""Measurements and the figures derived from them, without waiting for any clock."""

import pytest
import torch

from megatron.config import Config
from megatron.kernels.cost import Product
from megatron.planner.calibration import tasks
from megatron.planner.calibration.compute import compute_tasks
from megatron.planner.calibration.machine import HostSeconds, MachineMeasurements, machine, tiny
from megatron.planner.calibration.tasks import (
    FigureTask,
    GroupShape,
    kinds_of_groups,
    measure,
    members,
)
from megatron.planner.cluster import read_cluster, write_cluster
from megatron.planner.rates import DeviceRates
from megatron.planner.timing import estimate
from megatron.planner.trace import trace
from tests.helpers.clock import VirtualClock

CPU = torch.device("cpu")
MODEL = dict(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    seq_length=64,
    vocab_size=500,
    global_batch_size=2,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)


def test_a_point_is_a_rate_or_seconds():
    assert FigureTask("products.float32", (1, 2, 3), lambda: lambda: None, 6.0).value(2.0) == 3.0
    assert FigureTask("messages", (1, 8), lambda: lambda: None).value(3.0) == 3.0


def test_the_median_of_all_rounds_counts_and_pieces_are_counted(
    monkeypatch,
):
    """The median of all rounds counts.

    The clock returns the number of its calls times a factor: one for the warm-up, then three
    rounds.
    """
    factors = iter([9.0, 2.0, 3.0, 4.0, 9.0, 1.0, 5.0, 6.0, 9.0, 1.0, 1.0, 7.0])
    monkeypatch.setattr(
        tasks, "_elapsed", lambda work, calls, device, together: next(factors) * calls * 1e-3
    )
    found = measure(
        [FigureTask("a", (), lambda: lambda: None, calls=4)], CPU, 10.0, clock=VirtualClock()
    )
    assert found == pytest.approx([3e-3 / 4])


def test_what_comes_before_a_message_does_not_count(monkeypatch):
    done = []
    costs = {"before": 3e-3, "message": 2e-3}

    def elapsed(work, calls, *_):
        done.clear()
        work()
        return calls * sum(costs[name] for name in done)

    monkeypatch.setattr(tasks, "_elapsed", elapsed)
    task = FigureTask(
        "a",
        (),
        lambda: lambda: done.append("message"),
        calls=2,
        before=lambda: lambda: done.append("before"),
    )
    assert measure([task], CPU, 1.0, clock=VirtualClock()) == pytest.approx([1e-3])


def test_measuring_ends_by_the_clock_once_all_were_measured(
    monkeypatch,
):
    """Measuring ends by the clock once every task has been measured.

    Limits are by this process's clock or a partner's: one pass over all, then no more than the next
    task's memory.
    """

    def measured(largest, step_s):
        made, clock = [], VirtualClock()

        def task(i):
            return FigureTask(
                "a", (i,), lambda: made.append(i) or clock.advance(step_s) or (lambda: None)
            )

        assert measure([task(0), task(1)], CPU, 2.0, largest, clock=clock) == [1.0, 1.0]
        return made

    monkeypatch.setattr(tasks, "_elapsed", lambda *_: 1.0)
    # First another process is late, then this one.
    assert measured(lambda value: 100.0, 0.0) == measured(None, 1.0) == [0, 1, 0]
    assert measured(None, 0.1) == [0, 1] * tasks.PASSES


def test_groups_of_ranks():
    assert kinds_of_groups(1, 1) == []
    assert kinds_of_groups(4, 4) == [GroupShape(1, 2, 1), GroupShape(2, 2, 1), GroupShape(1, 4, 1)]
    assert kinds_of_groups(8, 4) == [
        GroupShape(1, 2, 1),
        GroupShape(2, 2, 1),
        GroupShape(4, 2, 2),
        GroupShape(1, 4, 1),
        GroupShape(1, 8, 2),
    ]
    assert kinds_of_groups(6, 2) == [GroupShape(1, 2, 1)], (
        "what does not divide the world is left out"
    )
    for kind in kinds_of_groups(16, 4):
        groups = {tuple(members(kind, rank)) for rank in range(16)}
        assert sorted(r for group in groups for r in group) == list(range(16)), (
            "each rank is in one group"
        )
        assert all(rank in members(kind, rank) for rank in range(16))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bf16": True},
        {"swiglu": True, "normalization": "rmsnorm", "add_bias_linear": False},
        {"attention_backend": "unfused"},
    ],
)
def test_every_task_runs(changes, monkeypatch):
    """Every task does its work once, on a small model.

    Figures are those that the time model asks for, and products those that a trace lists.
    """
    from megatron.planner.calibration import compute

    monkeypatch.setattr(compute, "MICRO_BATCHES", (1,))
    config = Config.create(**MODEL, **changes)
    found = compute_tasks(config, CPU, (1, 2))
    dtype = "bfloat16" if "bf16" in changes else "float32"
    for task in found:
        made = task.make()()
        if task.figure == f"products.{dtype}":
            assert made[0].shape == task.arguments[:2] and bool(made[0].any())
    listed = {
        (work.m, work.n, work.k)
        for t in (1, 2)
        for traced in [
            trace(
                Config.create(**MODEL, **changes, tensor_model_parallel_size=t, world_size=t), "cpu"
            )
        ]
        for part in (traced.layer, traced.head)
        for half in (part.forward, part.backward)
        for work in half.computations()
        if isinstance(work, Product) and work.batch == 1
    }
    assert {task.arguments for task in found if task.figure == f"products.{dtype}"} == listed
    wanted = {
        f"products.{dtype}",
        "update_gb_per_s",
        *(f"memory.{w}" for w in ("copy", "norm", "activation", "loss")),
    }
    if "attention_backend" not in changes:
        wanted |= {f"attention.{dtype}.forward", f"attention.{dtype}.backward"}
    assert wanted <= {task.figure for task in found}
    places = [(task.figure, task.arguments) for task in found]
    assert len(set(places)) == len(places), "no point is measured twice"


def test_the_tiny_model_is_of_the_same_kind():
    small = tiny(
        Config.create(**{**MODEL, "swiglu": True, "normalization": "rmsnorm", "num_layers": 2}), 3
    ).model
    assert (small.num_layers, small.swiglu, small.normalization, small.hidden_size) == (
        3,
        True,
        "rmsnorm",
        32,
    )


def found_of(points, **changes):
    values = dict(
        points=points,
        host=HostSeconds(3e-4, 4e-4, 6e-4, 5e-3),
        device="a CPU",
        device_type="cpu",
        nodes=1,
        per_node=4,
        threads=1,
        cores=2,
        memory_gib=32.0,
    )
    return MachineMeasurements(**{**values, **changes})


POINTS = {
    "products.float32": [[64, 256, 64, 0.05], [128, 64, 256, 0.08]],
    "update_gb_per_s": [[20.0]],
    "attention.float32.forward": [[64, 16, 0.02]],
    "attention.float32.backward": [[64, 16, 0.03]],
    "memory.copy": [[4096, 10.0]],
    "messages": [[1, 1024, 1e-5], [1, 1048576, 1e-3]],
    "collectives.all_reduce": [[1, 2, 1, 1024, 1e-4], [1, 2, 1, 65536, 2e-4]],
}


def test_a_measured_machine_loads_and_plans(tmp_path):
    cluster = machine(found_of(POINTS), "here", ["--num-layers", "2"])
    write_cluster(cluster, tmp_path / "here.toml")
    recompute = read_cluster(tmp_path / "here.toml")
    assert (
        recompute.compute == cluster.compute
        and recompute.shared_cores == 2
        and recompute.device_type == "cpu"
    )
    assert (
        recompute.memory_gib == 8.0
        and recompute.devices_per_node == 4
        and recompute.peak_tflops == {"float32": 0.08}
    )
    rates = DeviceRates(recompute, "float32")
    assert rates.product_s(64, 256, 64) == pytest.approx(2 * 64 * 256 * 64 / 0.05e12), (
        "measured shapes as measured"
    )
    between = rates.product_s(96, 128, 128)
    assert 2 * 96 * 128 * 128 / 0.081e12 < between < 2 * 96 * 128 * 128 / 0.049e12
    assert (rates.layer_forward_overhead_s, rates.layer_backward_overhead_s) == (3e-4, 4e-4)
    found = estimate(
        Config.create(**MODEL, tensor_model_parallel_size=2, world_size=4, micro_batch_size=1),
        recompute,
    )
    assert found.seconds > 0 and found.confidence.by_basis["measured"]
    assert "tools/calibrate.py" in recompute.compute["memory.copy"].source


def test_of_a_gpu_the_host_runs_ahead_and_the_peak_is_published():
    points = {name.replace("float32", "bfloat16"): rows for name, rows in POINTS.items()}
    changes = dict(device="NVIDIA H100 80GB HBM3", device_type="cuda", per_node=2, memory_gib=79.6)
    cluster = machine(found_of(points, **changes), "gpus", [])
    assert (
        cluster.shared_cores is None
        and cluster.memory_gib == 79.6
        and cluster.peak_tflops["bfloat16"] > 900
    )
    assert "layer_overhead_s" not in cluster.compute
    assert cluster.links == {(0, 1): pytest.approx(1048576 / 1e-3 / 1e9, rel=1e-3)}
