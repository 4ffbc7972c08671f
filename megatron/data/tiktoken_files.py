"""TikTokenizer: OpenAI's .tiktoken rank files and Megatron-LM's JSON vocabularies of the same kind.

A JSON vocabulary is numbered as in Megatron-LM: ids 0 to N - 1 are special tokens (<unk>, <s>,
</s>, <mask>, <pad>, <cls>, <sep> and <SPECIAL_7>, ...; N is 1000 unless given), rank r has id N +
r, and </s> ends a document. The vocabulary is cut at --vocab-size, or at 131072.

In a rank file ids are ranks, and special tokens follow them. Published files are recognised by
their number of ranks:

| ranks | file | pattern | ends a document | vocab_size |
|---|---|---|---|---|
| 50256 | r50k_base, GPT-2's | gpt2 | <|endoftext|> 50256 | 50257 |
| 50280 | p50k_base | gpt2 | <|endoftext|> 50256, which has no rank | 50281 |
| 100256 | cl100k_base | cl100k | <|endoftext|> 100257 | 100277 |
| 128000 | Llama 3's tokenizer.model | llama3 | <|end_of_text|> 128001 | 128256 |
| 199998 | o200k_base | o200k | <|endoftext|> 199999 | 200019 |

Other files need --tiktoken-pattern, and <|endoftext|> follows the last rank. In any file, special
tokens that --tiktoken-special-tokens names follow it instead.
"""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.data.tokenizer_adapters import (
    PATTERNS,
    Ids,
    RankEncoder,
    Tokenizer,
    read_with,
    require_all_bytes,
)
from megatron.errors import ConfigError, DataError
from megatron.untrusted import read_bytes, read_json

_MOST_BYTES = 1 << 28  # of a vocabulary: published ones have a few million
MEGATRON_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
MEGATRON_NUM_SPECIAL_TOKENS = 1000
MEGATRON_VOCAB_SIZE = 2**17
# The first of these among the named special tokens ends a document.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>")
WHAT_ELSE = (
    "--tokenizer-model of TikTokenizer is a .tiktoken rank file or Megatron-LM's JSON list "
    "of tokens; a vocab.json is for GPT2BPETokenizer, a tokenizer.json for HFTokenizer, a "
    "SentencePiece model for GPTSentencePieceTokenizer"
)


@dataclass(frozen=True)
class TikTokenSettings:
    """The --tiktoken-... flags; None for an absent flag."""

    pattern: str | None = None
    num_special_tokens: int | None = None
    special_tokens: Sequence[str] | None = None


@dataclass(frozen=True)
class Published:
    """The facts that the publisher of a rank file states about it."""

    pattern: str
    eod: str
    special: Mapping[str, int] = field(default_factory=dict)


_END = "<|endoftext|>"
_FILL_IN = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
PUBLISHED: Mapping[int, Published] = {
    50256: Published("gpt2", _END, {_END: 50256}),
    50280: Published("gpt2", _END, {_END: 50256}),
    100256: Published(
        "cl100k",
        _END,
        {
            _END: 100257,
            **{name: 100258 + i for i, name in enumerate(_FILL_IN)},
            "<|endofprompt|>": 100276,
        },
    ),
    128000: Published(
        "llama3",
        "<|end_of_text|>",
        # The names of the other 254 differ between versions of Llama 3; none of them is ever
        # written.
        {
            "<|begin_of_text|>": 128000,
            "<|end_of_text|>": 128001,
            "<|reserved_special_token_250|>": 128255,
        },
    ),
    199998: Published("o200k", _END, {_END: 199999, "<|endofprompt|>": 200018}),
}


class TikTokenTokenizer(Tokenizer):
    """Ranks with ids, and special tokens that no text can spell."""

    def __init__(
        self, ids: Mapping[bytes, int], special: Mapping[str, int], eod: int, pattern: str
    ) -> None:
        size, known = 1 + max(*special.values(), *ids.values()), set(ids.values())
        names = {i: "" for i in range(size) if i not in known} | {
            i: name for name, i in special.items()
        }
        super().__init__(size, eod, names)
        self._encoder = RankEncoder(ids, pattern)

    def _encode(self, texts: list[str]) -> Sequence[Ids]:
        return [self._encoder.encode(text) for text in texts]

    def _decode(self, ids: list[int]) -> str:
        return self._encoder.decode(ids)


def tik_token(
    path: Path, settings: TikTokenSettings, *, vocab_size: int | None
) -> TikTokenTokenizer:
    """Return the tokenizer of a file. Raises ConfigError for settings that do not fit it, DataError
    for other files.
    """
    if settings.pattern is not None and settings.pattern not in PATTERNS:
        raise ConfigError(
            f"--tiktoken-pattern {settings.pattern!r} is not known: choose one of "
            f"{', '.join(PATTERNS)}"
        )
    _check_names(settings)
    with path.open("rb") as file:
        is_json = file.read(100).lstrip()[:1] in (b"[", b"{")  # no characters of base64

    def read() -> TikTokenTokenizer:
        return _from_json(path, settings, vocab_size) if is_json else _from_ranks(path, settings)

    return read_with(path, "a vocabulary for tiktoken", read)


def _check_names(settings: TikTokenSettings) -> None:
    names, count = settings.special_tokens, settings.num_special_tokens
    if names is None:
        return
    if len(set(names)) != len(names) or not all(names):
        raise ConfigError(f"--tiktoken-special-tokens {' '.join(names)}: give each name once")
    if not any(name in names for name in ENDS):
        raise ConfigError(
            f"--tiktoken-special-tokens {' '.join(names)}: one must end documents: name one of "
            f"{', '.join(ENDS)}"
        )
    if count is not None and count < len(names):
        raise ConfigError(
            f"--tiktoken-num-special-tokens {count} is fewer than the {len(names)} special tokens "
            "named"
        )


def _filled(names: Sequence[str], count: int) -> list[str]:
    """Return `count` names: those given, then Megatron-LM's for ids without one."""
    filled = [*names, *(f"<SPECIAL_{i}>" for i in range(len(names), count))]
    if len(set(filled)) != len(filled):
        raise ConfigError(
            f"--tiktoken-special-tokens {' '.join(names)}: <SPECIAL_...> names the rest, choose "
            "others"
        )
    return filled


def _end(names: Sequence[str]) -> int:
    return next(names.index(name) for name in ENDS if name in names)


def _from_json(path: Path, settings: TikTokenSettings, vocab_size: int | None) -> TikTokenTokenizer:
    count = settings.num_special_tokens
    count = MEGATRON_NUM_SPECIAL_TOKENS if count is None else count
    names = MEGATRON_SPECIAL_TOKENS if settings.special_tokens is None else settings.special_tokens
    if count < len(names):
        raise ConfigError(
            f"--tiktoken-num-special-tokens {count}: {len(names)} are needed: {' '.join(names)}"
        )
    ranks = read_json_ranks(path, WHAT_ELSE)
    room = (MEGATRON_VOCAB_SIZE if vocab_size is None else vocab_size) - count
    if room < 256:
        raise ConfigError(
            f"--vocab-size {vocab_size} leaves {max(room, 0)} ids beside {count} special tokens "
            "(--tiktoken-num-special-tokens), but the single bytes alone need 256"
        )
    if vocab_size is not None and room > len(ranks):
        raise ConfigError(
            f"--vocab-size {vocab_size}: {path} has {len(ranks)} tokens, with {count} special "
            f"tokens the vocabulary is {len(ranks) + count} at most"
        )
    ids = {token: rank + count for token, rank in ranks.items() if rank < room}
    require_all_bytes(path, ids)
    special = {name: i for i, name in enumerate(_filled(names, count))}
    return TikTokenTokenizer(ids, special, _end(names), PATTERNS[settings.pattern or "v2"])


def _from_ranks(path: Path, settings: TikTokenSettings) -> TikTokenTokenizer:
    ranks = read_ranks(path, WHAT_ELSE)
    require_all_bytes(path, ranks)
    following, taken = 1 + max(ranks.values()), set(ranks.values())
    published = PUBLISHED.get(len(ranks))
    if published is not None and not taken.isdisjoint(published.special.values()):
        published = None  # another file of the same length
    pattern = settings.pattern or (published.pattern if published else None)
    if pattern is None:
        raise ConfigError(
            f"{path}: a rank file does not say how text is cut into pieces: give the "
            f"--tiktoken-pattern that the vocabulary was made with, one of {', '.join(PATTERNS)}"
        )
    if (
        settings.special_tokens is None
        and settings.num_special_tokens is None
        and published is not None
    ):
        special, eod = dict(published.special), published.special[published.eod]
    else:
        names = settings.special_tokens or (_END,)
        count = settings.num_special_tokens
        special = {
            name: following + i
            for i, name in enumerate(_filled(names, len(names) if count is None else count))
        }
        eod = following + _end(names)
    taken |= {i for i in (published.special.values() if published else ()) if i < following}
    if len(taken) < following:
        hole = next(i for i in range(following) if i not in taken)
        raise DataError(
            f"{path}: rank {hole} is missing, and {following - len(taken) - 1} more below the "
            f"highest, {following - 1}: the file is damaged; get it again"
        )
    return TikTokenTokenizer(ranks, special, eod, PATTERNS[pattern])


def read_ranks(path: Path, what_else: str) -> dict[bytes, int]:
    """Read a .tiktoken file: lines of a token in base64, a space and its rank.

    Raises DataError with the line for anything else, ending with `what_else`, and for repeated
    tokens or ranks.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path, _MOST_BYTES, error=DataError).split(b"\n"), 1):
        words = line.split()
        if not words:
            continue
        where = f"{path}:{number}"
        if len(words) != 2 or not words[1].isdigit() or len(words[1]) > 18:
            raise DataError(
                f"{where}: expected a base64 token, a space and its rank, got {line!r:.60}; "
                f"{what_else}"
            )
        _add(ranks, words[0], int(words[1]), where)
    if not ranks:
        raise DataError(f"{path}: no ranks in this file; {what_else}")
    if len(set(ranks.values())) < len(ranks):
        shared, times = Counter(ranks.values()).most_common(1)[0]
        raise DataError(f"{path}: {times} tokens have the rank {shared}: the file is damaged")
    return ranks


def read_json_ranks(path: Path, what_else: str) -> dict[bytes, int]:
    """Read Megatron-LM's JSON vocabulary: an ordered list of {"rank", "token_bytes" (base64),
    "token_str"}.

    Raises DataError with the number of the entry for anything else, ending with `what_else`.
    """
    try:
        entries: list[Any] = read_json(path, _MOST_BYTES, error=DataError, kind=list)
    except DataError as error:
        raise DataError(f"{error}; {what_else}") from None
    ranks: dict[bytes, int] = {}
    for place, entry in enumerate(entries):
        where = f"{path}: entry {place}"
        if not isinstance(entry, dict) or entry.get("rank") != place or "token_bytes" not in entry:
            expected = f'{{"rank": {place}, "token_bytes": ...}}'
            raise DataError(f"{where}: expected {expected}, got {entry!r:.60}; {what_else}")
        _add(ranks, str(entry["token_bytes"]).encode(), place, where)
    return ranks


def _add(ranks: dict[bytes, int], word: bytes, rank: int, where: str) -> None:
    try:
        token = base64.b64decode(word, validate=True)
    except binascii.Error as error:
        raise DataError(f"{where}: {word!r:.60} is not base64: {error}") from None
    if not token or token in ranks:
        raise DataError(
            f"{where}: the token {token!r:.60} is empty or repeats rank {ranks.get(token)}"
        )
    ranks[token] = rank
