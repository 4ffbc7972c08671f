"""tools/preflight.py measure, started by srun on two nodes of two processes, and its verdicts."""

import contextlib
import json
from collections import defaultdict
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.jobs.check_nodes import (
    BETWEEN,
    FIGURES,
    PRODUCT,
    WITHIN,
    Process,
    judge,
)
from megatron.parallel.launch import Launch
from megatron.parallel.store import StoreConnection
from megatron.planner.cluster import load_cluster
from tests.helpers.launching import Outcome, Script
from tests.helpers.processes import free_port
from tools.preflight import main

# -- real processes --------------------------------------------------------------------------------


def variables(rank, port):
    """Return the variables that srun sets for this task."""
    node, local = divmod(rank, 2)
    line = (
        "SLURM_JOB_ID=4711 SLURM_STEP_ID=0 SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=4 "
        "SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_STEP_NODELIST=node[01-02] "
        f"SLURM_PROCID={rank} SLURM_LOCALID={local} SLURM_NODEID={node} "
        f"SLURMD_NODENAME=node0{node + 1} ROCR_VISIBLE_DEVICES={local} MASTER_ADDR=127.0.0.1 "
        f"MASTER_PORT={port} RES_OPTIONS=timeout:1"
    )
    return dict(word.split("=") for word in line.split())


def prepared(living):
    """Do not wait for lost processes."""
    share = Process.share
    Process.share = lambda self, phase, ranks, limit: share(
        self, phase, {*ranks} & {*living}, limit
    )


def measured(folder, ranks):
    port = free_port()
    words = f"measure --out {folder} --backend gloo --seconds 600".split()
    with contextlib.ExitStack() as stack:
        scripts = []
        for rank in ranks:
            log = folder.with_name(f"rank_{rank}.log")
            here = variables(rank, port), (prepared, ranks)
            script = Script("tools/preflight.py", words, log, *here)
            scripts.append(stack.enter_context(script))
        return [script.wait() for script in scripts]


def hosts_of(folder):
    return [(folder / f"{kind}_hosts").read_text().split() for kind in ("good", "bad")]


@pytest.mark.slow
def test_a_good_allocation(tmp_path):
    first, *rest = measured(tmp_path / "out", range(4))
    assert [first.code, *rest] == [0, *[Outcome(0, "")] * 3], first.output
    assert "2 of 2 nodes" in first.output and "--exclude" not in first.output
    assert all(f"{name}, {unit}: " in first.output for name, (unit, _, _) in FIGURES.items())
    assert hosts_of(tmp_path / "out") == [["node01", "node02"], []]


@pytest.mark.slow
def test_who_does_not_come_is_named(tmp_path):
    first, *_ = measured(tmp_path / "out", [0, 1, 2])
    assert first.code == 4 and "--exclude=node02" in first.output and "rank 3:" in first.output
    assert hosts_of(tmp_path / "out") == [["node01"], ["node02"]]


def test_without_rank_0_the_others_end(tmp_path, monkeypatch, capsys):
    for name, value in variables(1, free_port()).items():
        monkeypatch.setenv(name, value)
    real = StoreConnection.open

    def impatient(self):
        self.timeout = timedelta(seconds=0.05)
        real(self)

    monkeypatch.setattr(StoreConnection, "open", impatient)
    assert main(["measure", "--out", str(tmp_path / "out")]) == 75
    assert "rank 0" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_device_that_computes_wrongly(monkeypatch):
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, **options: ones(*shape, **options).fill_(1.5))
    connection = SimpleNamespace(launch=Launch(), another=lambda: None)
    process = Process(connection, 60.0)
    process.multiply("gloo", None)
    assert "864" in process.errors[PRODUCT]


# -- who meets whom --------------------------------------------------------------------------------


def process_of(rank, world, speed):
    launch = Launch(rank=rank, local_rank=rank % 2, world_size=world, local_world_size=2)
    connection = SimpleNamespace(launch=launch, another=lambda: None)
    process = Process(connection, 60.0)
    process._bandwidth = lambda name, member, size: speed(name, member)
    return process


@pytest.mark.parametrize("count", range(1, 10))
def test_every_node_meets_both_neighbours_and_one_at_a_time(count):
    """Each node meets both neighbours, one at a time.

    Nodes 1, 3, 5, ... take part; the others are bad. Each group gets members 0 and 1.
    """
    nodes = [2 * i + 1 for i in range(count)]
    groups = defaultdict(list)
    for node in nodes:
        for rank in (2 * node, 2 * node + 1):
            process_of(
                rank, 40, lambda name, member, rank=rank: groups[name].append((member, rank)) or 1.0
            ).meet(nodes)
    partners = defaultdict(set)
    for members in groups.values():
        (first, one), (second, other) = sorted(members)
        assert (first, second) == (0, 1)
        partners[one // 2].add(other // 2)
        partners[other // 2].add(one // 2)
        assert one // 2 == other // 2 or one % 2 == other % 2, "ranks meet their counterparts"
    for i, node in enumerate(nodes):
        assert partners[node] == {node, nodes[i - 1], nodes[(i + 1) % count]}


@pytest.mark.parametrize("bad", ["between/0", "between/1", "between"])
def test_the_better_neighbour_counts(bad):
    """A node is judged by its better neighbour, whichever round the bad one is in."""

    def speed(name, member, failure):
        if name.startswith(bad) and failure:
            raise RuntimeError("timed out")
        return 1.0 if name.startswith(bad) else 50.0

    for failure in (True, False):
        process = process_of(
            2, 8, lambda name, member, failure=failure: speed(name, member, failure)
        )
        process.meet([0, 1, 2, 3])
        if bad != "between":
            assert process.figures == {WITHIN: 50.0, BETWEEN: 50.0} and process.errors == {}
        elif failure:
            assert process.figures == {WITHIN: 50.0} and process.errors == {BETWEEN: "timed out"}


def test_nodes_with_bad_devices_take_part_in_no_collective():
    """Nodes with bad devices take part in no collective.

    Rank 2 has no device, rank 7 did not come.
    """
    store = dist.HashStore()
    met = []
    for rank in {*range(1, 10)} - {7}:
        store.set(
            f"device/{rank}",
            json.dumps({"errors": {PRODUCT: "there is none"} if rank == 2 else {}}),
        )
    for rank in {*range(1, 10)} - {7, 9}:
        store.set(f"network/{rank}", '{"errors": {}}')
    connection = SimpleNamespace(
        launch=Launch(world_size=10, local_world_size=2),
        store=store,
        another=lambda: None,
        poll=lambda *_: None,
    )
    process = Process(connection, 60.0)
    process.meet = met.append
    assert {*process.exchange()} == {*range(9)} - {7}, (
        "who did not come is not asked again, who is silent is left out"
    )
    assert met == [[0, 2, 4]]


# -- the verdict -----------------------------------------------------------------------------------


def verdict(nodes, change, each=2, device="cuda"):
    reports = {
        rank: {
            "device": device,
            "errors": {},
            "figures": {PRODUCT: 102.0, WITHIN: 100.0, BETWEEN: 90.0},
        }
        for rank in range(nodes * each)
    }
    change(reports)
    return judge(
        reports,
        [f"n{rank // each}" for rank in range(nodes * each)],
        load_cluster("frontier").bands,
    )


def nothing(reports):
    """Change nothing: all is well."""


def figure(name, value, *ranks):
    def change(reports):
        for rank in ranks:
            reports[rank]["figures"][name] = value

    return change


def alone(*ranks):
    def change(reports):
        for rank in ranks:
            reports[rank]["errors"][BETWEEN] = "timed out"
            del reports[rank]["figures"][BETWEEN]

    return change


def test_nothing_against_sound_nodes():
    for nodes in (1, 2, 5):
        judgement = verdict(nodes, nothing)
        assert (judgement.bad, judgement.good) == ([], [f"n{n}" for n in range(nodes)])
        assert not any("FAULT" in line or "--exclude" in line for line in judgement.lines)


@pytest.mark.parametrize(
    "change",
    [
        figure(PRODUCT, 70.0, 3),
        figure(WITHIN, 20.0, 2, 3),
        figure(BETWEEN, 1.0, 3),
        alone(3),
        lambda reports: reports[3]["errors"].update({PRODUCT: "no device"}),
        lambda reports: reports.pop(3),
    ],
)
def test_one_bad_node_is_named_and_no_other(change):
    for nodes in (3, 4):
        judgement = verdict(nodes, change)
        assert judgement.bad == ["n1"] and judgement.good == [
            f"n{n}" for n in range(nodes) if n != 1
        ]
        assert "--exclude=n1" in judgement.lines and any(
            line.startswith("FAULT n1 rank 3: ") for line in judgement.lines
        )


def test_two_nodes_that_do_not_reach_each_other_are_nobodys_fault():
    judgement = verdict(2, alone(0, 1, 2, 3))
    assert judgement.bad == judgement.good == [] and any(
        line.startswith("FAULT no node") for line in judgement.lines
    )


def test_who_has_no_sound_neighbour_is_not_accused():
    judgement = verdict(
        2, lambda r: (alone(0, 1, 2, 3)(r), r[3]["errors"].update({WITHIN: "no end"}))
    )
    assert judgement.bad == ["n1"] and judgement.good == ["n0"]


def test_a_machine_below_its_band_is_compared_with_itself():
    assert verdict(1, figure(PRODUCT, 88.0, 1)).bad == ["n0"], "the band is narrower than the share"
    slow = figure(PRODUCT, 60.0, *range(8))
    assert not verdict(4, slow).bad
    assert verdict(4, lambda r: (slow(r), figure(PRODUCT, 40.0, 5)(r))).bad == ["n2"]


def test_nobody_is_accused_of_a_slow_cpu():
    for name in (BETWEEN, PRODUCT):
        assert not verdict(3, figure(name, 0.001, 1), device="cpu").bad


def test_normal_differences_accuse_nobody():
    """Normal differences accuse no node.

    With 3 % of noise on 1,000 nodes the slowest of 8,000 values is some four deviations below the
    median.
    """
    torch.manual_seed(1)
    noise = (1.0 + 0.03 * torch.randn(8000)).tolist()
    assert min(noise) < 0.91

    def change(reports):
        for rank, one in reports.items():
            one["figures"][PRODUCT] = 110.0 * noise[rank]

    assert not verdict(1000, change, each=8).bad
