"""Search spaces for the tuner: a TOML file, from the user or from this package (`spaces/`).

    [parameters]   name = [values]
    [variables]    the same, for names that are not flags
    [derived]      name = "expression"
    [constraints]  "displayed reason" = "expression that must hold"
    [trial]        iterations, warm_up; or, for the validation loss, tokens, evaluations,
                   valid_samples, halving

as well as title, source, flags and cluster. A name is a short name (planner/layout.py), processes,
preset, or a setting; expressions may also use dp.
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

from megatron.config.command_line import META_FLAGS, flag_table, read_settings, scan
from megatron.config.option import Option
from megatron.config.settings import all_options, did_you_mean, raise_problems
from megatron.errors import ConfigError
from megatron.planner.layout import DIMENSIONS, parse_layout, recompute_settings, write_value
from megatron.untrusted import read_toml

_KNOWN: Mapping[str, object] = {"true": True, "false": False, "none": None}
_FUNCTIONS = {"min": min, "max": max}
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
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
    """An expression, created by `parse_expression`."""

    text: str
    tree: ast.expr

    def value(self, values: Mapping[str, object]) -> object:
        """Evaluate with these values by name; `and`, `or` and `if` short-circuit as in Python.

        Raises ValueError for unsupported syntax, and if there is no value, as in a division by 0.
        """
        try:
            return _value(self.tree, values)
        except (ArithmeticError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(f"no value: {error}") from None


def parse_expression(text: str) -> Expression:
    """Parse an expression in a subset of Python.

    It may contain names, numbers, 'words', lists, + - * / // %, comparisons, in, and, or, not, A if
    B else C, min() and max(). Raises ValueError for invalid syntax.

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
            return None if node.value == "none" else node.value  # "none": the flag is not given
        case ast.Name():
            return _KNOWN[node.id] if node.id in _KNOWN else values[node.id]
        case ast.List() | ast.Tuple():
            return [_value(item, values) for item in node.elts]
        case ast.UnaryOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](_value(node.operand, values))
        case ast.BinOp() if type(node.op) in _OPERATORS:
            sides = _value(node.left, values), _value(node.right, values)
            # a string times a number could exhaust memory
            if not all(isinstance(side, int | float) for side in sides):
                raise TypeError(f"{sides[0]!r} and {sides[1]!r}: arithmetic needs numbers")
            return _OPERATORS[type(node.op)](*sides)
        case ast.BoolOp():
            result = None
            for operand in node.values:
                result = _value(operand, values)
                if bool(result) is isinstance(node.op, ast.Or):
                    break
            return result
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
    raise ValueError(f"'{ast.unparse(node)}' is not supported")


Value = int | float | str | bool | tuple[int, ...] | None
"""A parameter's value. None: the flag is not given."""
SPACES = Path(__file__).with_name("spaces")
CHUNK = "num_layers_per_virtual_pipeline_stage"
_MOST_BYTES = 1 << 22  # size limit for a file
_TABLES = ("parameters", "variables", "derived", "constraints")
_KEYS: Mapping[str, type] = {
    **dict.fromkeys(("title", "source", "cluster"), str),
    "flags": list,
    **dict.fromkeys((*_TABLES, "trial"), dict),
}
_TRIAL = dict(iterations=5, warm_up=3, tokens=0, evaluations=4, valid_samples=64, halving=2)
_DIMENSIONS = [d.name for d in DIMENSIONS]
_SHORT = (*_DIMENSIONS, "processes", "preset", "dp")
SETTING = {d.name: d.setting for d in DIMENSIONS if d.setting and d.name != "nodes"}
"""The setting for which each short name is an alias."""
_SHORT_OF = {setting: name for name, setting in SETTING.items()}
DECIDES = {
    **SETTING,
    "chunks": CHUNK,
    "schedule": "pipeline_schedule",
    "recompute": "recompute_granularity",
    "nodes": "world_size",
    "processes": "world_size",
}
"""The setting that each short name determines: giving both is an error."""
# Short forms of recomputation patterns.
_ABBREVIATIONS = {
    "selective": "selective:core_attn",
    "full": "full:uniform:1",
    "full:uniform": "full:uniform:1",
    "full:block": "full:block:1",
}
_NO_POSITION = (
    "is not allowed in a search: it would disturb a trial, or the tuner sets it (--iterations, "
    "--cluster, nodes, processes)"
)
# Settings that the tuner or a trial sets itself, that make the step time vary, or that would slow
# down a trial.
_REFUSED = frozenset(
    (
        "dp world_size data_parallel_size virtual_pipeline_model_parallel_size cluster "
        "deepspeed_config rampup_batch_size step_batch_size_schedule train_iters train_samples "
        "train_tokens exit_interval exit_duration_in_mins skip_train save save_interval "
        "save_interval_minutes load load_tag finetune lr_warmup_iters lr_warmup_samples "
        "lr_decay_samples lr_wsd_decay_iters lr_wsd_decay_samples metrics_file log_interval "
        "eval_iters timing_log_level master_addr master_port local_rank walltime requeue "
        "tensorboard_dir wandb_project wandb_exp_name wandb_entity wandb_save_dir "
        "mlflow_tracking_uri mlflow_experiment_name mlflow_run_name callback profile trace_dir "
        "straggler_report timeline_interval record_memory_history memory_snapshot_path"
    ).split()
)


@dataclass(frozen=True)
class Parameter:
    """A varied parameter; ordered: whether neighbouring values are similar, as with numbers."""

    name: str
    values: tuple[Value, ...]
    ordered: bool = True


@dataclass(frozen=True)
class SearchSpace:
    """A validated space file, created by `load_space`.

    name, path   name without .toml, and path, of the file
    parameters   those of [parameters], then those of [variables], each in the order of the file
    variables    names of [variables]: parameters that are not flags, only for expressions
    flags        flags for pretrain_gpt.py that all layouts share
    derived      name -> expression
    constraints  displayed reason -> expression that must hold
    cluster      name of the intended machine; "" for any
    iterations   measured steps in a trial, after `warm_up` steps
    tokens       tokens per trial, whose result is then its validation loss; 0: the result is the
                 step time
    evaluations  evaluations per trial, spread evenly over its steps, on `valid_samples` samples
                 each
    halving      after 1, `halving`, `halving`^2 ... evaluations, a trial continues only if it is
                 among the best 1/`halving`; 0: every trial continues
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
    tokens: int
    evaluations: int
    valid_samples: int
    halving: int

    @property
    def named(self) -> tuple[str, ...]:
        """Return the names whose values become flags of a layout."""
        return (*(p.name for p in self.parameters if p.name not in self.variables), *self.derived)

    @property
    def combinations(self) -> int:
        """Count all combinations of values, valid or not."""
        return math.prod(len(parameter.values) for parameter in self.parameters)

    def digest(self) -> str:
        """Return a digest that changes with the layouts or their order, but not with titles."""
        rules = (
            [(name, rule.text) for name, rule in self.derived.items()],
            [e.text for e in self.constraints.values()],
        )
        return hashlib.sha256(repr((self.parameters, self.flags, rules)).encode()).hexdigest()[:16]


# -- names and their flags -------------------------------------------------------------------------


def meaning(name: str) -> str:
    """Resolve a name, with or without dashes, to a short name or a setting.

    Raises ConfigError for an unknown name.
    """
    plain = name.lstrip("-").replace("-", "_")
    if plain not in _SHORT and plain not in all_options():
        hint = did_you_mean(plain, [*_SHORT, *all_options()])
        raise ConfigError(f"'{name}' is not a setting{hint}; short names are {', '.join(_SHORT)}")
    return _SHORT_OF.get(plain, plain)


def read_value(name: str, explicit: object) -> Value:
    """Convert a value of a space file. Raises ConfigError if it is invalid for this name."""
    if not isinstance(explicit, int | float | str):
        raise ConfigError(f"{explicit!r} cannot be the value of a flag")
    text = write_value(explicit)
    if name in _DIMENSIONS:
        value: Value = parse_layout(f"{name}={_ABBREVIATIONS.get(text, text)}", name)[name][0]
        return value
    if name == "processes":
        return read_value("nodes", explicit)
    option = all_options().get(name)
    value = (
        None
        if text.lower() == "none" and not (option and "none" in (option.choices or ()))
        else explicit
    )
    settings = read_settings(flags_of(name, value))
    raise_problems(settings.problems)
    return value if option is None or option.many else settings.explicit.get(name, value)


def flags_of(name: str, value: Any) -> list[str]:
    """Return the flags that set a name to this value.

    For chunks, whose flag depends on the number of stages, give the name CHUNK and its value.
    """
    if name == "preset":
        return [] if value is None else ["--preset", str(value)]
    settings = {SETTING.get(name, name): value}
    if name in ("nodes", "processes"):
        settings = {}
    elif name == "recompute":
        chosen = {
            name: setting_value
            for name, setting_value in recompute_settings(value).items()
            if setting_value is not None
        }
        settings = chosen or {"recompute_granularity": None}
    elif name == "schedule":
        settings = {"pipeline_schedule": value}
    return [
        word
        for setting, setting_value in settings.items()
        for word in _words(all_options()[setting], setting_value)
    ]


def _words(option: Option, value: object) -> list[str]:
    if value is None:
        return [option.flag, "none"] if option.has_none else []
    if option.kind is bool and isinstance(value, bool):
        return [option.written(value)]
    if isinstance(value, tuple):
        return [option.flag, *map(str, value)]
    return [option.flag, *(str(value).split() if option.many else [str(value)])]


def settings_of_flags(flags: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Map settings to their flags and words, given flags as returned by `scan`.

    Raises a ConfigError that lists all flags that are not allowed.
    """
    flags_of_settings = dict[str, str]()
    problems = list[str]()
    for spelling, words in flags.items():
        written = " ".join([spelling, *words])
        names = flag_table()[spelling].settings
        if _REFUSED & set(names) or (spelling in META_FLAGS and spelling != "--preset"):
            problems.append(f"{written} {_NO_POSITION}")
        flags_of_settings |= dict.fromkeys(
            ("preset",) if spelling == "--preset" else names, written
        )
    raise_problems(problems)
    return flags_of_settings


# -- files -----------------------------------------------------------------------------------------


def known_spaces() -> dict[str, str]:
    """Map the names of this package's spaces to their titles."""
    return {name: load_space(name).title for name in _ready()}


def _ready() -> list[str]:
    return sorted(path.stem for path in SPACES.glob("*.toml"))


def load_space(name_or_path: str) -> SearchSpace:
    """Load a space by name or file.

    Raises ConfigError with file, table and key for an unknown name, an unreadable file, and entries
    that are unknown, invalid or contradictory.
    """
    path = SPACES / f"{name_or_path}.toml" if name_or_path in _ready() else Path(name_or_path)
    if not path.is_file():
        raise ConfigError(
            f"--space {name_or_path} is neither a file nor a known "
            f"space{did_you_mean(name_or_path, _ready())}; known: {', '.join(_ready())}"
        )
    file = read_toml(path, _MOST_BYTES, error=ConfigError)
    with _at(path, "the file"):
        _check_keys(file, _KEYS)
    file = {key: kind() for key, kind in _KEYS.items()} | file
    with _at(path, "[trial]"):
        _check_keys(file["trial"], dict.fromkeys(_TRIAL, int))
        trial = _TRIAL | file["trial"]
        least = {"warm_up": 0, "tokens": 0, "halving": 0}
        for name, value in trial.items():
            if value < least.get(name, 1) or (name, value) == ("halving", 1):
                raise ConfigError(f"{name} is {value}: it must be at least {least.get(name, 1)}")
    flags = tuple(map(str, file["flags"]))
    with _at(path, "flags"):
        scanned = scan(flags)
        raise_problems(scanned.problems)
        origins = {
            setting: f"flags has {written}"
            for setting, written in settings_of_flags(scanned.flags).items()
        }
    tables: dict[str, dict[str, Any]] = {}
    for table in _TABLES:
        entries = tables[table] = {}
        for key, explicit in file[table].items():
            with _at(path, f"[{table}] {key}"):
                name = _named(key, origins) if table in ("parameters", "derived") else key
                if table in ("parameters", "variables"):
                    entries[name] = _parameter(name, explicit, table == "parameters")
                else:
                    entries[name] = _expression(explicit, file["variables"])
    if not tables["parameters"]:
        raise ConfigError(
            f"{path}: [parameters]: nothing varies: give at least one, such as tp = [1, 2, 4]"
        )
    return SearchSpace(
        path.stem,
        file["title"] or path.stem,
        str(path),
        file["cluster"],
        flags,
        (*tables["parameters"].values(), *tables["variables"].values()),
        frozenset(tables["variables"]),
        tables["derived"],
        tables["constraints"],
        **trial,
    )


@contextlib.contextmanager
def _at(path: Path, where: str) -> Iterator[None]:
    """Add the location in a file to errors."""
    try:
        yield
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{path}: {where}: {error}") from None


def _check_keys(table: Mapping[str, object], kinds: Mapping[str, type]) -> None:
    for key, value in table.items():
        if key not in kinds:
            raise ConfigError(
                f"{key} is unknown{did_you_mean(key, kinds)}; known: {', '.join(kinds)}"
            )
        if type(value) is not kinds[key]:
            raise ConfigError(f"{key} is {value!r}: it must be of type {kinds[key].__name__}")


def _named(key: str, origins: dict[str, str]) -> str:
    """Resolve a key and record its setting in `origins`.

    Raises ConfigError for an unknown name, one that is not allowed, and a setting given twice.
    """
    name = meaning(key)
    if name in _REFUSED:
        raise ConfigError(f"{key} {_NO_POSITION}")
    setting = DECIDES.get(name, name)
    if setting in origins:
        raise ConfigError(f"{origins[setting]}, which sets the same thing: remove one of them")
    origins[setting] = f"{key} is given"
    return name


def _parameter(name: str, explicit: object, is_flag: bool) -> Parameter:
    if not isinstance(explicit, list) or not explicit:
        raise ConfigError(f"expected values such as [1, 2, 4], got {explicit!r}")
    if not is_flag and (name in _SHORT or name in all_options()):
        raise ConfigError("is a flag or a short name: move it to [parameters]")
    read = [read_value(name, value) for value in explicit] if is_flag else explicit
    values = tuple({write_value(value): value for value in read}.values())
    numbers = tuple(sorted(value for value in values if isinstance(value, int | float)))
    ordered = len(numbers) == len(values)
    return Parameter(name, numbers if ordered else values, ordered)


def _expression(explicit: object, variables: Collection[str]) -> Expression:
    """Parse an expression, and replace the names in it by those that `meaning` returns.

    Raises ValueError for invalid syntax, ConfigError for an unknown name.
    """
    expression = parse_expression(
        str(explicit).lower() if isinstance(explicit, bool) else str(explicit)
    )
    for node in ast.walk(expression.tree):
        if isinstance(node, ast.Name) and node.id not in {*variables, *_KNOWN, *_FUNCTIONS}:
            node.id = meaning(node.id)
    return expression
