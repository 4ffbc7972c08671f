"""Join several .bin/.idx data sets into one, in order.

Examples:

    python tools/merge_datasets.py --inputs data/part-0 data/part-1 --output-prefix data/all
    python tools/merge_datasets.py --input data/parts --output-prefix data/all

The second form joins all data sets of a folder, sorted by name. If any data set has a loss mask
(PREFIX_mask), the result has one; all tokens of data sets without a mask are in the loss.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.option import Parser
from megatron.data.indexed_dataset import (
    MASK_DTYPE,
    TYPE_CODES,
    IndexedDataset,
    bin_bytes,
    bin_path,
    data_files,
    idx_path,
    mask_prefix,
)
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.data.tokenizer_record import read_record
from megatron.errors import ConfigError, DataError
from megatron.training.run.process import as_tool
from megatron_preparation.progress import ByteProgress


def build_parser() -> argparse.ArgumentParser:
    """Return the parser, with Megatron's flags and --inputs."""
    parser = Parser(description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--input", metavar="FOLDER", help="merge all data sets in this folder, sorted by name"
    )
    source.add_argument(
        "--inputs",
        nargs="+",
        metavar="PREFIX",
        help="merge these data sets in this order; paths without .bin and .idx",
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx"
    )
    return parser


_COPY_BYTES = 1 << 22
_BLOCK_ENTRIES = 1 << 18


def prefixes_in(folder: str | os.PathLike[str]) -> list[str]:
    """Return the data sets of a folder, sorted by name, which is Megatron's order.

    Loss masks and other files are left out. Raises DataError if there is no data set, or if a .bin
    has no .idx or an .idx no .bin.
    """
    path = Path(folder)
    if not path.is_dir():
        raise DataError(f"{path}: no such folder")
    files = {
        entry.name
        for entry in path.iterdir()
        if entry.suffix in (".bin", ".idx") and entry.is_file()
    }
    names = sorted({name[:-4] for name in files})
    for name in names:
        for suffix, other in ((".bin", ".idx"), (".idx", ".bin")):
            if name + suffix not in files:
                raise DataError(
                    f"{path / name}{other} exists, but {name}{suffix} does not: complete or remove "
                    "this data set"
                )
    masks = set(map(mask_prefix, names))
    if not names:
        raise DataError(f"{path}: no .bin and .idx files in it")
    return [str(path / name) for name in names if name not in masks]


def merge(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    *,
    on_progress: Callable[[int], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> IndexedDatasetWriter:
    """Concatenate the data sets `inputs` into one, with their masks; return its closed writer.

    Different types of tokens become the smallest type that can represent all; `say` is called with
    such notices. The output appears when it is complete; the next merge removes leftovers of a
    killed one. `on_progress` gets the bytes of .bin files, without masks, copied so far. Raises
    ConfigError if there are no inputs, if the output is one of them, or if they cannot be joined,
    and DataError for damaged inputs and for an output that cannot be written or does not fit on the
    disk.
    """
    if not inputs:
        raise ConfigError("nothing to merge: name at least one data set")
    _check_output(inputs, output_prefix)
    dtypes = list[np.dtype[Any]]()
    tokens = 0
    masked = dict[str | os.PathLike[str], bool]()
    # open only one at a time: there may be more than a process can open
    for prefix in inputs:
        dataset = _open(prefix)
        masked[prefix] = dataset.mask is not None
        if dataset.modes is not None:
            raise ConfigError(
                f"{dataset.prefix} has modes (multimodal data), but only text can be merged"
            )
        dtypes.append(dataset.dtype)
        tokens += dataset.num_tokens
    dtype = _common_dtype(inputs, dtypes)
    for prefix, input_dtype in zip(inputs, dtypes, strict=True):
        if input_dtype != dtype:
            say(
                f"{os.fspath(prefix)}: tokens of type {input_dtype} are written as {dtype}, which "
                "can represent all"
            )
    if any(masked.values()):
        for prefix in (prefix for prefix, has_mask in masked.items() if not has_mask):
            say(f"{os.fspath(prefix)}: has no loss mask: all its tokens are in the loss")
    done = 0
    mask_output = mask_prefix(output_prefix)
    with ExitStack() as stack:
        # closed in reverse order: the mask gets its name first, so tokens never appear without it
        writer = stack.enter_context(IndexedDatasetWriter(output_prefix, dtype))
        if any(masked.values()):
            mask = stack.enter_context(IndexedDatasetWriter(mask_output, MASK_DTYPE))
        bytes_each = dtype.itemsize + any(masked.values())
        _check_space(output_prefix, inputs, tokens * bytes_each)
        for prefix in inputs:
            dataset = _open(prefix)
            _add_structure(writer, dataset)
            for chunk in _tokens(dataset):
                writer.append_tokens(chunk)
                done += chunk.nbytes
                on_progress(done)
            if any(masked.values()):
                _add_structure(mask, dataset.mask or dataset)
                for chunk in _tokens(dataset.mask or dataset):
                    mask.append_tokens(chunk if dataset.mask else np.ones(len(chunk), MASK_DTYPE))
        if not any(masked.values()):  # remove the mask of earlier data
            for path in (idx_path(mask_output), bin_path(mask_output)):
                path.unlink(missing_ok=True)
    _merge_records(inputs, output_prefix, say)
    return writer


def _merge_records(
    inputs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    say: Callable[[str], None],
) -> None:
    """Record which tokenizer wrote the data, if all inputs name the same one.

    `say` is called for inputs that name another one than the first input that names one.
    """
    records = {os.fspath(prefix): read_record(prefix) for prefix in inputs}
    known = {prefix: record for prefix, record in records.items() if record is not None}
    if not known:
        return
    (first, record), *rest = known.items()
    alike = True
    for prefix, other in rest:
        if (record.digest, record.vocab_size) != (other.digest, other.vocab_size):
            alike = False
            say(
                f"{prefix} was written with {other.tokenizer} of {other.vocab_size} ids, {first} "
                f"with {record.tokenizer} of {record.vocab_size}: their ids mean different texts"
            )
    if alike and len(known) == len(records):
        largest = max(other.largest_id for other in known.values())
        replace(record, job="", largest_id=largest).write(output)


def _open(prefix: str | os.PathLike[str]) -> IndexedDataset:
    """Open a data set, and its loss mask if a file of it exists."""
    dataset = IndexedDataset(prefix, mmap=False)
    if len(data_files(prefix)) > 2:
        dataset.open_mask()
    return dataset


def _check_output(inputs: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]) -> None:
    targets = {
        os.path.realpath(path)
        for prefix in (output, mask_prefix(output))
        for path in (bin_path(prefix), idx_path(prefix))
    }
    for prefix in inputs:
        if targets & {os.path.realpath(bin_path(prefix)), os.path.realpath(idx_path(prefix))}:
            raise ConfigError(
                f"--output-prefix {os.fspath(output)} is the input {os.fspath(prefix)}: choose "
                "another name, or another folder if --input merges this one"
            )


def _common_dtype(
    inputs: Sequence[str | os.PathLike[str]], dtypes: Sequence[np.dtype[Any]]
) -> np.dtype[Any]:
    kinds = {
        dtype.kind == "f": (os.fspath(prefix), dtype)
        for prefix, dtype in zip(inputs, dtypes, strict=True)
    }
    if len(kinds) > 1:
        raise ConfigError(
            f"{kinds[False][0]} has tokens of type {kinds[False][1]} and {kinds[True][0]} of type "
            f"{kinds[True][1]}: integers and floats cannot be merged without loss"
        )
    dtype = np.result_type(*dtypes).newbyteorder("<")
    assert dtype in TYPE_CODES, f"{dtype} is no type of the format"
    return dtype


def _check_space(
    output: str | os.PathLike[str], inputs: Sequence[str | os.PathLike[str]], token_bytes: int
) -> None:
    folder = Path(os.path.abspath(output)).parent
    # The arrays of the index exist twice for a short time: in separate files and joined.
    needed = token_bytes + 2 * sum(idx_path(prefix).stat().st_size for prefix in inputs)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"{folder}: {free / 1e9:.3f} GB free, but the merged data set needs {needed / 1e9:.3f} "
            "GB: free some space or choose another --output-prefix; nothing was written"
        )


def _add_structure(writer: IndexedDatasetWriter, dataset: IndexedDataset) -> None:
    """Append the sequence sizes and document ends. Raises DataError for a damaged .idx."""
    dataset.check(0, len(dataset))
    before = writer.num_sequences
    last = 0
    for start in range(0, len(dataset), _BLOCK_ENTRIES):
        writer.append_sequences(dataset.sizes[start : start + _BLOCK_ENTRIES])
    for start in range(1, len(dataset.document_indices), _BLOCK_ENTRIES):
        ends = dataset.document_indices[start : start + _BLOCK_ENTRIES].astype(np.int64)
        wrong = (np.diff(ends, prepend=last) < 0) | (ends > len(dataset))
        if wrong.any():
            at = int(np.argmax(wrong))
            raise DataError(
                f"{idx_path(dataset.prefix)}: document {start + at - 1} ends before sequence "
                f"{ends[at]}, which is before its start or beyond the last of {len(dataset)}: the "
                "file is damaged"
            )
        last = int(ends[-1])
        writer.append_document_ends(before + ends)


def _tokens(dataset: IndexedDataset) -> Iterator[npt.NDArray[Any]]:
    """Yield all tokens of a data set in chunks. Raises DataError if .bin cannot be read."""
    path = bin_path(dataset.prefix)
    left = dataset.num_tokens
    try:
        with path.open("rb") as file:
            while left:
                chunk = np.fromfile(
                    file, dataset.dtype, min(_COPY_BYTES // dataset.dtype.itemsize, left)
                )
                left -= len(chunk)
                if not len(chunk):
                    raise DataError(
                        f"{path}: ends {left} tokens early: it was truncated while being merged"
                    )
                yield chunk
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code: 0, or 2 after an error."""
    args = build_parser().parse_args(argv)
    inputs = args.inputs if args.input is None else prefixes_in(args.input)
    with ByteProgress("merged", bin_bytes(inputs)) as progress:
        written = merge(
            inputs,
            args.output_prefix,
            on_progress=progress.update,
            say=lambda text: progress.say(f"notice: {text}"),
        )
    print(
        f"wrote {args.output_prefix}.bin and .idx from {len(inputs)} data sets: "
        f"{written.num_documents:,} documents, {written.num_sequences:,} sequences, "
        f"{written.num_tokens:,} tokens of type {written.dtype}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
