"""The chosen layout as a command line, and as a job script where the launch scripts know the machine."""
from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.config import PRESETS, Config, command_line_of
from megatron.config.command_line import parse_plan
from megatron.config.settings import all_options
from megatron.errors import ConfigError
from megatron.model import formulas
from megatron.planner.cluster import Cluster
from megatron.planner.memory import sized_model
from megatron.planner.search.base import Base
from megatron.untrusted import write_text

_TOKENS_FOR_EACH_PARAMETER = 20
"""Hoffmann et al. 2022, where nobody says how long the run is."""


class _Site(NamedTuple):
    """What the launch scripts need to know of a machine: its site file, and lines of the header beside the usual."""

    file: str
    header: tuple[str, ...]


_SITES: Mapping[str, _Site] = {
    "frontier": _Site("examples/frontier/site.env", ("-C nvme", "--network=disable_rdzv_get")),
    "lumi": _Site("examples/lumi/site.env", ()),
}


def flags_of(config: Config, base: Base) -> list[str]:
    """Flags of pretrain_gpt.py that give this configuration, without the number of processes: the preset's name, where
    there is one, and what differs from it."""
    world = ["--world-size", str(config.parallel.world_size)]
    if base.preset is not None:
        preset, flags, unset = PRESETS[base.preset], ["--preset", base.preset], list[str]()
        for name, option in all_options().items():
            value = config.given.get(name)
            if name == "world_size" or not option.flags or value == preset.get(name, _default(option.default)):
                continue
            if value is not None:
                flags += _written(option, value)
            elif option.has_none and name in preset:
                unset.append(option.flag)
        for flag in list(unset):  # some go with others
            fewer = [other for other in unset if other != flag]
            if _same(flags + _none(fewer) + world, config):
                unset = fewer
        if _same(flags + _none(unset) + world, config):
            return flags + _none(unset)
    words = [word for word in command_line_of(config) if not word.startswith("--world-size")]
    assert _same(words + world, config), "a configuration is what its flags say"
    return words


def _none(flags: list[str]) -> list[str]:
    return [word for flag in flags for word in (flag, "none")]


def _default(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _written(option: Any, value: Any) -> list[str]:
    if option.kind is bool:
        return [option.written(value)]
    if option.many:
        return [option.flag, ",".join(map(str, value))] if option.kind is int else [option.flag, *map(str, value)]
    return [option.flag, str(value)]


def _same(flags: list[str], config: Config) -> bool:
    try:
        return parse_plan(flags) == config
    except ConfigError:
        return False


def command_line(config: Config, base: Base, cluster: Cluster) -> str:
    """A command that starts the run: by torchrun on one node, else by srun."""
    devices, each = config.parallel.world_size, cluster.devices_per_node
    nodes = -(-devices // each)
    program = ["pretrain_gpt.py", *flags_of(config, base)]
    if cluster.device_type == "cpu":
        program += ["--distributed-backend", "gloo"]
    if nodes == 1:
        return shlex.join(["torchrun", f"--nproc-per-node={devices}", *program])
    return shlex.join(["srun", "-N", str(nodes), "-n", str(devices), f"--ntasks-per-node={each}", "python", *program])


class Origin(NamedTuple):
    """What a script says of where it comes from. said: after 'MODEL on N node(s) of MACHINE, '; file: its own name."""

    said: str
    file: str


def job_script(config: Config, base: Base, cluster: Cluster, tokens: float | None, notes: list[str]) -> str | None:
    """A batch script over examples/frontier/job.sh; None for a machine that those scripts do not know, and for a
    part of a node, which they do not start."""
    origin = Origin("the choice of tools/plan.py", "job.sbatch")
    return site_script(flags_of(config, base), config, base.preset, cluster, tokens, origin, notes)


def site_script(
    flags: Sequence[str], config: Config, preset: str | None, cluster: Cluster, tokens: float | None, origin: Origin,
    notes: Sequence[str],
) -> str | None:  # fmt: skip
    """The same for any flags of pretrain_gpt.py that give `config`. Without a length the run gets one of `tokens`,
    or of so many for each parameter."""
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


def write_script(folder: Path, config: Config, base: Base, cluster: Cluster, tokens: float | None,
                 notes: list[str]) -> Path:  # fmt: skip
    """job.sbatch, or command.sh where there is no such script for the machine."""
    text = job_script(config, base, cluster, tokens, notes)
    path = folder / ("command.sh" if text is None else "job.sbatch")
    if text is None:
        length = [] if tokens is None or _has_length(config) else ["--train-tokens", str(int(tokens))]
        line = " ".join([command_line(config, base, cluster), *length])
        text = "\n".join(["#!/bin/bash", *(f"# {note}" for note in notes), f'{line} "$@"']) + "\n"
    write_text(path, text, choose="another --output folder")
    try:
        path.chmod(0o755)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: choose another --output folder") from error
    return path
