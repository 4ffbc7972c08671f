"""tools/preflight.py measure: as srun starts it on two nodes of two processes, and with answers that others gave."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.jobs import check_nodes
from megatron.jobs.check_nodes import Desk, Found, Measurement, places_of, ring_pairs, slurm_places
from megatron.parallel.launch import Launch
from megatron.planner.cluster import load_cluster
from tests.helpers.launching import Outcome, Script
from tests.helpers.processes import free_port
from tools.preflight import main

SOUND = {"product": 0.06, "copy": 20.0}


def variables(rank: int, port: int) -> dict[str, str]:
    """What srun gives this task."""
    node, local = divmod(rank, 2)
    return {
        "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node), "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "node[01-02]",
        "SLURMD_NODENAME": f"node0{node + 1}", "ROCR_VISIBLE_DEVICES": str(local), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "RES_OPTIONS": "timeout:1",
    }  # fmt: skip


# -- real processes ----------------------------------------------------------------------------------------------------


class Patient(Desk):
    """Waits for those who live as long as they take, and for the others for seconds that do not pass."""

    lost = 0

    def __init__(self, store: Any) -> None:
        self.seconds = 0.0
        super().__init__(store, lambda: self.seconds, self.pause)

    def ask(self, orders: Mapping[int, Mapping[str, Any]], *limits: float) -> dict[int, dict[str, Any]]:
        self.living = len(orders) - self.lost
        return super().ask(orders, *limits)

    def pause(self, seconds: float) -> None:
        if self.store.add(f"came/{self.step}", 0) < self.living:
            time.sleep(seconds)
        else:
            self.seconds += seconds


def prepared(rank: int, lost: int) -> None:
    """A busy machine would have its processes differ."""
    check_nodes.speeds = lambda device: SOUND
    check_nodes.Desk = Patient  # type: ignore[misc]
    Patient.lost = lost


def measured(folder: Path, ranks: Sequence[int]) -> list[Outcome]:
    port, arguments = free_port(), ["measure", "--out", str(folder), "--backend", "gloo", "--seconds", "600"]
    with contextlib.ExitStack() as stack:
        scripts = [
            stack.enter_context(Script(
                "tools/preflight.py", arguments, folder.with_name(f"rank_{rank}.log"), variables(rank, port),
                (prepared, rank, 4 - len(ranks)),
            )) for rank in ranks
        ]  # fmt: skip
        return [script.wait() for script in scripts]


@pytest.mark.slow
def test_a_good_allocation(tmp_path: Path) -> None:
    first, *others = measured(tmp_path / "out", range(4))
    assert [first.code, *others] == [0, *[Outcome(0, "")] * 3], first.output
    assert "2 of 2 nodes" in first.output and "--exclude" not in first.output
    found = json.loads((tmp_path / "out/preflight.json").read_text())
    assert (found["exit_code"], found["faults"], found["general"]) == (0, {}, [])
    # Each rank of a node met one of the other node; of a node's own group the first rank speaks.
    assert [sorted(found["figures"][name]) for name in ("within", "between")] == [["0", "2"], ["0", "1", "2", "3"]]
    assert min(found["figures"]["between"].values()) > 0
    assert (tmp_path / "out/good_hosts").read_text() == "node01\nnode02\n"
    assert (tmp_path / "out/bad_hosts").read_text() == ""


@pytest.mark.slow
def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    first, *_ = measured(tmp_path / "out", [0, 1, 2])
    assert first.code == 4 and "--exclude=node02" in first.output
    found = json.loads((tmp_path / "out/preflight.json").read_text())
    assert list(found["faults"]) == ["node02"] and found["faults"]["node02"][0].startswith("local rank 1:")
    assert ((tmp_path / "out/good_hosts").read_text(), (tmp_path / "out/bad_hosts").read_text()) == ("", "node02\n")


@pytest.mark.parametrize(("rank", "speaks"), [(1, False), (2, True), (3, False)])
def test_the_first_of_the_second_node_speaks_when_rank_0_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, speaks: bool
) -> None:
    """Nobody serves the store."""
    for name, value in variables(rank, free_port()).items():
        monkeypatch.setenv(name, value)
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)  # where there are several processes, it does not return
    monkeypatch.setattr(check_nodes, "Stores", lambda launch, seconds: real(launch, 0.05))
    main(["measure", "--out", str(tmp_path / "out")])
    said = capsys.readouterr().err
    if not speaks:
        assert (ends, said, list(tmp_path.iterdir())) == ([0], "", [])
        return
    assert ends == [4] and "node01: " in said and "--exclude=node01" in said
    assert ((tmp_path / "out/bad_hosts").read_text(), (tmp_path / "out/good_hosts").read_text()) == ("node01\n", "")
    # Rank 0's own word stays.
    (tmp_path / "out/good_hosts").write_text("node02\n")
    main(["measure", "--out", str(tmp_path / "out")])
    assert ends == [4, 0] and (tmp_path / "out/good_hosts").read_text() == "node02\n"


real = check_nodes.Stores


@pytest.mark.parametrize("words", [["--cluster", "nowhere"], ["--nodes-needed", "2"], ["--out", "/proc/nothing"]])
def test_wrong_settings_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", *words]) == 2
    assert " ".join(words) in capsys.readouterr().err


def test_a_device_that_computes_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, **options: ones(*shape, **options).fill_(1.5))
    with pytest.raises(RuntimeError, match="3.77487e"):
        check_nodes.speeds(torch.device("cpu"))


# -- answers of other allocations --------------------------------------------------------------------------------------

Answer = Callable[[int, Mapping[str, Any]], Mapping[str, Any] | None]


class Played:
    """Ranks that answer by themselves: `change` gives what is otherwise of an answer, None for none."""

    def __init__(self, each: int, device: str, change: Answer) -> None:
        self.each, self.device, self.change, self.step = each, device, change, 0
        self.asked: list[tuple[str, frozenset[int]]] = []

    def ask(self, orders: Mapping[int, Mapping[str, Any]], *limits: float) -> dict[int, dict[str, Any]]:
        self.step += 1
        answers = {}
        if orders:
            self.asked.append((next(iter(orders.values()))["task"], frozenset(orders)))
        for rank, order in orders.items():
            node, local = divmod(rank, self.each)
            scale = 1.0 if self.device == "cpu" else 1700.0
            sound = {
                "host": f"n{node}",
                "local_rank": local,
                "shown": True,
                "device": self.device,
                "product": 0.06 * scale,
                "copy": 20.0 if self.device == "cpu" else 1250.0,
                "gb_per_s": 100.0,
            }
            changed = self.change(rank, order)
            if changed is not None:
                answers[rank] = sound | dict(changed)
        return answers


def looked_at(nodes: int, change: Answer, device: str = "AMD Instinct MI250X", each: int = 2) -> tuple[Found, Played]:
    played = Played(each, device, change)
    launch = Launch(world_size=nodes * each, local_world_size=each)
    planned = [(f"n{rank // each}", rank % each) for rank in range(nodes * each)]
    cluster = load_cluster("frontier")
    return Measurement(played, launch, cluster, 60.0, planned, lambda line: None).run(), played  # type: ignore[arg-type]


def bad(nodes: int, change: Answer, **more: Any) -> list[str]:
    found, _ = looked_at(nodes, change, **more)
    assert found.general == []
    return list(found.faults)


def at(rank: int, task: str, **answer: Any) -> Answer:
    return lambda r, order: answer if r == rank and order["task"] == task else {}


def test_nothing_against_sound_nodes() -> None:
    for nodes in (1, 2, 3, 4, 7):
        found, played = looked_at(nodes, lambda rank, order: {})
        assert (found.faults, found.warnings, found.verdict(None)) == ({}, [], (0, [f"n{n}" for n in range(nodes)]))
        # Devices, nodes, neighbours in as many rounds as a ring of so many needs, and the end.
        rounds = {1: 0, 2: 1}.get(nodes, 2 + nodes % 2)
        assert [task for task, _ in played.asked] == ["alone", *["group"] * (1 + rounds), "end"]


@pytest.mark.parametrize("change", [
    at(3, "alone", product=70.0), at(3, "alone", copy=900.0), at(3, "alone", error="no device"),
    at(3, "alone", shown=False), at(3, "group", error="does not end"),
    lambda rank, order: None if rank == 3 else {},
    lambda rank, order: {"gb_per_s": 20.0} if rank in (2, 3) and {2, 3} == set(order.get("members", [])) else {},
    # Messages of one card are slow, or do not come through, whomever they go to.
    lambda rank, order: {"gb_per_s": 1.0} if _across(order, 3) else {},
    lambda rank, order: {"error": "timed out"} if _across(order, 3) else {},
    lambda rank, order: (None if rank == 3 else {"error": "timed out"}) if _across(order, 3) else {},
])  # fmt: skip
def test_one_bad_node_is_named_and_no_other(change: Answer) -> None:
    for nodes in (3, 4, 5):
        found, _ = looked_at(nodes, change)
        assert list(found.faults) == ["n1"] and found.general == [], found.faults
        assert found.verdict(nodes) == (4, [])
        assert found.verdict(nodes - 2) == (0, [f"n{n}" for n in range(nodes) if n != 1][: nodes - 2])


def _across(order: Mapping[str, Any], rank: int) -> bool:
    members = order.get("members", [])
    return rank in members and {member // 2 for member in members} != {rank // 2}


def test_a_bad_node_takes_part_in_no_collective() -> None:
    _, played = looked_at(4, at(3, "alone", error="no device"))
    assert all(not ranks & {2, 3} for task, ranks in played.asked if task == "group")
    # Who lives is let go; who gave no answer is not waited for.
    assert played.asked[-1] == ("end", frozenset(range(8)))
    _, played = looked_at(4, lambda rank, order: None if rank == 3 else {})
    assert played.asked[-1] == ("end", frozenset(range(8)) - {3})


def test_two_nodes_that_do_not_reach_each_other_are_nobodys_fault() -> None:
    found, _ = looked_at(2, lambda rank, order: {"error": "timed out"} if _across(order, rank) else {})
    assert found.faults == {} and len(found.general) == 1 and found.verdict(1) == (4, [])


def test_a_rank_that_is_shown_no_device_where_others_are() -> None:
    """On its node, or on most; where nobody is, nothing limits them."""
    for hidden, expected in (({1}, ["n0"]), ({2, 3}, ["n1"]), ({0, 1, 3}, ["n1"]), (set(range(6)), [])):
        assert bad(3, lambda rank, order, hidden=hidden: {"shown": rank not in hidden}) == expected, hidden
    assert bad(1, at(1, "alone", shown=False)) == ["n0"]


def test_a_machine_below_its_band_is_compared_with_itself() -> None:
    found, _ = looked_at(
        4, lambda rank, order: {"product": 60.0 - (rank == 5) * 20.0} if order["task"] == "alone" else {}
    )
    assert list(found.faults) == ["n2"] and len(found.warnings) == 1


def test_a_cpu_has_no_band_and_its_messages_no_speed() -> None:
    slow_message: Answer = lambda rank, order: {"gb_per_s": 0.01} if rank == 1 else {}  # noqa: E731
    assert bad(3, slow_message, device="cpu") == []
    assert bad(3, at(3, "alone", product=0.02), device="cpu") == ["n1"]
    assert bad(3, at(3, "alone", product=0.05), device="cpu") == []


def test_normal_differences_accuse_nobody() -> None:
    """3 % of noise on 1,000 nodes: the slowest of 8,000 values is some four deviations below the median."""
    torch.manual_seed(1)
    noise = (1.0 + 0.03 * torch.randn(8000)).tolist()
    assert statistics.median(noise) == pytest.approx(1.0, abs=0.01) and min(noise) < 0.91
    assert bad(1000, lambda rank, order: {"product": 110.0 * noise[rank]}, each=8) == []


# -- who is where ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 12))
def test_every_host_meets_both_neighbours_and_one_at_a_time(count: int) -> None:
    hosts = [f"n{number}" for number in range(count)]
    rounds = ring_pairs(hosts)
    for pairs in rounds:
        met = [host for pair in pairs for host in pair]
        assert len(met) == len(set(met))
    partners = {
        host: {h for pairs in rounds for pair in pairs if host in pair for h in pair} - {host} for host in hosts
    }
    assert [len(partners[host]) for host in hosts] == [min(count - 1, 2)] * count


def test_places_of_those_who_did_not_come() -> None:
    launch = Launch(world_size=5, local_world_size=2)
    environ = {"SLURM_STEP_NODELIST": "a[1-3]", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
    planned = slurm_places(environ, launch)
    assert planned == [("a1", 0), ("a1", 1), ("a2", 0), ("a2", 1), ("a3", 0)]
    assert places_of(planned, {0: ("a1", 0), 4: ("a3", 0)}, 2) == planned
    # Slurm dealt them in turns: who came says where, and nodes and numbers of the others are right.
    cyclic = places_of(planned, {0: ("a1", 0), 1: ("a2", 0), 2: ("a3", 0)}, 2)
    assert cyclic[:3] == [("a1", 0), ("a2", 0), ("a3", 0)] and set(cyclic[3:]) == {("a1", 1), ("a2", 1)}
    # Another launcher, which tells no names.
    unknown = slurm_places({}, launch)
    assert places_of(unknown, {0: ("b", 0)}, 2)[:3] == [("b", 0), ("b", 1), ("node 1", 0)]


def test_who_still_arrives_is_waited_for() -> None:
    """The limit of 60 s is put off to 15 s after the last answer, never beyond 120 s."""
    for arrivals, came, ended in (([50, 63], 2, 63), ([50], 1, 65), ([], 0, 60), ([50, 64, 78, 92, 106, 119], 6, 120)):
        now = SimpleNamespace(s=0.0)

        def sleep(seconds: float, now: SimpleNamespace = now) -> None:
            now.s += seconds

        def add(key: str, by: int, now: SimpleNamespace = now, arrivals: list[int] = arrivals) -> int:
            return sum(arrival <= now.s for arrival in arrivals)

        store = SimpleNamespace(
            add=add, multi_set=lambda keys, values: None, multi_get=lambda keys: [check_nodes._NOTHING] * len(keys)
        )
        Desk(store, lambda now=now: now.s, sleep).ask({rank: {} for rank in range(came + (ended != 63))}, 60.0, 120.0)
        assert math.isclose(now.s, ended, abs_tol=0.2), (arrivals, now.s)
