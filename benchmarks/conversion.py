"""Time and memory of a conversion from and to Hugging Face, beside a plain copy of the files.

    python benchmarks/conversion.py --folder /scratch/x            # 8 layers of Llama 3 8B: 28 GB
    python benchmarks/conversion.py --folder /scratch/x --layers 32

The model has the widths and the vocabulary of Llama 3 8B, in bf16, with values that repeat.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
TOOL = str(ROOT / "tools/convert_checkpoint.py")


def make(folder: Path, layers: int) -> None:
    """Write the model."""
    import torch

    from megatron.checkpoint.huggingface_save import write_model
    from megatron.config import Config
    from megatron.model.gpt import global_shapes
    from megatron.parallel.topology import Layout, Topology

    sizes = dict(num_layers=layers, vocab_size=128256, pipeline_model_parallel_size=1)
    config = Config.create(preset="llama-8b", **sizes)
    shapes = global_shapes(config)
    block = torch.randn(1 << 20).bfloat16()

    def whole(name: str) -> torch.Tensor:
        tensor = torch.empty(shapes[name], dtype=torch.bfloat16)
        for part in tensor.view(-1).split(len(block)):
            part.copy_(block[: len(part)])
        return tensor

    alone = Topology.from_layout(Layout(), 0)
    write_model(folder, config, alone, shapes, whole, torch.bfloat16)


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


def main() -> None:
    """Measure all ways in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="for the files; removed at the end"
    )
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    folder: Path = args.folder
    folder.mkdir(parents=True)
    try:
        source, copied, native, back = (folder / n for n in ("hf", "copy", "native", "back"))
        measured(lambda: make(source, args.layers))
        size = sum(path.stat().st_size for path in source.iterdir()) / 1e9
        print(f"{args.layers} layers of Llama 3 8B in bf16: {size:.1f} GB")
        print("| | s | GB/s of the model | peak resident GB |\n|---|---|---|---|")
        for what, action, after in (
            ("copy of the files", lambda: copy(source, copied), copied),
            ("to a checkpoint (fp32)", run_tool(source, native), None),
            ("to Hugging Face", run_tool("--to", "hf", native, back), None),
        ):
            seconds, peak = measured(action)
            print(f"| {what} | {seconds:.1f} | {size / seconds:.2f} | {peak:.2f} |", flush=True)
            if after is not None:
                shutil.rmtree(after)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
