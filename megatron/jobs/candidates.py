"""The finite list of layouts that may be tried: every combination of a space that is valid and, by the planner, fits.

That the list is finite and known before the first trial is what lets a search rank all of it, try nothing twice, and
refuse nothing after it was paid for.
"""
from __future__ import annotations

import functools
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.config.command_line import flag_table, parse_args, read_settings, scan
from megatron.config.resolve import resolve
from megatron.config.settings import raise_problems
from megatron.errors import ConfigError
from megatron.jobs.expressions import Expression
from megatron.jobs.names import CHUNK, LEFT_OUT, Value, recompute_words, settings_of_flags, subject
from megatron.jobs.space import Space, write_key
from megatron.planner.cluster import CLUSTERS, Cluster
from megatron.planner.memory import memory_of_ranks
from megatron.planner.search.places import worthwhile_placements
from megatron.planner.search.tables import first_problem
from megatron.planner.timing import estimate

GIB = 2**30
_MOST = 50_000  # combinations that are looked at, of a larger space a sample
_TELL = 2_000  # combinations between two tellings
_DATA = {"data_path", "data_file_list", "train_data_path", "mock_data"}
# What a flag of the command line takes back from those of the space.
_YIELDS: Mapping[str, set[str]] = {
    "bf16": {"fp16", "initial_loss_scale", "loss_scale"}, "fp16": {"bf16"},
    "recompute_granularity": {"recompute_modules", "recompute_method", "recompute_num_layers"},
}  # fmt: skip
# From Megatron's first loss scale, 2^32, the first steps in fp16 overflow and are skipped, which are all of a trial's.
_FIRST_LOSS_SCALE, _MEGATRONS = 4096, 2.0**32


@dataclass(frozen=True)
class Candidate:
    """A layout that may be tried: it is valid and, as far as is known, fits.

    index         its place among the candidates of the space; key: tp=2,pp=4,mbs=1, the same in every run of the tuner
    values        by parameter of the space
    flags         of pretrain_gpt.py, all of them, without what a trial adds (length, metrics file, log intervals)
    processes     of the job; nodes that they are on; tokens of one step
    memory_bytes  on a device of the fullest pipeline rank, by the planner; None: not asked
    step_s        of a step by the planner; None: without a described machine
    """

    index: int
    key: str
    values: Mapping[str, Value]
    flags: tuple[str, ...]
    processes: int
    nodes: int
    tokens: int
    memory_bytes: float | None = None
    step_s: float | None = None


@dataclass(frozen=True)
class Machine:
    """Where trials run. cluster: its description, None: not known, so that neither memory nor time is predicted;
    processes_per_node: of a job that fills its nodes; max_nodes: that one trial may have; capacity_bytes: of a device
    that a layout may use, None: memory is not asked."""

    cluster: Cluster | None
    processes_per_node: int
    max_nodes: int
    capacity_bytes: float | None = None


@dataclass
class Enumeration:
    """candidates in the order of the space's combinations; rejections: reason -> (how many, an example) of the others;
    looked: how many combinations were, of a space with more than that at random; flags: that all have in common."""

    candidates: list[Candidate] = field(default_factory=list)
    rejections: dict[str, tuple[int, str]] = field(default_factory=dict)
    looked: int = 0
    flags: tuple[str, ...] = ()


class Rejected(Exception):
    """A combination that makes no layout, for this reason; `example` is the case at hand."""

    def __init__(self, reason: str, example: str) -> None:
        super().__init__(reason)
        self.reason, self.example = reason, example


def enumerate_candidates(
    space: Space, flags: Sequence[str], machine: Machine, *, predict: bool, seed: int = 0, most: int = _MOST,
    tell: Callable[[int, int], object] = lambda looked, of: None,
) -> Enumeration:
    """Every layout of a space that runs on this machine; of those that run the same the first.

    flags    of the command line, which win over the space's
    predict  ask the planner for the time of a step, on the best placement
    most     combinations that are looked at, drawn by `seed`; tell: told (looked at, of how many) now and then

    Raises ConfigError for flags that cannot be, for an expression that has no value, and for a machine that does not go
    with its description.
    """
    cluster, each = machine.cluster, machine.processes_per_node
    if cluster is not None and (each > cluster.devices_per_node or (machine.max_nodes > 1
                                                                    and each != cluster.devices_per_node)):  # fmt: skip
        raise ConfigError(f"{each} processes on each of {machine.max_nodes} node(s), but a node of {cluster.name} has "
                          f"{cluster.devices_per_node} devices: describe the machine that trials run on with "
                          "--cluster")  # fmt: skip
    common, total, draw = _common_flags(space, flags, machine), space.combinations, random.Random(seed)
    numbers: Any = range(total)
    if total > most:  # which may be beyond any machine word
        numbers = set[int]()
        while len(numbers) < most:
            numbers.add(draw.randrange(total))
    found, seen = Enumeration(looked=len(numbers), flags=common), dict[str, str]()
    for place, number in enumerate(sorted(numbers)):
        if place % _TELL == _TELL - 1:
            tell(place, len(numbers))
        combination = Combination(space, common, machine, number)
        try:
            candidate, same = _checked(combination, predict)
            if (first := seen.setdefault(same, candidate.key)) != candidate.key:
                raise Rejected("the same as another one", f"as {first}")
        except Rejected as rejected:
            count, example = found.rejections.get(rejected.reason, (0, f"{combination.key}: {rejected.example}"))
            found.rejections[rejected.reason] = count + 1, example
        else:
            found.candidates.append(replace(candidate, index=len(found.candidates)))
    return found


def _common_flags(space: Space, flags: Sequence[str], machine: Machine) -> tuple[str, ...]:
    """Flags of all layouts, in order; of those that say one setting, that of the command line. Raises ConfigError."""
    scanned = scan(flags)
    raise_problems(scanned.problems)
    said = settings_of_flags(scanned.flags)
    for name in (*(p.name for p in space.parameters if p.name not in space.variables), *space.derived):
        for setting in set(subject(name).settings) & said.keys():
            raise ConfigError(f"{said[setting]} contradicts {name} of {space.path}, which says the same: leave the flag"
                              " out, or use a space without it")  # fmt: skip
    yielding = set(said).union(*(_YIELDS.get(setting, ()) for setting in said))
    words: list[str] = []
    for spelling, values in scan(space.flags).flags.items():
        settings = settings_of_flags({spelling: values})
        # A space is written for nodes of one size; on others ranks are placed as the machine wants.
        order = settings.get("device_order", "").replace(",", " ").split()[1:]
        if not (order and len(order) != machine.processes_per_node) and not yielding & settings.keys():
            words += [spelling, *values]
    words += [word for spelling, values in scanned.flags.items() for word in (spelling, *values)]
    raise_problems(read_settings(words).problems)  # what is wrong with them is wrong with every layout
    return tuple(words)


class Combination(Mapping[str, Value]):
    """The values of names in expressions, worked out as they are asked for. Raises Rejected and ConfigError."""

    def __init__(self, space: Space, flags: tuple[str, ...], machine: Machine, number: int) -> None:
        self.space, self.common, self.machine = space, flags, machine
        self.values_of = space.combination(number)
        varied = {p.name for p in space.parameters if len(p.values) > 1} or set(self.values_of)
        self.key = write_key({name: value for name, value in self.values_of.items() if name in varied})
        self._given = {n if n in space.variables else subject(n).id: v for n, v in self.values_of.items()}
        self._derived = {subject(name).id: name for name in space.derived}
        self._asked: list[str] = []

    def __getitem__(self, name: str) -> Value:
        name = name if name in self.space.variables else "dp" if name == "dp" else subject(name).id
        if name not in self._given:
            self._given[name] = self._derive(self._derived[name]) if name in self._derived else self._follow(name)
        return self._given[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def evaluate(self, where: str, expression: Expression) -> Value:
        """Raises ConfigError for an expression that has no value, or that asks for itself."""
        if where in self._asked:
            raise ConfigError(f"{self.space.path}: {' needs '.join([*self._asked, where])}: none can be worked out "
                              "first")  # fmt: skip
        self._asked.append(where)
        try:
            found: Value = expression.value(self)
            return found
        except ValueError as error:
            raise ConfigError(f"{self.space.path}: {where}: '{expression.text}': {error} (with {self.key})") from None
        finally:
            self._asked.pop()

    def _derive(self, name: str) -> Value:
        found = self.evaluate(f"[derived] {name}", self.space.derived[name])
        try:
            return subject(name).accept(int(found) if isinstance(found, float) and not found % 1 else found)
        except ValueError as error:
            raise Rejected(_general(f"refused: {name} {error}"), f"{name} {error}") from None

    def whole(self, name: str) -> int:
        """Raises ConfigError for anything but a whole number of at least 1."""
        found = self[name]
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise ConfigError(f"{self.space.path}: {name} is {found}, not a whole number of at least 1 (with "
                              f"{self.key})")  # fmt: skip
        return found

    def _follow(self, name: str) -> Value:
        """The value of what neither varies nor is derived."""
        each = self.machine.processes_per_node
        if name == "processes":
            known = "nodes" in self._given or "nodes" in self._derived
            return (self.whole("nodes") if known else self.machine.max_nodes) * each
        if name == "nodes":
            return -(-self.whole("processes") // each)
        if name == "dp":
            processes, replica = self.whole("processes"), self.whole("tp") * self.whole("pp")
            if processes % replica:
                raise Rejected("TP x PP does not divide the processes", f"{replica} into {processes}")
            return processes // replica
        resolved, chosen = _resolved(self.common, self._model_words())
        if name == "global_batch_size" and name not in chosen:
            return self.whole("mbs") * self.whole("dp")
        if name not in resolved:
            raise ConfigError(f"{self.space.path}: an expression asks for {name}, which does not vary here")
        found = resolved[name]
        return " ".join(map(str, found)) if isinstance(found, tuple | list) else found

    def _model_words(self) -> tuple[str, ...]:
        """Flags of the names from which settings of the model follow, but of one that is being worked out."""
        derived = [name for name in self.space.derived if f"[derived] {name}" not in self._asked]
        names = [name for name in (*self.values_of, *derived) if name not in self.space.variables]
        return tuple(word for name in names if subject(name).of_model for word in self._words(name))

    def _words(self, name: str) -> list[str]:
        meant, value = subject(name), self[name]
        if meant.id in ("nodes", "processes") or value == "auto":
            return []
        if meant.id == "preset":
            return [] if value is None else ["--preset", str(value)]
        if meant.id == "recompute":
            return recompute_words(str(value))
        if meant.id == "schedule":
            return ["--enable-zbh1-pipeline" if value == "zb-h1" else "--no-enable-zbh1-pipeline"]
        if meant.id == "chunks":
            chunks, stages, layers = self.whole("chunks"), self.whole("pp"), self.whole("num_layers")
            if chunks > 1 and layers % (stages * chunks):
                raise Rejected("layers do not divide into so many chunks",
                               f"{layers} layers over {stages} x {chunks} chunks")  # fmt: skip
            return [subject(CHUNK).spelling, str(layers // (stages * chunks)) if chunks > 1 else "none"]
        return meant.words(value)

    def flags(self) -> tuple[str, ...]:
        """All flags of the layout, but what a trial adds."""
        names = [*(name for name in self.values_of if name not in self.space.variables), *self.space.derived]
        return (*self.common, *(word for name in names for word in self._words(name)))

    def config(self, flags: Sequence[str]) -> Config:
        """Make the configuration that pretrain_gpt.py makes of these flags in a trial. Raises Rejected."""
        try:
            found = parse_args(trial_flags(flags, self.space.warm_up + self.space.iterations), self.whole("processes"))
        except ConfigError as error:
            problem = first_problem(str(error))
            raise Rejected(f"refused: {_general(problem.split(';')[0].split(': ')[0])}", problem) from None
        for name, is_now in (("schedule", found.parallel.schedule), ("chunks", found.parallel.num_chunks)):
            asked = self._given.get(name)
            # A single stage has no schedule that could be another one.
            if asked not in (None, is_now) and not (asked == "zb-h1" and found.parallel.num_stages == 1):
                raise Rejected(f"no such {name} with these stages and chunks", f"it would be {is_now}")
        return found


@functools.lru_cache(maxsize=256)
def _resolved(flags: tuple[str, ...], more: tuple[str, ...]) -> tuple[Mapping[str, Any], frozenset[str]]:
    """(values of all settings, names of those that were chosen) by flags of which some may still be missing."""
    settings = read_settings([*flags, *more])
    chosen = frozenset(settings.given)
    resolve(settings)
    return settings.values, chosen


def _general(text: str) -> str:
    """Put N for every number, so that messages about several sizes are one."""
    return re.sub(r"(?<![\w-])-?\d[\d.,]*", "N", " ".join(text.split()))


def trial_flags(flags: Sequence[str], steps: int) -> list[str]:
    """All flags of a trial but the metrics file's. Raises ConfigError where they cannot be read."""
    kept, said = list[str](), set[str]()
    for spelling, words in scan(flags).flags.items():
        names = set(flag_table()[spelling].settings)
        said |= names
        kept += [] if names & LEFT_OUT else [spelling, *words]
    kept += [] if said & _DATA else ["--mock-data"]
    kept += ["--train-iters", str(steps), "--eval-iters", "0", "--log-interval", "1", "--timing-log-level", "1"]
    scales = read_settings(kept).values
    if scales.get("fp16") and not scales.get("loss_scale") and scales.get("initial_loss_scale") in (None, _MEGATRONS):
        kept += ["--initial-loss-scale", str(_FIRST_LOSS_SCALE)]
    return kept


# -- one combination ---------------------------------------------------------------------------------------------------


def _checked(combination: Combination, predict: bool) -> tuple[Candidate, str]:
    """A layout, by checks in order of their cost, and what is equal for those that run the same. Raises Rejected and
    ConfigError."""
    space, machine = combination.space, combination.machine
    for reason, rule in space.constraints.items():
        holds = combination.evaluate(f"[constraints] '{reason}'", rule)
        if not isinstance(holds, bool):
            # 64 % tp is 0, and so false, where tp divides: the contrary of what whoever writes it means.
            raise ConfigError(f"{space.path}: [constraints] '{reason}': '{rule.text}' is {holds!r}, neither true nor "
                              f"false: write a comparison (with {combination.key})")  # fmt: skip
        if not holds:
            raise Rejected(reason, rule.text)
    processes, each = combination.whole("processes"), machine.processes_per_node
    nodes, most = -(-processes // each), machine.max_nodes
    most = most if machine.cluster is None else min(most, machine.cluster.nodes)
    if nodes > most:
        raise Rejected("more nodes than there are", f"{nodes}, there are {most}")
    if nodes > 1 and processes % each:
        raise Rejected(f"neither whole nodes of {each} processes nor a part of one", f"{processes} processes")
    flags = combination.flags()
    config = combination.config(flags)
    try:
        memory, step_s, placed = _fit(config, machine, predict)
    except ConfigError as error:
        raise Rejected("the planner refuses it", " ".join(str(error).split())) from None
    tokens = config.batch.global_batch_size * config.model.seq_length
    found = Candidate(0, combination.key, combination.values_of, (*flags, *placed), processes, nodes, tokens, memory,
                      step_s)  # fmt: skip
    return found, _same(config, placed)


def _fit(config: Config, machine: Machine, predict: bool) -> tuple[float | None, float | None, tuple[str, ...]]:
    """(bytes of the fullest rank, seconds of a step on the best placement, flags that place the ranks) by the planner.
    Raises Rejected for what does not fit, ConfigError for what it refuses."""
    cluster, parallel, capacity = machine.cluster, config.parallel, machine.capacity_bytes
    if cluster is None:
        return None, None, ()
    memory = 0.0
    for ranks in ((0,), None):  # the first holds most micro-batches: often it is enough to ask for it
        memory = max(rank.total for rank in memory_of_ranks(config, cluster.device_type, ranks=ranks))
        if capacity is not None and memory > capacity:
            raise Rejected("more memory than a device has, by the planner",
                           f"{memory / GIB:.1f} GiB, {capacity / GIB:.1f} may be used")  # fmt: skip
    words, step_s = list[str](), None
    # Where a node's devices are not all alike, and all of them are used.
    ordered = len(cluster.device_orders) > 1 and parallel.world_size % cluster.devices_per_node == 0
    if predict:
        wanted: dict[str, tuple[Any, ...]] = {} if parallel.rank_order is None else {"order": (parallel.rank_order,)}
        if parallel.device_order is not None and len(parallel.device_order) == cluster.devices_per_node:
            wanted["devices"] = (parallel.device_order,)
        step_s, order, devices = min(
            (estimate(config, cluster, place).seconds, place.layout.order, place.device_order)
            for place in worthwhile_placements(config, cluster, wanted)
        )  # fmt: skip
        if parallel.rank_order is None and parallel.world_size > 1:
            words += ["--rank-order", order]
        if parallel.device_order is None and ordered:
            words += ["--device-order", ",".join(map(str, devices))]
    if ordered:
        # Its name where it comes with the package, else its file, from whatever folder.
        path = Path(cluster.path)
        words += ["--cluster", path.stem if path.parent == CLUSTERS else str(path.absolute())]
    return memory, step_s, tuple(words)


def _same(config: Config, placed: tuple[str, ...]) -> str:
    """Equal for configurations that run the same: without what makes no difference to one replica, or one rank."""
    settings, parallel = config.to_dict(), config.parallel
    sizes = {"tp": parallel.tensor_model_parallel_size, "pp": parallel.pipeline_model_parallel_size,
             "dp": parallel.data_parallel_size}  # fmt: skip
    settings["zero_stage"] = settings["zero_stage"] if parallel.data_parallel_size > 1 else None
    settings["tp_comm_overlap_chunks"] = settings["tp_comm_overlap_chunks"] if parallel.tp_comm_overlap else None
    if config.recompute.recompute_granularity != "full":
        settings["recompute_num_layers"] = None
    if parallel.rank_order is not None:
        settings["rank_order"] = [name for name in parallel.rank_order.split("-") if sizes[name] > 1]
    return hashlib.sha256(json.dumps([settings, placed], sort_keys=True, default=str).encode()).hexdigest()
