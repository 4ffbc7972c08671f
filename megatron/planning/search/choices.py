"""What the search decides, and how it is written: tp=4,pp=16,chunks=2,mbs=1,recompute=selective."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron.config.parallel import RANK_ORDERS, SCHEDULES
from megatron.config.settings import did_you_mean
from megatron.errors import ConfigError
from megatron.planning.cluster import Cluster

MODULES = ("core_attn", "mlp_act", "layernorm")


class Shape(NamedTuple):
    """The sizes of a layout: what decides most of its time. `devices` in all, `micro` samples of a micro-batch."""

    devices: int
    batch: int
    tp: int
    pp: int
    chunks: int
    schedule: str
    micro: int

    @property
    def replicas(self) -> int:
        return self.devices // (self.tp * self.pp)

    @property
    def micro_batches(self) -> int:
        return self.batch // (self.micro * self.replicas)


class Choices(NamedTuple):
    """A layout in all that is searched. `recompute` as `recompute_settings` reads it; the orders are "" and () until
    ranks are placed."""

    shape: Shape
    sp: bool
    overlap: bool
    zero: int
    recompute: str
    rank_order: str = ""
    device_order: tuple[int, ...] = ()


def recompute_settings(text: str) -> dict[str, Any]:
    """Settings of none, selective:MODULE+MODULE, full:uniform:LAYERS or full:block:LAYERS.

    >>> recompute_settings("full:block:3")["recompute_num_layers"]
    3
    """
    granularity, _, rest = text.partition(":")
    found: dict[str, Any] = dict.fromkeys((
        "recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers",
    ))  # fmt: skip
    if granularity == "selective":
        found |= {"recompute_granularity": "selective", "recompute_modules": tuple(rest.split("+"))}
    elif granularity == "full":
        method, layers = rest.split(":")
        found |= {
            "recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": int(layers),
        }  # fmt: skip
    return found


def settings_of(choices: Choices, layers: int, layout: str | None = None) -> dict[str, Any]:
    """What Config.replace needs for so many layers; `layout`: its --pipeline-layout, which says the chunks."""
    shape = choices.shape
    chunked = shape.chunks > 1 and layout is None
    return {
        "world_size": shape.devices, "global_batch_size": shape.batch, "micro_batch_size": shape.micro,
        "tensor_model_parallel_size": shape.tp, "pipeline_model_parallel_size": shape.pp,
        # Not whole: the configuration says what is wrong with it.
        "num_layers_per_virtual_pipeline_stage": max(1, layers // (shape.pp * shape.chunks)) if chunked else None,
        "enable_zbh1_pipeline": shape.schedule == "zb-h1", "sequence_parallel": choices.sp,
        "tp_comm_overlap": choices.overlap, "zero_stage": choices.zero,
        "rank_order": choices.rank_order or None, "device_order": choices.device_order or None,
        **recompute_settings(choices.recompute),
    }  # fmt: skip


def kind_of_recompute(text: str) -> str:
    """Without the number of layers: what `sensitivity` tells apart."""
    return text.rpartition(":")[0] if text.startswith("full") else text


# -- dimensions --------------------------------------------------------------------------------------------------------


class Dimension(NamedTuple):
    """One thing that is chosen: its names (the first is shown), a title, its value in a layout, how a word is read."""

    names: tuple[str, ...]
    title: str
    value: Callable[[Choices, Cluster], Any]
    read: Callable[[str], Any]
    words: str  # what values look like


def _whole(word: str) -> int:
    value = int(word)
    if value < 1:
        raise ValueError(word)
    return value


def _switch(word: str) -> bool:
    words = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
    return words[word.lower()]


def _one_of(*known: str) -> Callable[[str], str]:
    def read(word: str) -> str:
        if word.lower() not in known:
            raise ValueError(word)
        return word.lower()

    return read


def _stage(word: str) -> int:
    return {"0": 0, "1": 1}[word]


def _recompute(word: str) -> str:
    """A pattern: its later parts may be left out, and modules may stand in any order."""
    kind, *rest = word.lower().split(":")
    if kind in ("none", "selective", "full") and not rest:
        return kind
    if kind == "selective" and len(rest) == 1:
        modules = rest[0].split("+")
        if set(modules) <= set(MODULES) and len(set(modules)) == len(modules):
            return f"selective:{'+'.join(m for m in MODULES if m in modules)}"
    if kind == "full" and rest[0] in ("uniform", "block") and len(rest) <= 2:
        return ":".join([kind, rest[0], *(str(_whole(n)) for n in rest[1:])])
    raise ValueError(word)


def _order_of_devices(word: str) -> tuple[int, ...]:
    return tuple(int(part) for part in word.split("-"))


def nodes_of(devices: int, cluster: Cluster) -> int:
    """Nodes that so many devices are on."""
    return -(-devices // cluster.devices_per_node)


DIMENSIONS: tuple[Dimension, ...] = (
    Dimension(("nodes",), "nodes", lambda c, k: nodes_of(c.shape.devices, k), _whole, "a number"),
    Dimension(("gbs", "batch", "global-batch"), "global batch", lambda c, k: c.shape.batch, _whole, "a number"),
    Dimension(("tp",), "tensor parallel", lambda c, k: c.shape.tp, _whole, "a number"),
    Dimension(("pp",), "pipeline stages", lambda c, k: c.shape.pp, _whole, "a number"),
    Dimension(("chunks", "vpp"), "chunks", lambda c, k: c.shape.chunks, _whole, "a number"),
    Dimension(("schedule",), "schedule", lambda c, k: c.shape.schedule, _one_of(*SCHEDULES), ", ".join(SCHEDULES)),
    Dimension(("mbs", "micro"), "micro-batch", lambda c, k: c.shape.micro, _whole, "a number"),
    Dimension(("sp",), "sequence parallel", lambda c, k: c.sp, _switch, "on or off"),
    Dimension(("overlap",), "tensor overlap", lambda c, k: c.overlap, _switch, "on or off"),
    Dimension(("zero",), "ZeRO stage", lambda c, k: c.zero, _stage, "0 or 1"),
    Dimension(("recompute",), "recomputation", lambda c, k: c.recompute, _recompute,
              "none, selective[:MODULE+MODULE] of core_attn, mlp_act and layernorm, or full[:uniform|block[:LAYERS]]"),
    Dimension(("order",), "rank order", lambda c, k: c.rank_order, _one_of(*RANK_ORDERS), ", ".join(RANK_ORDERS)),
    Dimension(("devices",), "device order", lambda c, k: c.device_order, _order_of_devices, "such as 0-1-6-7-2-3-4-5"),
)  # fmt: skip
_BY_NAME: Mapping[str, Dimension] = {name: dimension for dimension in DIMENSIONS for name in dimension.names}

Wanted = Mapping[str, tuple[Any, ...]]
"""Values that are allowed, by the first name of a dimension; what is not named may be anything."""


def parse_choices(text: str, flag: str) -> dict[str, tuple[Any, ...]]:
    """The values in tp=4,pp=8,16,recompute=selective: a word without = is one more value of the name before it.

    Raises ConfigError that begins with `flag` for an unknown name, an unreadable value and a name given twice.
    """
    found: dict[str, tuple[Any, ...]] = {}
    name = ""
    for item in filter(None, (part.strip() for part in text.split(","))):
        before, equals, word = item.rpartition("=")
        if equals:
            given = before.strip().lower().replace("_", "-").lstrip("-")
            if given not in _BY_NAME:
                known = ", ".join(d.names[0] for d in DIMENSIONS)
                raise ConfigError(f"{flag} {text}: '{given}' is unknown{did_you_mean(given, _BY_NAME)}; known: {known}")
            name = _BY_NAME[given].names[0]
            if name in found:
                raise ConfigError(f"{flag} {text}: {name} is given twice: several values are {name}=A,B")
        elif not name:
            raise ConfigError(f"{flag} {text}: '{item}' is not NAME=VALUE, such as tp=4,pp=16,mbs=1,recompute=none")
        dimension = _BY_NAME[name]
        try:
            found[name] = (*found.get(name, ()), dimension.read(word.strip()))
        except (ValueError, KeyError):
            raise ConfigError(f"{flag} {text}: {name} is {dimension.words}, not '{word.strip()}'") from None
    if not found:
        raise ConfigError(f"{flag} '{text}' names nothing: give NAME=VALUE, such as tp=4,pp=16,mbs=1,recompute=none")
    return found


def narrowed(first: Wanted, second: Wanted) -> dict[str, tuple[Any, ...]]:
    """What both allow: values named twice must be in both lists, where recompute=full is all that begin so."""
    both = {**first, **second}
    for name in first.keys() & second.keys():
        if name == "recompute":
            pairs = [(a, b) for a in first[name] for b in second[name]]
            both[name] = tuple(dict.fromkeys(
                a if matches(a, b) else b for a, b in pairs if matches(a, b) or matches(b, a)
            ))  # fmt: skip
        else:
            both[name] = tuple(v for v in second[name] if v in first[name])
    return both


def matches(value: Any, pattern: Any) -> bool:
    """Whether a value is what a pattern allows: selective allows selective:mlp_act.

    >>> matches("full:block:2", "full"), matches("full:block:2", "full:block:1")
    (True, False)
    """
    return value == pattern or (isinstance(pattern, str) and isinstance(value, str) and value.startswith(f"{pattern}:"))


def allowed(value: Any, name: str, wanted: Wanted) -> bool:
    return name not in wanted or any(matches(value, pattern) for pattern in wanted[name])


def write_value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def write_choices(choices: Choices, cluster: Cluster) -> str:
    """As `parse_choices` reads it; what makes no difference is left out."""
    shape = choices.shape
    idle = {"sp": shape.tp == 1, "overlap": shape.tp == 1, "chunks": shape.chunks == 1, "schedule": shape.pp == 1}
    words = []
    for dimension in DIMENSIONS:
        value, name = dimension.value(choices, cluster), dimension.names[0]
        if not idle.get(name, False) and value not in ("", ()):
            words.append(f"{name}={write_value(value)}")
    return ",".join(words)
