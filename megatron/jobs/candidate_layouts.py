"""List of layouts to try: combinations from a search space that are valid and fit in memory.

The list is finite and known before the first trial. A search can therefore rank the whole list, try
nothing twice, and reject layouts before they cost a trial.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.config.command_line import parse_args, read_settings, scan
from megatron.config.config import resolve
from megatron.config.parallel import V_SHAPED
from megatron.config.settings import raise_problems
from megatron.errors import ConfigError
from megatron.jobs.space import (
    CHUNK,
    DECIDES,
    SETTING,
    Expression,
    SearchSpace,
    Value,
    flags_of,
    read_value,
    settings_of_flags,
)
from megatron.planner.cluster import CLUSTERS, GIB, Cluster
from megatron.planner.layout import candidate_of, write_value
from megatron.planner.memory import peak_rank
from megatron.planner.placement import chosen_dispatch, with_shards_of_node
from megatron.planner.progress import Progress
from megatron.planner.search.find import worthwhile_placements
from megatron.planner.search.output import first_problem
from megatron.planner.search.space import Rejections
from megatron.planner.timing import estimate

LOSS = "valid_loss"
"""The objective of a space that sets [trial] tokens."""
_MOST = 50_000  # combinations; each takes about a millisecond to check
DATA = {"data_path", "data_file_list", "train_data_path", "blend_schedule", "mock_data"}
_PRECISION = {"fp16", "bf16", "initial_loss_scale"}
# With Megatron's initial loss scale of 2^32, the first steps in fp16, and so all steps of a trial,
# would overflow and be skipped.
_FIRST_LOSS_SCALE = 4096


@dataclass(frozen=True)
class Candidate:
    """A layout that may be tried: it is valid and, as far as known, fits in memory.

    index         position among the candidates of the space
    key           name such as tp=2,pp=4,mbs=1, the same in every run of the tuner
    values        values of the space's parameters, by name
    processes     number of processes in a trial
    flags         flags for pretrain_gpt.py, except those that a trial adds (trial_flags,
                  --metrics-file)
    nodes         number of nodes of a trial; tokens, batch: tokens and samples per step
    memory_bytes  predicted peak on the device that needs the most; None: not predicted
    step_s        predicted seconds per step; None: not predicted
    """

    index: int
    key: str
    values: Mapping[str, Value]
    processes: int
    flags: tuple[str, ...]
    nodes: int
    tokens: int
    memory_bytes: float | None = None
    step_s: float | None = None
    batch: int = 1

    def cost(self, figure: float, objective: str) -> float:
        """Return the seconds or node-seconds per token if a step takes `figure` seconds.

        If the objective is the validation loss, `figure` is the loss, and so is the cost.
        """
        if objective == LOSS:
            return figure
        return figure * (self.nodes if objective == "node_hours" else 1) / self.tokens


@dataclass(frozen=True)
class Machine:
    """The machine that trials run on.

    cluster             its description; None: unknown, so that memory and time are not predicted
    processes_per_node  for a job that fills its nodes
    max_nodes           maximum number of nodes for one trial
    capacity_bytes      device memory that a layout may use; None: memory is not checked
    """

    cluster: Cluster | None
    processes_per_node: int
    max_nodes: int
    capacity_bytes: float | None = None


@dataclass
class Enumeration:
    """Candidates in the order of the combinations, and why other combinations were rejected."""

    candidates: list[Candidate] = field(default_factory=list)
    rejections: Rejections = field(default_factory=Rejections)


class InvalidLayout(Exception):
    """A combination is not a valid layout. Arguments: general reason, details of this case."""


def enumerate_candidates(
    space: SearchSpace,
    flags: Sequence[str],
    machine: Machine,
    *,
    predict: bool,
    progress: Progress = lambda *_: None,
) -> Enumeration:
    """List every layout in a space that can run on this machine, without duplicates.

    flags     from the command line; they override those of the space
    predict   whether to predict the time per step, with the best placement
    progress  is told how many combinations have been checked

    Raises ConfigError for invalid flags, for an expression without a value, for too many
    combinations, and for a machine that contradicts its description.
    """
    cluster = machine.cluster
    each = machine.processes_per_node
    if cluster is not None and (
        each > cluster.devices_per_node
        or (machine.max_nodes > 1 and each != cluster.devices_per_node)
    ):
        raise ConfigError(
            f"{each} processes on each of {machine.max_nodes} node(s), but a node of "
            f"{cluster.name} has {cluster.devices_per_node} devices: describe the machine that "
            "trials run on with --cluster"
        )
    if space.combinations > _MOST:
        raise ConfigError(
            f"{space.path}: {space.combinations:,} combinations are more than {_MOST:,}: remove "
            "parameters or values"
        )
    enumeration = Enumeration()
    seen = dict[str, str]()
    common = _common_flags(space, flags)
    names = [p.name for p in space.parameters]
    varied = [p.name for p in space.parameters if len(p.values) > 1] or names
    combinations = itertools.product(*(p.values for p in space.parameters))
    for done, combination in enumerate(combinations):
        progress("checking layouts", "combinations", done, space.combinations)
        values = dict(zip(names, combination, strict=True))
        key = ",".join(f"{name}={write_value(values[name])}" for name in varied)
        try:
            candidate, same = _checked(_Names(space, common, machine, values, key), predict)
            if (first := seen.setdefault(same, key)) != key:
                raise InvalidLayout("equivalent to another combination", f"same as {first}")
            enumeration.candidates.append(replace(candidate, index=len(enumeration.candidates)))
        except InvalidLayout as rejected:
            reason, case = rejected.args
            enumeration.rejections.add(reason, f"{key}: {case}")
    return enumeration


def _common_flags(space: SearchSpace, flags: Sequence[str]) -> tuple[str, ...]:
    """Return the flags that all layouts share; the command line overrides the space.

    Raises ConfigError for flags that are invalid or that contradict the space.
    """
    scanned = scan(flags)
    raise_problems(scanned.problems)
    fixed = settings_of_flags(scanned.flags)
    words = list[str]()
    for name in space.named:
        if (setting := DECIDES.get(name, name)) in fixed:
            raise ConfigError(
                f"{fixed[setting]} contradicts {name} of {space.path}: leave the flag out"
            )
    for spelling, values in scan(space.flags).flags.items():
        settings = settings_of_flags({spelling: values}).keys()
        if not fixed.keys() & (settings | (_PRECISION if settings & _PRECISION else set())):
            words += [spelling, *values]
    words += flags
    # an error in the shared flags is an error in every layout
    raise_problems(read_settings(words).problems)
    return tuple(words)


def trial_flags(flags: Sequence[str], steps: int, evaluation: str = "--eval-iters 0") -> list[str]:
    """Return a trial's flags, except --metrics-file; invalid flags are kept as they are."""
    explicit = read_settings(flags).explicit
    more = f"--train-iters {steps} {evaluation} --log-interval 1"
    words = [*flags, *more.split()]
    words += [] if DATA & explicit.keys() else ["--mock-data"]
    if explicit.get("fp16") and not {"loss_scale", "initial_loss_scale"} & explicit.keys():
        words += ["--initial-loss-scale", str(_FIRST_LOSS_SCALE)]
    return words


# -- one combination -------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _settings(flags: tuple[str, ...]) -> dict[str, object]:
    """Return all settings by short and full names, from flags that may be incomplete."""
    settings = read_settings(flags)
    unknown = {} if settings.explicit.get("global_batch_size") else {"gbs": None}
    resolve(settings)
    return settings.values | {
        name: settings.values[setting] for name, setting in SETTING.items() if name not in unknown
    }


class _Names(dict[str, Any]):
    """Values for names in expressions: settings, the combination's values, and derived values.

    Derived values are computed on demand.

    Looking up a name raises InvalidLayout if the combination is invalid, and ConfigError for an
    expression that has no value or depends on itself.
    """

    def __init__(
        self,
        space: SearchSpace,
        flags: tuple[str, ...],
        machine: Machine,
        values: Mapping[str, Value],
        key: str,
    ) -> None:
        # the model's sizes may depend on these
        model_names = values.keys() - space.variables - DECIDES.keys()
        words = [word for name in sorted(model_names) for word in flags_of(name, values[name])]
        super().__init__({**_settings((*flags, *words)), **values})
        self.space = space
        self.common = flags
        self.machine = machine
        self.varied = values
        self.key = key
        self._in_progress = list[str]()
        for name in space.derived:
            self.pop(name, None)

    def __missing__(self, name: str) -> object:
        if name in self._in_progress:
            around = " -> ".join([*self._in_progress, name])
            raise ConfigError(
                f"{self.space.path}: [derived] {self._in_progress[0]} depends on itself: {around}"
            )
        self._in_progress.append(name)
        try:
            value = self[name] = self._worked_out(name)
        finally:
            self._in_progress.pop()
        return value

    def _worked_out(self, name: str) -> object:
        each = self.machine.processes_per_node
        if name in self.space.derived:
            value = self.evaluate(f"[derived] {name}", self.space.derived[name])
            value = int(value) if isinstance(value, float) and value.is_integer() else value
            try:
                return read_value(name, value) if name in DECIDES or value is not None else None
            except ConfigError as error:
                raise InvalidLayout(f"refused: {name}", str(error)) from None
        if name == "processes":
            known = "nodes" in self or "nodes" in self.space.derived
            return (self["nodes"] if known else self.machine.max_nodes) * each
        if name == "nodes":
            return -(-self["processes"] // each)
        if name == "dp":
            sizes = self["tp"], self["pp"], self["cp"]
            replicas, rest = divmod(self["processes"], math.prod(sizes))
            if rest:
                raise InvalidLayout(
                    "TP x PP x CP does not divide the processes", " x ".join(map(str, sizes))
                )
            return replicas
        if name == "gbs":
            return self["mbs"] * self["dp"]
        raise KeyError(f"{name} is neither a parameter nor derived")

    def evaluate(self, where: str, expression: Expression) -> object:
        try:
            return expression.value(self)
        except ValueError as error:
            raise ConfigError(
                f"{self.space.path}: {where}: '{expression.text}': {error} (with {self.key})"
            ) from None

    def flags(self) -> tuple[str, ...]:
        """Return all flags for the layout, except those that a trial adds."""
        words = list[str]()
        for name in self.space.named:
            value = self[name]
            if name == "chunks":
                layers = self["num_layers"] or 0
                stages = self["pp"] * value
                if layers % stages:
                    raise InvalidLayout(
                        "layers do not divide into this many chunks",
                        f"{layers} layers, {stages} chunks",
                    )
                name = CHUNK
                value = layers // stages if value > 1 else None
            words += flags_of(name, value)
        return (*self.common, *words)


def _checked(names: _Names, predict: bool) -> tuple[Candidate, str]:
    """Check a layout, cheapest checks first; return it and a text that identifies duplicates.

    Raises InvalidLayout for a layout that cannot be used, ConfigError for an expression without a
    value.
    """
    space = names.space
    machine = names.machine
    for reason, rule in space.constraints.items():
        holds = names.evaluate(f"[constraints] '{reason}'", rule)
        if not isinstance(holds, bool):
            # 64 % tp is 0, hence false, if tp divides 64: the opposite of the author's intention.
            raise ConfigError(
                f"{space.path}: [constraints] '{reason}': '{rule.text}' is {holds!r}, neither true "
                f"nor false: write a comparison (with {names.key})"
            )
        if not holds:
            raise InvalidLayout(reason, rule.text)
    processes = names["processes"]
    each = machine.processes_per_node
    nodes = names["nodes"]
    most = machine.max_nodes
    most = most if machine.cluster is None else min(most, machine.cluster.nodes)
    if nodes > most:
        raise InvalidLayout("more nodes than available", f"{nodes}, but the limit is {most}")
    if nodes > 1 and processes % each:
        raise InvalidLayout(
            f"does not fill whole nodes of {each} processes", f"{processes} processes"
        )
    flags = names.flags()
    try:
        config = parse_args(trial_flags(flags, space.warm_up + space.iterations), processes)
    except ConfigError as error:
        problem = first_problem(str(error))
        # Replace every number with N, so that messages about different sizes are merged.
        general = re.sub(r"(?<![\w-])-?\d[\d.,]*", "N", problem.split(";")[0].split(": ")[0])
        raise InvalidLayout(f"refused: {general}", problem) from None
    layout = candidate_of(config)
    settings = config.to_dict()
    # With a single stage, these are turned off, which does not contradict the combination.
    turned_off = ("zb-h1", *V_SHAPED)
    if names.get("schedule", layout.schedule) not in (layout.schedule, *turned_off):
        raise InvalidLayout("schedule contradicts the chunks", f"it would be {layout.schedule}")
    try:
        memory, step_s, placed = _fit(config, machine, predict)
    except ConfigError as error:
        raise InvalidLayout("the planner refuses it", " ".join(str(error).split())) from None
    tokens = layout.batch * config.model.seq_length
    candidate = Candidate(
        0,
        names.key,
        names.varied,
        processes,
        (*flags, *placed),
        nodes,
        tokens,
        memory,
        step_s,
        layout.batch,
    )
    if not layout.has_choice("zero"):
        settings["zero_stage"] = None
    return candidate, json.dumps([settings, placed], sort_keys=True, default=str)


def _fit(
    config: Config, machine: Machine, predict: bool
) -> tuple[float | None, float | None, tuple[str, ...]]:
    """Return the planner's (peak bytes, seconds per step, flags of the best placement).

    Without a machine description the result is (None, None, ()); seconds are None unless `predict`.
    The flags include --cluster if the device order matters.

    Raises InvalidLayout for a layout that does not fit, and ConfigError for one that the planner
    refuses.
    """
    cluster = machine.cluster
    layout = candidate_of(config)
    capacity = machine.capacity_bytes
    if cluster is None:
        return None, None, ()
    sized = with_shards_of_node(config, cluster)
    memory = peak_rank(sized, cluster.device_type, capacity or math.inf).total
    if capacity is not None and memory > capacity:
        raise InvalidLayout(
            "predicted memory exceeds device memory",
            f"{memory / GIB:.1f} GiB of {capacity / GIB:.1f} usable",
        )
    words = list[str]()
    step_s = None
    # The device order matters if links between a node's devices differ and all devices are used.
    ordered = len(cluster.device_orders) > 1 and layout.world % cluster.devices_per_node == 0
    if predict:
        restrictions = {
            name: (explicit,)
            for name, explicit in (("order", layout.rank_order), ("devices", layout.device_order))
            if explicit
        }
        step_s, order, devices, dispatch = min(
            (
                estimate(config, cluster, placement).seconds,
                placement.layout.order,
                placement.device_order,
                chosen_dispatch(config, placement) or 0,
            )
            for placement in worthwhile_placements(config, cluster, restrictions)
        )
        words += ["--rank-order", order] if not layout.rank_order and layout.world > 1 else []
        words += flags_of("devices", devices) if not layout.device_order and ordered else []
        words += flags_of("epn", dispatch) if dispatch else []
    if ordered:
        # its name if it ships with the package, otherwise the absolute path of its file
        path = Path(cluster.path)
        words += ["--cluster", path.stem if path.parent == CLUSTERS else str(path.absolute())]
    return memory, step_s, tuple(words)
