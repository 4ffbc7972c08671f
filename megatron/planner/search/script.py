"""Job script or command for a planned layout."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.config import Config, command_line_of
from megatron.config.validate import DATA
from megatron.errors import ConfigError
from megatron.planner.cluster import CLUSTERS, Cluster
from megatron.planner.trace import cached_sizes
from megatron.untrusted import write_text

CHOOSE = "another --output folder"
_ROOT = Path(__file__).resolve().parents[3]

_TOKENS_FOR_EACH_PARAMETER = 20
"""Default length of a run, in tokens per parameter (Hoffmann et al. 2022)."""


_RATES = (
    *((2.5e8, 6e-4), (5.5e8, 3e-4), (1e9, 2.5e-4), (2e9, 2e-4)),
    *((5e9, 1.6e-4), (1e10, 1.2e-4), (5e10, 1e-4), (math.inf, 6e-5)),
)
"""Learning rates, each after the largest number of parameters that it is for (Brown et al. 2020,
arXiv 2005.14165, table 2.1); the limits are between neighbouring models of the table, roughly at
the geometric mean.
"""

_SITES = {
    "frontier": ("-C nvme", "--network=disable_rdzv_get"),
    "lumi": ("--gpus-per-node=8", "--mem=0"),
}
"""Machines that the launch scripts support, with additional #SBATCH lines."""

_VARIABLES = (
    "SBATCH_ACCOUNT SBATCH_PARTITION SBATCH_QOS SITE_DATA SITE_VOCAB SITE_MERGES SITE_VENV"
).split()


class JobSite(NamedTuple):
    """Needs of a job besides its layout, from flags, variables and the site's site.env.

    partition, qos  "" for the machine's default
    flags           flags of pretrain_gpt.py for the data, unless the user has given some
    python          interpreter of the job
    """

    account: str
    partition: str
    qos: str
    flags: tuple[str, ...]
    python: Path


def site_of(
    cluster: Cluster, worlds: Sequence[int], config: Config, account: str | None
) -> JobSite | None:
    """Return the site of a job on whole nodes; None if the launch scripts do not support the machine.

    Raises ConfigError if the project or the training data is unknown: the job would be refused.
    """
    whole = [world for world in worlds if world % cluster.devices_per_node == 0]
    if cluster.name not in _SITES or not whole:
        return None
    file = _ROOT / "examples" / cluster.name / "site.env"
    variables = _variables(file, account)
    account = variables["SBATCH_ACCOUNT"]
    data = variables["SITE_DATA"]
    if not re.fullmatch(r"[\w.-]*", account):
        raise ConfigError(
            f"--account {account!r}: give a name of letters, digits, '.', '_' and '-'"
        )
    data_flags = {*DATA, "mock_data"} & config.explicit.keys()
    missing = [] if account else ["a project: --account NAME"]
    if not data_flags and not data:
        missing.append(
            "training data: -- --data-path PREFIX and the flags of its tokenizer, or -- --mock-data"
        )
    if missing:
        raise ConfigError(
            f"--output writes a job for {cluster.name}, which needs {'; and '.join(missing)}. Or "
            f"fill in {file}, which gives them to all jobs"
        )
    flags: list[str] = []
    if not data_flags:
        flags += ["--data-path", data]
        if variables["SITE_VOCAB"] and "tokenizer_type" not in config.explicit:
            flags += ["--tokenizer-type", "GPT2BPETokenizer"]
            flags += ["--vocab-file", variables["SITE_VOCAB"]]
            flags += ["--merge-file", variables["SITE_MERGES"]]
    partition = variables["SBATCH_PARTITION"]
    qos = variables["SBATCH_QOS"]
    cluster.wall_limit_hours(max(whole) // cluster.devices_per_node, partition or None, qos or None)
    python = Path(variables["SITE_VENV"], "bin", "python")
    return JobSite(account, partition, qos, tuple(flags), python)


def _variables(file: Path, account: str | None) -> dict[str, str]:
    """Return the variables that a site.env sets, or else those of this process."""
    environ = os.environ | ({"SBATCH_ACCOUNT": account} if account else {})
    values = [environ.get(name, "") for name in _VARIABLES]
    if file.is_file():
        show = 'source "$0" >&2 && for name; do printf "%s\\0" "${!name:-}"; done'
        command = ["bash", "-c", show, str(file), *_VARIABLES]
        try:
            done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(f"{file} cannot be read by bash: {error}") from error
        if done.returncode == 0:  # otherwise it has no account
            values = done.stdout.split("\0")[:-1]
    return dict(zip(_VARIABLES, values, strict=True))


def _site_script(
    flags: Sequence[str],
    config: Config,
    preset: str | None,
    cluster: Cluster,
    notes: Sequence[str],
    site: JobSite,
) -> str:
    """Return a batch script that uses examples/frontier/job.sh, with these flags of `config`."""
    nodes = config.parallel.world_size // cluster.devices_per_node
    name = preset or "gpt"
    model = preset or f"{config.model.num_layers} layers of width {config.model.hidden_size}"
    limit_hours = cluster.wall_limit_hours(nodes, site.partition or None, site.qos or None)
    hours, minutes = divmod(math.floor(60 * limit_hours), 60)
    comments = "".join(f"# {note}\n" for note in notes)
    queues = {"-p": site.partition, "-q": site.qos}
    lines = [f"{flag} {queue}" for flag, queue in queues.items() if queue]
    more = "".join(f"#SBATCH {line}\n" for line in (*lines, *_SITES[cluster.name]))
    file = f"examples/{cluster.name}/site.env"
    arguments = "\n".join(f"    {line}" for line in _by_flag(flags))
    return f"""\
#!/bin/bash
# {model} on {nodes} node(s) of {cluster.name}, as chosen by tools/plan.py:
#     python tools/preflight.py check FOLDER/job.sbatch
#     sbatch FOLDER/job.sbatch [flags of pretrain_gpt.py, which override these]
{comments}#SBATCH -J {name}
#SBATCH -A {site.account}
#SBATCH -N {nodes}
#SBATCH -t {hours:02d}:{minutes:02d}:00
{more}#SBATCH --ntasks-per-node={cluster.devices_per_node}
#SBATCH -c {cluster.cpus_per_task}
#SBATCH --signal=USR1@600
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH -o %x-%j.out
set -uo pipefail
MODEL={name}
PRESET='' # all settings are given below
FLAGS=(
{arguments}
)
for root in "${{MEGATRON_ROOT:-}}" "${{SLURM_SUBMIT_DIR:-}}" {shlex.quote(str(_ROOT))}; do
    [[ ! -f $root/examples/frontier/job.sh ]] || break
done
export SBATCH_ACCOUNT=${{SBATCH_ACCOUNT:-{site.account}}} SITE_FILE=${{SITE_FILE:-$root/{file}}}
# shellcheck source=/dev/null
source "$root/examples/frontier/job.sh" || {{ echo "export MEGATRON_ROOT, the folder of the code" >&2 && exit 2; }}
train_job "${{FLAGS[@]}}" "$@"
"""


def _by_flag(words: Sequence[str]) -> list[str]:
    """Return one line per flag, including its values."""
    lines: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return [shlex.join(line) for line in lines]


def write_script(
    folder: Path,
    config: Config,
    preset: str | None,
    cluster: Cluster,
    tokens: float | None,
    notes: list[str],
    site: JobSite | None,
) -> Path:
    """Write job.sbatch for a site or, without one and for a part of a node, command.sh.

    If no flag gives the length of the run, it is `tokens` or, if this is None, a fixed number of
    tokens per parameter. If no flag gives the learning rate, it is GPT-3's for the model's size.
    Both choices are added to `notes`. Raises ConfigError if the file cannot be written.
    """
    flags = [word for word in command_line_of(config) if not word.startswith("--world-size")]
    flags += ["--distributed-backend", "gloo"] if cluster.device_type == "cpu" else []
    devices = config.parallel.world_size
    each = cluster.devices_per_node
    parameters = cached_sizes(config).parameters()
    lengths = {"train_iters", "train_samples", "train_tokens"}
    has_length = bool(lengths & config.explicit.keys())
    if tokens is None and not has_length:
        tokens = _TOKENS_FOR_EACH_PARAMETER * parameters
        notes.append(
            f"--train-tokens is {_TOKENS_FOR_EACH_PARAMETER} for each parameter, since no length "
            "was given; the tables have days and node-hours for 1e9 tokens: choose your own"
        )
    if tokens is not None and not has_length:
        flags += ["--train-tokens", str(int(tokens))]
    if "lr" not in config.explicit:
        rate = next(rate for most, rate in _RATES if parameters <= most)
        flags += ["--lr", f"{rate:g}"]
        notes.append(
            f"--lr {rate:g} is GPT-3's for this size, since none was given: choose your own"
        )
    if site is not None and devices % each == 0:
        flags += site.flags
        text = _site_script(flags, config, preset, cluster, notes, site)
        return write_text(folder / "job.sbatch", text, choose=CHOOSE)
    if not {*DATA, "mock_data"} & config.explicit.keys():
        notes.append("Give the training data as arguments: --data-path PREFIX, or --mock-data")
    if devices % each == 0:  # the placement of ranks depends on the node's devices and cores
        flags += ["--cluster", _name(cluster)]
    command = f'pretrain_gpt.py {shlex.join(flags)} "$@"'
    if devices > each:
        lines = [*_on_nodes(cluster, devices // each, notes), f'"${{start[@]}}" {command}']
    else:
        comments = (f"# {note}" for note in notes)
        lines = ["#!/bin/bash", *comments, f"torchrun --nproc-per-node={devices} {command}"]
    return write_text(folder / "command.sh", "\n".join(lines) + "\n", choose=CHOOSE)


def _name(cluster: Cluster) -> str:
    """Return the name of a machine of this package, or else the path of its file."""
    path = Path(cluster.path)
    return path.stem if path.parent == CLUSTERS else cluster.path


def _on_nodes(cluster: Cluster, nodes: int, notes: Sequence[str]) -> list[str]:
    """Return the first lines of a script for several nodes, with or without Slurm."""
    each = cluster.devices_per_node
    last = nodes - 1
    comments = (
        *notes,
        f"With Slurm run this once, in an allocation of {nodes} nodes or on a login node.",
        "Without Slurm run it on each node, with the node's number and the name of node 0:",
        f"    NODE_RANK=0..{last} MASTER_ADDR=HOST [MASTER_PORT=PORT] bash command.sh",
    )
    number = f"${{NODE_RANK:?set it to the number of this node, 0 to {last}}}"
    host = "${MASTER_ADDR:?set it to the name or address of node 0}"
    return [
        "#!/bin/bash",
        *(f"# {comment}" for comment in comments),
        f"start=(srun -N {nodes} -n {nodes * each} --ntasks-per-node={each} "
        f"-c {cluster.cpus_per_task} python)",
        "if [[ -n ${NODE_RANK:-} ]] || ! command -v srun >/dev/null; then",
        f'    start=(torchrun --nnodes={nodes} --nproc-per-node={each} "--node-rank={number}"',
        f'        "--master-addr={host}" "--master-port=${{MASTER_PORT:-29500}}")',
        "fi",
    ]
