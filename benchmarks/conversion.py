"""Time and memory of a conversion from and to Hugging Face, beside a plain copy of the files.

    python benchmarks/conversion.py --folder /scratch/x            # 8 layers of Llama 3 8B: 28 GB
    python benchmarks/conversion.py --folder /scratch/x --layers 1 --dtype float32 --rounds 3

The model has the widths and the vocabulary of Llama 3 8B, with values that repeat. A checkpoint is
in fp32, so a conversion of bf16 reads or writes more than a copy: times are compared by the bytes
read and written, those of a conversion with the copy's of the same round.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
TOOL = str(ROOT / "tools/convert_checkpoint.py")


def make(folder: Path, layers: int, type_name: str) -> None:
    """Write the model."""
    import torch

    from megatron.checkpoint.huggingface_save import Parameters, write_model
    from megatron.config import Config
    from megatron.model.gpt import global_shapes
    from megatron.parallel.layout import Layout
    from megatron.parallel.topology import Topology

    sizes = dict(num_layers=layers, vocab_size=128256, pipeline_model_parallel_size=1)
    config = Config.create(preset="llama-8b", **sizes)
    shapes = global_shapes(config)
    dtype = getattr(torch, type_name)
    block = torch.randn(1 << 20).to(dtype)

    def whole(name: str) -> torch.Tensor:
        tensor = torch.empty(shapes[name], dtype=dtype)
        for part in tensor.view(-1).split(len(block)):
            part.copy_(block[: len(part)])
        return tensor

    alone = Topology.from_layout(Layout(), 0)
    write_model(folder, config, alone, Parameters(shapes, whole), dtype)


def copy(source: Path, target: Path) -> None:
    """Copy the files and sync each to disk."""
    target.mkdir()
    for path in source.iterdir():
        with open(path, "rb") as old, open(target / path.name, "wb") as new:
            shutil.copyfileobj(old, new, 16 << 20)
            os.fsync(new.fileno())


def measured(action: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds, and the largest resident memory in GB, of an action in a process."""
    started = time.perf_counter()
    if (child := os.fork()) == 0:
        action()
        os._exit(0)
    _, status, used = os.wait4(child, 0)
    assert status == 0, "the action failed"
    return time.perf_counter() - started, used.ru_maxrss * 1024 / 1e9


def run_tool(*words: object) -> Callable[[], None]:
    """Return an action that becomes the tool."""

    def action() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.execv(sys.executable, [sys.executable, TOOL, *map(str, words)])

    return action


def spread(values: list[float], digits: int) -> str:
    """Return the median of values, and the smallest and the largest in brackets."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def main() -> None:
    """Measure all ways in turns, and print a table of medians with the smallest and the largest."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="for the files; removed at the end"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    folder: Path = args.folder
    if min(args.layers, args.rounds) < 1:
        parser.error("--layers and --rounds are at least 1")
    if folder.exists():
        parser.error(f"--folder {folder} exists, and would be removed at the end: name a new one")
    folder.mkdir(parents=True)
    try:
        source, copied, native, back = (folder / n for n in ("hf", "copy", "native", "back"))
        measured(lambda: make(source, args.layers, args.dtype))
        size = sum(path.stat().st_size for path in source.iterdir()) / 1e9
        of_checkpoint = size * 4 / (4 if args.dtype == "float32" else 2)
        # what is done, GB read, GB written
        ways = {
            "copy of the files": (lambda: copy(source, copied), size, size),
            "to a checkpoint": (run_tool(source, native), size, of_checkpoint),
            "to Hugging Face": (run_tool("--to", "hf", native, back), of_checkpoint, size),
        }
        rounds = []
        for _ in range(args.rounds):
            rounds.append({what: measured(action) for what, (action, *_) in ways.items()})
            for target in (copied, native, back):
                shutil.rmtree(target)
        print(
            f"{args.layers} layers of Llama 3 8B in {args.dtype}: {size:.1f} GB, {len(rounds)} rounds"
        )
        print("| | s | GB read and written per s | times a copy | largest resident GB |")
        print("|---|---|---|---|---|")
        of_copy = [one["copy of the files"][0] / (2 * size) for one in rounds]
        for what, (_, read, written) in ways.items():
            moved = read + written
            seconds = [one[what][0] for one in rounds]
            ratios = [s / moved / reference for s, reference in zip(seconds, of_copy, strict=True)]
            print(
                f"| {what} | {spread(seconds, 1)} | {moved / statistics.median(seconds):.2f} | "
                f"{spread(ratios, 2)} | {max(one[what][1] for one in rounds):.2f} |"
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
