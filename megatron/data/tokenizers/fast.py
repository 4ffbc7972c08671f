"""Tokenizers of Hugging Face's `tokenizers` library, and the byte-pair vocabulary of GPT-2."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron.data.tokenizers.base import Ids, Tokenizer, read_with
from megatron.data.tokenizers.ranks import PATTERNS, RankEncoder, require_all_bytes
from megatron.errors import DataError

# Names under which models end a text, for a tokenizer.json that comes without the files that say it.
USUAL_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")


class FastTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer` with the id that ends a document."""

    def __init__(self, tokenizer: Any, eod: int) -> None:
        super().__init__(1 + max(tokenizer.get_vocab(with_added_tokens=True).values()), eod)
        self._tokenizer = tokenizer

    def _encode(self, texts: list[str]) -> Sequence[Ids]:
        # The fast form leaves out the places of tokens in the text.
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


class GPT2Tokenizer(FastTokenizer):
    """Byte-level byte-pair encoding from vocab.json and merges.txt.

    It runs in tiktoken, which is three to four times as fast, where the ids are proven to be the same. tiktoken merges
    by the ids of the results; the files say which pairs merge, and when. Both come to the same ids if (1) later merges
    have higher ids, and (2) each result, as a text of its own, is encoded to itself. Suppose they part for the first
    time, tiktoken merging x and y to t, by a pair that is not in the files. Nothing has merged across the ends of t
    until then, so with the files alone the text t becomes x, y as well, and stays so: against (2). Both are looked at
    before the first text; where one fails, `tokenizers` encodes.
    """

    def __init__(self, tokenizer: Any, eod: int, merges: Sequence[str]) -> None:
        super().__init__(tokenizer, eod)
        self._merges = merges

    def _encode(self, texts: list[str]) -> Sequence[Ids]:
        return super()._encode(texts) if self._ranks is None else [self._ranks.encode(text) for text in texts]

    @cached_property
    def _ranks(self) -> RankEncoder | None:
        from tokenizers import Tokenizer as Fast

        vocabulary = self._tokenizer.get_vocab()
        results = ["".join(merge.split(" ")) for merge in self._merges]
        ids = [vocabulary[result] for result in results]
        if any(later <= earlier for earlier, later in pairwise(ids)):
            return None
        whole = Fast(self._tokenizer.model)  # without the pattern that cuts texts into pieces
        if any(encoding.ids != [i] for encoding, i in zip(whole.encode_batch_fast(results), ids, strict=True)):
            return None
        letters = byte_letters()
        tokens = {bytes([byte]): vocabulary[letter] for letter, byte in letters.items()}
        tokens |= {bytes(letters[letter] for letter in result): i for result, i in zip(results, ids, strict=True)}
        return RankEncoder(tokens, PATTERNS["gpt2"])


def byte_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for, as published with GPT-2.

    Printable bytes of Latin-1 are their own letters; the others have those from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def gpt2(vocab_file: Path, merge_file: Path) -> Tokenizer:
    """GPT2BPETokenizer. Raises DataError for files that do not go together."""

    def read() -> tuple[Any, list[str]]:
        from tokenizers import Tokenizer as Fast
        from tokenizers.decoders import ByteLevel as ByteLevelDecoder
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import ByteLevel

        tokenizer = Fast(BPE.from_file(str(vocab_file), str(merge_file)))
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        tokenizer.decoder = ByteLevelDecoder()
        lines = merge_file.read_text(encoding="utf-8").split("\n")
        return tokenizer, [line.rstrip("\r") for line in lines if line.strip() and not line.startswith("#version")]

    tokenizer, merges = read_with(vocab_file, f"a byte-level BPE vocabulary that goes with {merge_file}", read)
    letters, vocabulary = byte_letters(), tokenizer.get_vocab()
    shared, times = Counter(vocabulary.values()).most_common(1)[0] if vocabulary else (0, 0)
    if times > 1:
        raise DataError(f"{vocab_file}: {times} tokens have the id {shared}: the file is damaged")
    require_all_bytes(vocab_file, (bytes([byte]) for letter, byte in letters.items() if letter in vocabulary))
    eod = vocabulary.get("<|endoftext|>")
    if eod is None:
        raise DataError(f"{vocab_file}: has no <|endoftext|>, which ends a document for GPT2BPETokenizer")
    return GPT2Tokenizer(tokenizer, eod, merges)


def hugging_face(path: Path) -> Tokenizer:
    """HFTokenizer: a tokenizer.json or a folder with one.

    eod is the eos_token of tokenizer_config.json or special_tokens_map.json beside it, or one of USUAL_ENDS.
    Raises DataError for anything else.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"{file}: no such file, which HFTokenizer reads; a *.model is for GPTSentencePieceTokenizer or "
            f"TikTokenizer, vocab.json and merges.txt of GPT-2 for GPT2BPETokenizer; with transformers, "
            f"AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes a tokenizer.json of others"
        )
    tokenizer = read_with(file, "a tokenizer.json", lambda: _read_tokenizer_json(file))
    named, said_by = _end_beside(file)
    candidates = [named] if named else USUAL_ENDS
    for piece in candidates:
        eod = tokenizer.token_to_id(piece)
        if eod is not None:
            return FastTokenizer(tokenizer, eod)
    raise DataError(
        f"{file}: no token ends a document: tried {', '.join(candidates)}{f' of {said_by}' if named else ''}; name it "
        f"as eos_token in tokenizer_config.json"
    )


def _read_tokenizer_json(file: Path) -> Any:
    from tokenizers import Tokenizer as Fast

    tokenizer = Fast.from_file(str(file))
    # Files are saved with the limits of their last use; here a text is never cut or filled up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _end_beside(file: Path) -> tuple[str, str]:
    """The eos_token that the JSON files beside a tokenizer.json name, and which of them does; '' where none does."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        beside = file.with_name(name)
        if not beside.is_file():
            continue
        settings = read_with(beside, "a JSON object", lambda: dict(json.loads(beside.read_text("utf-8"))))  # noqa: B023
        eos = settings.get("eos_token")
        eos = eos.get("content") if isinstance(eos, dict) else eos
        if not isinstance(eos, str | None):
            raise DataError(f"{beside}: its eos_token is {eos!r:.60}, expected a text")
        if eos:
            return eos, name
    return "", ""
