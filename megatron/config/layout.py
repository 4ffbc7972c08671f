"""A layout of a run, and how it is written: tp=4,pp=16,chunks=2,mbs=1,recompute=selective."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron.config.config import Config
from megatron.config.parallel import RANK_ORDERS, SCHEDULES
from megatron.config.settings import did_you_mean
from megatron.errors import ConfigError

MODULES = ("core_attn", "mlp_act", "layernorm")


class Layout(NamedTuple):
    """How a model is divided over devices, and a batch over steps.

    world, batch  devices in all; samples of a step
    micro         samples of a micro-batch
    recompute     none, selective:MODULE+MODULE, full:uniform:LAYERS or full:block:LAYERS
    rank_order, device_order   "" and (): by the machine
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

    @property
    def sizes(self) -> tuple[Any, ...]:
        """What decides most of its time: all before the switches."""
        return self[:7]

    @property
    def replicas(self) -> int:
        return self.world // (self.tp * self.pp)

    def settings(self, layers: int, stages: str | None = None) -> dict[str, Any]:
        """What Config.replace needs for a model of so many layers; `stages`: its --pipeline-layout, which says the
        chunks."""
        chunked = self.chunks > 1 and stages is None
        return {
            "world_size": self.world, "global_batch_size": self.batch, "micro_batch_size": self.micro,
            "tensor_model_parallel_size": self.tp, "pipeline_model_parallel_size": self.pp,
            # Not whole: the configuration says what is wrong with it.
            "num_layers_per_virtual_pipeline_stage": max(1, layers // (self.pp * self.chunks)) if chunked else None,
            "enable_zbh1_pipeline": self.schedule == "zb-h1", "sequence_parallel": self.sp,
            "tp_comm_overlap": self.overlap, "zero_stage": self.zero,
            "rank_order": self.rank_order or None, "device_order": self.device_order or None,
            **recompute_settings(self.recompute),
        }  # fmt: skip

    def write(self, per_node: int) -> str:
        """As `parse_layout` reads it, on nodes of so many devices; what makes no difference is left out."""
        idle = {"sp": self.tp == 1, "overlap": self.tp == 1, "chunks": self.chunks == 1, "schedule": self.pp == 1}
        values = {d.names[0]: d.value(self, per_node) for d in DIMENSIONS}
        return ",".join(f"{n}={write_value(v)}" for n, v in values.items() if not idle.get(n) and v not in ("", ()))

    def has_choice(self, name: str) -> bool:
        """Whether a dimension can have several values with so many tensor, pipeline and data-parallel ranks."""
        ranks = {"sp": self.tp, "overlap": self.tp, "chunks": self.pp, "schedule": self.pp, "zero": self.replicas}
        return ranks.get(name, 2) > 1


def layout_of(config: Config) -> Layout:
    """The layout of a configuration."""
    parallel, again = config.parallel, config.recompute
    kind, recompute = again.recompute_granularity, "none"
    if kind == "selective":
        recompute = f"selective:{'+'.join(m for m in MODULES if m in again.recompute_modules)}"
    elif kind == "full":
        recompute = f"full:{again.recompute_method}:{again.recompute_num_layers}"
    return Layout(
        parallel.world_size, config.batch.global_batch_size, parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size, parallel.num_chunks, config.schedule_name, config.batch.micro_batch_size,
        parallel.sequence_parallel, parallel.tp_comm_overlap, config.engine.zero_stage, recompute,
        parallel.rank_order or "", tuple(parallel.device_order or ()),
    )  # fmt: skip


def recompute_settings(text: str) -> dict[str, Any]:
    """Settings of none, selective:MODULE+MODULE, full:uniform:LAYERS or full:block:LAYERS.

    >>> recompute_settings("full:block:3")["recompute_num_layers"]
    3
    """
    kind, _, rest = text.partition(":")
    method, _, layers = rest.partition(":")
    full = kind == "full"
    return {
        "recompute_granularity": None if kind == "none" else kind,
        "recompute_modules": tuple(rest.split("+")) if kind == "selective" else None,
        "recompute_method": method if full else None, "recompute_num_layers": int(layers) if full else None,
    }  # fmt: skip


def kind_of_recompute(text: str) -> str:
    """Without the number of layers."""
    return text.rpartition(":")[0] if text.startswith("full:") else text


# -- dimensions --------------------------------------------------------------------------------------------------------


class Dimension(NamedTuple):
    """One thing that is chosen: its names (the first is shown), a title, the field of a layout, how a word is read, and
    what words look like."""

    names: tuple[str, ...]
    title: str
    field: str
    read: Callable[[str], Any]
    words: str = "a number"

    def value(self, layout: Layout, per_node: int) -> Any:
        """Of a layout, on nodes of so many devices."""
        found = getattr(layout, self.field)
        return -(-found // per_node) if self.field == "world" else found


def _whole(word: str) -> int:
    value = int(word)
    if value < 1:
        raise ValueError(word)
    return value


def _one_of(values: Mapping[str, Any]) -> Callable[[str], Any]:
    return lambda word: values[word.lower()]


_SWITCH = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}


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


DIMENSIONS: tuple[Dimension, ...] = (
    Dimension(("nodes",), "nodes", "world", _whole),
    Dimension(("gbs", "batch", "global-batch"), "global batch", "batch", _whole),
    Dimension(("tp",), "tensor parallel", "tp", _whole),
    Dimension(("pp",), "pipeline stages", "pp", _whole),
    Dimension(("chunks", "vpp"), "chunks", "chunks", _whole),
    Dimension(("schedule",), "schedule", "schedule", _one_of({s: s for s in SCHEDULES}), ", ".join(SCHEDULES)),
    Dimension(("mbs", "micro"), "micro-batch", "micro", _whole),
    Dimension(("sp",), "sequence parallel", "sp", _one_of(_SWITCH), "on or off"),
    Dimension(("overlap",), "tensor overlap", "overlap", _one_of(_SWITCH), "on or off"),
    Dimension(("zero",), "ZeRO stage", "zero", _one_of({"0": 0, "1": 1}), "0 or 1"),
    Dimension(("recompute",), "recomputation", "recompute", _recompute,
              "none, selective[:MODULE+MODULE] of core_attn, mlp_act and layernorm, or full[:uniform|block[:LAYERS]]"),
    Dimension(("order",), "rank order", "rank_order", _one_of({o: o for o in RANK_ORDERS}), ", ".join(RANK_ORDERS)),
    Dimension(("devices",), "device order", "device_order", lambda word: tuple(map(int, word.split("-"))),
              "such as 0-1-6-7-2-3-4-5"),
)  # fmt: skip
_BY_NAME: Mapping[str, Dimension] = {name: dimension for dimension in DIMENSIONS for name in dimension.names}

Wanted = Mapping[str, tuple[Any, ...]]
"""Values that are allowed, by the first name of a dimension; what is not named may be anything."""


def parse_layout(text: str, flag: str) -> dict[str, tuple[Any, ...]]:
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
        pairs = [(a, b) for b in second[name] for a in first[name] if matches(a, b) or matches(b, a)]
        both[name] = tuple(dict.fromkeys(a if matches(a, b) else b for a, b in pairs))
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
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)
