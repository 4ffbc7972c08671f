"""The chosen layout as a command line, and as a job script where the launch scripts know the machine."""
from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.config import Config, command_line_of
from megatron.model import formulas
from megatron.planner.cluster import Cluster
from megatron.planner.memory import sized_model
from megatron.untrusted import write_text

_TOKENS_FOR_EACH_PARAMETER = 20
"""Hoffmann et al. 2022, where nobody says how long the run is."""


class _Site(NamedTuple):
    """A machine that the launch scripts know: its site file, and lines of the header beside the usual."""

    file: str
    header: tuple[str, ...]


_SITES: Mapping[str, _Site] = {
    "frontier": _Site("examples/frontier/site.env", ("-C nvme", "--network=disable_rdzv_get")),
    "lumi": _Site("examples/lumi/site.env", ()),
}


def flags_of(config: Config) -> list[str]:
    """Write the flags of pretrain_gpt.py that give this configuration, without the number of processes."""
    return [word for word in command_line_of(config) if not word.startswith("--world-size")]


class Origin(NamedTuple):
    """Where a script comes from. said: after 'MODEL on N node(s) of MACHINE, '; file: its own name."""

    said: str
    file: str


def site_script(
    flags: Sequence[str], config: Config, preset: str | None, cluster: Cluster, tokens: float | None, origin: Origin,
    notes: Sequence[str],
) -> str | None:  # fmt: skip
    """Write a batch script over examples/frontier/job.sh; None for a machine that those scripts do not know, and for
    a part of a node, which they do not start.

    flags  of pretrain_gpt.py that give `config`; without a length the run gets one of `tokens`, or of so many for each
           parameter
    """
    site, devices = _SITES.get(cluster.name), config.parallel.world_size
    if site is None or devices % cluster.devices_per_node:
        return None
    nodes, name = devices // cluster.devices_per_node, preset or "gpt"
    hours = cluster.wall_limit_hours(nodes)
    length = int(tokens or _TOKENS_FOR_EACH_PARAMETER * formulas.total_parameters(sized_model(config)))
    flags = [*flags, *([] if _has_length(config) else ["--train-tokens", str(length)])]
    whole, minutes = divmod(math.floor(60 * hours), 60)
    header = [
        f"-J {name}", f"-N {nodes}", f"-t {whole:02d}:{minutes:02d}:00", *site.header,
        f"--ntasks-per-node={cluster.devices_per_node}", f"-c {cluster.cpus_per_task}", "--signal=USR1@600",
        "--requeue", "--open-mode=append", "-o %x-%j.out",
    ]  # fmt: skip
    model = preset or f"{config.model.num_layers} layers of width {config.model.hidden_size}"
    lines = [
        "#!/bin/bash",
        f"# {model} on {nodes} node(s) of {cluster.name}, {origin.said}. From the repository:",
        f"#     source {site.file} && sbatch FOLDER/{origin.file} [flags of pretrain_gpt.py, which win over these]",
        f"#     source {site.file} && python tools/preflight.py check FOLDER/{origin.file}",
        *(f"# {note}" for note in notes),
        *(f"#SBATCH {line}" for line in header),
        "set -uo pipefail",
        f"MODEL={name}",
        "PRESET='' # all is said below",
        "FLAGS=(",
        *(f"    {line}" for line in _by_flag(flags)),
        ")",
        'for root in "${MEGATRON_ROOT:-}" "${SLURM_SUBMIT_DIR:-}" "$PWD"; do',
        "    [[ ! -f $root/examples/frontier/job.sh ]] || break",
        "done",
        "# shellcheck source=/dev/null",
        'source "$root/examples/frontier/job.sh" || { echo "source site.env first, then sbatch" >&2 && exit 2; }',
        'train_job "${FLAGS[@]}" "$@"',
    ]
    return "\n".join(lines) + "\n"


def _has_length(config: Config) -> bool:
    return any(name in config.given for name in ("train_iters", "train_samples", "train_tokens"))


def _by_flag(words: Sequence[str]) -> list[str]:
    """A line for each flag with its values."""
    lines: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return [shlex.join(line) for line in lines]


def write_script(
    folder: Path, config: Config, preset: str | None, cluster: Cluster, tokens: float | None, notes: Sequence[str]
) -> Path:
    """Write job.sbatch, or command.sh where the launch scripts do not know the machine. Raises ConfigError."""
    flags, choose = flags_of(config), "another --output folder"
    origin = Origin("the choice of tools/plan.py", "job.sbatch")
    text = site_script(flags, config, preset, cluster, tokens, origin, notes)
    if text is not None:
        return write_text(folder / origin.file, text, choose=choose)
    devices, each = config.parallel.world_size, cluster.devices_per_node
    nodes = -(-devices // each)
    start = ["torchrun", f"--nproc-per-node={devices}"]
    if nodes > 1:
        start = ["srun", "-N", str(nodes), "-n", str(devices), f"--ntasks-per-node={each}", "python"]
    flags += ["--distributed-backend", "gloo"] if cluster.device_type == "cpu" else []
    flags += ["--train-tokens", str(int(tokens))] if tokens is not None and not _has_length(config) else []
    lines = ["#!/bin/bash", *(f"# {note}" for note in notes), f'{shlex.join([*start, "pretrain_gpt.py", *flags])} "$@"']
    return write_text(folder / "command.sh", "\n".join(lines) + "\n", choose=choose)
