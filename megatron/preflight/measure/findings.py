"""What a measurement found, and what it says about hosts."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron.preflight.measure.expected import UNKNOWN, Place


@dataclass(frozen=True)
class Finding:
    """A fault of a host, or of one rank on it (with its GCD), for which the host is to be excluded.

    kind                one word for programs: missing, stopped, device, slow, link, disk, version, network
    measured, expected  in `unit`, where something was measured; expected is the least that would have been enough
    """

    kind: str
    host: str
    text: str
    rank: int | None = None
    local_rank: int | None = None
    device: str = ""
    measured: float | None = None
    expected: float | None = None
    unit: str = ""

    @property
    def line(self) -> str:
        where = self.host
        if self.local_rank is not None:
            where += f" local rank {self.local_rank}" + (f" (device {self.device})" if self.device else "")
        return f"{where}: {self.text}"


@dataclass
class Results:
    """Everything a measurement found.

    places    where each rank is, or ought to be
    hosts     ranks of each host, in the order of the allocation
    findings  faults of hosts; warnings: what is no reason to exclude a host; general: what is wrong with the whole
              allocation, for which no host can be blamed
    ranks     what each rank measured; nodes: the facts of each node; pairs: GB/s between ranks of neighbouring nodes
    limits    below what a measurement counted as slow
    """

    places: Sequence[Place]
    hosts: dict[str, list[int]]
    findings: list[Finding] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    general: list[str] = field(default_factory=list)
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    pairs: dict[tuple[int, int], float] = field(default_factory=dict)
    limits: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def accuse(self, kind: str, rank: int, text: str, **numbers: Any) -> None:
        place = self.places[rank]
        device = str(self.ranks.get(rank, {}).get("device", ""))
        self.findings.append(Finding(kind, place.host, text, rank, place.local_rank, device, **numbers))

    def accuse_host(self, kind: str, host: str, text: str, **numbers: Any) -> None:
        self.findings.append(Finding(kind, host, text, **numbers))

    @property
    def bad_ranks(self) -> set[int]:
        return {finding.rank for finding in self.findings if finding.rank is not None}

    @property
    def bad_hosts(self) -> list[str]:
        """In the order of the allocation; only hosts whose name is known."""
        bad = {finding.host for finding in self.findings}
        return [host for host in self.hosts if host in bad and not host.startswith(UNKNOWN)]

    @property
    def good_hosts(self) -> list[str]:
        bad = {finding.host for finding in self.findings}
        return [host for host in self.hosts if host not in bad]

    def verdict(self, nodes_needed: int | None) -> tuple[int, list[str]]:
        """(exit code, hosts to use): 0 and the first good hosts where there are enough, else 4 and none."""
        good = self.good_hosts
        needed = len(self.hosts) if nodes_needed is None else nodes_needed
        if self.general or len(good) < needed:
            return 4, []
        return 0, good[:needed]

    @property
    def exclude(self) -> str:
        """What to add to sbatch, or ""."""
        return f"--exclude={','.join(self.bad_hosts)}" if self.bad_hosts else ""

    def as_json(self, nodes_needed: int | None) -> dict[str, Any]:
        code, use = self.verdict(nodes_needed)
        return {
            "exit_code": code, "nodes": len(self.hosts), "ranks": len(self.places), "nodes_needed": nodes_needed,
            "seconds": round(self.seconds, 2), "good_hosts": use, "bad_hosts": self.bad_hosts,
            "exclude": self.exclude, "general": self.general,
            "findings": [{k: v for k, v in asdict(f).items() if v not in (None, "")} for f in self.findings],
            "warnings": self.warnings, "limits": self.limits, "steps": self.steps,
            "hosts": {
                host: {
                    **self.nodes.get(host, {}),
                    "ranks": {self.places[r].local_rank: {"rank": r, **self.ranks.get(r, {})} for r in ranks},
                }
                for host, ranks in self.hosts.items()
            },
            "pairs": [[a, b, round(bandwidth, 4)] for (a, b), bandwidth in self.pairs.items()],
        }  # fmt: skip
