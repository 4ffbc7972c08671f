"""The .bin/.idx format by struct alone, independent of our code: bytes from documents and back."""

import itertools
import struct
from pathlib import Path

Documents = list[list[list[int]]]  # documents of sequences of tokens

LETTERS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "d", 7: "f", 8: "H"}
CODES = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<f8": 6, "<f4": 7, "<u2": 8}


def packed(documents, dtype, modes=None):
    """Return the bytes of (.bin, .idx)."""
    code = CODES[dtype]
    letter = "<" + LETTERS[code]
    sequences = [sequence for document in documents for sequence in document]
    data = b"".join(struct.pack(letter, token) for sequence in sequences for token in sequence)
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    starts = [0]
    for document in documents:
        starts.append(starts[-1] + len(document))
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(starts))
    index += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    offset = 0
    for sequence in sequences:
        index += struct.pack("<q", offset)
        offset += len(sequence) * struct.calcsize(letter)
    index += b"".join(struct.pack("<q", start) for start in starts)
    return data, index + b"".join(struct.pack("<b", mode) for mode in modes or [])


def unpacked(prefix):
    """Return (dtype, documents, modes) of a pair of files."""
    data = Path(f"{prefix}.bin").read_bytes()
    index = Path(f"{prefix}.idx").read_bytes()
    magic, version, code, count, boundaries = struct.unpack_from("<9sQBQQ", index)
    assert (magic, version) == (b"MMIDIDX\x00\x00", 1)
    at = 34
    sizes = struct.unpack_from(f"<{count}i", index, at)
    pointers = struct.unpack_from(f"<{count}q", index, at + 4 * count)
    starts = struct.unpack_from(f"<{boundaries}q", index, at + 12 * count)
    modes = struct.unpack(
        f"<{len(index) - at - 12 * count - 8 * boundaries}b",
        index[at + 12 * count + 8 * boundaries :],
    )
    sequences = [
        list(struct.unpack_from(f"<{size}{LETTERS[code]}", data, pointer))
        for size, pointer in zip(sizes, pointers, strict=True)
    ]
    documents = [sequences[a:b] for a, b in itertools.pairwise(starts)]
    return next(name for name, c in CODES.items() if c == code), documents, list(modes)


def write(prefix, documents, dtype="<u2", modes=None):
    """Write the pair of files and return their prefix."""
    for suffix, content in zip((".bin", ".idx"), packed(documents, dtype, modes), strict=True):
        Path(f"{prefix}{suffix}").write_bytes(content)
    return str(prefix)
