"""One process's part in a measurement: it does what rank 0 asks, and rank 0 itself conducts as well."""
from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.errors import LaunchError, MegatronError
from megatron.parallel.launch import Launch, select_device
from megatron.parallel.nodelist import iterate_hosts
from megatron.parallel.placing import Placing
from megatron.parallel.report import bounded, device_name
from megatron.parallel.topology import Layout
from megatron.preflight.measure import device, facts, links
from megatron.preflight.measure.board import (
    Conductor,
    StoreLostError,
    Worker,
    connect_store,
    job_part,
    serve_store,
)
from megatron.preflight.measure.conduct import Measurement, Settings, connect_limit_s
from megatron.preflight.measure.expected import slurm_places
from megatron.preflight.measure.findings import Results
from megatron.preflight.measure.trial_groups import group_of

_FACTS_S = 6.0  # a node's facts; a disk that hangs must not keep its rank


class Tasks:
    """What a process can be asked for; each answer is a dictionary for JSON."""

    def __init__(self, launch: Launch, settings: Settings, port: int) -> None:
        self._launch = launch
        self._settings = settings
        self._port = port
        self._device: torch.device | None = None
        self._groups: links.Groups | None = None
        self._log: Path | None = None
        self._blocked = False

    def do(self, order: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = getattr(self, order["task"])(order)
        return found

    def hello(self, order: Mapping[str, Any]) -> dict[str, Any]:
        launch = self._launch
        return {"host": launch.node, "local_rank": launch.local_rank, "pid": os.getpid(), "shown": device.shown()}

    def device(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's device and core; with "folders", the node too."""
        found: dict[str, Any] = {}
        if "folders" in order:
            try:
                clock = order["clock"]
                found["node"] = bounded(lambda: facts.node_facts(order["folders"], clock), _FACTS_S, "no facts came")
            except (RuntimeError, LaunchError, OSError, ValueError) as error:
                found["node"] = {"error": str(error)}
        limit_s = max(order["limit_s"] - (_FACTS_S if "folders" in order else 0.0), 2.0)
        try:
            self._device = bounded(self._select, limit_s, "torch did not find out which devices there are")
        except (RuntimeError, LaunchError) as error:
            return {**found, "error": str(error).splitlines()[0]}
        found |= {"kind": self._device.type, "device": self._number()}
        return {**found, **device.measure_device(self._device, order["host_s"], limit_s)}

    def _select(self) -> torch.device:
        cluster = self._settings.cluster
        placing = Placing(local_order=cluster.local_order) if cluster else None
        return select_device(self._launch, self._settings.backend, placing)

    def _number(self) -> str:
        """The device as its node numbers it, where only this one is shown; else as torch numbers it."""
        assert self._device is not None
        from megatron.parallel.placing import visible_devices

        numbers = visible_devices(os.environ)
        if numbers is not None and len(numbers) == 1:
            return str(numbers[0])
        return device_name(self._device) if self._device.type == "cuda" else ""

    def group(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Bandwidth of a group that this rank is a member of."""
        members, whole_node = list(order["members"]), order["whole_node"]
        found = self._in_group(lambda groups: groups.measure(order["name"], members, whole_node, order["limit_s"]))
        return found if whole_node or "blocked_before" in found else {**found, **links.network_of(self._log)}

    def reduce(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Whether a group of a layout of `ranks` connects: the one of this kind that this rank is in."""
        ranks = [int(rank) for rank in iterate_hosts(f"[{order['ranks'].replace(' ', '')}]")]
        places = group_of(Layout(*order["layout"]), order["kind"], ranks.index(self._launch.rank))
        members = [ranks[place] for place in places]
        name = f"{order['kind']}/{members[0]}"
        return self._in_group(lambda groups: groups.reduce(name, members, order["limit_s"]))

    def _in_group(self, work: Callable[[links.Groups], dict[str, Any]]) -> dict[str, Any]:
        assert self._device is not None, "a group is asked of ranks whose device is known"
        if self._blocked:
            return {"error": "an earlier message did not end", "blocked_before": True}
        if self._groups is None:
            one_node = self._launch.on_one_node
            self._log = links.prepare_environment(one_node, self._device)
            self._groups = links.Groups(self._connect, self._launch.rank, self._device)
        found = work(self._groups)
        self._blocked = found.pop("blocked", False)
        return found

    def _connect(self) -> Any:
        return job_part(connect_store(self._launch, self._port, self._settings.seconds), self._launch)

    def look(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """What has become of other processes of this node; those that never came are looked for."""
        states = {}
        for rank, process in order["processes"]:
            process = facts.find_process(rank) if process is None else process
            states[str(rank)] = facts.process_state(process)
        return {"states": states}

    def end(self, order: Mapping[str, Any]) -> dict[str, Any]:
        if self._log is not None:
            self._log.unlink(missing_ok=True)
        return {}


def work(worker: Worker, tasks: Tasks, limit_s: float) -> None:
    """Do what is asked until rank 0 says that it is over. Raises StoreLostError when rank 0 is gone."""
    while True:
        order = worker.next_order(limit_s)
        try:
            answer = tasks.do(order)
        except (RuntimeError, MegatronError, OSError, ValueError) as error:
            answer = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
        worker.answer(answer)
        if order["task"] == "end":
            return


def measure(
    launch: Launch, settings: Settings, say: Callable[[str], None] = print, make_tasks: Callable[..., Tasks] = Tasks
) -> Results | None:
    """Take part in a measurement of all ranks. Rank 0 gets the results, the others None.

    Raises StoreLostError within about `settings.seconds` when rank 0 cannot be reached, or stops; LaunchError for
    launcher variables that contradict each other and for a port that is taken.
    """
    # A meeting that is prolonged, all steps, the ends of their limits, and a group that hangs.
    total_s = 2 * settings.seconds + 20.0 + connect_limit_s(launch.world_size)
    if launch.rank:
        store = job_part(connect_store(launch, launch.master_port, settings.seconds), launch)
        tasks = make_tasks(launch, settings, launch.master_port)
        work(Worker(store, launch.rank, launch.world_size), tasks, total_s)
        return None
    nodes = slurm_places(os.environ, launch.world_size)
    server = serve_store(launch, settings.seconds)
    port = launch.master_port if launch.store_served else server.port
    own = job_part(connect_store(launch, port, settings.seconds), launch)
    tasks = make_tasks(launch, settings, port)

    def body() -> None:
        try:
            work(Worker(own, 0, launch.world_size), tasks, total_s)
        except StoreLostError as error:
            print(f"rank 0: {error}", file=sys.stderr)

    thread = threading.Thread(target=body, name="rank 0's own part", daemon=True)
    thread.start()
    clock = facts.ClockServer()
    address = (launch.master_addr, clock.port)
    measurement = Measurement(Conductor(job_part(server, launch)), launch, settings, nodes, address, say)
    try:
        return measurement.run()
    finally:
        measurement.end()
        clock.close()
