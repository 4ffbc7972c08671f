"""Merges a DeepSpeed JSON file into the settings.

"auto" leaves a value to the command line. A value that is only in the JSON is used. A value that
contradicts a chosen one is a problem that names both values, their origins and the line in the
file, except that a loss scale of 0 (dynamic) overrides a static one. deepspeed_json.toml lists the
entries that set something, are refused, have no effect or are passed on to DeepSpeed; unknown
entries are also passed on, with a notice.
"""

from __future__ import annotations

import functools
import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.config.option import Values
from megatron.config.parallel import SIZES
from megatron.config.settings import Settings, all_options, did_you_mean
from megatron.errors import ConfigError
from megatron.untrusted import parse_json, read_text

_MOST_BYTES = 1 << 20  # such a file normally has a few thousand bytes
_STEPS = "gradient_accumulation_steps"


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def merge_deepspeed_json(settings: Settings) -> None:
    """Merge the file named by `deepspeed_config`, if any.

    Problems and notices are added to `settings`.
    """
    path = settings.explicit.get("deepspeed_config")
    if path is None:
        return
    try:
        text = read_text(path, _MOST_BYTES, error=ConfigError)
        content = parse_json(text, path, error=ConfigError, object_pairs_hook=_object)
    except ConfigError as error:
        settings.problems.append(f"--deepspeed_config: {error}")
        return
    _Merge(settings, path, content, text).run()


def _object(pairs: list[tuple[str, object]]) -> Values:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f'duplicate key "{max(keys, key=keys.count)}" in one object')
    return entries


class _Merge:
    """One merge. Handled entries are removed from `content`; the rest is passed to DeepSpeed."""

    def __init__(self, settings: Settings, path: str, content: Values, text: str) -> None:
        self.settings = settings
        self.path = path
        self.content = content
        self.text = text

    def run(self) -> None:
        tables = _tables()
        for key, names in tables["settings"].items():
            self._set(key, names, self._pop(key))
        for key, name in tables["fp16_settings"].items():
            value = self._pop(key)
            if self.settings.explicit.get("fp16"):
                self._set(key, name, value)
        self._accumulation(self._pop(_STEPS))
        for key, (harmless, remedy) in tables["refused"].items():
            value = self._pop(key)
            if value not in (None, "auto", harmless):
                written = json.dumps(value)
                self._problem(key, f"{key} {written} is not supported: {remedy}")
        for key, why in tables["without_effect"].items():
            rest = self._pop(key)
            if rest in (None, "auto", {}):
                continue
            has = f"{key} has"
            used = (*tables["settings"], *tables["fp16_settings"])
            if isinstance(rest, dict) and any(name.startswith(f"{key}.") for name in used):
                # other entries of this object set something
                has = f"{', '.join(f'{key}.{inner}' for inner in rest)} have"
            self.settings.notices.append(f"{self._at(key)}: {has} no effect: {why}")
        remaining = {key: value for key, value in self.content.items() if not _only_empty(value)}
        if "optimizer" in remaining:
            unknown = json.dumps(remaining.pop("optimizer"))
            self._problem(
                "optimizer", f"optimizer has entries that are not supported: {unknown}: remove them"
            )
        known = {key.split(".")[0] for table in tables.values() for key in table} | {_STEPS}
        for key, value in remaining.items():
            if key not in tables["passed_on"]:
                hint = "" if key in known else did_you_mean(key, known)
                notice = f"{self._at(key)}: {key} is passed on to DeepSpeed{hint}"
                self.settings.notices.append(notice)
            elif not isinstance(value, dict):
                self._problem(key, f"{key} must be an object, got {json.dumps(value)}")
        if remaining:
            self.settings.give("extra", remaining, self.path)

    def _pop(self, key: str) -> Any:
        """Remove an entry and return its value; None if there is no such entry."""
        path = key.split(".")
        node: Any = self.content
        for depth, name in enumerate(path[:-1], 1):
            inner = node.get(name)
            if inner is None:
                return None
            if not isinstance(inner, dict):
                parent = ".".join(path[:depth])
                self._problem(parent, f"{parent} must be an object, got {json.dumps(inner)}")
                del node[name]
                return None
            node = inner
        return node.pop(path[-1], None)

    def _at(self, key: str) -> str:
        """Return FILE:LINE of a key, searching for it after the keys of its enclosing objects."""
        at = 0
        for name in key.split("."):
            match = re.compile(rf"{re.escape(json.dumps(name))}\s*:").search(self.text, at)
            at = at if match is None else match.start() + 1
        return f"{self.path}:{1 + self.text.count(chr(10), 0, at)}"

    def _problem(self, key: str, text: str) -> None:
        self.settings.problems.append(f"{self._at(key)}: {text}")

    def _set(self, key: str, names: str | list[str], value: object) -> None:
        """Set the setting of an entry, or, with a list of `names`, one setting for each number."""
        if value is None or value == "auto":
            return
        if isinstance(names, str):
            self._set_one(key, names, value)
        elif isinstance(value, list) and len(value) == len(names):
            for name, item in zip(names, value, strict=True):
                self._set_one(key, name, item, written=value)
        else:
            problem = f"{key} expected a list of {len(names)} numbers, got {value!r}"
            self.settings.mark_bad(names[0], problem, self._at(key))

    def _set_one(self, key: str, name: str, value: object, written: object = None) -> None:
        """Set one setting.

        `written` is the value in the file if the setting's value was computed from it; None: both
        are the same.
        """
        settings = self.settings
        option = all_options()[name]
        origin = f"{self._at(key)}: {key}"
        try:
            if key in _READ:
                written = value
                value = _READ[key](value)
            value = option.accept(value)
            if option.kind is dict and not value:  # switched off
                return
        except ValueError as error:
            settings.mark_bad(name, f"{key} {error}", self._at(key))
            return
        if name not in settings.explicit:
            # false for a precision is the default, not a choice
            if value != option.default or name not in ("fp16", "bf16"):
                settings.give(name, value, origin)
            return
        chosen = settings.explicit[name]
        where = settings.origins[name]
        if name == "loss_scale" and value == 0 and chosen:
            # DeepSpeed reads the scale only from its JSON: scripts that set both have trained with
            # a dynamic scale.
            settings.give(name, None, origin)
            settings.notices.append(
                f"--loss-scale {chosen:g} ({where}) has no effect: the loss scale is dynamic, "
                f"because DeepSpeed takes it from its JSON ({origin} 0); for a static one, write "
                "it there"
            )
        elif chosen != value:
            entry = key
            right = f'{json.dumps(chosen)} or "auto"'
            if written is not None:
                entry = f"{key} {json.dumps(written)}"
                right = '"auto"'
            settings.problems.append(
                f"{option.flag} is {chosen} ({where}), but {entry} means {value} "
                f"({self._at(key)}): write {right} there, or give "
                f"{option.written(value)}"
            )

    def _accumulation(self, steps: object) -> None:
        """Derive the missing batch size from the accumulation steps, or check the given sizes.

        The global batch size is gradient_accumulation_steps x micro-batch size x replicas.
        """
        if steps is None or steps == "auto":
            return
        if type(steps) is not int or steps < 1:
            written = json.dumps(steps)
            self._problem(_STEPS, f"{_STEPS} must be a whole number of at least 1, got {written}")
            return
        explicit = self.settings.explicit
        tensor, pipeline, context, expert = (explicit.get(name, 1) for name in SIZES)
        replica = tensor * pipeline * context
        least = tensor * pipeline * math.lcm(context, expert)
        replicas, rest = divmod(explicit.get("world_size", least), replica)
        if rest:
            return  # reported by the check of the world size
        micro: int | None = explicit.get("micro_batch_size")
        total: int | None = explicit.get("global_batch_size")
        if micro is not None:
            total = micro * steps * replicas
            self._set_one(_STEPS, "global_batch_size", total, written=steps)
        elif total is None:
            self._problem(_STEPS, f"{_STEPS} {steps} needs a batch size: give --micro-batch-size")
        elif total % (steps * replicas) == 0:
            micro = total // (steps * replicas)
            self._set_one(_STEPS, "micro_batch_size", micro, written=steps)
        else:
            self.settings.problems.append(
                f"global batch size {total} ({self.settings.origins['global_batch_size']}) is not "
                f"a multiple of {_STEPS} {steps} ({self._at(_STEPS)}) x data-parallel size "
                f"{replicas}: change one of them"
            )


def _power_of_two(value: Any) -> float:
    if type(value) not in (int, float) or not -1000 <= value <= 1000:
        raise ValueError(f"expected an exponent of two between -1000 and 1000, got {value!r}")
    return float(2.0**value)


def _curriculum(value: object) -> Values:
    if not isinstance(value, dict):
        raise ValueError(f"must be an object, got {json.dumps(value)}")
    return value if value.get("enabled") else {}


def _on_the_host(value: object) -> bool:
    if value not in ("cpu", "none"):
        raise ValueError(f'expected "cpu" or "none", got {value!r}')
    return value == "cpu"


_READ: Mapping[str, Callable[[Any], object]] = {
    "fp16.initial_scale_power": _power_of_two,
    "curriculum_learning": _curriculum,
    "zero_optimization.offload_optimizer.device": _on_the_host,
}
"""Functions that convert the value of an entry to that of its setting, by entry."""


def _only_empty(value: object) -> bool:
    return value == "auto" or (isinstance(value, dict) and all(map(_only_empty, value.values())))
