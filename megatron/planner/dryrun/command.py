"""`pretrain_gpt.py ... --dry-run`: try a job's set-up and steps without its devices, and say whether it runs and fits.

Exit codes: 0 it runs and fits; 2 the configuration cannot be (as everywhere); 3 it does not fit or cannot run.
"""
from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron.config import Config
from megatron.config.command_line import parse_plan, scan
from megatron.config.pieces import PLAIN, Pieces
from megatron.data.tokenizer import with_vocabulary
from megatron.errors import ConfigError
from megatron.planner.cluster import Cluster, load_cluster

EXIT_DOES_NOT_RUN = 3
_NO_WORDS = ("", "none")


def dry_run(arguments: Sequence[str], launched: int = 1, pieces: Pieces = PLAIN) -> int:
    """Print what a job of these flags would need, and return the exit code. `launched` processes were started, of
    which this is the first: --world-size, where it is not given. Raises ConfigError."""
    words = list(arguments)
    if launched > 1 and not any(word.split("=")[0] == "--world-size" for word in words):
        words += ["--world-size", str(launched)]
    config = parse_plan(words, pieces)
    rank = _asked_rank(scan(words).flags.get("--rank"), config.parallel.world_size)
    name = config.parallel.cluster or os.environ.get("MEGATRON_CLUSTER", "").strip()
    cluster = None if name in _NO_WORDS else load_cluster(name)
    config, unknown = with_vocabulary(config)
    assumed = "GPT-2's vocabulary" if config.model.vocab_size is None else f"--vocab-size {config.model.vocab_size}"
    notes = [f"{unknown}: {assumed} is taken"] if unknown else []
    if config.checkpoint.use_checkpoint_args:
        notes.append("--use-checkpoint-args: the checkpoint was not read; the model's sizes are those given here")
    from megatron.planner.dryrun.rehearsal import (  # not before the arguments are known to be right
        device_of,
        rehearse,
        settled,
    )
    from megatron.planner.dryrun.render import WIDTH, heading, render

    config = settled(config, cluster)
    print(heading(config, _machine(config, cluster, device_of(cluster))), flush=True)
    found = rehearse(config, cluster, processes=min(2, os.cpu_count() or 1), rank=rank)
    width = os.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    print(render(found, max(width, WIDTH)))
    for note in (*notes, *config.notices):
        print(f"note: {note}")
    return EXIT_DOES_NOT_RUN if found.findings else 0


def _asked_rank(words: Sequence[str] | None, world_size: int) -> int | None:
    """The rank that --rank names. Raises ConfigError for one that the job does not have."""
    if words is None:
        return None
    text = " ".join(words)
    if not text.isdecimal() or len(text) > 9 or int(text) >= world_size:
        raise ConfigError(f"--rank {text}: of --world-size {world_size} there are ranks 0 to {world_size - 1}")
    return int(text)


def _machine(config: Config, cluster: Cluster | None, device: str) -> str:
    if cluster is None:
        return f"this machine's kind of device ({device})"
    nodes = -(-config.parallel.world_size // cluster.devices_per_node)
    return f"{nodes} node{'s' * (nodes > 1)} of {cluster.name} ({cluster.device}, {cluster.memory_gib:g} GiB)"
