"""What rank 0 concludes from answers: the real steps, with answers from a table."""
from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.preflight.measure import report
from megatron.preflight.measure.findings import Results
from tests.preflight.measure.played import NVME, Change, measured

Answer = dict[str, Any]
Order = Mapping[str, Any]


def only(ranks: set[int], task: str, **values: Any) -> Change:
    """These ranks answer this with other values."""

    def change(rank: int, order: Order, answer: Answer) -> Answer:
        return answer | values if rank in ranks and order["task"] == task else answer

    return change


def on_node(host: int, path: str, value: Any) -> Change:
    """A fact of a node, "disks/tmp" for example; hosts from 0."""

    def change(rank: int, order: Order, answer: Answer) -> Answer:
        if rank // 8 == host and "node" in answer:
            place, names = answer["node"], path.split("|")
            for name in names[:-1]:
                place = place[name]
            place[names[-1]] = value
        return answer

    return change


def accused(results: Results) -> list[tuple[str, str, int | None]]:
    return [(finding.kind, finding.host, finding.local_rank) for finding in results.findings]


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 8), (2, 1), (3, 2), (5, 4)])
def test_other_sizes(nodes: int, per_node: int) -> None:
    results, _ = measured(nodes=nodes, per_node=per_node)
    assert not results.findings and results.verdict(None)[0] == 0


def test_a_healthy_allocation_has_no_findings() -> None:
    results, played = measured()
    assert (results.findings, results.warnings, results.general) == ([], [], [])
    assert results.verdict(None) == (0, [f"frontier{k:05d}" for k in (1, 2, 3, 4)])
    assert results.exclude == ""
    assert [task for task, _ in played.asked] == ["hello", "device", "group", "group", "group", *["reduce"] * 8]
    assert len(results.pairs) == 32  # four neighbours in the ring, eight ranks each
    assert "per GCD" in " ".join(str(column.header) for column in report.node_table(results).columns)


def test_who_does_not_come_is_named_with_node_and_local_rank() -> None:
    results, played = measured(lambda rank, order, answer: None if rank in (11, 30) else answer)
    assert accused(results) == [("missing", "frontier00002", 3), ("missing", "frontier00004", 6)]
    assert results.exclude == "--exclude=frontier00002,frontier00004"
    assert [task for task, _ in played.asked][-1] == "look"
    assert not any(rank in ranks for task, ranks in played.asked if task != "hello" for rank in (11, 30))


def test_who_is_stopped_before_it_comes_is_told_from_who_is_not_there() -> None:
    def change(rank: int, order: Order, answer: Answer) -> Answer | None:
        if order["task"] == "look":
            text = "stopped 80%"
            return {"states": {str(lost): (text, 0.8) for lost, _ in order["processes"]}}
        return None if rank == 8 else answer

    results, played = measured(change)
    assert [finding.kind for finding in results.findings] == ["stopped"]
    assert played.asked[-1] == ("look", [9])  # the first of its node that is there
    assert "stopped 80%" in results.findings[0].text


@pytest.mark.parametrize("step", ["device", "group", "across"])
def test_who_dies_on_the_way_is_named_and_nobody_else(step: str) -> None:
    """Members of its groups fail with it."""

    def change(rank: int, order: Order, answer: Answer) -> Answer | None:
        across = order["task"] == "group" and not order["whole_node"]
        dies = across if step == "across" else order["task"] == step
        if rank == 11 and dies:
            return None
        if 11 in order.get("members", ()) and dies:
            return {"error": "timed out"}
        return answer

    results, played = measured(change)
    ((_, *place),) = accused(results)
    assert place == ["frontier00002", 3] and results.warnings == []
    assert not any(task == "group" and set(ranks) < set(range(8, 16)) for task, ranks in played.asked)  # nobody again
    assert "1011" in results.findings[0].text


def test_a_slow_device_is_accused_after_a_second_measurement() -> None:
    results, played = measured(only({9}, "device", gemm_tflops=50.0, copy_gb_per_s=300.0))
    assert {(f.rank, f.measured, f.expected, f.unit) for f in results.findings} == {
        (9, 50.0, 90.0, "TFLOP/s"), (9, 300.0, 1000.0, "GB/s")
    }
    assert ("device", [9]) in played.asked


def test_who_is_slow_only_once_is_not_accused() -> None:
    count = {"asked": 0}

    def change(rank: int, order: Order, answer: Answer) -> Answer:
        if rank == 9 and order["task"] == "device":
            count["asked"] += 1
            return answer | ({"gemm_tflops": 50.0} if count["asked"] == 1 else {})
        return answer

    results, _ = measured(change)
    assert not results.findings
    assert count["asked"] == 2
    assert results.ranks[9]["gemm_tflops"] > 100


def test_a_band_that_all_miss_is_a_warning() -> None:
    results, _ = measured(only(set(range(32)), "device", gemm_tflops=60.0))
    assert not results.findings
    (warning,) = results.warnings
    assert "60" in warning and "90" in warning


def test_a_stopped_process_is_accused_of_that_alone() -> None:
    results, _ = measured(only({5}, "device", stopped=0.7, host_gflops=9.0), on_cpu=True, backend="gloo")
    assert accused(results) == [("stopped", "frontier00001", 5)] and "70%" in results.findings[0].text


@pytest.mark.parametrize(
    "shown", [{}, {"ROCR_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}]
)
def test_a_rank_that_is_shown_no_device(shown: dict[str, str]) -> None:
    results, _ = measured(only({10}, "hello", shown=shown), on_cpu=True, backend="gloo")
    assert accused(results) == [("device", "frontier00002", 2)]
    assert all(name in results.findings[0].text for name in shown)


def test_devices_that_are_shown_otherwise_are_right() -> None:
    """All eight for everybody, numbers anew for each, or no variable at all."""
    for shown in ({"ROCR_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, {"ROCR_VISIBLE_DEVICES": "0"}, {}):
        assert not measured(only(set(range(32)), "hello", shown=shown))[0].findings


def test_two_ranks_on_one_device() -> None:
    results, _ = measured(only({17}, "hello", shown={"ROCR_VISIBLE_DEVICES": "4"}))
    assert [f.local_rank for f in results.findings] == [1, 4]
    results, _ = measured(only({17}, "device", identity="0:4"))
    assert [f.local_rank for f in results.findings] == [1, 4]
    assert "0:4" in results.findings[0].text


def test_a_rank_without_a_device_in_torchs_eyes() -> None:
    results, _ = measured(only({3}, "device", kind="cpu"))
    assert accused(results) == [("device", "frontier00001", 3)]
    assert not measured(only({3}, "device", kind="cpu"), backend="gloo")[0].findings


def test_a_device_that_fails() -> None:
    results, _ = measured(only({3}, "device", error="within 5 s"))
    assert accused(results) == [("device", "frontier00001", 3)] and "within 5 s" in results.findings[0].text


def test_a_slow_link_within_a_node() -> None:
    def change(rank: int, order: Order, answer: Answer) -> Answer:
        return answer | {"p2p_gb_per_s": 10.0} if rank in (20, 21) and order.get("whole_node") else answer

    results, played = measured(change)
    (finding,) = results.findings
    assert (finding.kind, finding.host, finding.measured, finding.unit) == ("link", "frontier00003", 10.0, "GB/s")
    assert "4 and 5" in finding.text
    assert ("group", list(range(16, 24))) in played.asked  # once more, this node alone


def test_speeds_of_messages_between_cpus_are_no_fault() -> None:
    def change(rank: int, order: Order, answer: Answer) -> Answer:
        return answer | {"p2p_gb_per_s": 0.1} if rank in (20, 21) and order["task"] == "group" else answer

    results, _ = measured(change, on_cpu=True, backend="gloo")
    assert (results.findings, results.warnings) == ([], [])


def test_messages_that_fail_in_a_node_without_a_dead_rank() -> None:
    def change(rank: int, order: Order, answer: Answer) -> Answer:
        return {"error": "gave 3"} if rank // 8 == 1 and order.get("whole_node") else answer

    results, _ = measured(change)
    assert accused(results) == [("link", "frontier00002", 0)] and "gave 3" in results.findings[0].text


def slow_pairs(bad: set[int], value: float = 1.0) -> Change:
    def change(rank: int, order: Order, answer: Answer) -> Answer:
        across = order["task"] == "group" and not order["whole_node"]
        return answer | {"p2p_gb_per_s": value} if across and bad.intersection(order["members"]) else answer

    return change


@given(st.sets(st.integers(0, 63), max_size=2))
def test_a_slow_link_between_nodes_is_its_ranks_and_nobody_elses(bad: set[int]) -> None:
    results, _ = measured(slow_pairs(bad), nodes=8)
    assert results.bad_ranks == bad
    assert set(results.bad_hosts) == {f"frontier{rank // 8 + 1:05d}" for rank in bad}


def test_the_network_plugin_is_missing() -> None:
    """Everything is as slow as TCP: nobody is accused, but nothing may run."""
    results, _ = measured(slow_pairs(set(range(32)), 2.0))
    assert not results.findings
    assert results.verdict(1) == (4, [])
    assert "rccl-net-plugin" in results.general[0]


def test_the_network_plugin_is_missing_by_rccls_own_word() -> None:
    results, _ = measured(only(set(range(32)), "group", network="Socket"))
    assert "32 of 32" in results.general[0]
    results, _ = measured(only(set(range(8)), "group", network="Socket"))
    assert not results.general
    assert results.bad_hosts == ["frontier00001"]


def failing_group(kind: str, members: set[int]) -> Change:
    """The group of this kind that has these ranks, and all that come after it, hang."""

    def change(rank: int, order: Order, answer: Answer) -> Answer:
        return {"error": "within 61 s"} if order.get("kind") == kind and rank in members else answer

    return change


def test_a_group_that_hangs_is_named_and_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 ranks, 2 x 4 x 4. The group of a node is its node's fault; nobody's is that of several, and nothing may
    run."""
    monkeypatch.setenv("NCCL_NET_GDR_LEVEL", "SYS")
    results, played = measured(failing_group("data", {1, 3, 5, 7}))
    assert accused(results) == [("network", "frontier00001", None)] and not results.general
    assert all(words in results.findings[0].text for words in ("data", "1, 3, 5, 7", "61 s"))
    assert [task for task, _ in played.asked].count("reduce") == 2
    results, _ = measured(failing_group("pipeline", {0, 8, 16, 24}))
    (text,) = results.general
    assert all(words in text for words in ("pipeline", "0, 8, 16, 24", "frontier00003", "NCCL_NET_GDR_LEVEL=SYS"))
    assert (results.findings, results.verdict(1)) == ([], (4, []))


def test_who_dies_in_a_group_explains_it() -> None:
    def change(rank: int, order: Order, answer: Answer) -> Answer | None:
        return failing_group("world", set(range(32)))(rank, order, answer) if rank != 9 or "kind" not in order else None

    results, _ = measured(change)
    assert accused(results) == [("missing", "frontier00002", 1)] and not results.general


def test_versions_that_are_known_to_hang_are_a_warning() -> None:
    results, _ = measured(only(set(range(32)), "group", versions={"aws-ofi-rccl": "1.4.0", "libfabric": "1.22"}))
    (warning,) = results.warnings
    assert "libfabric 1.22" in warning and not results.findings


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("versions|torch", "2.9", ("torch", "2.9", "2.10")),
        (f"disks|{NVME}", {"error": "FileNotFoundError"}, (NVME, "FileNotFoundError")),
    ],
)
def test_facts_that_exclude_a_node(path: str, value: Any, words: tuple[str, ...]) -> None:
    results, _ = measured(on_node(1, path, value))
    (finding,) = results.findings
    assert all(word in finding.text for word in words)
    assert results.bad_hosts == ["frontier00002"]


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("versions|kernel", "5.15", ("5.15", "5.14")),
        (f"disks|{NVME}|free_gib", 20.0, ("20 GiB", "100")),
        (f"disks|{NVME}|write_gb_per_s", 0.1, ("0.1 GB/s", "2")),
        ("skew_s", 9.001, ("+9.000 s",)),
        ("memory|MemTotal", 470.0, ("470 GiB", "502")),
        ("memory|MemAvailable", 100.0, ("100 GiB", "490")),
        ("errors", {"card3": 2}, ("2", "card3")),
    ],
)
def test_facts_that_are_only_warnings(path: str, value: Any, words: tuple[str, ...]) -> None:
    results, _ = measured(on_node(1, path, value))
    assert not results.findings
    (warning,) = results.warnings
    assert warning.startswith("frontier00002: ")
    assert all(word in warning for word in words)


def test_a_disk_that_no_node_has_is_one_warning() -> None:
    def change(rank: int, order: Order, answer: Answer) -> Answer:
        if "node" in answer:
            answer["node"]["disks"][NVME] = {"error": "FileNotFoundError"}
        return answer

    results, _ = measured(change)
    assert not results.findings
    (warning,) = results.warnings
    assert NVME in warning and "FileNotFoundError" in warning


def test_spare_nodes_take_the_place_of_bad_ones(tmp_path: Path) -> None:
    results, _ = measured(only({9}, "device", gemm_tflops=50.0))
    assert results.verdict(None) == (4, [])
    assert results.verdict(4) == (4, [])
    assert results.verdict(2) == (0, ["frontier00001", "frontier00003"])
    report.prepare_folder(tmp_path / "out")
    report.write_files(tmp_path / "out", results.as_json(3))
    assert (tmp_path / "out/good_hosts").read_text() == "frontier00001\nfrontier00003\nfrontier00004\n"
    assert (tmp_path / "out/bad_hosts").read_text() == "frontier00002\n"
    content = json.loads((tmp_path / "out/preflight.json").read_text())
    assert (content["exit_code"], content["exclude"]) == (0, "--exclude=frontier00002")
    assert content["findings"][0]["measured"] == 50.0
    assert content["hosts"]["frontier00002"]["ranks"]["1"]["rank"] == 9
    report.prepare_folder(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
