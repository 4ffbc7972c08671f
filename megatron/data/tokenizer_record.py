"""Records the tokenizer that wrote a data set, in `<prefix>.tokenizer.json` next to the data.

The file holds the tokenizer's type, vocabulary size, end-of-document id and digest, the largest id
in the data, and a digest of the job that wrote the data ("" if it is unknown). The tokenizer's
digest covers the meaning of ids: the ids of a sample text, and the texts of the ids up to the
vocabulary size in the record. Thus another file with the same tokenizer, or with the same tokenizer
and added tokens, gives the same digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from megatron.data.arrays import StrPath
from megatron.data.file_lock import renamed_into
from megatron.data.indexed_dataset import IndexedDataset, record_path
from megatron.data.tokenizer_adapters import NullTokenizer, Tokenizer
from megatron.errors import DataError
from megatron.untrusted import is_count, read_json

_MOST_BYTES = 1 << 16
# bytes read from a .bin: all of it if it is shorter, otherwise blocks spread over it
_SCANNED_BYTES = 1 << 24
_PLACES = 16
# Several scripts, numbers, code, spaces: no two tokenizers in use cut it in the same way.
_SAMPLE = (
    "The quick brown fox doesn't jump over 1234567 lazy dogs.\n\n\tdef f(x):\n        return x**2\n"
    "Größe, naïve façade; Москва, Ελλάδα, 北京市, 東京, 서울, العربية, हिन्दी, ไทย  \r\n 3.14159 ≤ π² 🙂 "
    + "".join(map(chr, range(0x20, 0x250)))
)


@dataclass(frozen=True)
class TokenizerRecord:
    """Content of PREFIX.tokenizer.json; see the module's docstring."""

    tokenizer: str
    vocab_size: int
    eod: int
    digest: str
    largest_id: int
    job: str = ""

    def write(self, prefix: StrPath) -> None:
        """Write the record next to a data set. Raises OSError."""
        with renamed_into(record_path(prefix)) as file:
            file.write(json.dumps(asdict(self)).encode())


def record_of(kind: str, tokenizer: Tokenizer, largest_id: int, job: str) -> TokenizerRecord:
    """Return the record of data written with a tokenizer of --tokenizer-type `kind`."""
    size = tokenizer.vocab_size
    return TokenizerRecord(kind, size, tokenizer.eod, digest(tokenizer, size), largest_id, job)


def digest(tokenizer: Tokenizer, size: int) -> str:
    """Return a digest of the meaning of the first `size` ids; "" for a NullTokenizer."""
    if isinstance(tokenizer, NullTokenizer):
        return ""
    ids, _ = tokenizer.encode_with_offsets(_SAMPLE, special=False)
    texts = tokenizer.texts_of(min(size, tokenizer.vocab_size))
    return hashlib.sha256(json.dumps([ids, texts]).encode()).hexdigest()


def read_record(prefix: StrPath) -> TokenizerRecord | None:
    """Return the record of a data set; None if it has none.

    Raises DataError if the record is damaged.
    """
    path = record_path(prefix)
    if not path.exists():
        return None
    values = read_json(path, _MOST_BYTES, error=DataError)
    values.setdefault("job", "")
    names = [field.name for field in fields(TokenizerRecord)]
    numbers = ("vocab_size", "eod", "largest_id")
    if values.keys() != set(names) or not all(
        is_count(value) if name in numbers else isinstance(value, str)
        for name, value in values.items()
    ):
        raise DataError(f"{path}: damaged: it does not have {', '.join(names)}: remove it")
    record = TokenizerRecord(**values)
    if max(record.eod, record.largest_id) >= record.vocab_size:
        raise DataError(
            f"{path}: damaged: it has {record.vocab_size} ids, but {record.largest_id} is the "
            f"largest and {record.eod} ends a document: remove it"
        )
    return record


def largest_id(dataset: IndexedDataset) -> int:
    """Return the largest id in a .bin; for a long file, only in blocks spread over it."""
    size = dataset.num_tokens
    itemsize = dataset.dtype.itemsize
    if dataset.dtype.kind == "f":  # refused where samples are read
        return 0
    count = size if size * itemsize <= _SCANNED_BYTES else _SCANNED_BYTES // _PLACES // itemsize
    starts = np.linspace(0, size - count, 1 if count == size else _PLACES, dtype=np.int64)
    blocks = (dataset.tokens_at(int(start), count) for start in starts)
    return max((int(block.max()) for block in blocks if len(block)), default=0)


def check_tokenizer(
    datasets: Sequence[IndexedDataset],
    kind: str | None,
    tokenizer: Tokenizer | None,
    vocab_size: int,
) -> list[str]:
    """Compare data with the tokenizer and the vocabulary of a run; return notices.

    `kind` is the run's --tokenizer-type. Raises DataError for data written with another tokenizer,
    for an id beyond the vocabulary, and for a damaged record.
    """
    unknown = list[str]()
    other = list[str]()
    ends = list[str]()
    digests = dict[int, str]()
    texts = tokenizer if not isinstance(tokenizer, NullTokenizer) else None
    for dataset in datasets:
        record = read_record(dataset.prefix)
        # another program may have overwritten the data and left the record
        most = max(largest_id(dataset), 0 if record is None else record.largest_id)
        if most >= vocab_size:
            limit = f"the vocabulary of this run has {vocab_size} ids"
            size = ""
            if isinstance(tokenizer, NullTokenizer):
                limit = f"NullTokenizer with --vocab-size {tokenizer.eod} allows 0..{tokenizer.eod}"
                size = f"--vocab-size {most} or more, or "
            elif tokenizer is None:
                size = f"--vocab-size {most + 1} or more, or "
            wrote = "no file next to it names the tokenizer that wrote it"
            if record is not None:
                wrote = f"{record.tokenizer} of {record.vocab_size} ids wrote it"
            raise DataError(
                f"{dataset.prefix}: has the id {most}, but {limit}; {wrote}. A model for it needs "
                f"{size}the tokenizer of the data"
            )
        if record is None:
            unknown.append(dataset.prefix)
            continue
        if texts is None or not record.digest:
            if texts is not None or record.digest:
                other.append(f"{dataset.prefix} ({record.tokenizer} of {record.vocab_size} ids)")
            continue
        count = record.vocab_size
        if count not in digests:
            digests[count] = digest(texts, count)
        if digests[count] != record.digest:
            raise DataError(
                f"{dataset.prefix}: was written with another tokenizer than this run's: "
                f"{record.tokenizer} of {count} ids, and {kind} of {texts.vocab_size} gives other ids "
                "for the same text. Give the tokenizer of the data; if you are sure that it fits, "
                f"remove {record_path(dataset.prefix)}"
            )
        if record.eod != texts.eod:
            ends.append(f"{dataset.prefix} ({record.eod})")
    notices = {
        "do not name their tokenizer: only their largest ids were compared": unknown,
        f"are not compared with --tokenizer-type {kind}: one of the two encodes no text": other,
        f"end documents with another id than this run's tokenizer ({texts and texts.eod})": ends,
    }
    return [
        f"{len(names)} of {len(datasets)} data sets {what}: {names[0]}"
        + (f" and {len(names) - 1} more" if names[1:] else "")
        for what, names in notices.items()
        if names
    ]
