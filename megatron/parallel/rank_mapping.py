"""Rank mapping: the rank that each process gets on its node, and its device if it sees several.

The mapping changes ranks, never devices: the launcher binds a process to cores, and so to the
device and the network card next to them. The machine's links then determine the best order of a
node's devices (`device_order`), and a process takes the rank that belongs to its device. Processes
first use the launcher's numbers (Launch.task), and one of them computes all ranks (`assign`). A
node's ranks are permuted among its own processes or left as they are: two processes never get the
same rank, even if they report a wrong device.

A process that sees all devices of a node takes the one that belongs to its local rank, which no
other process takes. It does not choose by the cores that it is bound to: several processes may be
bound to cores next to one device (srun -c2 does this). If its cores belong to other devices, a
notice says so.

This module needs no torch.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.errors import LaunchError
from megatron.parallel.environment import natural_number

# The variables of ROCm, HIP and CUDA; HIP reads CUDA's if its own is not set.
VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_SHOWN = 4  # maximum number of nodes listed in a notice


@dataclass(frozen=True)
class RankMapping:
    """An assignment of ranks to devices, in plain numbers taken from the machine's description.

    device_order     a node's devices in the order of its ranks; empty: ranks stay as the launcher
                     numbered them
    local_order      local rank i runs next to device local_order[i]; empty: next to device i
    cores_of_device  first and last core next to each device; empty: unknown
    rank_order       order of the mesh dimensions (Layout.order), compared over all processes
    expert_ranks_per_node  see LayoutSizes, compared as well; None: that of the configuration
    """

    device_order: tuple[int, ...] = ()
    local_order: tuple[int, ...] = ()
    cores_of_device: tuple[tuple[int, int], ...] = ()
    rank_order: str = "tp-dp-pp"
    expert_ranks_per_node: int | None = None

    @property
    def agreed(self) -> str:
        """The part that must be the same in all processes of a job, as text."""
        each = self.expert_ranks_per_node
        return (
            f"rank order {self.rank_order}, device order "
            f"{_listed(self.device_order) or 'as launched'}"
            + (f", expert ranks per node {each}" if each is not None else "")
        )


@dataclass(frozen=True)
class RankPlan:
    """A planned rank mapping.

    mapping   the same in every process of the job
    describe  returns the placement and its cost, in lines for the log; takes a moment
    """

    mapping: RankMapping
    describe: Callable[[], list[str]] = list


class LaunchedProcess(NamedTuple):
    """A process as the launcher started it and as it describes itself to the others.

    node, number, address  its node, its device's number on that node, and the device's PCI address,
                           if known
    near                   the devices next to the cores that it may use
    pid, backend           its process ID, and the backend of torch.distributed
    device, identity       torch's name for its device, and an identifier of it within the node
    alike                  digests of values that must be the same for all, by kind
    """

    node: str
    number: int | None = None
    address: tuple[int, ...] = ()
    near: tuple[int, ...] = ()
    pid: int = 0
    backend: str = ""
    device: str = "cpu"
    identity: str = ""
    alike: Mapping[str, str] = {}

    @property
    def location(self) -> str:
        """Return "node:device".

        The device's number on the node is appended if it differs from torch's.
        """
        other = self.number is not None and self.device != f"cuda:{self.number}"
        return f"{self.node}:{self.device}" + (f" (device {self.number})" if other else "")


@dataclass(frozen=True)
class Assignment:
    """The ranks of all tasks.

    ranks    rank of each task
    devices  number of each task's device on its node; None if it is not known
    notices  for the log: nodes whose ranks stay as launched, and processes far from their devices
    """

    ranks: list[int]
    devices: list[int | None]
    notices: list[str]


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def visible_devices(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return the node's numbers for the devices that this process can see, in its order.

    None if nothing limits them, or if they are not given as numbers (but as "GPU-...", say). ROCm
    filters twice: HIP_VISIBLE_DEVICES (or CUDA_VISIBLE_DEVICES, which HIP also reads) indexes the
    list in ROCR_VISIBLE_DEVICES, up to the first index beyond its end. If already the first index
    is beyond it and both lists are equal, as some launchers write them, they mean devices of the
    node.
    """
    rocr, hip, cuda = (environ.get(name, "").strip() for name in VISIBLE)
    outer = _numbers(rocr)
    inner = _numbers(hip or cuda)
    if not rocr:
        return inner
    if outer is None or not (hip or cuda):
        return outer
    counted = tuple(
        outer[number]
        for number in itertools.takewhile(lambda number: number < len(outer), inner or ())
    )
    return counted or (outer if inner == outer else None)


def _numbers(text: str) -> tuple[int, ...] | None:
    """Return the numbers in a list such as '4' or '0,1,2'.

    None for any other text, or if a number is repeated.
    """
    words = text.split(",")
    numbers = tuple(
        number for word in words if (number := natural_number(word.strip())) is not None
    )
    return numbers if len(set(numbers)) == len(words) else None


def near_index(
    mapping: RankMapping | None, local_rank: int, visible: int, shown: tuple[int, ...] | None
) -> int | None:
    """Return the index, among the visible devices, of the one next to this local rank's cores.

    None if the machine is unknown, if this process does not see all devices of its node, or if
    there are too few for this local rank.

    visible  number of visible devices
    shown    their numbers on the node; see visible_devices
    """
    order = () if mapping is None else mapping.local_order
    if len(order) != visible or local_rank >= visible:
        return None
    number = order[local_rank]
    return number if shown is None else shown.index(number) if number in shown else None


def device_number(
    mapping: RankMapping,
    local_rank: int,
    index: int | None,
    visible: int,
    shown: tuple[int, ...] | None,
) -> int | None:
    """Return the node's number for this process's device, the `index`th of `visible` devices.

    None if it is not known.

    index  None: the process uses no device; the result is the one that its local rank would use
    """
    if shown is not None and len(shown) == 1:
        return shown[0]
    if index is None:
        order = mapping.local_order or tuple(range(len(mapping.device_order)))
        return order[local_rank] if local_rank < len(order) else None
    if shown is not None:
        return shown[index] if len(shown) == visible else None
    return index if visible > 1 else None


def near_devices(mapping: RankMapping, cores: Collection[int]) -> tuple[int, ...]:
    """Return the devices next to these cores of a process; empty if the machine is not known."""
    spans = mapping.cores_of_device
    # The second hardware thread of each core is numbered after the first threads of all cores.
    total = 1 + max((last for _, last in spans), default=0)
    near = {core % total for core in cores}
    return tuple(
        device for device, (low, high) in enumerate(spans) if near & set(range(low, high + 1))
    )


def assign(tasks: Sequence[LaunchedProcess], device_order: Sequence[int]) -> Assignment:
    """Return ranks for all tasks: a permutation.

    A node's ranks follow `device_order` if it has as many tasks as devices, and these tasks are
    numbered consecutively and use different devices. Otherwise, or without a device order, they
    stay as launched.
    """
    ranks = list(range(len(tasks)))
    device_of_task = [task.number for task in tasks]
    nodes = defaultdict[str, list[int]](list)
    unmapped = defaultdict[str, list[str]](list)
    for number, task in enumerate(tasks):
        nodes[task.node].append(number)
    for node, members in nodes.items() if device_order else ():
        devices = _devices([tasks[member] for member in members], members, len(device_order))
        if not isinstance(devices, str):
            for member, device in zip(members, devices, strict=True):
                ranks[member] = members[0] + device_order.index(device)
                device_of_task[member] = device
            continue
        unmapped[devices].append(node)
        known = [device_of_task[member] for member in members if device_of_task[member] is not None]
        # a launcher that counts each task's devices from 0 provides no information
        if len(set(known)) < len(known):
            for member in members:
                device_of_task[member] = None
    notices = []
    for why, names in unmapped.items():
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        notices.append(
            f"ranks of {len(names)} of {len(nodes)} node(s) ({', '.join(names[:_SHOWN])}{more}) "
            f"stay as launched: {why}"
        )
    far = [
        number
        for number, (task, device) in enumerate(zip(tasks, device_of_task, strict=True))
        if task.near and device is not None and device not in task.near
    ]
    if far:
        first = tasks[far[0]]
        notices.append(
            f"{len(far)} of {len(tasks)} processes run on cores that are not next to their device, "
            f"such as task {far[0]} on node {first.node}, which has device {device_of_task[far[0]]} and the "
            f"cores of device {_listed(first.near)}: see --cpu-bind and --gpu-bind of srun"
        )
    return Assignment(ranks, device_of_task, notices)


def ranks_per_node(nodes: Sequence[str]) -> int:
    """Return the number of consecutive ranks on each node, from the node of each rank.

    It is 1 if nodes have different numbers of ranks, or non-consecutive ranks.
    """
    runs = [len(list(run)) for _, run in itertools.groupby(nodes)]
    return runs[0] if len(set(runs)) == 1 and len(runs) == len(set(nodes)) else 1


def _devices(
    tasks: Sequence[LaunchedProcess], members: Sequence[int], count: int
) -> list[int] | str:
    """Return the device of each of a node's tasks, or why ranks cannot follow the devices."""
    if len(tasks) != count:
        return f"{len(tasks)} process(es) on a node of {count} devices"
    if members[-1] - members[0] + 1 != count:
        return (
            "their processes are not numbered one after the other: start them with "
            "--distribution=block"
        )
    known = [task.number for task in tasks if task.number is not None]
    if sorted(known) == list(range(count)):
        return known
    addresses = [tuple(task.address) for task in tasks]
    if all(addresses) and len(set(addresses)) == count:
        in_order = sorted(addresses)  # the order of the numbers unless a variable changes it
        return [in_order.index(address) for address in addresses]
    if len(known) < count:
        return f"the device of {count - len(known)} of {count} processes is unknown"
    return f"their devices are {_listed(known)}, not each of 0 to {count - 1} once"


def check_devices(mapping: RankMapping) -> RankMapping:
    """Return `mapping`. Raises LaunchError if its device order omits or repeats devices."""
    order = mapping.device_order
    devices = len(mapping.local_order) or len(order)
    if order and sorted(order) != list(range(devices)):
        raise LaunchError(
            f"device order {_listed(order)} does not name each of a node's {devices} devices once"
        )
    return mapping
