"""Write a text corpus, as JSON lines, from the Python standard library of this machine.

Example:

    python tools/build_corpus.py --output runs/corpus.jsonl

Each document is a module: its source with the docstrings, or only the docstrings if the module is
compiled into the interpreter. Only modules of the second kind are imported; no source is run.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import io
import json
import os
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.option import Parser, integer, real
from megatron.data.file_lock import renamed_into
from megatron.errors import DataError
from megatron.training.run.process import as_tool
from megatron.untrusted import read_bytes

# Tests repeat each other, and the code tables in encodings are numbers rather than text.
SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "idlelib",
        "encodings",
        "lib2to3",
    }
)
MIN_CHARACTERS = 64
_MOST_SOURCE_BYTES = 1 << 24


def build_corpus(
    output: str | os.PathLike[str],
    *,
    max_bytes: int = 20_000_000,
    seed: int = 1234,
    docstrings_only: bool = False,
    stdlib: str | os.PathLike[str] | None = None,
) -> tuple[int, int]:
    """Write JSON lines {"name": module, "text": ...} to `output`.

    Returns the number of documents and the bytes of text. The order of modules depends only on
    `seed` and their names. Writing stops before the texts exceed `max_bytes`. `docstrings_only`
    keeps only the docstrings of modules, classes and functions. `stdlib` is the folder to read, by
    default this Python's. Modules that this Python lacks, that have fewer than MIN_CHARACTERS or
    that cannot be read as text are left out. Raises DataError if no module is left or `output`
    cannot be written.
    """
    folder = Path(stdlib if stdlib is not None else sysconfig.get_path("stdlib"))
    sources = find_modules(folder)
    if stdlib is None:
        sources.update(dict.fromkeys(sys.builtin_module_names))
    path = Path(output)
    documents = text_bytes = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with renamed_into(path) as file:
            for name in sorted(
                sources, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest()
            ):
                text = _document(name, sources[name], docstrings_only)
                if text is None:
                    continue
                size = len(text.encode())
                if text_bytes + size > max_bytes:
                    break
                file.write(
                    f"{json.dumps({'name': name, 'text': text}, ensure_ascii=False)}\n".encode()
                )
                documents = documents + 1
                text_bytes = text_bytes + size
            if not documents:
                raise DataError(f"{folder}: no module with text in it within {max_bytes} bytes")
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from error
    return documents, text_bytes


def find_modules(folder: Path) -> dict[str, Path | None]:
    """Return the file of each Python source under `folder`, by the module's dotted name."""
    modules: dict[str, Path | None] = {}
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(
            f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith(("config-", "."))
        )
        for file in files:
            if file.endswith(".py"):
                path = Path(root, file)
                components = path.relative_to(folder).with_suffix("").parts
                modules[
                    ".".join(
                        components[:-1]
                        if components[-1] == "__init__" and components[1:]
                        else components
                    )
                ] = path
    return modules


def _document(name: str, path: Path | None, docstrings_only: bool) -> str | None:
    """Return the text of a module; None if it is too short or cannot be read as text."""
    if path is None:
        text = "\n\n".join(_builtin_docstrings(name))
    else:
        try:
            source = read_bytes(path, _MOST_SOURCE_BYTES, error=DataError)
            # the encoding that the source declares
            encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
            text = io.TextIOWrapper(io.BytesIO(source), encoding).read()
            if docstrings_only:
                text = "\n\n".join(_source_docstrings(name, text))
            text.encode()
        # the last two are raised for a source that is nested too deeply
        except (DataError, SyntaxError, ValueError, RecursionError, MemoryError):
            return None
    return text if len(text) >= MIN_CHARACTERS else None


def _source_docstrings(name: str, source: str) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own deprecated escapes
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield f"{name if isinstance(node, ast.Module) else f'{name}.{node.name}'}\n\n{docstring}"


def _builtin_docstrings(name: str) -> Iterator[str]:
    """Yield the docstrings of a built-in module; importing it runs no source."""
    try:
        module = __import__(name)
    except ImportError:  # some builds list modules that cannot be imported on this system
        return
    for label, item in [(name, module)] + [
        (f"{name}.{key}", item) for key, item in sorted(vars(module).items())
    ]:
        if inspect.ismodule(item) and item is not module:
            continue
        docstring = (
            inspect.cleandoc(item.__doc__)
            if isinstance(getattr(item, "__doc__", None), str)
            else ""
        )
        if docstring and (
            inspect.ismodule(item) or inspect.isclass(item) or inspect.isroutine(item)
        ):
            yield f"{label}\n\n{docstring}"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--output", required=True, metavar="FILE", help="JSON lines with the keys name and text"
    )
    parser.add_argument(
        "--max-megabytes",
        type=real(),
        default=20.0,
        metavar="MB",
        help="maximum size of the texts (default: 20)",
    )
    parser.add_argument(
        "--seed", type=integer(0), default=1234, help="seed of the order of modules (default: 1234)"
    )
    parser.add_argument(
        "--docstrings-only", action="store_true", help="write docstrings instead of whole sources"
    )
    parser.add_argument(
        "--stdlib",
        metavar="FOLDER",
        help="read the sources in this folder instead of this Python's library",
    )
    return parser


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code: 0, or 2 after an error."""
    args = build_parser().parse_args(argv)
    documents, text_bytes = build_corpus(
        args.output,
        max_bytes=int(args.max_megabytes * 1e6),
        seed=args.seed,
        docstrings_only=args.docstrings_only,
        stdlib=args.stdlib,
    )
    print(f"wrote {args.output}: {documents} documents, {text_bytes / 1e6:.1f} MB of text")
    return 0


if __name__ == "__main__":
    sys.exit(main())
