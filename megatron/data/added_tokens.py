"""Adds the tokens that only files next to a tokenizer.json define, as transformers 5 does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.errors import DataError
from megatron.untrusted import read_json

if TYPE_CHECKING:
    from tokenizers import AddedToken

_MOST_BYTES = 1 << 24
FILES_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def files_beside(file: Path) -> list[Path]:
    """Return the files next to a tokenizer.json that add tokens to it."""
    if file.suffix != ".json":
        return []
    return [beside for beside in map(file.with_name, FILES_BESIDE) if beside.is_file()]


def add_tokens(tokenizer: Any, file: Path) -> dict[str, str]:
    """Add the tokens that files next to a tokenizer.json define to its `tokenizers.Tokenizer`.

    The ids of new tokens follow those of the tokenizer.json, in transformers' order: first the
    tokens of added_tokens_decoder in tokenizer_config.json, by id, or else those of the older
    added_tokens.json; then the named tokens, such as eos_token, and the extra ones. Without
    added_tokens_decoder, special_tokens_map.json takes precedence over tokenizer_config.json.
    Also applies split_special_tokens of tokenizer_config.json. Returns the text of each named
    token. Raises DataError for values of the wrong type.
    """
    config, added, extra, named = _read(file)
    beside = next(iter(files_beside(file)), file)
    decoder = config.get("added_tokens_decoder")
    if isinstance(extra, dict):  # the list is then under the older name
        extra = config.get("additional_special_tokens") or []
    extras = [
        _token(
            beside,
            "extra_special_tokens",
            value,
            special=not isinstance(value, dict) or value.get("special") is True,
        )
        for value in (extra if isinstance(extra, list) else [])
    ]
    special = {token.content for token in [*named.values(), *extras]}
    listed = []
    if decoder is None:
        if not all(isinstance(number, int) for number in added.values()):
            raise DataError(f"{beside}: added_tokens.json has ids that are not integers")
        for name in sorted(added, key=added.__getitem__):
            listed.append(_token(beside, "added_tokens", name, special=name in special))
    elif isinstance(decoder, dict) and all(i.isdecimal() and len(i) < 20 for i in decoder):
        for number in sorted(decoder, key=int):
            token = decoder[number]
            special_too = isinstance(token, dict) and token.get("special") is True
            listed.append(_token(beside, "added_tokens_decoder", token, special=special_too))
    else:
        raise DataError(f"{beside}: its added_tokens_decoder does not map ids to tokens")
    existing = tokenizer.get_added_tokens_decoder().values()
    same = set(map(repr, existing))
    new = [token for token in listed if repr(token) not in same]
    texts = {token.content for token in [*existing, *new]}
    for token in [*named.values(), *extras]:
        if token.content not in texts:
            new.append(token)
            texts.add(token.content)
    names = {token.content for token in named.values()}
    for token in new:
        token.special = token.special or token.content in names
    tokenizer.add_tokens(new)
    tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
    return {name: token.content for name, token in named.items()}


def named_tokens(file: Path) -> dict[str, str]:
    """Return the text of each named token, such as eos_token, in the files next to `file`."""
    return {name: token.content for name, token in _read(file)[3].items()}


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Any], Any, dict[str, AddedToken]]:
    """Return (settings, added_tokens.json, extra and named tokens) of the files next to `file`."""
    # transformers writes 10^30 as model_max_length for "no limit", which needs more than 64 bits
    config, older, added = (
        read_json(beside, _MOST_BYTES, error=DataError, bits=128) if beside.is_file() else {}
        for beside in map(file.with_name, FILES_BESIDE)
    )
    beside = next(iter(files_beside(file)), file)
    if "additional_special_tokens" in config and not config.get("extra_special_tokens"):
        config["extra_special_tokens"] = config.pop("additional_special_tokens")
    if config.get("added_tokens_decoder") is None:
        config |= older
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    values = {name: value for name, value in config.items() if name.endswith("_token")}
    values |= extra if isinstance(extra, dict) else {}
    named = {
        name: _token(beside, name, values[name], special=True)
        for name in dict.fromkeys([*_NAMED, *values])
        if values.get(name) and (name in _NAMED or isinstance(values[name], str | dict))
    }
    return config, added, extra, named


def _token(file: Path, name: str, value: Any, *, special: bool) -> AddedToken:
    from tokenizers import AddedToken

    settings = value if isinstance(value, dict) else {"content": value}
    flags = {flag: settings[flag] for flag in _FLAGS if flag in settings}
    if not isinstance(settings.get("content"), str) or not settings["content"]:
        raise DataError(
            f"{file}, or a file next to it: {name} is {value!r:.60}, expected a non-empty string"
        )
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise DataError(
            f"{file}, or a file next to it: a flag of {name} {settings['content']!r:.60} is not a "
            "boolean"
        )
    return AddedToken(settings["content"], special=special, **flags)
