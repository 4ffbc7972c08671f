"""Cost of checkpoints: bandwidth compared with torch.save and torch.load, stalls, memory.

    python benchmarks/checkpoint.py [--folder DIR] [--repeat 5] [--layers 12 --hidden 768] [--json FILE]

One process trains a GPT (GPT-2 124M in bf16: 1.39 GiB of fp32 weights and moments) and saves it.

Bandwidth: the sides take turns within each repeat, on the same tensors and the same disk. They are
torch.save into one file, with and without fsync, and our checkpoint, which always syncs, computes
digests and writes its lists; then torch.load of that file, and our load, which compares the digests
and fills the engine. Files are read from the page cache: the programs are compared, not the disk.

Background: groups of steps without a save, with a synchronous save, and with a background save take
turns, too. The stall is the time for which training pauses; the cost of a save is the additional
time of its group.

Memory: growth of the process's resident size during a save, compared with the size of the state.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

GIB = 2**30
Row = dict[str, Any]


class Training:
    """A model, its engine and steps of one global batch of random tokens."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        from megatron.config import Config
        from megatron.engine.engine import Engine
        from megatron.model.gpt import (
            build_chunks,
            hidden_state,
            layer_context,
            stages_of,
        )
        from megatron.parallel.topology import Topology
        from megatron.pipeline.executor import Executor

        self.config = Config.create(
            num_layers=args.layers,
            hidden_size=args.hidden,
            num_attention_heads=args.hidden // 64,
            seq_length=args.sequence,
            max_position_embeddings=args.sequence,
            vocab_size=args.vocabulary,
            bf16=True,
            micro_batch_size=args.micro_batch,
            global_batch_size=args.micro_batch * args.micro_batches,
            lr=1e-4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        self.topology = Topology.create(device=args.device)
        context = layer_context(self.config, self.topology)
        chunks = build_chunks(self.config, self.topology, context)
        chunks.train()
        self.engine = Engine(self.config, self.topology, chunks)
        self._executor = Executor(
            self.topology,
            stages_of(chunks),
            self.config.parallel.schedule,
            hidden_state(self.config),
            context.weight_gradients,
            before_training=self.engine.begin,
        )
        self._tokens = torch.randint(
            0, args.vocabulary, (args.micro_batches, args.micro_batch, args.sequence + 1)
        )

    def step(self) -> float:
        """One step; its seconds."""
        from megatron.data.sampler import make_micro_batch

        began = time.perf_counter()
        batches = [
            make_micro_batch(tokens.numpy()).to(self.topology.device) for tokens in self._tokens
        ]
        self._executor.train(batches, loss_scale=self.engine.loss_scale)
        self.engine.step(1e-4)
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        import torch

        if self.topology.device.type == "cuda":
            torch.cuda.synchronize()

    def state(self) -> dict[str, Any]:
        """The tensors of a checkpoint, as torch.save would get them."""
        found = {}
        for fragment in self.engine.fragments():
            name = fragment.sharding.name
            found |= {f"master.{name}": fragment.master}
            found |= {f"{kind}.{name}": moment for kind, moment in fragment.moments.items()}
        return found


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def torch_save(state: dict[str, Any], path: Path, *, sync: bool) -> None:
    import torch

    with open(path, "wb") as f:
        torch.save(state, f)
        if sync:
            f.flush()
            os.fsync(f.fileno())


def bandwidth(training: Training, folder: Path, repeat: int) -> Iterator[Row]:
    """Seconds of saving and loading, side by side."""
    import torch

    from megatron.checkpoint.load import load
    from megatron.checkpoint.save import Saver

    state, file = training.state(), folder / "plain.pt"
    size = sum(tensor.nbytes for tensor in state.values())
    engine, topology, config = training.engine, training.topology, training.config
    sides: dict[str, Callable[[], object]] = {
        "torch.save": lambda: torch_save(state, file, sync=False),
        "torch.save, fsync": lambda: torch_save(state, file, sync=True),
        "save": lambda: Saver(folder / "ours", topology, config).start(1, engine, {}),
        "torch.load": lambda: torch.load(file, map_location=topology.device, weights_only=True),
        "load": lambda: load(folder / "ours", engine, topology, config),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeat):
        for name, action in sides.items():
            if "save" in name:
                file.unlink(missing_ok=True) if "torch" in name else shutil.rmtree(
                    folder / "ours", ignore_errors=True
                )
                os.sync()  # what the side before left to be written is not this side's
            times[name].append(seconds(action))
    for name, values in times.items():
        other = "torch.load" if "load" in name else "torch.save, fsync"
        ratio = statistics.median(
            theirs / own for own, theirs in zip(values, times[other], strict=True)
        )
        rate = size / statistics.median(values) / 1e9
        yield row(name, values, "s", f"{rate:.2f} GB/s, {ratio:.2f} of that of {other}")
    file.unlink()
    shutil.rmtree(folder / "ours")


def background(training: Training, folder: Path, repeat: int) -> Iterator[Row]:
    """Groups of steps with and without a save."""
    from megatron.checkpoint.save import Saver

    saver = Saver(folder / "background", training.topology, training.config)
    training.step()
    number, first = 0, 0.0

    def begin(in_background: bool) -> float:
        nonlocal number
        number += 1
        shutil.rmtree(folder / "background", ignore_errors=True)
        os.sync()
        return seconds(
            lambda: saver.start(number, training.engine, {}, {}, background=in_background)
        )

    first = begin(True)  # pages of the copy come from the system
    steps = 2
    while not saver.written:
        training.step()
        steps += 1
    saver.finish()
    quiet: list[float] = []
    busy: list[float] = []
    stalls: list[float] = []
    commits: list[float] = []
    waited: list[float] = []
    more: list[float] = []
    for _ in range(repeat):
        alone = [training.step() for _ in range(steps)]
        quiet += alone
        waited.append(begin(False))
        stall, commit, group = begin(True), 0.0, list[float]()
        for _ in range(steps):
            overlaps = saver.pending and not saver.written
            group.append(training.step())
            if overlaps:
                busy.append(group[-1])
            if saver.pending and saver.written:
                commit = seconds(saver.commit)
        if saver.pending:
            commit = seconds(saver.commit)
        stalls.append(stall + commit)
        commits.append(commit)
        more.append(stall + commit + sum(group) - sum(alone))
    step = statistics.median(quiet)

    def share(values: list[float]) -> str:
        return f"{statistics.median(values) / step:.3f} of a step"

    yield row("step without a save", quiet, "s", f"{steps} in a group")
    yield row("training waits: save", waited, "s", share(waited))
    yield row(
        "background: stall", stalls, "s", f"{share(stalls)}; the first copy {first / step:.3f}"
    )
    yield row("background: of it the commit", commits, "s", share(commits))
    yield row(
        "background: step meanwhile",
        busy,
        "s",
        f"{statistics.median(busy) / step:.2f} of one without",
    )
    compared = statistics.median(more) / statistics.median(waited)
    yield row(
        "background: whole cost",
        more,
        "s",
        f"{share(more)}, {compared:.2f} of the save that is waited for",
    )
    shutil.rmtree(folder / "background")


def memory(training: Training, folder: Path) -> Iterator[Row]:
    """Growth of the resident memory in each kind of save."""
    from megatron.checkpoint.save import Saver

    size = sum(tensor.nbytes for tensor in training.state().values())
    training.step()
    for name, in_background in (
        ("memory: training waits", False),
        ("memory: in the background", True),
    ):
        saver = Saver(folder / "memory", training.topology, training.config)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from what is resident now
        before = resident("VmRSS")
        saver.start(1, training.engine, {}, {}, background=in_background)
        saver.finish()
        grown = resident("VmHWM") - before
        yield row(
            name, [grown / GIB], "GiB", f"{grown / size:.2f} of the state's {size / GIB:.2f} GiB"
        )
    shutil.rmtree(folder / "memory")


def resident(name: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )
    return int(line.split()[1]) * 1024


def row(name: str, values: list[float], unit: str, note: str) -> Row:
    return {
        "name": name,
        "values": values,
        "median": statistics.median(values),
        "unit": unit,
        "note": note,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder to write to; its disk is measured (default: a temporary folder)",
    )
    parser.add_argument("--repeat", type=int, default=5, help="repeats of every side (default 5)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch

    from megatron.training.run.host import tune_allocator

    tune_allocator()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    training, rows = Training(args), []
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        print(f"{'':32s} {'median':>9s} {'min':>9s} {'max':>9s}")
        for found in itertools.chain(
            memory(training, folder),
            bandwidth(training, folder, args.repeat),
            background(training, folder, args.repeat),
        ):
            rows.append(found)
            values = found["values"]
            print(
                f"{found['name']:32s} {found['median']:9.3f} {min(values):9.3f} {max(values):9.3f} "
                f"{found['unit']:4s} {found['note']}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
