"""Declaration of a setting in its dataclass field: type, flags, limits and help.

The command line, type and range checks, --help and --print-config are generated from these
declarations.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from megatron.errors import ConfigError

Values = dict[str, object]
"""Settings by name."""
_KEY = "option"
_ARTICLE = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "True or False",
    dict: "a mapping",
}
_SHOWN = 80  # characters of a bad value that a message shows

# Upper limits, far above the values in any real run. Larger numbers are typos that would exhaust
# memory, take minutes before the first step, or overflow in fp32. MOST is the limit of settings
# that have no other one: iterations, minutes, vocabulary entries.
MOST = 10**9
MOST_LAYERS = 2**16
MOST_WIDTH = 2**20  # a square matrix of this width has 4 TiB in fp32
MOST_POSITIONS = 2**24  # angles are computed in fp32, which is exact for integers up to here
MOST_PROCESSES = 2**20  # ten times the devices of the largest machines
MOST_BATCH = 2**20  # samples in a step, each of which is an entry in a schedule
MOST_SAMPLES = 10**12
MOST_TOKENS = 10**16  # about the limit of exact counts in float64, used for learning rates
LEAST_NORMAL = 2.0**-126  # of fp32; smaller values may be flushed to zero


class Range(NamedTuple):
    """Limits for a number."""

    at_least: float = -math.inf
    at_most: float = MOST
    above: float = -math.inf
    below: float = math.inf


ANY = Range()
NATURAL = Range(0)
COUNT = Range(1)
SHARE = Range(0, below=1)
FACTOR = Range(above=0, at_most=1e6)
RATE = Range(0, 1000)
POSITIVE_RATE = Range(above=0, at_most=1000)
FREQUENCY = Range(0, MOST_LAYERS)
LAYERS = Range(1, MOST_LAYERS)
WIDTH = Range(1, MOST_WIDTH)
FFN_WIDTH = Range(1, 16 * MOST_WIDTH)
POSITIONS = Range(1, MOST_POSITIONS)
PROCESSES = Range(1, MOST_PROCESSES)
BATCH = Range(1, MOST_BATCH)
SAMPLES = Range(1, MOST_SAMPLES)
TOKENS = Range(1, MOST_TOKENS)


@dataclass(frozen=True)
class Option:
    """One setting, declared with `option(...)`.

    `name`, `kind` (the type of a value) and `many` (whether the setting is a tuple of values) come
    from the dataclass field.

    flags           spellings that take a value, or switch a bool on
    off_flags       spellings that switch a bool off
    shortcuts       spellings that take no value, with the value that each sets
    weak_shortcuts  the same, but any other flag of the setting overrides them
    value_names     other accepted names of a choice, or words for a number, in lower case, with
                    their values. A number outside of the limits has its word as its only name
    implies         spellings, or names of values, that also set other settings, unless a flag sets
                    those
    """

    name: str = ""
    help: str = ""
    default: Any = None
    kind: type = str
    many: bool = False
    flags: tuple[str, ...] = ()
    off_flags: tuple[str, ...] = ()
    shortcuts: Mapping[str, object] = dataclasses.field(default_factory=dict)
    weak_shortcuts: Mapping[str, object] = dataclasses.field(default_factory=dict)
    choices: tuple[object, ...] | None = None
    value_names: Mapping[str, object] = dataclasses.field(default_factory=dict)
    implies: Mapping[str, Mapping[str, object]] = dataclasses.field(default_factory=dict)
    inert: str = ""  # why the setting has no effect; it is accepted for existing scripts
    # what to do about an invalid value, or why another word is read as a number
    hint: str = ""
    metavar: str | None = None
    shown_off: bool = False  # a bool that is on by default: --help shows its off_flags
    # the value if the flag is given without one, for the few flags that allow it
    implied: object = None
    limits: Range = ANY
    derived: str = ""  # how an absent value is filled in, for --help
    internal: bool = False  # never set from outside: always computed
    # a setting for a single start, such as the checkpoint to load and when to exit; the others are
    # carried over through settings.toml
    one_start: bool = False
    of_folder: bool = False  # names an output of one run: a run with another --save has its own
    names_code: bool = False  # its value is imported or run: fine on a command line, not in files
    # function that raises ValueError for a value in another form than the setting's
    syntax: Callable[[Any], object] | None = None
    none_word: bool = False  # the word none resets this setting, even though it has no choices

    @property
    def has_none(self) -> bool:
        """Return whether the word none resets this setting on the command line."""
        unset = self.default is None and not self.many
        return unset and (self.choices is not None or self.none_word)

    @property
    def is_path(self) -> bool:
        """Return whether a value names a file, a folder or the prefix of data files."""
        return bool({"FILE", "FOLDER", "PATH", "PREFIX"} & {*re.split(r"\W+", self.metavar or "")})

    @property
    def flag(self) -> str:
        """Return the spelling used in messages."""
        return self.flags[0] if self.flags else self.name

    @property
    def usage(self) -> str:
        """Return the flag with a placeholder for its value; a switch has none."""
        if self.kind is bool:
            return self.written(True)
        words = self.metavar or "|".join(map(str, self.choices or "N"))
        return f"{self.flag} {words}"

    def named(self, value: Any) -> Any:
        """Return a value as users give it: a number outside of the limits by its word."""
        if isinstance(value, (int, float)) and value < self.limits.at_least:
            return next((word for word, each in self.value_names.items() if each == value), value)
        return value

    def written(self, value: Any) -> str:
        """Return the flag that sets this value; only the name of a setting with many entries."""
        if self.kind is bool:
            spellings = self.flags if value else self.off_flags
            return spellings[0] if spellings else f"{self.name}={value}"
        if self.kind is dict:
            return self.flag
        return f"{self.flag} {' '.join(map(str, value)) if self.many else self.named(value)}"

    def parse(self, texts: list[str]) -> Any:
        """Return the value expressed by these command-line words.

        Raises ValueError, stating the expected form.
        """
        if self.many:
            if self.kind is int:  # 0,1,6,7 and 0 1 6 7 are the same
                texts = [word for text in texts for word in _unrolled(text).split(",")]
            return self.accept([self._parse_one(text) for text in texts])
        if len(texts) != 1:
            raise ValueError(
                f"takes one value, got {len(texts)}"
                + (f": {shown(' '.join(texts))}" if texts else "")
            )
        if self.has_none and texts[0].lower() == "none":
            return None
        return self.accept(self._parse_one(texts[0]))

    def _parse_one(self, text: str) -> object:
        if self.kind is bool:
            words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
            if text.lower() not in words:
                raise ValueError(f"expected true or false, got '{shown(text)}'")
            return words[text.lower()]
        if self.kind in (int, float) and text.lower() not in self.value_names:
            for number in (int, float):  # 1e6 is a whole number too; accept() refuses 1.5
                with contextlib.suppress(ValueError):
                    return number(text)
            raise ValueError(f"expected {_ARTICLE[self.kind]}, got '{shown(text)}'")
        return text

    def accept(self, value: object) -> object:
        """Return the value in the field's type; a choice in the spelling of `choices`.

        Returns None for a word that leaves the setting unset, such as auto.

        Raises ValueError if its type or its syntax is wrong, or if it is not among the choices or
        limits.
        """
        if not self.many:
            accepted = written = self._accept_one(value)
        elif isinstance(value, (list, tuple)):
            accepted = tuple(map(self._accept_one, value))
            written = " ".join(map(str, accepted))
        else:
            raise ValueError(f"expected a list, got {shown(repr(value))}")
        try:
            if self.syntax is not None and accepted is not None:
                self.syntax(accepted)
        except ValueError as error:
            raise ValueError(f"{shown(written)}: {error}") from None
        return accepted

    def _accept_one(self, value: object) -> object:
        kind = self.kind
        if self.choices is None and isinstance(value, str) and value.lower() in self.value_names:
            return self.value_names[value.lower()]
        if kind in (int, float) and isinstance(value, (int, float)) and not isinstance(value, bool):
            if not -math.inf < value < math.inf or (kind is int and value != int(value)):
                raise ValueError(f"expected {_ARTICLE[kind]}, got {value}")
            limits = self.limits
            for wrong, words, limit in (
                (value < limits.at_least, "at least", limits.at_least),
                (value <= limits.above, "greater than", limits.above),
                (value >= limits.below, "less than", limits.below),
                (value > limits.at_most, "at most", limits.at_most),
            ):
                if wrong and self.choices is None:
                    raise ValueError(
                        f"is {shown(value)}, but must be {words} {shown(limit)}{self._advice}"
                    )
            value = kind(value)
        elif not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"expected {_ARTICLE[kind]}, got {shown(repr(value))}")
        if value == "" and self.is_path:
            raise ValueError(
                f"expected {self.metavar}, got '': is a variable of the script unset? Leave "
                f"{self.flag} out, or give it a value"
            )
        return value if self.choices is None else self._choose(value)

    def _choose(self, value: object) -> object:
        assert self.choices is not None
        if value in self.choices:
            return value
        if isinstance(value, str):
            by_name = {str(c).lower(): c for c in self.choices} | dict(self.value_names)
            if value.lower() in by_name:
                return by_name[value.lower()]
        listed = ", ".join(map(str, self.choices))
        raise ValueError(f"'{shown(value)}' is not one of {listed}{self._advice}")

    @property
    def _advice(self) -> str:
        return f": {self.hint}" if self.hint else ""


def _unrolled(text: str) -> str:
    """Expand a list with repetitions, such as Megatron's ([1]*3+[0])*2, to 1,1,1,0,1,1,1,0.

    Other texts are returned unchanged. Raises ValueError for brackets in another form.
    """
    if "[" not in text:
        return text
    wrong = ValueError(f"expected lists of numbers with + and *, got '{shown(text)}'")

    def value(node: ast.expr) -> Any:
        match node:
            case ast.List(elts=elements):
                return [value(element) for element in elements]
            case ast.Constant(value=int(number)):
                return number
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value(left) + value(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                a = value(left)
                b = value(right)
                if isinstance(a, list) and isinstance(b, int) and len(a) * b <= MOST_LAYERS:
                    return a * b
        raise wrong

    try:
        return ",".join(map(str, value(ast.parse(text.strip(), mode="eval").body)))
    except (SyntaxError, TypeError, RecursionError, MemoryError):
        raise wrong from None


class Parser(argparse.ArgumentParser):
    """Parser for tools, based on argparse.

    Errors raise ConfigError, abbreviations are off, and description and epilog keep their line
    breaks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"invalid command line: {message}; --help lists the flags")


def integer(least: int = 1, most: int = MOST) -> Callable[[str], int]:
    """Return an argparse type for a whole number from `least` to `most`."""
    return functools.partial(_number, Option(kind=int, limits=Range(least, most)))


def real(most: float = MOST, least: float | None = None) -> Callable[[str], float]:
    """Return an argparse type for a number: above 0, or at least `least`; at most `most`."""
    limits = Range(above=0, at_most=most) if least is None else Range(least, most)
    return functools.partial(_number, Option(kind=float, limits=limits))


def _number(rule: Option, text: str) -> Any:
    try:
        return rule.parse([text])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def pairs(text: str) -> dict[str, str]:
    """Return the values of the NAME=VALUE words in a text, by name.

    >>> pairs("rotary=rope absolute=learned_absolute")
    {'rotary': 'rope', 'absolute': 'learned_absolute'}
    """
    return dict(word.split("=") for word in text.split())


def shown(value: Any) -> str:
    """Return a value as messages show it, shortened if it is long."""
    try:
        text = str(value)
    except ValueError:  # too many digits
        text = f"{'-' * (value < 0)}2**{value.bit_length() - 1} or more"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def option(default: object, help: str, limits: Range = ANY, **attributes: object) -> Any:
    """Return a dataclass field with an Option.

    A default of None means unset (required, derived or off). `flags`, `off_flags` and `choices` are
    space-separated words; value_names and shortcuts may be NAME=VALUE words. `flags` defaults to
    the field's name with dashes; flags="" gives a field no flag. A bool also has --no-NAME, unless
    its name begins with no_. --help lists a bool that is on by default by the flag that switches it
    off, unless `flags` are given.
    """
    metadata = {_KEY: {"help": help, "default": default, "limits": limits, **attributes}}
    if default is dict:  # a mapping, empty unless given
        metadata[_KEY]["default"] = {}
        return dataclasses.field(default_factory=dict, metadata=metadata, hash=False)
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def options_of(section: type) -> tuple[Option, ...]:
    """Return the Options of a section dataclass, in field order."""
    return tuple(_read(f) for f in dataclasses.fields(section) if _KEY in f.metadata)


def _read(f: dataclasses.Field[object]) -> Option:
    attributes = dict(f.metadata[_KEY])
    # Annotations are text here: "int", "float | None", "tuple[str, ...] | None", "dict[str, Any]".
    many = str(f.type).startswith("tuple[")
    kind: type = getattr(builtins, re.split(r"\W", str(f.type).removeprefix("tuple["))[0])
    name = f.name.replace("_", "-")
    words = attributes.pop("flags", None)
    shown_off = kind is bool and attributes["default"] is True and words is None
    flags = f"--{name}" if words is None and not attributes.get("internal") else words or ""
    off_flags = attributes.pop("off_flags", "").split()
    if kind is bool and not name.startswith("no-"):
        # so that a flag can undo what a preset or a DeepSpeed JSON switched on
        off_flags = list(dict.fromkeys((*off_flags, f"--no-{name}")))
    if isinstance(choices := attributes.get("choices"), str):
        attributes["choices"] = tuple(choices.split())
    for meanings in ("value_names", "shortcuts", "weak_shortcuts"):
        if isinstance(text := attributes.get(meanings), str):
            attributes[meanings] = pairs(text)
    return Option(
        name=f.name,
        kind=kind,
        many=many,
        flags=tuple(flags.split()),
        off_flags=tuple(off_flags),
        shown_off=shown_off,
        **attributes,
    )
