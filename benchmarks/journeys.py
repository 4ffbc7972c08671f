"""Count the files of megatron/ that a reader passes on six journeys through the code.

    python benchmarks/journeys.py [--list]

Two are recorded with Python's profiler in a training of one process: a micro-batch from its .bin
file to the updated weight (the third step of a run, without log line, evaluation and save), and a
flag from the command line to the configuration. The other four are what a user writes to bring a
layer, a schedule, an optimizer or a data set: the files of examples/extend, which change none of
megatron/ (tests/examples/test_extend.py trains, dry-runs and plans them).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.config.command_line import parse_args  # noqa: E402

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 5 --lr "
    "1e-3 --clip-grad 1.0 --log-interval 1000 --eval-iters 0 --split 100,0,0 --tokenizer-type "
    "NullTokenizer --vocab-size 300 --num-workers 0"
).split()
EXTENSIONS = {
    "a layer": "layer",
    "a schedule": "schedule",
    "an optimizer": "optimizer",
    "a data set": "data",
}


class Files:
    """Set of the project's files whose functions are called while it records."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if (
            event == "call"
            and frame.f_code.co_name != "<module>"
            and path.startswith(f"{ROOT}/megatron/")
        ):
            self.found.add(os.path.relpath(path, ROOT))

    def start(self) -> None:
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def stop(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def of_a_flag() -> set[str]:
    """Record the way of the command line to a configuration."""
    files = Files()
    parse_args([*FLAGS, "--mock-data"])  # tables are made once
    files.start()
    parse_args([*FLAGS, "--mock-data"])
    files.stop()
    return files.found


def of_a_micro_batch(folder: Path) -> set[str]:
    """Record the third step of a training on a token file in `folder`."""
    import numpy as np

    import megatron
    from megatron.data.indexed_writer import IndexedDatasetWriter
    from megatron.pipeline.executor import Executor

    with IndexedDatasetWriter(folder / "tokens", np.uint16) as writer:
        for _ in range(40):
            writer.add_document(np.arange(40) % 300)
    files, plain, steps = Files(), Executor.train, iter(range(1, 100))

    def train(self: Executor, *args: Any, **kwargs: Any) -> Any:
        step = next(steps)
        if step == 3:
            files.start()
        elif step == 4:
            files.stop()
        return plain(self, *args, **kwargs)

    Executor.train = train  # type: ignore[method-assign]
    with contextlib.redirect_stdout(io.StringIO()):
        megatron.pretrain(parse_args([*FLAGS, "--data-path", str(folder / "tokens")]))
    return files.found


def run() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="list the files")
    listed = parser.parse_args().list
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "a flag to its configuration": of_a_flag(),
            "a micro-batch from .bin to updated weight": of_a_micro_batch(Path(folder)),
        }
    for name, files in found.items():
        print(f"{name}: {len(files)} files of megatron/")
        if listed:
            print(*(f"    {file}" for file in sorted(files)), sep="\n")
    for name, file in EXTENSIONS.items():
        path = ROOT / "examples" / "extend" / f"{file}.py"
        lines = len(path.read_text().splitlines())
        print(
            f"{name} of one's own: 0 files of megatron/, 1 of the user's "
            f"({path.relative_to(ROOT)}, {lines} lines)"
        )


if __name__ == "__main__":
    run()
