"""The order of a measurement: who came, what their devices do, what links carry, whether groups come together. Rank 0
runs it.

Each step asks only those that were healthy in the one before, since a collective hangs with one member that is not; a
suspect is measured once more before it is accused; and a step's time limit is a share of what is left, so that time
which a step did not need goes to those after it. Groups are tried once: RCCL may leave nothing to try again with.
"""
from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron.parallel.launch import Launch
from megatron.parallel.nodelist import compress_ranks
from megatron.planning.cluster import Cluster
from megatron.preflight import network
from megatron.preflight.measure import checks, rules
from megatron.preflight.measure.board import Conductor
from megatron.preflight.measure.expected import Place, by_host, places_of_ranks
from megatron.preflight.measure.findings import Results
from megatron.preflight.measure.trial_groups import KINDS, group_of, trial_layout

_MEETING = 1 / 3  # of all time: how long nobody is missed
_PATIENCE_S = 5.0  # with ranks still arriving: so long, and twice the time of the last one
_END_S = 5.0
_LEAST_S = 6.0  # RCCL takes some seconds to connect; better a little late than a healthy node accused
_SPEEDS = ("host_gflops", "host_copy_gb_per_s", "gemm_tflops", "copy_gb_per_s", "stopped")
_GIVE_UP_ROUNDS = 2  # more rounds of pairs for suspects


def connect_limit_s(ranks: int) -> float:
    """How long a group may take to connect: a sound start on two nodes of LUMI took 35 s (docs/frontier.md)."""
    return 60.0 + ranks / 1000


@dataclass(frozen=True)
class Settings:
    """What is measured.

    cluster        whose bands hold, and where its node-local disk is
    nodes_needed   good nodes that are enough; None: all
    seconds        about how long it may take; the meeting may take as long again while ranks still arrive
    backend        "nccl" or "gloo"; None: what each process has
    disks          node-local folders to test
    nvme           the one of them that is the machine's own disk, "" where there is none
    host_s         seconds of each rank's busy loop
    """

    cluster: Cluster | None = None
    nodes_needed: int | None = None
    seconds: float = 60.0
    backend: str | None = None
    disks: tuple[str, ...] = ("/tmp", "/dev/shm")
    nvme: str = ""
    host_s: float = 1.5


class Measurement:
    """One measurement of an allocation.

    nodes  places as the launcher's variables give them (slurm_places); clock: where to ask for the time
    say    prints a line of progress
    """

    def __init__(
        self, conductor: Conductor, launch: Launch, settings: Settings, nodes: list[list[Place]],
        clock: tuple[str, int] | None, say: Callable[[str], None],
    ) -> None:
        self._conductor = conductor
        self._launch = launch
        self._settings = settings
        self._nodes = nodes
        self._clock = clock
        self._say = say
        self._start = time.monotonic()
        self._met = self._start
        self._hello: dict[int, dict[str, Any]] = {}
        self._gone: set[int] = set()  # ranks that gave no answer
        self._versions: dict[str, str] = {}  # of the network's plugin and what is around it
        self.results = Results([], {})

    def run(self) -> Results:
        """All steps. Raises RuntimeError when the store fails."""
        self._meet()
        self._devices()
        self._node_links()
        self._neighbours()
        self._groups()
        self._look_at_missing()
        self.results.seconds = time.monotonic() - self._start
        return self.results

    def end(self) -> None:
        """Let all ranks go; the missing may come back."""
        end, world = {"task": "end"}, range(self._launch.world_size)
        self._conductor.ask(dict.fromkeys(sorted(self._gone), end), 0.0)
        self._conductor.ask({rank: end for rank in world if rank not in self._gone}, _END_S)

    # -- steps -----------------------------------------------------------------------------------------------------

    def _ask(
        self, name: str, orders: Mapping[int, Mapping[str, Any]], limit_s: float, patience_s: float = 0.0
    ) -> dict[int, dict[str, Any]]:
        """Answers of a step; ranks that give none within the limit are accused and not asked again.

        patience_s  more than 0: those that take far longer than most are not given up before
        """
        start = time.monotonic()
        timed = {id(order): {**order, "limit_s": limit_s} for order in orders.values()}
        orders = {rank: timed[id(order)] for rank, order in orders.items()}
        answers = self._conductor.ask(orders, limit_s + 1.0, patience_s)
        waited_s = time.monotonic() - start
        for rank in sorted(set(orders) - set(answers)):
            self._gone.add(rank)
            self.results.accuse("missing", rank, f"gave no answer within {waited_s:.0f} s when asked for its {name}")
        self._note(name, len(orders), len(answers), start)
        return answers

    def _note(self, name: str, asked: int, answered: int, start: float) -> None:
        seconds = time.monotonic() - start
        step = {"step": name, "asked": asked, "answered": answered, "seconds": round(seconds, 2)}
        self.results.steps.append(step)
        self._say(f"{name}: {answered} of {asked} ranks answered in {seconds:.1f} s")

    def _limit(self, weight: float, later: float) -> float:
        """A step's share of the time that is left, by its weight against that of all steps after it."""
        left = self._settings.seconds * (1 - _MEETING) + self._met - time.monotonic()
        spare = max(self._start + self._settings.seconds * _MEETING - self._met, 0.0)
        return max((left + spare) * weight / (weight + later), 2.0, min(_LEAST_S, self._settings.seconds / 10))

    def _healthy(self, ranks: Iterable[int]) -> list[int]:
        bad = self.results.bad_ranks  # the missing too
        return [rank for rank in ranks if rank not in bad]

    def _meet(self) -> None:
        launch, settings = self._launch, self._settings
        meeting_s, world = settings.seconds * _MEETING, range(launch.world_size)
        hello = {"task": "hello"}
        self._hello = self._conductor.ask(dict.fromkeys(world, hello), meeting_s, _PATIENCE_S, settings.seconds)
        self._met = time.monotonic()
        present = {rank: Place(said["host"], said["local_rank"]) for rank, said in self._hello.items()}
        places = places_of_ranks(self._nodes, present, launch.world_size, launch.local_world_size)
        self.results = Results(places, by_host(places))
        self._gone = set(world) - set(present)
        for rank in sorted(self._gone):
            text = f"did not come within {self._met - self._start:.0f} s (rank {rank})"
            self.results.accuse("missing", rank, text)
        self._note("arrival", launch.world_size, len(present), self._start)
        for rank, said in self._hello.items():
            self.results.ranks[rank] = {"pid": said["pid"], **said["shown"]}
        checks.check_visible(self.results, {rank: said["shown"] for rank, said in self._hello.items()})

    def _devices(self) -> None:
        """Each rank's device alone; on each node one rank tells about the node."""
        ranks = self._healthy(range(self._launch.world_size))
        leaders = {next(iter(self._healthy(of)), None) for of in self.results.hosts.values()}
        usual = {"task": "device", "host_s": self._settings.host_s}
        leading = {**usual, "folders": list(self._settings.disks), "clock": self._clock}
        orders = {rank: leading if rank in leaders else usual for rank in ranks}
        answers = self._ask("device", orders, self._limit(3, 5))
        for rank, answer in answers.items():
            if facts := answer.pop("node", None):
                self.results.nodes[self.results.places[rank].host] = facts
            self.results.ranks[rank] |= answer
            if "error" in answer:
                self.results.accuse("device", rank, answer["error"])
        checks.check_kinds(self.results, self._settings.backend)
        self._check_speeds([rank for rank in answers if rank not in self.results.bad_ranks])
        cluster = self._settings.cluster
        free, skew = (cluster.bands.get(name) if cluster else None for name in ("nvme_free_gib", "clock_skew_s"))
        checks.check_facts(
            self.results, self._settings.nvme, free.low if free else None, (skew.high if skew else None) or 0.5
        )

    def _check_speeds(self, ranks: list[int]) -> None:
        found = self.results.ranks
        values = {m: {rank: found[rank][m] for rank in ranks if m in found[rank]} for m in _SPEEDS}
        limits, failed = checks.suspects(values, rules.RATIOS, self._bands(("gemm_tflops", "copy_gb_per_s")))
        self._note_limits(limits)
        if not failed:
            return
        order = {"task": "device", "host_s": self._settings.host_s}
        again = self._ask("second measurement", dict.fromkeys(failed, order), self._limit(2, 5))
        for rank, answer in again.items():
            if "error" in answer:
                self.results.accuse("device", rank, answer["error"])
                continue
            for metric in failed[rank]:
                better = (min if metric == "stopped" else max)(found[rank][metric], answer[metric])
                found[rank][metric] = better
            still = [metric for metric in failed[rank] if checks.fails(metric, answer[metric], limits[metric])]
            # A process that is stopped for a while is slow for that reason.
            for metric in ["stopped"] if "stopped" in still else still:
                kind = "stopped" if metric == "stopped" else "slow"
                value = answer[metric]
                self.results.accuse(
                    kind, rank, checks.describe(metric, value, limits[metric]), measured=round(value, 4),
                    expected=round(limits[metric].slow, 4), unit=checks.unit(metric),
                )  # fmt: skip

    def _bands(self, metrics: Iterable[str]) -> dict[str, tuple[float, str]]:
        """Lower ends of the machine's bands, where the devices are the machine's own."""
        cluster, found = self._settings.cluster, self.results.ranks.values()
        if cluster is None or not any(cluster.device.split()[0] in answer.get("device_name", "") for answer in found):
            return {}
        names = {"allreduce_gb_per_s": "allreduce_node_gb_per_s", "p2p_gb_per_s": "p2p_node_gb_per_s",
                 "pair_gb_per_s": "neighbour_gb_per_s"}  # fmt: skip
        bands = {metric: cluster.bands.get(names.get(metric, metric)) for metric in metrics}
        return {m: (band.low, f"band of {cluster.name}") for m, band in bands.items() if band and band.low is not None}

    def _note_limits(self, limits: Mapping[str, rules.Limit]) -> None:
        for metric, limit in limits.items():
            self.results.limits[metric] = {
                "slow": round(limit.slow, 4), "reference": round(limit.reference, 4), "basis": limit.basis,
                "unit": checks.unit(metric),
            }  # fmt: skip
            if limit.general:
                self.results.warnings.append(f"all ranks: {checks.WHAT[metric]}: {limit.general}")

    # -- links -----------------------------------------------------------------------------------------------------

    @property
    def _ratios(self) -> dict[str, float]:
        on_cpu = all(answer.get("kind", "cpu") == "cpu" for answer in self.results.ranks.values())
        links = ("allreduce_gb_per_s", "p2p_gb_per_s", "pair_gb_per_s")
        return rules.RATIOS | (dict.fromkeys(links, rules.CPU_LINK_RATIO) if on_cpu else {})

    def _node_links(self) -> None:
        """All-reduce and messages within each node, twice where something was slow."""
        hosts = [host for host, ranks in self.results.hosts.items() if len(self._healthy(ranks)) > 1]
        if not hosts:
            return
        values, errors = self._measure_nodes("links within nodes", hosts, self._limit(3, 4))
        limits, failed = checks.suspects(values, self._ratios, self._bands(values))
        self._note_limits(limits)
        suspects = {who[0] for who in failed} | set(errors)
        if not suspects:
            return
        again, errors = self._measure_nodes("suspect nodes again", list(suspects), self._limit(2, 4))
        for host, (rank, text) in errors.items():
            self.results.accuse("link", rank, f"messages within node {host} fail: {text}")
        for metric, of in again.items():
            limit = limits.get(metric)
            for who, value in of.items():
                if limit is None or who[0] in errors or not checks.fails(metric, value, limit):
                    continue
                pair = "" if len(who) == 1 else f" between local ranks {who[1]} and {who[2]}"
                self.results.accuse_host(
                    "link", who[0], checks.describe(metric, value, limit) + pair, measured=round(value, 4),
                    expected=round(limit.slow, 4), unit="GB/s",
                )  # fmt: skip

    def _measure_nodes(
        self, name: str, hosts: list[str], limit_s: float
    ) -> tuple[dict[str, dict[Any, float]], dict[str, tuple[int, str]]]:
        """(measurement -> (host,) or (host, local rank, local rank) -> GB/s, host -> (rank, why it failed))."""
        orders: dict[int, dict[str, Any]] = {}
        for host in hosts:
            members = self._healthy(self.results.hosts[host])
            group = {"task": "group", "name": f"{name}/{host}", "members": members, "whole_node": True}
            orders |= dict.fromkeys(members, group)
        answers = self._ask(name, orders, limit_s)
        values: dict[str, dict[Any, float]] = {"allreduce_gb_per_s": {}, "p2p_gb_per_s": {}}
        errors: dict[str, tuple[int, str]] = {}
        for rank, answer in answers.items():
            self.results.ranks[rank] |= {k: round(v, 4) for k, v in answer.items() if k.endswith("_gb_per_s")}
            host, local = self.results.places[rank]
            members = orders[rank]["members"]
            if "error" in answer:
                # A member that died explains it.
                if not self._gone.intersection(members):
                    errors.setdefault(host, (rank, answer["error"]))
                continue
            values["allreduce_gb_per_s"][host,] = answer["allreduce_gb_per_s"]
            if answer.get("partner", -1) > rank:
                other = self.results.places[answer["partner"]].local_rank
                values["p2p_gb_per_s"][host, local, other] = answer["p2p_gb_per_s"]
        return values, errors

    def _neighbours(self) -> None:
        """Pairs across nodes: each good node with both of its neighbours, suspects with a good one more."""
        hosts = self.results.good_hosts
        rounds = rules.ring_pairs(hosts)
        if not rounds:
            return
        words: dict[int, str] = {}
        tested: set[frozenset[str]] = set()
        for number, pairs in enumerate(rounds):
            limit_s = self._limit(1, len(rounds) - number + 1)
            self._measure_pairs(f"neighbours, round {number + 1}", pairs, limit_s, words)
            tested |= {frozenset(pair) for pair in pairs}
        values = {"pair_gb_per_s": {pair: value for pair, value in self.results.pairs.items() if value > 0}}
        limits, _ = checks.suspects(values, self._ratios, self._bands(values))
        self._note_limits(limits)
        limit = limits.get("pair_gb_per_s", rules.Limit(0.0, 0.0, "no pair of nodes reached any other"))
        verdict = rules.attribute(self.results.pairs, limit.slow)
        for number in range(_GIVE_UP_ROUNDS):
            # The accused once more, as every suspect; the unclear until it is clear.
            doubtful = self._hosts_of(verdict.unclear | (verdict.accused if number == 0 else frozenset()))
            more = rules.partners(doubtful, self._proven(hosts, doubtful, verdict), tested)
            if len(hosts) == 2 and number == 0 and doubtful:
                more = [(hosts[0], hosts[1])]  # nobody else is there: at least a second time
            if not more:
                break
            self._measure_pairs(f"suspects, round {number + 1}", more, self._limit(2, 2), words)
            tested |= {frozenset(pair) for pair in more}
            verdict = rules.attribute(self.results.pairs, limit.slow)
        self._judge_pairs(verdict, limit)
        self._judge_network(words)
        self.results.warnings += network.known_hangs(self._versions, os.environ)

    def _hosts_of(self, ranks: Iterable[int]) -> list[str]:
        found = {self.results.places[rank].host for rank in ranks}
        return [host for host in self.results.hosts if host in found]

    def _proven(self, hosts: list[str], doubtful: list[str], verdict: rules.Verdict) -> list[str]:
        """Hosts all of whose ranks were fast with somebody."""
        return [h for h in hosts if h not in doubtful and verdict.proven.issuperset(self.results.hosts[h])]

    def _measure_pairs(self, name: str, pairs: list[tuple[str, str]], limit_s: float, words: dict[int, str]) -> None:
        """Rank by rank, all ranks of both hosts at the same time. Of two measurements of a pair the better stays."""
        orders: dict[int, dict[str, Any]] = {}
        for hosts in pairs:
            both = [self._healthy(self.results.hosts[host]) for host in hosts]
            for members in zip(*both, strict=False):
                group = {"task": "group", "name": f"{name}/{members[0]}", "members": members, "whole_node": False}
                orders |= dict.fromkeys(members, group)
        answers = self._ask(name, orders, limit_s)
        seen = {tuple(order["members"]) for order in orders.values()}
        for pair in seen:
            both_answers = [answers.get(rank) for rank in pair]
            if None in both_answers or any(answer.get("blocked_before") for answer in both_answers if answer):
                continue  # who died, or hangs in an earlier message, is named for that
            value = min(answer.get("p2p_gb_per_s", 0.0) if "error" not in answer else 0.0
                        for answer in both_answers if answer)  # fmt: skip
            self.results.pairs[pair] = max(value, self.results.pairs.get(pair, 0.0))
        words |= {rank: answer["network"] for rank, answer in answers.items() if answer.get("network")}
        self._versions = next((answer["versions"] for answer in answers.values() if "versions" in answer), {})

    def _judge_pairs(self, verdict: rules.Verdict, limit: rules.Limit) -> None:
        for rank in sorted(verdict.accused | verdict.unclear):
            mine = {pair: value for pair, value in self.results.pairs.items() if rank in pair}
            others = [self.results.places[a if b == rank else b] for a, b in mine]
            best = max(mine.values())
            text = checks.describe("pair_gb_per_s", best, limit) if best else "no message reached the other node"
            named = ", ".join(f"{place.host} local rank {place.local_rank}" for place in others)
            doubt = "; it cannot be told which of them is at fault" if rank in verdict.unclear else ""
            self.results.accuse("network", rank, f"{text}; with {named}{doubt}", measured=round(best, 4),
                                expected=round(limit.slow, 4), unit="GB/s")  # fmt: skip
        for a, b in verdict.links:
            one, other = self.results.places[a], self.results.places[b]
            self.results.warnings.append(
                f"{one.host} and {other.host}, local ranks {one.local_rank} and {other.local_rank}: "
                f"{checks.describe('pair_gb_per_s', self.results.pairs[a, b], limit)}, though both are fast with others"
            )

    def _judge_network(self, words: Mapping[int, str]) -> None:
        """Whether the network's own plugin carries the messages, or TCP."""
        cluster = self._settings.cluster
        tcp = [rank for rank, word in words.items() if word.lower() == "socket"]
        for rank, word in words.items():
            self.results.ranks[rank]["network"] = word
        if cluster is None:
            return
        advice = "load rccl-net-plugin after rocm, and set NCCL_NET=OFI"
        if tcp and 2 * len(tcp) > len(words):
            self.results.general.append(
                f"RCCL says that it uses sockets (TCP) between nodes on {len(tcp)} of {len(words)} ranks: {advice}"
            )
        else:
            for rank in tcp:
                text = f"RCCL says that it uses sockets (TCP) here, but not elsewhere: {advice}"
                self.results.accuse("network", rank, text)
        most = cluster.bands.get("tcp_gb_per_s")
        values = sorted(self.results.pairs.values())
        if self._bands(["pair_gb_per_s"]) and most and most.high and values:
            half = rules.quantile(values, 0.5)
            if half <= most.high:
                self.results.general.append(
                    f"between nodes half of all pairs of ranks reach at most {half:.3g} GB/s, which TCP gives too "
                    f"(up to {most.high:g}): the network plugin is not in use; {advice}"
                )

    # -- groups ----------------------------------------------------------------------------------------------------

    def _groups(self) -> None:
        """Each kind of group that a training has, on all good nodes, one after the other until one does not work."""
        hosts = [self.results.hosts[host] for host in self.results.good_hosts]
        ranks = sorted(rank for of in hosts for rank in of)
        if len(ranks) < 2:
            return
        layout = trial_layout([len(of) for of in hosts])
        sizes = [layout.tensor, layout.pipeline, layout.data]
        for number, kind in enumerate(KINDS):
            members = {rank: group_of(layout, kind, place) for place, rank in enumerate(ranks)}
            order = {"task": "reduce", "kind": kind, "ranks": compress_ranks(ranks), "layout": sizes}
            orders = {rank: order for rank in ranks if len(members[rank]) > 1}
            limit_s = max(self._limit(1, len(KINDS) - 1 - number), connect_limit_s(len(ranks)))
            answers = self._ask(f"groups, {kind}", orders, limit_s, patience_s=1.0) if orders else {}
            found = {members[rank][0]: (rank, answer["error"]) for rank, answer in answers.items() if "error" in answer}
            groups = ((tuple(ranks[place] for place in members[rank]), text) for rank, text in found.values())
            failed = {group: text for group, text in groups if not self._gone.intersection(group)}  # else that is why
            checks.blame_groups(self.results, kind, failed, network.hints(self._versions, os.environ))
            if failed or self._gone.intersection(ranks):
                return

    def _look_at_missing(self) -> None:
        """Ask a neighbour on the same node what has become of the processes that gave no answer, or never came."""
        orders = {}
        for ranks in self.results.hosts.values():
            lost = [(rank, self._hello.get(rank, {}).get("pid")) for rank in ranks if rank in self._gone]
            present = [rank for rank in ranks if rank not in self._gone]
            if lost and present:
                orders[present[0]] = {"task": "look", "processes": lost}
        if not orders:
            return
        states: dict[int, tuple[str, float]] = {}
        limit_s = 2.0 + 1.5 * max(len(order["processes"]) for order in orders.values())
        for answer in self._conductor.ask({r: {**o, "limit_s": limit_s} for r, o in orders.items()}, limit_s).values():
            states |= {int(rank): (text, share) for rank, (text, share) in answer.get("states", {}).items()}
        for number, finding in enumerate(self.results.findings):
            if finding.kind == "missing" and finding.rank in states:
                text, share = states[finding.rank]
                kind = "stopped" if share >= rules.STOPPED else finding.kind
                self.results.findings[number] = replace(finding, kind=kind, text=f"{finding.text}; {text}")
