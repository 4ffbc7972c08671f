"""Measurements and the figures derived from them, without waiting for any clock."""

import dataclasses

import pytest
import torch

from megatron.kernels.cost import Product
from megatron.planner.calibration import compute, tasks
from megatron.planner.calibration.machine import HostSeconds, MachineMeasurements, machine
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
from tests.planner.layouts import planned

CPU = torch.device("cpu")
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 500 "
    "--global-batch-size 2 --attention-dropout 0 --hidden-dropout 0"
)


def test_a_point_is_a_rate_or_seconds():
    assert FigureTask("products.float32", (1, 2, 3), lambda: lambda: None, 6.0).value(2.0) == 3.0
    assert FigureTask("messages", (1, 8), lambda: lambda: None).value(3.0) == 3.0


def test_the_median_of_all_rounds_counts_and_pieces_are_counted(monkeypatch):
    """The median of all rounds counts.

    The clock returns the number of its calls times a factor: one for the warm-up, then three
    rounds.
    """
    factors = iter([9.0, 2.0, 3.0, 4.0, 9.0, 1.0, 5.0, 6.0, 9.0, 1.0, 1.0, 7.0])
    monkeypatch.setattr(
        tasks, "_elapsed", lambda work, calls, device, synchronized: next(factors) * calls * 1e-3
    )
    task = FigureTask("a", (), lambda: lambda: None, calls=4)
    assert measure([task], CPU, 10.0, clock=VirtualClock()) == pytest.approx([3e-3 / 4])


def test_what_comes_before_a_message_does_not_count(monkeypatch):
    seconds = []

    def elapsed(work, calls, *_):
        seconds.clear()
        work()
        return calls * sum(seconds)

    def taking(step_s):
        return lambda: lambda: seconds.append(step_s)

    monkeypatch.setattr(tasks, "_elapsed", elapsed)
    task = FigureTask("a", (), taking(2e-3), calls=2, before=taking(3e-3))
    assert measure([task], CPU, 1.0, clock=VirtualClock()) == pytest.approx([1e-3])


def test_measuring_ends_by_the_clock_once_all_were_measured(monkeypatch):
    """Measuring ends by the clock once every task has been measured.

    Limits are by this process's clock or a partner's: one pass over all, then no more than the next
    task's memory.
    """

    def measured(largest, step_s):
        made = []
        clock = VirtualClock()

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
    pair = GroupShape(1, 2, 1)
    apart = GroupShape(2, 2, 1)
    four = GroupShape(1, 4, 1)
    assert kinds_of_groups(1, 1) == []
    assert kinds_of_groups(4, 4) == [pair, apart, four]
    over_nodes = GroupShape(4, 2, 2), GroupShape(1, 8, 2)
    assert kinds_of_groups(8, 4) == [pair, apart, over_nodes[0], four, over_nodes[1]]
    assert kinds_of_groups(6, 2) == [pair], "what does not divide the world is left out"
    for kind in kinds_of_groups(16, 4):
        groups = {tuple(members(kind, rank)) for rank in range(16)}
        assert sorted(sum(groups, ())) == list(range(16)), "each rank is in one group"
        assert all(rank in members(kind, rank) for rank in range(16))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("--bf16 --swiglu --normalization rmsnorm --disable-bias-linear", "bfloat16"),
        ("--attention-backend unfused --optimizer muon", "float32"),
    ],
)
def test_every_task_runs(flags, dtype, monkeypatch):
    """Every task does its work once, on a small model.

    Figures are those that the time model asks for, and products those that a trace lists.
    """
    monkeypatch.setattr(compute, "MICRO_BATCHES", (1,))
    measurements = compute.compute_tasks(planned(MODEL, flags), CPU, (1, 2))
    products = f"products.{dtype}"
    for task in measurements:
        made = task.make()()
        if task.figure == products:
            assert made[0].shape == task.arguments[:2] and bool(made[0].any())
    listed = set()
    for size in (1, 2):
        traced = trace(planned(MODEL, flags, f"--tensor-model-parallel-size {size}"), "cpu")
        for section in (traced.layer, traced.head):
            for work in (*section.forward.computations(), *section.backward.computations()):
                if isinstance(work, Product) and work.batch == 1:
                    listed.add((work.m, work.n, work.k))
    assert {task.arguments for task in measurements if task.figure == products} == listed
    figures = {"update_gb_per_s", *(f"memory.{w}" for w in "copy norm activation loss".split())}
    if "unfused" not in flags:
        figures |= {f"attention.{dtype}.forward", f"attention.{dtype}.backward"}
    assert figures <= {task.figure for task in measurements}
    points = [(task.figure, task.arguments) for task in measurements]
    assert len(set(points)) == len(points), "no point is measured twice"


def measurements(points, device, device_type, per_node, memory_gib):
    return MachineMeasurements(
        points,
        host=HostSeconds(3e-4, 4e-4, 6e-4, 5e-3),
        device=device,
        device_type=device_type,
        nodes=1,
        per_node=per_node,
        threads=1,
        cores=2,
        memory_gib=memory_gib,
    )


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
    cluster = machine(measurements(POINTS, "a CPU", "cpu", 4, 32.0), "here", ["--num-layers", "2"])
    write_cluster(cluster, tmp_path / "here.toml")
    read = read_cluster(tmp_path / "here.toml")
    assert read.compute == cluster.compute and read.peak_tflops == {"float32": 0.08}
    assert (read.shared_cores, read.device_type) == (2, "cpu")
    assert (read.memory_gib, read.devices_per_node) == (8.0, 4)
    rates = DeviceRates(read, "float32")
    assert rates.product_s(64, 256, 64) == pytest.approx(2 * 64 * 256 * 64 / 0.05e12), (
        "measured shapes as measured"
    )
    between = rates.product_s(96, 128, 128)
    assert 2 * 96 * 128 * 128 / 0.081e12 < between < 2 * 96 * 128 * 128 / 0.049e12
    assert (rates.layer_forward_overhead_s, rates.layer_backward_overhead_s) == (3e-4, 4e-4)
    plan = estimate(planned(MODEL, "--tensor-model-parallel-size 2 --world-size 4"), read)
    assert plan.seconds > 0 and plan.confidence.by_basis["measured"]
    assert "tools/calibrate.py" in read.compute["memory.copy"].source
    more = dataclasses.replace(measurements(POINTS, "a CPU", "cpu", 4, 32.0), cores=12)
    spans = ((0, 2), (3, 5), (6, 8), (9, 11))
    assert machine(more, "here", []).cores_of_device == spans


def test_of_a_gpu_the_host_runs_ahead_and_the_peak_is_published():
    points = {name.replace("float32", "bfloat16"): rows for name, rows in POINTS.items()}
    values = measurements(points, "NVIDIA H100 80GB HBM3", "cuda", 2, 79.6)
    cluster = machine(values, "gpus", [])
    assert (cluster.shared_cores, cluster.memory_gib) == (None, 79.6)
    assert cluster.peak_tflops["bfloat16"] > 900
    assert "layer_overhead_s" not in cluster.compute
    assert cluster.links == {(0, 1): pytest.approx(1048576 / 1e-3 / 1e9, rel=1e-3)}
