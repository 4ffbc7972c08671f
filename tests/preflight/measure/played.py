"""Answers of an allocation that exists only in a table, for the real conductor's steps."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron.parallel.launch import Launch
from megatron.planning.cluster import load_cluster
from megatron.preflight.measure.conduct import Measurement, Settings
from megatron.preflight.measure.expected import Place
from megatron.preflight.measure.findings import Results

Change = Callable[[int, Mapping[str, Any], dict[str, Any]], "dict[str, Any] | None"]
"""(rank, order, healthy answer) -> the answer, or None where none comes."""

NVME = "/mnt/bb/user"
VERSIONS = {"python": "3.11.7", "torch": "2.10", "megatron": "0.1.0 abc", "kernel": "5.14"}


def unchanged(rank: int, order: Mapping[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    return answer


class Played:
    """Stands for Conductor: a healthy Frontier, but for what `change` makes of it."""

    def __init__(self, per_node: int, change: Change, on_cpu: bool = False) -> None:
        self.per_node, self.change, self.on_cpu = per_node, change, on_cpu
        self.asked: list[tuple[str, list[int]]] = []

    def ask(self, orders: Mapping[int, Mapping[str, Any]], *limits: float) -> dict[int, dict[str, Any]]:
        self.asked.append((next(iter(orders.values()), {}).get("task", ""), list(orders)))
        answers = {rank: self.change(rank, order, self.healthy(rank, order)) for rank, order in orders.items()}
        return {rank: answer for rank, answer in answers.items() if answer is not None}

    def healthy(self, rank: int, order: Mapping[str, Any]) -> dict[str, Any]:
        node, local = divmod(rank, self.per_node)
        if order["task"] == "hello":
            shown = {"ROCR_VISIBLE_DEVICES": str(local)}
            return {"host": f"frontier{node + 1:05d}", "local_rank": local, "pid": 1000 + rank, "shown": shown}
        if order["task"] == "device":
            return self._device(rank, local, order)
        if order["task"] == "group":
            whole, members = order["whole_node"], order["members"]
            partner = members.index(rank) ^ 1
            answer = {"p2p_gb_per_s": 150.0 if whole else 10.0}
            if partner < len(members):
                answer["partner"] = members[partner]
            return answer | ({"allreduce_gb_per_s": 130.0} if whole else {"network": "AWS Libfabric"})
        if order["task"] == "look":
            return {"states": {str(lost): (f"process {pid} has ended", 0.0) for lost, pid in order["processes"]}}
        return {}

    def _device(self, rank: int, local: int, order: Mapping[str, Any]) -> dict[str, Any]:
        wobble = 1.0 + 0.01 * ((rank * 7) % 5 - 2)
        answer = {
            "kind": "cuda", "device": str(local), "device_name": "AMD Instinct MI250X", "identity": f"0:{local}",
            "answers": True, "host_gflops": 60 * wobble, "host_copy_gb_per_s": 20 * wobble, "stopped": 0.0,
            "gemm_tflops": 106 * wobble, "copy_gb_per_s": 1250 * wobble,
        }  # fmt: skip
        if self.on_cpu:
            for name in ("device_name", "gemm_tflops", "copy_gb_per_s"):
                del answer[name]
            answer |= {"kind": "cpu", "identity": ""}
        if "folders" in order:
            answer["node"] = {
                "skew_s": 0.001, "bound_s": 1e-5, "memory": {"MemTotal": 502.0, "MemAvailable": 490.0}, "errors": {},
                "versions": dict(VERSIONS),
                "disks": {folder: {"free_gib": 1700.0, "write_gb_per_s": 2.0} for folder in order["folders"]},
            }  # fmt: skip
        return answer


def measured(
    change: Change = unchanged, nodes: int = 4, per_node: int = 8, on_cpu: bool = False, **settings: Any
) -> tuple[Results, Played]:
    """The results of all steps."""
    played = Played(per_node, change, on_cpu)
    launch = Launch(rank=0, world_size=nodes * per_node, local_world_size=per_node)
    hosts = [[Place(f"frontier{node + 1:05d}", local) for local in range(per_node)] for node in range(nodes)]
    wanted = Settings(**{"cluster": load_cluster("frontier"), "nvme": NVME, "disks": (NVME, "/tmp"), **settings})
    measurement = Measurement(played, launch, wanted, hosts, None, lambda line: None)  # type: ignore[arg-type]
    return measurement.run(), played
