"""What all ranks of a run must have alike: settings, versions, code, tokenizer and data files.

Each tells digests of it in its hello (megatron.parallel.meeting), before torch connects anything; the first compares
them as it reads the hellos, so that no message is added. A difference ends the run on every rank: with another seed,
learning rate or index file on one of them, the ranks would train together what nobody asked for.
"""
from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.config.settings import all_options
from megatron.data.datasets import data_prefixes
from megatron.errors import MegatronError
from megatron.parallel.hello import Alike
from megatron.parallel.launch import Launch
from megatron.training.run.provenance import ends_digest, versions

MAY_DIFFER = {
    "local_rank", "master_addr", "master_port",  # a process's own place, and how it reaches the first
    "data_cache_path", "stage_data_to",  # scratch folders of a node
    "metrics_file", "tensorboard_dir", "trace_dir", "kill_switch_file",  # for one rank alone, or for each by itself
}  # fmt: skip
"""The settings, by name, that ranks may have otherwise than others. Those without an effect may, too."""

_INDEX_END = 64 << 10  # bytes: offsets add up, so that a longer document anywhere shows at the end of an .idx file
_FILE_END = 16 << 20


def identity(config: Config, launch: Launch, placement: str = "") -> Alike:
    """The settings of this process, and, of the first process of each node, the files: those of a node are the same.

    `placement` says how ranks are placed on devices (Placing.agreed).
    """
    values = config.to_dict()
    own = {f"{name} of your own": where for name, where in config.pieces.describe().items()}
    settings: dict[str, Any] = {
        option.flag: values[name] for name, option in all_options().items()
        if name not in MAY_DIFFER and not option.inert and not option.internal
    }  # fmt: skip
    found = {name: version for name, version in versions().items() if name != "system"}  # kernels of nodes may differ
    alike = {"settings": {**settings, **own, "placement": placement, **found}}
    return alike if launch.local_rank else {**alike, "files": dict(files(config))}


def files(config: Config, package: Path = Path(__file__).parents[2]) -> Iterator[tuple[str, str]]:
    """(name, size and digest) of source files, of the tokenizer's and of the data's; of long ones the ends are read.

    Of the code it is the content that counts: copies of one clone have other times. One process of a node reads it, a
    two hundredth part of what all of its processes have just imported from the same file system.
    """
    main = getattr(sys.modules["__main__"], "__file__", None)
    own = {*config.pieces.files(), *([main] if main else [])}
    for path in [*sorted(package.rglob("*.py")), *map(Path, sorted(own))]:
        inside = path.is_relative_to(package)
        yield str(path.relative_to(package.parent) if inside else path.name), _file(path, _FILE_END)
    t = config.tokenizer
    for name in (t.tokenizer_model, t.vocab_file, t.merge_file):
        if name:
            folder = sorted(Path(name).glob("*.json")) if os.path.isdir(name) else [Path(name)]
            yield from ((str(path), _file(path, _FILE_END)) for path in folder)
    try:
        prefixes = data_prefixes(config)
    except MegatronError as error:
        yield "data", str(error)  # of all of them, or nobody goes on
        return
    for prefix in prefixes:
        yield f"{prefix}.bin", _file(Path(f"{prefix}.bin"), 0)
        yield f"{prefix}.idx", _file(Path(f"{prefix}.idx"), _INDEX_END)


def _file(path: Path, end: int) -> str:
    """Size and digest of a file, of its first and last `end` bytes where it is longer; or why it cannot be read."""
    try:
        if not path.is_file():
            return "no file"
        size = path.stat().st_size
        return f"{size} bytes" + (f" [{ends_digest(path, size, end)[:12]}]" if end else "")
    except OSError as error:
        return str(error.strerror)
