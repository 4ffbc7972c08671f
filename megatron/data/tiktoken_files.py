"""TikTokenizer: OpenAI's .tiktoken rank files, and Megatron-LM's JSON vocabularies of this kind.

A JSON vocabulary is numbered as in Megatron-LM: ids 0 to N - 1 are special tokens (by default
<unk>, <s>, </s>, <mask>, <pad>, <cls>, <sep> and <SPECIAL_7>, ..., of which </s> ends a document),
and rank r has id N + r. N is --tiktoken-num-special-tokens, by default 1000. The vocabulary is cut
at --vocab-size, or at 131072.

In a rank file ids are ranks, and special tokens follow them. Published files are recognised by
their number of ranks:

| ranks | file | pattern | ends a document | vocab_size |
|---|---|---|---|---|
| 50256 | r50k_base, GPT-2's | gpt2 | <|endoftext|> 50256 | 50257 |
| 50280 | p50k_base | gpt2 | <|endoftext|> 50256, which has no rank | 50281 |
| 100256 | cl100k_base | cl100k | <|endoftext|> 100257 | 100277 |
| 128000 | Llama 3's tokenizer.model | llama3 | <|end_of_text|> 128001 | 128256 |
| 199998 | o200k_base | o200k | <|endoftext|> 199999 | 200019 |

Other rank files need --tiktoken-pattern, and <|endoftext|> follows the last rank.

--tiktoken-special-tokens names the special tokens of either kind of file. With this flag or
--tiktoken-num-special-tokens, the special tokens of any rank file follow the last rank.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.config.io import TokenizerConfig
from megatron.data.tokenizer_adapters import (
    MOST_BYTES,
    PATTERNS,
    RankTokenizer,
    check_vocabulary,
    reading,
)
from megatron.errors import ConfigError, DataError
from megatron.untrusted import read_bytes, read_json

MEGATRON_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
MEGATRON_NUM_SPECIAL_TOKENS = 1000
MEGATRON_VOCAB_SIZE = 2**17
# The first of these among the named special tokens ends a document.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>")
WHAT_ELSE = (
    "--tokenizer-model for TikTokenizer is a .tiktoken rank file or Megatron-LM's JSON list "
    "of tokens; a vocab.json is for GPT2BPETokenizer, a tokenizer.json for HFTokenizer, a "
    "SentencePiece model for GPTSentencePieceTokenizer"
)


Entries = Iterator[tuple[str, bytes, int]]
"""Location, token in base64 and rank of each entry of a file."""
_END = "<|endoftext|>"
# Number of ranks -> the pattern and the special tokens that the publisher of the file specifies.
PUBLISHED: Mapping[int, tuple[str, Mapping[str, int]]] = {
    50256: ("gpt2", {_END: 50256}),
    50280: ("gpt2", {_END: 50256}),
    100256: (
        "cl100k",
        {
            _END: 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
    ),
    128000: (
        "llama3",
        # The names of the other 253 tokens differ between versions of Llama 3; none of them is
        # ever written.
        {
            "<|begin_of_text|>": 128000,
            "<|end_of_text|>": 128001,
            "<|reserved_special_token_250|>": 128255,
        },
    ),
    199998: ("o200k", {_END: 199999, "<|endofprompt|>": 200018}),
}


def tik_token(path: Path, settings: TokenizerConfig, *, vocab_size: int | None) -> RankTokenizer:
    """Return the tokenizer that a file defines.

    Raises ConfigError for settings that do not fit the file, and DataError if it is not such a file
    or is damaged.
    """
    with path.open("rb") as file:
        is_json = file.read(100).lstrip()[:1] in (b"[", b"{")  # not in base64's alphabet
    with reading(path, "a vocabulary for tiktoken"):
        return _from_json(path, settings, vocab_size) if is_json else _from_ranks(path, settings)


def _special_tokens(
    settings: TokenizerConfig, names: Sequence[str], count: int | None
) -> tuple[list[str], int]:
    """Return the special tokens and the index of the one that ends a document.

    `names` and `count` are used if the flags are absent; a `count` of None is the number of names.
    Tokens without a name are called <SPECIAL_i>, as in Megatron-LM. Raises ConfigError for
    contradictory flags.
    """
    if settings.tiktoken_special_tokens is not None:
        names = settings.tiktoken_special_tokens
    if settings.tiktoken_num_special_tokens is not None:
        count = settings.tiktoken_num_special_tokens
    elif count is None:
        count = len(names)
    flag = f"--tiktoken-special-tokens {' '.join(names)}"
    end = next((name for name in ENDS if name in names), None)
    if end is None:
        raise ConfigError(f"{flag}: one must end documents: name one of {', '.join(ENDS)}")
    if count < len(names):
        raise ConfigError(
            f"--tiktoken-num-special-tokens {count} is fewer than the {len(names)} special tokens "
            f"{' '.join(names)}"
        )
    filled = [*names, *(f"<SPECIAL_{i}>" for i in range(len(names), count))]
    if len(set(filled)) < len(filled) or "" in filled:
        raise ConfigError(f"{flag}: give each name once; <SPECIAL_...> are the names of the rest")
    return filled, filled.index(end)


def _from_json(path: Path, settings: TokenizerConfig, vocab_size: int | None) -> RankTokenizer:
    names, eod = _special_tokens(settings, MEGATRON_SPECIAL_TOKENS, MEGATRON_NUM_SPECIAL_TOKENS)
    count = len(names)
    ranks = _ranks(_json_entries(path))
    size = MEGATRON_VOCAB_SIZE if vocab_size is None else vocab_size
    room = size - count
    if room < 256:
        raise ConfigError(
            f"--vocab-size {size} leaves {max(room, 0)} ids beside {count} special tokens "
            "(--tiktoken-num-special-tokens), but the single bytes alone need 256"
        )
    if vocab_size is not None and room > len(ranks):
        raise ConfigError(
            f"--vocab-size {vocab_size}: {path} has {len(ranks)} tokens; with {count} special "
            f"tokens, the vocabulary size is {len(ranks) + count} at most"
        )
    ids = {token: rank + count for token, rank in ranks.items() if rank < room}
    check_vocabulary(path, ids.values(), ids)
    special = {name: i for i, name in enumerate(names)}
    return RankTokenizer(ids, special, eod, PATTERNS[settings.tiktoken_pattern or "v2"])


def _from_ranks(path: Path, settings: TokenizerConfig) -> RankTokenizer:
    ranks = _ranks(_lines(path))
    check_vocabulary(path, ranks.values(), ranks)
    following = 1 + max(ranks.values())
    if following > len(ranks) + 1:  # p50k_base leaves out one rank
        raise DataError(
            f"{path}: ranks up to {following - 1}, but only {len(ranks)} tokens: the file is "
            "damaged; get it again"
        )
    unknown: tuple[str, Mapping[str, int]] = ("", {})
    pattern, special = PUBLISHED.get(len(ranks), unknown)
    if set(special.values()) & set(ranks.values()):  # another file of the same length
        pattern, special = unknown
    pattern = settings.tiktoken_pattern or pattern
    if not pattern:
        raise ConfigError(
            f"{path}: a rank file does not define how text is cut into pieces: give the "
            f"--tiktoken-pattern of the vocabulary, one of {', '.join(PATTERNS)}"
        )
    chosen = (settings.tiktoken_special_tokens, settings.tiktoken_num_special_tokens)
    if special and chosen == (None, None):
        eod = next(special[name] for name in ENDS if name in special)
    else:
        names, end = _special_tokens(settings, [_END], None)
        special = {name: following + i for i, name in enumerate(names)}
        eod = following + end
    return RankTokenizer(ranks, special, eod, PATTERNS[pattern])


def _lines(path: Path) -> Entries:
    """Yield the location, token in base64 and rank of each line of a .tiktoken file."""
    for number, line in enumerate(read_bytes(path, MOST_BYTES, error=DataError).split(b"\n"), 1):
        words = line.split()
        if not words:
            continue
        where = f"{path}:{number}"
        if len(words) != 2 or not words[1].isdigit() or len(words[1]) > 18:
            raise DataError(
                f"{where}: expected a base64 token, a space and its rank, got {line!r:.60}; "
                f"{WHAT_ELSE}"
            )
        yield where, words[0], int(words[1])


def _json_entries(path: Path) -> Entries:
    """Yield the location, token in base64 and rank of each entry in a Megatron-LM JSON vocabulary.

    The vocabulary is an ordered list of {"rank", "token_bytes" (base64), "token_str"}.
    """
    entries: list[Any] = read_json(path, MOST_BYTES, error=DataError, kind=list)
    for index, entry in enumerate(entries):
        where = f"{path}: entry {index}"
        if not isinstance(entry, dict) or entry.get("rank") != index or "token_bytes" not in entry:
            expected = f'{{"rank": {index}, "token_bytes": ...}}'
            raise DataError(f"{where}: expected {expected}, got {entry!r:.60}; {WHAT_ELSE}")
        yield where, str(entry["token_bytes"]).encode(), index


def _ranks(entries: Entries) -> dict[bytes, int]:
    """Return the rank of each token.

    Raises DataError, with its location, for a token that is not base64 or that repeats another.
    """
    ranks: dict[bytes, int] = {}
    for where, word, rank in entries:
        try:
            token = base64.b64decode(word, validate=True)
        except binascii.Error as error:
            raise DataError(f"{where}: {word!r:.60} is not base64: {error}") from None
        if not token:
            raise DataError(f"{where}: the token is empty")
        if token in ranks:
            raise DataError(f"{where}: the token {token!r:.60} repeats that of rank {ranks[token]}")
        ranks[token] = rank
    return ranks
