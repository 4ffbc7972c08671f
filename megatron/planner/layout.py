"""Candidate layout, and its notation, such as tp=4,pp=16,chunks=2,mbs=1,recompute=selective."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from megatron.config import Config
from megatron.config.parallel import RANK_ORDERS, SCHEDULES
from megatron.config.settings import did_you_mean
from megatron.errors import ConfigError

MODULES = ("core_attn", "mlp_act", "layernorm")
_SIZES = "world batch tp pp chunks schedule micro cp ep etp".split()

Value = str | int | tuple[int, ...]
Restrictions = Mapping[str, tuple[Any, ...]]
"""Allowed values by dimension; a dimension that is not listed may have any value."""


class CandidateLayout(NamedTuple):
    """Division of a model over devices, and of a global batch into micro-batches.

    world           number of devices
    batch           samples per step
    tp, pp, cp, ep  tensor-, pipeline-, context- and expert-parallel size
    etp             number of ranks over which each expert is divided; 0: as many as tp
    chunks          chunks per pipeline rank
    schedule        one of SCHEDULES
    micro           samples per micro-batch
    sp, overlap     whether --sequence-parallel and --tp-comm-overlap are on
    zero            ZeRO stage
    shard, states   numbers of ranks over which ZeRO shards (EngineConfig.zero_shard_size and
                    zero_state_shard_size); 0: all, -1: those of a node
    offload         whether the optimizer's state is in host memory
    recompute       none, selective:MODULE+MODULE, full:uniform:LAYERS or full:block:LAYERS
    rank_order, device_order   "" and (): chosen for the machine
    epn             --expert-ranks-per-node; 0: chosen for the machine
    """

    world: int
    batch: int
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    micro: int = 1
    sp: bool = False
    overlap: bool = False
    zero: int = 1
    recompute: str = "none"
    rank_order: str = ""
    device_order: tuple[int, ...] = ()
    cp: int = 1
    ep: int = 1
    etp: int = 0
    shard: int = 0
    states: int = 0
    offload: bool = False
    epn: int = 0

    @property
    def sizes(self) -> CandidateLayout:
        """Return the layout with only its main dimensions, and all switches at their defaults."""
        return CandidateLayout(**{name: getattr(self, name) for name in _SIZES})

    @property
    def gradient_ranks(self) -> int:
        """Number of devices with the same shard of the model, except for experts."""
        return self.world // (self.tp * self.pp)

    @property
    def replicas(self) -> int:
        return self.gradient_ranks // self.cp

    @property
    def expert_ranks(self) -> int:
        """Number of devices of a stage that hold all experts of a layer once."""
        return (self.etp or self.tp) * self.ep

    def settings(self, layers: int, stages: str | None = None) -> dict[str, Any]:
        """Return the arguments of Config.replace for a model with this many layers.

        stages  its --pipeline-layout, which implies the number of chunks; None: it has none
        """
        chunked = self.schedule == "interleaved" and self.chunks > 1 and stages is None
        return {
            **{d.setting: getattr(self, d.field) for d in DIMENSIONS if d.setting},
            # The configuration reports layers that do not divide evenly.
            "num_layers_per_virtual_pipeline_stage": max(1, layers // (self.pp * self.chunks))
            if chunked
            else None,
            "expert_tensor_parallel_size": self.etp or None,
            # a user's own schedule has another name
            "pipeline_schedule": self.schedule
            if self.pp > 1 and self.schedule in SCHEDULES
            else None,
            "rank_order": self.rank_order or None,
            "device_order": self.device_order or None,
            "expert_ranks_per_node": self.epn or None,
            **recompute_settings(self.recompute),
        }

    def write(self, per_node: int) -> str:
        """Return the notation that `parse_layout` reads, for nodes with this many devices.

        Dimensions without effect are left out, and so are orders that are not chosen, and shard,
        states, offload and epn at their defaults.
        """
        values = {d.name: d.value(self, per_node) for d in DIMENSIONS if self.has_choice(d.name)}
        return ",".join(
            f"{name}={write_value(value)}"
            for name, value in values.items()
            if value not in ("", ()) and (value or name not in _OFF_BY_DEFAULT)
        )

    def has_choice(self, name: str) -> bool:
        """Return whether a dimension has an effect at this layout's sizes, as sp has if tp > 1."""
        ranks = {
            "sp": self.tp,
            "overlap": self.tp,
            "chunks": self.pp,
            "schedule": self.pp,
            "zero": self.gradient_ranks,
            "cp": self.cp,
            "ep": self.ep,
            "etp": 2 if self.etp or self.ep > 1 else 1,
            "epn": self.ep,
            **dict.fromkeys(("shard", "states"), self.gradient_ranks if self.zero else 1),
        }
        return ranks.get(name, 2) > 1


def candidate_of(config: Config) -> CandidateLayout:
    """Return the layout of a configuration."""
    parallel = config.parallel
    settings = config.recompute
    kind = settings.recompute_granularity
    recompute = "none"
    if kind == "selective":
        recompute = f"selective:{_in_order(settings.recompute_modules)}"
    elif kind == "full":
        recompute = f"full:{settings.recompute_method}:{settings.recompute_num_layers}"
    plain = {d.field: config.get(d.setting) for d in DIMENSIONS if d.setting}
    return CandidateLayout(**plain)._replace(
        etp=parallel.expert_tensor_parallel_size if parallel.folded else 0,
        rank_order=parallel.rank_order or "",
        device_order=tuple(parallel.device_order or ()),
        epn=parallel.expert_ranks_per_node or 0,
        chunks=parallel.num_chunks,
        schedule=config.schedule_name,
        recompute=recompute,
    )


def recompute_settings(text: str) -> dict[str, Any]:
    """Return the settings for none, selective:MODULE+MODULE, full:uniform:LAYERS or
    full:block:LAYERS.

    >>> recompute_settings("full:block:3")["recompute_num_layers"]
    3
    """
    kind, _, rest = text.partition(":")
    method, _, layers = rest.partition(":")
    full = kind == "full"
    return {
        "recompute_granularity": None if kind == "none" else kind,
        "recompute_modules": tuple(rest.split("+")) if kind == "selective" else None,
        "recompute_method": method if full else None,
        "recompute_num_layers": int(layers) if full else None,
    }


def kind_of_recompute(text: str) -> str:
    """Return the kind of recomputation without its number of layers."""
    return text.rpartition(":")[0] if text.startswith("full:") else text


# -- dimensions ------------------------------------------------------------------------------------


class Dimension(NamedTuple):
    """Dimension of the search space.

    name     name in the notation
    field    field of CandidateLayout
    setting  setting of Config with the same value; "" for none
    values   accepted words, and the values that they stand for; empty: words match a pattern
    words    description of the words that `pattern` matches, for messages
    pattern  regular expression for accepted words if `values` is empty
    """

    name: str
    field: str
    setting: str = ""
    values: Mapping[str, Value] = {}
    words: str = "a positive integer of at most nine digits"
    pattern: str = r"0*[1-9]\d{,8}"

    def value(self, layout: CandidateLayout, per_node: int) -> Value:
        """Return a layout's value in this dimension, for nodes with this many devices."""
        if self.field == "world":
            return -(-layout.world // per_node)
        if self.field == "etp":
            return layout.etp or layout.tp
        value: Value = getattr(layout, self.field)
        return value

    def read(self, word: str) -> Value:
        """Return the value that a word stands for. Raises ValueError for an invalid word."""
        if word in self.values:
            return self.values[word]
        if self.values or not re.fullmatch(self.pattern, word):
            raise ValueError(
                f"{self.name} must be {' or '.join(self.values) or self.words}, not '{word}'"
            )
        if word in ("node", "world"):
            return -1 if word == "node" else 0
        if self.field == "recompute":
            kind, _, modules = word.partition(":")
            selected = kind == "selective" and modules
            return f"{kind}:{_in_order(modules.split('+'))}" if selected else word
        return int(word) if self.field != "device_order" else tuple(map(int, word.split("-")))


def _in_order(modules: Collection[str]) -> str:
    return "+".join(module for module in MODULES if module in modules)


_RANKS: tuple[Mapping[str, Value], str, str] = (
    {},
    "node, world or a positive integer of at most nine digits",
    r"node|world|0*[1-9]\d{,8}",
)
_OFF_BY_DEFAULT = ("shard", "states", "offload", "epn")
_SWITCH = {"on": True, "off": False}
_ONE = f"(?:{'|'.join(MODULES)})"
_RECOMPUTE = rf"none|selective(:{_ONE}(\+{_ONE})*)?|full(:(uniform|block)(:[1-9]\d{{,8}})?)?"

DIMENSIONS: tuple[Dimension, ...] = (
    Dimension("nodes", "world", "world_size"),
    Dimension("gbs", "batch", "global_batch_size"),
    Dimension("tp", "tp", "tensor_model_parallel_size"),
    Dimension("pp", "pp", "pipeline_model_parallel_size"),
    Dimension("cp", "cp", "context_parallel_size"),
    Dimension("ep", "ep", "expert_model_parallel_size"),
    Dimension("etp", "etp", "expert_tensor_parallel_size"),
    Dimension("chunks", "chunks"),
    Dimension("schedule", "schedule", values={name: name for name in SCHEDULES}),
    Dimension("mbs", "micro", "micro_batch_size"),
    Dimension("sp", "sp", "sequence_parallel", _SWITCH),
    Dimension("overlap", "overlap", "tp_comm_overlap", _SWITCH),
    Dimension("zero", "zero", "zero_stage", {str(stage): stage for stage in range(4)}),
    Dimension("shard", "shard", "zero_shard_size", *_RANKS),
    Dimension("states", "states", "zero_state_shard_size", *_RANKS),
    Dimension("offload", "offload", "cpu_offload", _SWITCH),
    Dimension(
        "recompute",
        "recompute",
        pattern=_RECOMPUTE,
        words=f"none, selective[:MODULE+MODULE] of {', '.join(MODULES)}, or "
        "full[:uniform|block[:LAYERS]]",
    ),
    Dimension("epn", "epn", "expert_ranks_per_node"),
    Dimension("order", "rank_order", "rank_order", {name: name for name in RANK_ORDERS}),
    Dimension(
        "devices",
        "device_order",
        "device_order",
        pattern=r"\d{1,4}(-\d{1,4})*",
        words="a list of devices such as 0-1-6-7-2-3-4-5",
    ),
)
_BY_NAME = {dimension.name: dimension for dimension in DIMENSIONS}


def parse_layout(text: str, flag: str) -> dict[str, tuple[Value, ...]]:
    """Return the values in a text such as tp=4,pp=8,16,recompute=selective.

    A word without = is another value for the preceding name. Raises ConfigError, with a message
    that begins with `flag`, for a missing, unknown or repeated name and for an invalid value.
    """
    values: dict[str, tuple[Value, ...]] = {}
    name = ""
    items = [item.strip() for item in text.split(",") if item.strip()]
    try:
        for item in items or [""]:
            before, equals, word = item.rpartition("=")
            if equals:
                name = before.strip().lower().lstrip("-")
                if name not in _BY_NAME:
                    raise ValueError(
                        f"'{name}' is unknown{did_you_mean(name, _BY_NAME)}; known: "
                        f"{', '.join(_BY_NAME)}"
                    )
                if name in values:
                    raise ValueError(f"{name} is given twice: write several values as {name}=A,B")
            elif not name:
                raise ValueError(
                    f"'{item}' is not NAME=VALUE, such as tp=4,pp=16,mbs=1,recompute=none"
                )
            values[name] = (*values.get(name, ()), _BY_NAME[name].read(word.strip().lower()))
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: {error}") from None
    return values


def narrowed(first: Restrictions, second: Restrictions) -> dict[str, tuple[Value, ...]]:
    """Return the values of each dimension that both restrictions allow.

    recompute=full stands for every value that begins with it.
    """
    both = {**first, **second}
    for name in first.keys() & second.keys():
        values = dict.fromkeys((*first[name], *second[name]))
        both[name] = tuple(
            v for v in values if allowed(v, name, first) and allowed(v, name, second)
        )
    return both


def matches(value: Value, pattern: Value) -> bool:
    """Return whether a pattern allows a value: for example, selective allows selective:mlp_act.

    >>> matches("full:block:2", "full"), matches("full:block:2", "full:block:1")
    (True, False)
    """
    return value == pattern or (
        isinstance(pattern, str) and isinstance(value, str) and value.startswith(f"{pattern}:")
    )


def allowed(value: Value, name: str, restrictions: Restrictions) -> bool:
    return name not in restrictions or any(
        matches(value, pattern) for pattern in restrictions[name]
    )


def write_value(value: object) -> str:
    if value is None:
        return "none"
    if value == -1:
        return "node"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)
