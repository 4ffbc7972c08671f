"""The space that a tuner searches: a TOML file, or one of those that come with this package
(`spaces/`).

    [parameters]   name = [values]
    [variables]    the same, for names that are no flags
    [derived]      name = "expression"
    [constraints]  "reason that is shown" = "expression that must hold"
    [trial]        iterations, warm_up

beside title, source, flags and cluster. A name is a short one (planner/layout.py), processes,
preset, or a setting.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.command_line import OWN_FLAGS, flag_table, read_settings, scan
from megatron.config.option import Option
from megatron.config.settings import all_options, did_you_mean, raise_problems
from megatron.errors import ConfigError
from megatron.planner.layout import DIMENSIONS, parse_layout, recompute_settings, write_value
from megatron.untrusted import read_toml

_KNOWN: Mapping[str, Any] = {"true": True, "false": False, "none": None}
_FUNCTIONS = {"min": min, "max": max}
_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}


@dataclass(frozen=True)
class Expression:
    """An expression; make one with `parse_expression`."""

    text: str
    tree: ast.expr

    def value(self, values: Mapping[str, Any]) -> Any:
        """Evaluate with these values of names; `and`, `or` and `if` look at no more than Python's
        do. Raises ValueError for what is not offered, and where there is no value, such as after a
        division by zero."""
        try:
            return _value(self.tree, values)
        except (ArithmeticError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(f"no value: {error}") from None


def parse_expression(text: str) -> Expression:
    """Parse names, numbers, 'words', lists, + - * / // %, comparisons, in, and, or, not, A if B
    else C, min() and max(). Raises ValueError for what is no expression of Python.

    >>> parse_expression("max(1, 1024 // tp)").value({"tp": 8})
    128
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"'{text}' cannot be read: {getattr(error, 'msg', error)}") from None
    return Expression(text.strip(), tree)


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=int() | float() | str()):
            return None if node.value == "none" else node.value  # a flag that is not given
        case ast.Name():
            return _KNOWN[node.id] if node.id in _KNOWN else values[node.id]
        case ast.List() | ast.Tuple():
            return [_value(item, values) for item in node.elts]
        case ast.UnaryOp(op=ast.Not()):
            return not _value(node.operand, values)
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, values)
        case ast.BinOp() if type(node.op) in _OPERATORS:
            sides = _value(node.left, values), _value(node.right, values)
            # a text times a number may fill the memory
            if not all(isinstance(side, int | float) for side in sides):
                raise TypeError(f"{sides[0]!r} and {sides[1]!r}: only numbers can be computed with")
            return _OPERATORS[type(node.op)](*sides)
        case ast.BoolOp():
            found = None
            for part in node.values:
                found = _value(part, values)
                if bool(found) is isinstance(node.op, ast.Or):
                    break
            return found
        case ast.IfExp():
            return _value(node.body if _value(node.test, values) else node.orelse, values)
        case ast.Compare() if _OPERATORS.keys() >= set(map(type, node.ops)):
            pairs = itertools.pairwise(
                _value(item, values) for item in (node.left, *node.comparators)
            )
            return all(
                _OPERATORS[type(kind)](*pair) for kind, pair in zip(node.ops, pairs, strict=True)
            )
        case ast.Call(func=ast.Name(id="min" | "max" as name), keywords=[]) if len(node.args) > 1:
            return _FUNCTIONS[name](_value(argument, values) for argument in node.args)
    raise ValueError(f"'{ast.unparse(node)}' is not offered")


Value = int | float | str | bool | tuple[int, ...] | None
"""Value of a parameter. None: the flag is not given."""
SPACES = Path(__file__).with_name("spaces")
CHUNK = "num_layers_per_virtual_pipeline_stage"
_MOST_BYTES = 1 << 22  # of a file
_KEYS: Mapping[str, type] = {
    "title": str,
    "source": str,
    "cluster": str,
    "flags": list,
    "parameters": dict,
    "variables": dict,
    "derived": dict,
    "constraints": dict,
    "trial": dict,
}
_TRIAL = {"iterations": 5, "warm_up": 3}
_DIMENSIONS = {name: dimension.names[0] for dimension in DIMENSIONS for name in dimension.names}
_SHORT = {**_DIMENSIONS, "processes": "processes", "preset": "preset", "dp": "dp"}
SETTING = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "mbs": "micro_batch_size",
    "gbs": "global_batch_size",
    "sp": "sequence_parallel",
    "zero": "zero_stage",
    "overlap": "tp_comm_overlap",
    "order": "rank_order",
    "devices": "device_order",
}
"""The setting that a short name is another name of."""
_SHORT_OF = {setting: name for name, setting in SETTING.items()}
DECIDES = {
    **SETTING,
    "chunks": CHUNK,
    "schedule": "enable_zbh1_pipeline",
    "recompute": "recompute_granularity",
    "nodes": "world_size",
    "processes": "world_size",
}
"""The setting that nothing else may say beside a short name."""
# Patterns of recomputation as values.
_WHOLE = {
    "selective": "selective:core_attn",
    "full": "full:uniform:1",
    "full:uniform": "full:uniform:1",
    "full:block": "full:block:1",
}
_NO_PLACE = (
    "has no place in a search: the tuner and its trials decide it (--iterations, "
    "--cluster, nodes, processes)"
)
# What the tuner or a trial says, what has no one step time, and what would cost a trial time.
_REFUSED = frozenset(
    (
        "dp world_size data_parallel_size virtual_pipeline_model_parallel_size cluster "
        "deepspeed_config rampup_batch_size train_iters train_samples train_tokens exit_interval "
        "exit_duration_in_mins skip_train save save_interval save_interval_minutes load load_tag "
        "finetune lr_warmup_iters lr_warmup_samples lr_decay_samples lr_wsd_decay_iters "
        "lr_wsd_decay_samples metrics_file log_interval eval_iters timing_log_level master_addr "
        "master_port local_rank walltime requeue tensorboard_dir wandb_project wandb_exp_name "
        "wandb_save_dir profile trace_dir straggler_report"
    ).split()
)


@dataclass(frozen=True)
class Parameter:
    """One thing that varies; ordered: whether neighbouring values are alike (numbers are, names are
    not).
    """

    name: str
    values: tuple[Value, ...]
    ordered: bool = True


@dataclass(frozen=True)
class Space:
    """A space file, read and checked; `load_space` makes one.

    parameters   all that varies, with the variables, in the order of the file
    variables    names of those that are no flags and stand in expressions only
    flags        of pretrain_gpt.py that all layouts have
    derived      name -> what it is
    constraints  reason that is shown -> what must hold
    cluster      name of the machine that it is meant for; ""
    iterations   of a trial that are measured, after `warm_up` that are not
    """

    name: str
    title: str
    path: str
    cluster: str
    flags: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    variables: frozenset[str]
    derived: Mapping[str, Expression]
    constraints: Mapping[str, Expression]
    iterations: int
    warm_up: int

    @property
    def named(self) -> tuple[str, ...]:
        """Return the names whose values are flags of a layout."""
        return (*(p.name for p in self.parameters if p.name not in self.variables), *self.derived)

    @property
    def combinations(self) -> int:
        """Count all combinations of values, whether they make a layout or not."""
        return math.prod(len(parameter.values) for parameter in self.parameters)

    def digest(self) -> str:
        """Return a digest that is the same for spaces of the same layouts in the same order,
        whatever their titles and reasons are."""
        rules = (
            [(name, rule.text) for name, rule in self.derived.items()],
            [e.text for e in self.constraints.values()],
        )
        return hashlib.sha256(repr((self.parameters, self.flags, rules)).encode()).hexdigest()[:16]


# -- names and their flags -------------------------------------------------------------------------


def meaning(name: str) -> str:
    """Return the short name, or else the setting, that a name stands for, with or without dashes.
    Raises ConfigError."""
    plain = name.lstrip("-").replace("-", "_")
    if plain not in _SHORT and plain not in all_options():
        hint = did_you_mean(plain, [*_SHORT, *all_options()])
        raise ConfigError(f"'{name}' is no setting{hint}; short names are {', '.join(_SHORT)}")
    return _SHORT.get(plain) or _SHORT_OF.get(plain, plain)


def read_value(name: str, given: Any) -> Value:
    """Return a value of a space file as it is kept. Raises ConfigError for what the name's flags do
    not take.
    """
    if type(given) not in (int, float, str, bool):
        raise ConfigError(f"{given!r} is no value of a flag")
    text = write_value(given)
    if name in _DIMENSIONS:
        value: Value = parse_layout(f"{name}={_WHOLE.get(text, text)}", name)[name][0]
        return value
    if name == "processes":
        return read_value("nodes", given)
    option = all_options().get(name)
    value = (
        None
        if text.lower() == "none" and not (option and "none" in (option.choices or ()))
        else given
    )
    found = read_settings(flags_of(name, value))
    raise_problems(found.problems)
    return value if option is None or option.many else found.given.get(name, value)


def flags_of(name: str, value: Any) -> list[str]:
    """Return the flags that give a name this value; for chunks, which depend on the stages, ask for
    CHUNK.
    """
    if name == "preset":
        return [] if value is None else ["--preset", str(value)]
    settings = {SETTING.get(name, name): value}
    if name in ("nodes", "processes"):
        settings = {}
    elif name == "recompute":
        chosen = {
            setting: own for setting, own in recompute_settings(value).items() if own is not None
        }
        settings = chosen or {"recompute_granularity": None}
    elif name == "schedule":
        settings = {"enable_zbh1_pipeline": value == "zb-h1"}
    return [
        word for setting, own in settings.items() for word in _words(all_options()[setting], own)
    ]


def _words(option: Option, value: Any) -> list[str]:
    if value is None:
        return [option.flag, "none"] if option.has_none and not option.many else []
    if option.kind is bool and isinstance(value, bool):
        return [option.written(value)]
    words = (
        list(value) if isinstance(value, tuple) else str(value).split() if option.many else [value]
    )
    return [option.flag, *map(str, words)]


def settings_of_flags(flags: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Map each setting to the flag with its words, of flags as `scan` gives them. Raises
    ConfigError with all that have no place."""
    found, problems = dict[str, str](), list[str]()
    for spelling, words in flags.items():
        written, names = " ".join([spelling, *words]), flag_table()[spelling].settings
        if _REFUSED & set(names) or (spelling in OWN_FLAGS and spelling != "--preset"):
            problems.append(f"{written} {_NO_PLACE}")
        found |= dict.fromkeys(("preset",) if spelling == "--preset" else names, written)
    raise_problems(problems)
    return found


# -- files -----------------------------------------------------------------------------------------


def known_spaces() -> dict[str, str]:
    """Map the names of the spaces that come with this package to their titles."""
    return {name: load_space(name).title for name in _ready()}


def _ready() -> list[str]:
    return sorted(path.stem for path in SPACES.glob("*.toml"))


def load_space(name_or_path: str) -> Space:
    """Load the space of this name, or of this file.

    Raises ConfigError for an unknown name, a file that cannot be read, and everything in it that is
    unknown, cannot be read or is said twice; with the file, the table and the key.
    """
    path = SPACES / f"{name_or_path}.toml" if name_or_path in _ready() else Path(name_or_path)
    if not path.is_file():
        raise ConfigError(
            f"--space {name_or_path} is neither a file nor a space that is "
            f"known{did_you_mean(name_or_path, _ready())}; known: {', '.join(_ready())}"
        )
    file = read_toml(path, _MOST_BYTES, error=ConfigError)
    with _at(path, "the file"):
        _check_keys(file, _KEYS)
    file = {key: kind() for key, kind in _KEYS.items()} | file
    with _at(path, "[trial]"):
        _check_keys(file["trial"], dict.fromkeys(_TRIAL, int))
        trial = _TRIAL | file["trial"]
        if trial["iterations"] < 1 or trial["warm_up"] < 0:
            raise ConfigError(f"{trial}: at least 1 of iterations and 0 of warm_up")
    flags = tuple(map(str, file["flags"]))
    with _at(path, "flags"):
        scanned = scan(flags)
        raise_problems(scanned.problems)
        said = {
            setting: f"flags has {written}"
            for setting, written in settings_of_flags(scanned.flags).items()
        }
    found: dict[str, dict[str, Any]] = {
        "parameters": {},
        "variables": {},
        "derived": {},
        "constraints": {},
    }
    for table, entries in found.items():
        for key, given in file[table].items():
            with _at(path, f"[{table}] {key}"):
                name = _named(key, said) if table in ("parameters", "derived") else key
                if table in ("parameters", "variables"):
                    entries[name] = _parameter(name, given, table == "parameters")
                else:
                    entries[name] = _expression(given, file["variables"])
    if not found["parameters"]:
        raise ConfigError(
            f"{path}: [parameters]: nothing varies: give at least one, such as tp = [1, 2, 4]"
        )
    return Space(
        path.stem,
        file["title"] or path.stem,
        str(path),
        file["cluster"],
        flags,
        (*found["parameters"].values(), *found["variables"].values()),
        frozenset(found["variables"]),
        found["derived"],
        found["constraints"],
        **trial,
    )


@contextlib.contextmanager
def _at(path: Path, where: str) -> Iterator[None]:
    """Say in which place of a file a mistake is."""
    try:
        yield
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{path}: {where}: {error}") from None


def _check_keys(found: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    for key, value in found.items():
        if key not in kinds:
            raise ConfigError(
                f"{key} is unknown{did_you_mean(key, kinds)}; known: {', '.join(kinds)}"
            )
        if type(value) is not kinds[key]:
            raise ConfigError(f"{key} is {value!r}, but has to be a {kinds[key].__name__}")


def _named(key: str, said: dict[str, str]) -> str:
    """Return what a key means; none of its settings may be said already. Raises ConfigError."""
    name = meaning(key)
    if name in _REFUSED:
        raise ConfigError(f"{key} {_NO_PLACE}")
    setting = DECIDES.get(name, name)
    if setting in said:
        raise ConfigError(f"{said[setting]}, which says the same: leave one out")
    said[setting] = f"{key} is there"
    return name


def _parameter(name: str, given: Any, is_flag: bool) -> Parameter:
    if not isinstance(given, list) or not given:
        raise ConfigError(f"expected values such as [1, 2, 4], got {given!r}")
    if not is_flag and (name in _SHORT or name in all_options()):
        raise ConfigError("is a flag or a short name: put it into [parameters]")
    read = [read_value(name, value) for value in given] if is_flag else given
    values = tuple({write_value(value): value for value in read}.values())
    numbers = tuple(sorted(value for value in values if isinstance(value, int | float)))
    ordered = len(numbers) == len(values)
    return Parameter(name, numbers if ordered else values, ordered)


def _expression(given: Any, variables: Collection[str]) -> Expression:
    """Parse an expression; settings in it get their short names. Raises ConfigError and
    ValueError.
    """
    found = parse_expression(str(given).lower() if isinstance(given, bool) else str(given))
    for node in ast.walk(found.tree):
        if isinstance(node, ast.Name) and node.id not in {*variables, *_KNOWN, *_FUNCTIONS}:
            node.id = meaning(node.id)
    return found
