"""What Slurm and the machine make of the request: nodes, wall time, tasks, cores, devices, signal, requeueing."""
from __future__ import annotations

import re
from collections.abc import Iterator

from megatron.config.duration import duration_s, show_duration
from megatron.errors import ConfigError
from megatron.parallel.environment import whole
from megatron.preflight.check.findings import Finding, Place, error, note, warning
from megatron.preflight.check.slurm_options import Given, count
from megatron.preflight.check.subject import Subject

_UNLIMITED = ("UNLIMITED", "INFINITE", "0")
_HANDLED = {"USR1": "USR1", "SIGUSR1": "USR1", "10": "USR1", "TERM": "TERM", "SIGTERM": "TERM", "15": "TERM"}


def wall_time_s(subject: Subject) -> float | None:
    """The time limit of the job; None where it has none or its default."""
    given = subject.job.options.get("time")
    return None if given is None or given.value in _UNLIMITED else duration_s(given.value)


def check_nodes(s: Subject) -> Iterator[Finding]:
    """Number of nodes and wall time against what the machine gives."""
    if not s.is_batch:
        return
    place = s.place_in_job("nodes")
    if "nodes" not in s.job.options:
        yield warning("nodes", "no -N: Slurm gives as few nodes as hold the tasks, one by default. Add #SBATCH "
            "-N N", place)
    given = s.job.options.get("time")
    seconds = wall_time_s(s)
    if given is None:
        yield warning("wall time", "no -t: the partition's default holds. Add #SBATCH -t HH:MM:SS", s.head)
    elif seconds is None and given.value not in _UNLIMITED:
        yield error("wall time", f"{given.written} is no time: give minutes, HH:MM:SS or "
            f"D-HH:MM:SS", s.place_in_job("time"))
    if s.cluster is None:
        return
    try:
        hours = s.cluster.wall_limit_hours(s.nodes, s.job.value("partition"), s.job.value("qos"))
    except ConfigError as problem:
        named = [name for name in ("partition", "qos") if f"{name} " in str(problem) and name in s.job.options]
        yield error("nodes", str(problem), s.place_in_job(named[0] if named else "nodes"))
        return
    if seconds is not None and seconds > 3600 * hours:
        more = ", ".join(f"{low} to {high} nodes get {h:g} h" for low, high, h in s.cluster.wall_limits if h > hours)
        yield error(
            "wall time",
            f"{given.written if given else ''}: {s.nodes} nodes may run for {hours:g} h on {s.cluster.name}"
            f"{f' ({more})' if more else ''}: ask for at most {show_duration(3600 * hours)}",
            s.place_in_job("time"),
        )


def check_account(s: Subject) -> Iterator[Finding]:
    """On a machine with a queue of its own, the account must be there."""
    if s.is_batch and s.cluster is not None and "account" not in s.job.options:
        yield warning("account", "no -A and no SBATCH_ACCOUNT: Slurm takes your default account, or refuses", s.head)


def check_tasks(s: Subject) -> Iterator[Finding]:
    """Tasks of the srun against nodes, devices, and --ntasks-per-node."""
    sizes, place = s.training.sizes, s.training.place
    if s.training.srun is None and s.is_batch:
        many = f" on the job's {s.nodes} nodes" if s.nodes > 1 else ""
        yield (error if s.nodes > 1 else warning)(
            "tasks", f"{s.training.launcher} is started without srun{many}: it runs on the first node alone. "
            f"Start it with "
            "srun -N NODES -n TASKS", place,
        )  # fmt: skip
    if s.training.launcher == "torchrun" and s.slingshot:
        yield warning(
            "tasks", "torchrun: all its ranks share the cores of one task. Start one task a device with srun", place
        )
    if sizes.nodes > s.nodes and s.is_batch:
        yield error(
            "tasks", f"srun asks for {sizes.nodes} nodes, the job has {s.nodes}: raise #SBATCH -N or lower srun "
            f"-N", place
        )
    elif sizes.nodes < s.nodes and s.is_batch and s.training.srun is not None:
        yield note("tasks", f"{s.nodes - sizes.nodes} of the job's {s.nodes} nodes are spares or unused", place)
    given = s.option("ntasks-per-node")
    if s.training.launcher == "torchrun":
        given = None
    per_node = count(given.value) if given else None
    if per_node and sizes.tasks != sizes.nodes * per_node and "ntasks-per-node" in s.training.options:
        yield error(
            "tasks",
            f"{given.written if given else ''} x {sizes.nodes} nodes = {sizes.nodes * per_node} tasks, but the "
            f"step has "
            f"{sizes.tasks}: srun ignores --ntasks-per-node where -n (or the job's number of tasks) says "
            f"otherwise. Give "
            f"-n {sizes.nodes * per_node}",
            place,
        )  # fmt: skip
    elif sizes.tasks % sizes.nodes:
        yield error(
            "tasks", f"{sizes.tasks} tasks do not spread evenly over {sizes.nodes} nodes: give a multiple of "
            f"the nodes", place
        )
    if s.cluster is None or not s.on_gpus:
        return
    devices = s.cluster.devices_per_node
    if sizes.per_node > devices:
        yield error(
            "tasks", f"{sizes.per_node} tasks on each node, which has {devices} devices: give "
            f"--ntasks-per-node={devices} "
            f"and -n {devices * sizes.nodes}", place,
        )  # fmt: skip
    elif sizes.per_node < devices:
        yield warning(
            "tasks", f"{sizes.per_node} tasks on each node, which has {devices} devices: "
            f"{devices - sizes.per_node} stay "
            f"idle. Give -n {devices * sizes.nodes} --ntasks-per-node={devices}", place,
        )  # fmt: skip


def check_cores(s: Subject) -> Iterator[Finding]:
    """-c against the cores that a node has for tasks."""
    if s.training.srun is None:
        return
    own = s.training.options.get("cpus-per-task")
    value = own.value if own else s.training.srun.environ.get("SRUN_CPUS_PER_TASK")
    cores = count(value) if value else None
    each = s.cluster.cpus_per_task if s.cluster else None
    if cores is None:
        want = f" -c {each}" if each else " -c"
        yield warning(
            "cores", f"srun has no -c: it does not take the job's (Slurm 22.05 and later), so a task gets one "
            f"core. Give"
            f" srun{want}, or export SRUN_CPUS_PER_TASK", s.training.place,
        )  # fmt: skip
        return
    if s.cluster is None or each is None:
        return
    free = s.cluster.devices_per_node * each
    if cores * s.training.sizes.per_node > free:
        yield error(
            "cores", f"-c {cores} x {s.training.sizes.per_node} tasks = {cores * s.training.sizes.per_node} "
            f"cores, but a node "
            f"of {s.cluster.name} has {free} for tasks ({each} for each device): give -c {each}", s.training.place,
        )  # fmt: skip
    elif cores < each and s.training.sizes.per_node == s.cluster.devices_per_node:
        yield warning(
            "cores", f"-c {cores} leaves {free - cores * s.training.sizes.per_node} of {free} cores idle: give "
            f"-c {each}; "
            "with fewer, tasks are not next to the device that --gpu-bind=closest means for them", s.training.place,
        )  # fmt: skip


def devices_seen(s: Subject) -> int | None:
    """How many devices a task sees; None where nothing says it, 0 where none was asked for."""
    def number(name: str) -> int | None:
        given = s.option(name)
        return count(given.value) if given else None

    bind = s.option("gpu-bind")
    bound = bind is not None and bind.value.removeprefix("verbose,") not in ("", "none")
    each, on_node = number("gpus-per-task"), number("gpus-per-node")
    if each is not None:
        unbound = bind is not None and bind.value.endswith("none")
        return each * s.training.sizes.per_node if unbound else each
    if on_node is None and (gres := s.option("gres")) is not None:
        match = re.search(r"gpu(?::[A-Za-z]\w*)?(?::(\d+))?", gres.value)
        on_node = int(match[1] or 1) if match else None
    if on_node is None and (total := number("gpus")) is not None:
        on_node = total // max(1, s.training.sizes.nodes)
    if on_node is None:
        return 0
    return 1 if bound and on_node >= s.training.sizes.per_node else on_node


def check_devices(s: Subject) -> Iterator[Finding]:
    """Which devices tasks see."""
    if not s.on_gpus or s.training.srun is None:
        return
    sizes, place = s.training.sizes, s.place_of("gpus-per-task", "gpus-per-node", "gpus", "gres")
    seen = devices_seen(s)
    if seen == 0:
        yield error(
            "devices", "neither srun nor the job asks for GPUs, so tasks see none: give srun --gpus-per-task=1 "
            "--gpu-bind=closest (or --distributed-backend gloo for a run on CPUs)", s.training.place,
        )  # fmt: skip
        return
    each = s.option("gpus-per-task")
    have = s.cluster.devices_per_node if s.cluster else None
    number = count(each.value) if each else None
    if number and have and number * sizes.per_node > have:
        yield error(
            "devices", f"{each.written if each else ''} x {sizes.per_node} tasks = {number * sizes.per_node} "
            f"devices, but a "
            f"node has {have}: give --gpus-per-task=1", place,
        )  # fmt: skip
    elif number and number > 1:
        yield warning("devices", f"a rank uses one device, and {number} are given to each: --gpus-per-task=1", place)
    elif not number and seen is not None and 1 < seen < sizes.per_node:
        yield error("devices", f"{sizes.per_node} tasks of a node share {seen} devices: ask for "
            f"{sizes.per_node}", place)
    if s.cluster and s.option("gpu-bind") is None:
        yield note(
            "devices", "without --gpu-bind=closest Slurm may give a task a device that is far from its cores", place
        )
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        value = s.training.environ.get(name, "")
        if "," in value and number == 1:
            yield warning(
                "devices", f"{name}={value} is exported, but each task is given one device (number 0 of its own): "
                "remove it", s.sources.find(name) or place,
            )  # fmt: skip


def signal_of(given: Given) -> tuple[str, str, int]:
    """(letters before the colon, signal, seconds) of --signal."""
    before, colon, rest = given.value.rpartition(":")
    name, _, seconds = rest.partition("@")
    known = whole(seconds)
    return before if colon else "", name, 60 if known is None else known


def check_signal(s: Subject, save_s: float | None) -> Iterator[Finding]:
    """--signal against what a save takes and who gets it. `save_s`: seconds of a save as far as can be told."""
    if not s.is_batch or s.config is None or not s.config.checkpoint.save:
        return
    given = s.job.options.get("signal")
    if given is None:
        if s.config.training.walltime != "none":
            yield warning(
                "signal", "no --signal: the run asks squeue when its time ends, and nothing else warns it. Add #SBATCH "
                "--signal=USR1@300", s.head,
            )  # fmt: skip
        else:
            yield error("signal", "no --signal and --walltime none: the end of the time loses all since the last save",
                        s.head)  # fmt: skip
        return
    who, name, seconds = signal_of(given)
    place = s.place_in_job("signal")
    handled = _HANDLED.get(name.upper())
    if handled is None:
        yield error("signal", f"{given.written}: {name} is not heeded and ends the processes: use USR1", place)
    elif not s.config.training.exit_signal_handler:
        yield error(
            "signal", f"{given.written} ends the processes at once, because --no-exit-signal-handler is given",
            s.flag("--no-exit-signal-handler"),
        )  # fmt: skip
    elif "B" in who and not _forwards(s, handled):
        yield error(
            "signal", f"{given.written} reaches only the batch script, which has no trap for {handled}: it ends "
            f"the script. "
            f"Drop the B:, or trap {handled} and send it on to srun", place,
        )  # fmt: skip
    if save_s is not None and seconds < 1.5 * save_s + 30:
        yield warning(
            "signal", f"{given.written} leaves {seconds} s for the step under way and a save of about {save_s:.0f} s "
            f"(assumed): give @{_rounded(1.5 * save_s + 60)}", place,
        )  # fmt: skip
    limit = wall_time_s(s)
    if limit is not None and seconds >= limit:
        yield error("signal", f"{given.written} comes before the job's {show_duration(limit)} have begun", place)


def _rounded(seconds: float) -> int:
    return int(-(-seconds // 60) * 60)


def _forwards(s: Subject, name: str) -> bool:
    traps = [event.words for event in s.followed.events if event.kind == "trap"]
    return any(len(words) > 1 and words[0] not in ("", "-") and any(_HANDLED.get(w.upper()) == name for w in words[1:])
               for words in traps)  # fmt: skip


def check_requeue(s: Subject) -> Iterator[Finding]:
    """What happens when a node fails or the time ends."""
    if not s.is_batch or s.config is None:
        return
    wants, options = s.config.training.requeue, s.job.options
    if wants and "no-requeue" in options:
        yield error(
            "requeue", f"{options['no-requeue'].written} forbids what --requeue of the training asks for: remove one",
            s.place_in_job("no-requeue"),
        )  # fmt: skip
    elif "requeue" not in options and "no-requeue" not in options:
        why = "the training asks to be requeued" if wants else "a job that loses a node is not started again"
        yield warning("requeue", f"no --requeue: {why}, which the site's default may not allow. Add #SBATCH --requeue",
                      s.head)  # fmt: skip
    if "requeue" in options and options.get("open-mode", Given("truncate", "")).value[:1] != "a":
        yield warning(
            "requeue", "--requeue without --open-mode=append: the log of the first start is lost with the second. Add "
            "#SBATCH --open-mode=append", s.place_in_job("open-mode" if "open-mode" in options else "requeue"),
        )  # fmt: skip


def check_script(s: Subject, late: list[int], text: str) -> Iterator[Finding]:
    """The script as Slurm reads it."""
    for line in late:
        yield warning("script", "this #SBATCH line stands after the first command: Slurm does not read it",
                      Place(s.script, line))  # fmt: skip
    first = text.split("\n", 1)[0]
    if not first.startswith("#!"):
        yield error("script", "the first line is no interpreter: sbatch refuses it. Add "
            "#!/bin/bash", Place(s.script, 1))
    if s.cluster and s.cluster.nvme_constraint and any(e.kind == "sbcast" for e in s.followed.events):
        given = s.job.options.get("constraint")
        if given is None or s.cluster.nvme_constraint not in given.value:
            yield error(
                "script", f"sbcast to {s.cluster.nvme_path} needs nodes with that disk: add #SBATCH -C "
                f"{s.cluster.nvme_constraint}", s.place_in_job("constraint"),
            )  # fmt: skip
