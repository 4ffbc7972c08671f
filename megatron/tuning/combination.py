"""One combination of a space's values: what every name is in it, and its flags of pretrain_gpt.py."""
from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config import Config
from megatron.config.command_line import parse_args, read_settings, scan
from megatron.config.resolve import layout_counts, resolve
from megatron.config.settings import raise_problems
from megatron.errors import ConfigError
from megatron.planning.search.choices import recompute_settings
from megatron.tuning.expressions import Expression, ExpressionError
from megatron.tuning.names import recompute_words, settings_of_flags, subject
from megatron.tuning.space import Machine, Space, write_key
from megatron.tuning.types import Value

_CHUNK = "num_layers_per_virtual_pipeline_stage"
_DATA = ("data_path", "train_data_path", "data_file_list", "mock_data")
# What a flag of the command line takes back from those of the space.
_YIELDS: Mapping[str, tuple[str, ...]] = {
    "bf16": ("fp16", "initial_loss_scale", "loss_scale"), "fp16": ("bf16",),
    "recompute_granularity": tuple(recompute_settings("none")),
}  # fmt: skip


class Rejected(Exception):
    """A combination that makes no layout, for this reason; `example` is the case at hand, `miss` by how much."""

    def __init__(self, reason: str, example: str = "", miss: float = 0.0) -> None:
        super().__init__(reason)
        self.reason, self.example, self.miss = reason, example, miss


@dataclass(frozen=True)
class Request:
    """A space with the flags of the command line, on a machine; make one with `make_request`.

    flags    of all layouts, in order; of flags that say one setting, that of the command line
    preset   that is among them, or None
    trial    flags that pretrain_gpt.py needs beside them to check a layout: a length, and data where none are named
    """

    space: Space
    machine: Machine
    flags: tuple[str, ...]
    preset: str | None
    trial: tuple[str, ...]


def make_request(space: Space, flags: Sequence[str], machine: Machine) -> Request:
    """Raises ConfigError for a flag that cannot be read or that a trial cannot have, and for one that says what a
    parameter or a derived name says too."""
    scanned = scan(flags)
    raise_problems(scanned.problems)
    said = settings_of_flags(scanned.flags)
    names = [*(p.name for p in space.parameters if p.name not in space.variables), *space.derived]
    for name in names:
        for setting in subject(name).settings:
            if setting in said:
                kind = "[derived]" if name in space.derived else "[parameters]"
                raise ConfigError(f"{said[setting]} contradicts {kind} {name} of {space.path}, which says the same: "
                                  "leave the flag out, or use a space without it")  # fmt: skip
    yielding = set(said).union(*(_YIELDS.get(setting, ()) for setting in said))
    words: list[str] = []
    for spelling, values in scan(space.flags).flags.items():
        settings = settings_of_flags({spelling: values})
        order = settings.get("device_order", "").split()[1:]
        # A space is written for nodes of one size; on others ranks are placed as the machine wants.
        misfit = order and len(",".join(order).split(",")) != machine.processes_per_node
        if not misfit and not yielding & set(settings):
            words += [spelling, *values]
    words += [word for spelling, values in scanned.flags.items() for word in (spelling, *values)]
    # What is wrong with them is wrong with every layout.
    raise_problems(read_settings(words).problems)
    merged = scan(words).flags
    decided = {*settings_of_flags(merged), *(setting for name in names for setting in subject(name).settings)}
    trial = ["--train-iters", str(space.warm_up + space.iterations)]
    trial += [] if decided & set(_DATA) else ["--mock-data"]
    return Request(space, machine, tuple(words), next(iter(merged.get("--preset", ())), None), tuple(trial))


class Combination(Mapping[str, Value]):
    """The values of names in expressions, worked out as they are asked for. Raises Rejected and ConfigError."""

    def __init__(self, request: Request, number: int) -> None:
        self.request, self.values_of = request, request.space.combination(number)
        self._given = {subject(n).id if n not in request.space.variables else n: v for n, v in self.values_of.items()}
        self._derived = {subject(name).id: (name, e) for name, e in request.space.derived.items()}
        self._asked: list[str] = []

    @functools.cached_property
    def key(self) -> str:
        """Its name: the values of what varies."""
        varied = {p.name for p in self.request.space.parameters if len(p.values) > 1} or set(self.values_of)
        return write_key({name: value for name, value in self.values_of.items() if name in varied})

    # -- names ---------------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Value:
        if name == "dp":
            return self._replicas()
        return self._by_id(name if name in self.request.space.variables else subject(name).id)

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def _by_id(self, name: str) -> Value:
        if name not in self._given:
            self._given[name] = self._derive(name) if name in self._derived else self._follow(name)
        return self._given[name]

    def _derive(self, name: str) -> Value:
        key, expression = self._derived[name]
        found = self.evaluate(f"[derived] {key}", expression)
        if isinstance(found, float) and found == int(found):
            found = int(found)
        try:
            return subject(key).accept(found)
        except ValueError as error:
            raise Rejected(f"refused: {key} {_general(str(error))}", f"{self.key}: {key} {error}") from None

    def evaluate(self, where: str, expression: Expression) -> Value:
        """Raises ConfigError for an expression that has no value, or that asks for itself."""
        path = self.request.space.path
        if where in self._asked:
            chain = " needs ".join([*self._asked[self._asked.index(where) :], where])
            raise ConfigError(f"{path}: {chain}: neither can be worked out first")
        self._asked.append(where)
        try:
            return expression.value(self)
        except ExpressionError as error:
            raise ConfigError(f"{path}: {where}: '{expression.text}': {error} (with {self.key})") from None
        finally:
            self._asked.pop()

    def _follow(self, name: str) -> Value:
        """The value of what neither varies nor is derived."""
        if name == "processes":
            if "nodes" in self._given or "nodes" in self._derived:
                return self.whole("nodes") * self.request.machine.processes_per_node
            return self.request.machine.processes
        if name == "nodes":
            return -(-self.whole("processes") // self.request.machine.processes_per_node)
        if name == "chunks":
            return self._chunks()
        if name == "schedule":
            return "zb-h1" if self["enable_zbh1_pipeline"] else "interleaved" if self.whole("chunks") > 1 else "1f1b"
        if name == "recompute":
            return self._recompute()
        if name == "preset":
            return self.request.preset
        return self._setting(name)

    def whole(self, name: str) -> int:
        """Raises ConfigError for anything but a whole number of at least 1."""
        found = self[name]
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise ConfigError(f"{self.request.space.path}: {name} is {found}, not a whole number of at least 1 "
                              f"(with {self.key})")  # fmt: skip
        return found

    def _replicas(self) -> int:
        processes, replica = self.whole("processes"), self.whole("tp") * self.whole("pp")
        if processes % replica:
            raise Rejected("TP x PP does not divide the processes",
                           f"{self.key}: {replica} into {processes}", processes % replica)  # fmt: skip
        return processes // replica

    def _chunks(self) -> int:
        stages, layout, each = self.whole("pp"), self["pipeline_layout"], self[_CHUNK]
        if layout is not None:
            return max(1, len(layout_counts(str(layout)) or []) // stages)
        return 1 if each is None or stages == 1 else max(1, self.whole("num_layers") // (stages * int(each)))

    def _recompute(self) -> str:
        kind = self["recompute_granularity"]
        if kind == "selective":
            return f"selective:{'+'.join(str(self['recompute_modules']).split())}"
        return f"full:{self['recompute_method']}:{self['recompute_num_layers']}" if kind else "none"

    def _setting(self, name: str) -> Value:
        for parameter in (*self.values_of, *self.request.space.derived):
            if parameter in self.request.space.variables or name not in subject(parameter).settings:
                continue
            meant, value = subject(parameter), self[parameter]
            if meant.id == "recompute":
                return _plain(recompute_settings(str(value))[name])
            if meant.id == "schedule":
                return value == "zb-h1"
            if meant.flag and (found := meant.setting(value)) is not None:
                return found
        if name == _CHUNK and ("chunks" in self._given or "chunks" in self._derived):
            return self._layers_of_chunk()
        resolved, chosen = _resolved(self.request.flags, self._model_words())
        if name == "global_batch_size" and name not in chosen:
            return self.whole("mbs") * self._replicas()
        return _plain(resolved.get(name))

    # -- flags ---------------------------------------------------------------------------------------------------------

    def _model_words(self) -> tuple[str, ...]:
        """Flags of the names from which settings of the model follow, but of one that is being worked out."""
        space = self.request.space
        varied = [name for name in self.values_of if name not in space.variables]
        derived = [name for name in space.derived if f"[derived] {name}" not in self._asked]
        named = [name for name in (*varied, *derived) if subject(name).of_model]
        return tuple(word for name in named for word in self._words(name, self[name]))

    def _words(self, name: str, value: Value) -> list[str]:
        meant = subject(name)
        if meant.id in ("nodes", "processes") or value == "auto":
            return []
        if meant.id == "preset":
            return [] if value is None else ["--preset", str(value)]
        if meant.id == "recompute":
            return recompute_words(str(value))
        if meant.id == "schedule":
            return ["--enable-zbh1-pipeline" if value == "zb-h1" else "--no-enable-zbh1-pipeline"]
        if meant.id == "chunks":
            if self["pipeline_layout"] is not None:
                return []  # which says the chunks
            each = self._layers_of_chunk()
            return [subject(_CHUNK).flag, "none" if each is None else str(each)]
        return meant.words(value)

    def _layers_of_chunk(self) -> int | None:
        chunks, stages, layers = self.whole("chunks"), self.whole("pp"), self.whole("num_layers")
        each, rest = divmod(layers, stages * chunks)
        if chunks > 1 and rest:
            raise Rejected("layers do not divide into so many chunks",
                           f"{self.key}: {layers} layers over {stages} x {chunks} chunks")  # fmt: skip
        return each if chunks > 1 else None

    def flags(self) -> list[str]:
        """All flags of the layout, but what a trial adds."""
        words = list(self.request.flags)
        for name, value in self.values_of.items():
            words += [] if name in self.request.space.variables else self._words(name, value)
        for name in self.request.space.derived:
            words += self._words(name, self[name])
        return words

    def config(self, flags: Sequence[str]) -> Config:
        """As pretrain_gpt.py makes it of these flags in a trial. Raises Rejected."""
        processes = self.whole("processes")
        try:
            found = parse_args([*flags, *self.request.trial], processes)
        except ConfigError as error:
            raise Rejected(*_refusal(error, self.key)) from None
        for name, is_now in (("schedule", found.parallel.schedule), ("chunks", found.parallel.num_chunks)):
            asked = self._given.get(name)
            # A single stage has no schedule that could be another one.
            if asked not in (None, is_now) and not (asked == "zb-h1" and found.parallel.num_stages == 1):
                raise Rejected(f"no such {name} with these stages and chunks", f"{self.key}: it would be {is_now}")
        return found


@functools.lru_cache(maxsize=256)
def _resolved(flags: tuple[str, ...], more: tuple[str, ...]) -> tuple[Mapping[str, Any], frozenset[str]]:
    """(values of all settings, names of those that were chosen) by flags of which some may still be missing."""
    settings = read_settings([*flags, *more])
    chosen = frozenset(settings.given)
    resolve(settings)
    return settings.values, chosen


def _plain(value: Any) -> Value:
    if isinstance(value, (tuple, list)):
        return ("-" if all(isinstance(part, int) for part in value) else " ").join(map(str, value))
    found: Value = value if isinstance(value, (int, float, str, bool)) else None
    return found


def _refusal(error: ConfigError, key: str) -> tuple[str, str]:
    """(reason that many share, the case at hand) of a configuration that is refused."""
    text = " ".join(str(error).split())
    text = text.removeprefix("the configuration has 1 problem: ")
    if text.startswith("the configuration has "):  # several: the first decides
        text = text.partition(" 1. ")[2].partition(" 2. ")[0].strip()
    return f"refused: {_general(text.split(';')[0].split(': ')[0])}", f"{key}: {text}"


def _general(text: str) -> str:
    """With N for every number, so that messages about several sizes are one."""
    return " ".join(word if word.startswith("-") and not word[1:2].isdigit() else _without_number(word)
                    for word in text.split())  # fmt: skip


def _without_number(word: str) -> str:
    core = word.strip(":,;()'")
    return word.replace(core, "N") if core.lstrip("-").replace(".", "", 1).replace(",", "").isdigit() else word
