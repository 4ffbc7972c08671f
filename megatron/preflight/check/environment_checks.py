"""The environment in which ranks start: addresses, network, modules, the programs themselves."""
from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from megatron.parallel.environment import whole
from megatron.preflight import network
from megatron.preflight.check.findings import Finding, Place, error, note, warning
from megatron.preflight.check.follow import SPOOL
from megatron.preflight.check.subject import Subject

_OTHER_MODULE_WORDS = ("unload", "list", "purge", "use", "rm", "del", "avail", "show", "reset")
_PLUGIN = re.compile(r"rccl-net-plugin|aws-ofi-(rccl|nccl)")
_ROCM = re.compile(r"(^|/)(rocm|amd(-mixed)?)(/|$)")


def check_master(s: Subject) -> Iterator[Finding]:
    """MASTER_ADDR: the host of rank 0, not the one that the job was submitted from."""
    name, environ = "MASTER_ADDR", s.training.environ
    address = environ.get(name, "")
    words = s.training.arguments
    for at, word in enumerate(words):
        if word.startswith("--master-addr"):
            address = word.partition("=")[2] or (words[at + 1] if at + 1 < len(words) else "")
            name = "--master-addr"
    if not address:
        return
    place = s.sources.find(name) or s.training.place
    submit = environ.get("SLURM_SUBMIT_HOST", "")
    if submit and address in (submit, submit.split(".")[0]) and address != environ.get("SLURMD_NODENAME"):
        yield error(
            "address", f"{name}={address} is the host that the job is submitted from (SLURM_SUBMIT_HOST), where "
            f"no rank "
            "runs: take the first node of SLURM_JOB_NODELIST, or leave it out", place,
        )  # fmt: skip
    elif address in ("localhost", "127.0.0.1", "::1") and s.training.sizes.nodes > 1:
        yield error(
            "address", f"{name}={address} is another host on each of {s.training.sizes.nodes} nodes: take the "
            f"first node "
            "of SLURM_JOB_NODELIST, or leave it out", place,
        )  # fmt: skip


def check_ranks(s: Subject) -> Iterator[Finding]:
    """RANK and WORLD_SIZE, which win over Slurm's own variables."""
    srun, environ, tasks = s.training.srun, s.training.environ, s.training.sizes.tasks
    if srun is not None and srun.environ.get("RANK") and tasks > 1 and environ.get("RANK") == srun.environ["RANK"]:
        yield error(
            "ranks", f"RANK={srun.environ['RANK']} is exported before srun: all {tasks} tasks would have it. "
            f"Set it inside "
            "of the task (RANK=$SLURM_PROCID), or leave it out", s.sources.find("RANK") or s.training.place,
        )  # fmt: skip
    size = whole(environ.get("WORLD_SIZE", ""))
    if size not in (None, tasks) and s.training.launcher.startswith("python"):
        yield error(
            "ranks", f"WORLD_SIZE={size}, but {tasks} tasks are started: set it to $SLURM_NTASKS inside of the "
            f"task, or "
            "leave it out", s.sources.find("WORLD_SIZE") or s.training.place,
        )  # fmt: skip


def check_network(s: Subject) -> Iterator[Finding]:
    """Variables of the network plugin, its version, and what Slurm is asked for."""
    if not s.slingshot or not s.on_gpus or s.cluster is None:
        return
    environ = s.training.environ
    given = [one.value for one in (s.job.options.get("network"), s.training.options.get("network")) if one is not None]
    asked = ",".join([*given, environ.get("SLURM_NETWORK", "")]).split(",")  # Slurm adds them up
    if s.training.sizes.nodes == 1:
        if environ.get("NCCL_NET") == "OFI":
            yield warning("network", "NCCL_NET=OFI on one node: the plugin does not start there. Use Socket",
                          s.flag("NCCL_NET"))  # fmt: skip
        if s.training.srun is not None and "single_node_vni" not in asked:
            yield warning("network", "a step on one node gets no part of Slingshot, without which RCCL's plugin cannot "
                          "start: give srun --network=single_node_vni", s.training.place)  # fmt: skip
        return
    yield from _check_variables(s, network.works_on(s.cluster))
    modules = [word for event in s.followed.events if event.kind == "module" for word in event.words]
    paths = [environ.get(name, "") for name in ("LOADEDMODULES", "LD_LIBRARY_PATH", "NCCL_NET_PLUGIN")]
    for text in network.known_hangs(network.versions_in([*paths, *modules]), environ):
        yield warning("network", text, s.training.place)
    if s.is_batch:
        alt = environ.get("FI_CXI_RDZV_PROTO") == "alt_read"
        if alt != ("disable_rdzv_get" in asked):
            have, lacks = ("FI_CXI_RDZV_PROTO=alt_read", "#SBATCH --network=disable_rdzv_get")[:: 1 if alt else -1]
            yield warning("network", f"{have} goes with {lacks}, which is absent: give both or "
                f"none", s.place_in_job("network"))


def _check_variables(s: Subject, works: Mapping[str, tuple[str, ...]]) -> Iterator[Finding]:
    """`works`: values that are known to work on this machine (network.works_on)."""
    environ = s.training.environ
    missing = [name for name, values in works.items() if values and not environ.get(name)]
    if missing:
        listed = " ".join(f"{name}={works[name][0]}" for name in missing)
        worst = " Without NCCL_NET, RCCL takes TCP where the plugin is not loaded, and says nothing." if (
            "NCCL_NET" in missing) else ""  # fmt: skip
        yield warning("network", f"not set: {listed}.{worst} examples/frontier/env.sh sets them", s.training.place)
    for name in network.STRICT:
        value, known = environ.get(name), works[name]
        if value == "memhooks":
            yield error("network", f"{name}=memhooks deadlocks with RCCL: use {known[0]}", s.flag(name))
        elif value and value not in known:
            yield warning("network", f"{name}={value}: known to work is {' or '.join(known)}", s.flag(name))
    level = environ.get("NCCL_NET_GDR_LEVEL")
    if level is not None:
        found, advice = (note, "if start-up hangs, unset it") if works["NCCL_NET_GDR_LEVEL"] else (warning, "unset it")
        yield found("network", f"NCCL_NET_GDR_LEVEL={level}: {network.GDR_LEVEL}: {advice}",
                    s.flag("NCCL_NET_GDR_LEVEL"))  # fmt: skip


def check_modules(s: Subject) -> Iterator[Finding]:
    """rccl-net-plugin, after rocm."""
    if not s.slingshot or not s.on_gpus:
        return
    loaded = [
        (name, Place(event.file, event.line)) for event in s.followed.events
        if event.kind == "module" and event.words and event.words[0] not in _OTHER_MODULE_WORDS
        for name in event.words if not name.startswith("-") and name not in ("load", "add", "swap", "switch")
    ]  # fmt: skip
    plugins = [i for i, (name, _) in enumerate(loaded) if _PLUGIN.search(name)]
    rocm = [i for i, (name, _) in enumerate(loaded) if _ROCM.search(name)]
    by_path = _PLUGIN.search(s.training.environ.get("LD_LIBRARY_PATH", ""))
    already = _PLUGIN.search(s.training.environ.get("LOADEDMODULES", ""))
    if plugins and rocm and plugins[0] < rocm[-1]:
        yield error(
            "modules", f"{loaded[plugins[0]][0]} is loaded before {loaded[rocm[-1]][0]}: it takes its build "
            f"from the ROCm "
            "that is loaded then. Load it after", loaded[plugins[0]][1],
        )  # fmt: skip
    elif not plugins and not by_path and not already and s.training.sizes.nodes > 1:
        yield warning(
            "modules", "no network plugin: without module rccl-net-plugin (or a plugin on LD_LIBRARY_PATH) RCCL "
            "runs over "
            "TCP. Add module load rccl-net-plugin, after rocm", loaded[-1][1] if loaded else s.training.place,
        )  # fmt: skip


def check_programs(s: Subject) -> Iterator[Finding]:
    """Interpreter and program, as far as the login node has them."""
    made = str(s.followed.scratch)
    for what, word in (("interpreter", s.training.event.words[0]), ("program", s.training.program)):
        if what == "interpreter" and "/" not in word:
            continue
        path = s.training.real_path(word)
        if s.is_local(path) or path.startswith(made) or os.path.exists(path):
            continue
        yield error("programs", f"the {what} {path} is not there", s.training.place)
    if os.path.basename(s.training.program) != "pretrain_gpt.py":
        yield note(
            "programs", f"{os.path.basename(s.training.program)} is checked as pretrain_gpt.py of this "
            f"project", s.training.place
        )


def check_following(s: Subject) -> Iterator[Finding]:
    """What could not be followed, and files that the script misses."""
    for event in s.followed.events:
        place = Place(event.file, event.line)
        if event.kind == "missing":
            path = event.words[0] if event.words else ""
            if os.path.dirname(SPOOL) in path:
                yield error(
                    "script", f"{path}: Slurm runs a copy of the script from its spool folder, so what lies beside the "
                    "script is not beside the copy: use SLURM_SUBMIT_DIR, or a path", place,
                )  # fmt: skip
            elif not s.is_local(path):
                yield warning("script", f"{path or 'a file'} is read here, and is not there", place)
        elif event.kind == "unfollowed":
            yield warning("script", f"not followed, because it could change something: "
                f"{' '.join(event.words)[:200]}", place)
        elif event.kind == "endless":
            yield error("script", "the script does not come to an end: 200,000 commands were followed", place)
