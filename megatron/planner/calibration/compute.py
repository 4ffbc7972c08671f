"""Tasks that measure one device: a model's matrix products, attention, other kernels and optimizer.

The operators in a trace of the model (planner/recorder.py) are called as in the code, on tensors of
the same shapes and strides; matrix products are all called as torch.mm. Successive calls use
different tensors for inputs and outputs, as in a model that is larger than the caches.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron.config import Config
from megatron.config.parallel import RecomputeConfig
from megatron.engine.gradients import sum_of_squares
from megatron.engine.optimizer import build_optimizer, create_state
from megatron.engine.optimizer_state import group_keys, has_kernel, optimizer_state
from megatron.kernels.choose import choose_fusions
from megatron.kernels.cost import Attention, Memory, Product
from megatron.kernels.library import available
from megatron.kernels.ops.optimizer import scale_and_norm_
from megatron.planner.calibration.tasks import FigureTask, Make, Work
from megatron.planner.rates import as_long_as, attention_operations
from megatron.planner.recorder import Call, Calls, calls
from megatron.planner.tensors import is_empty
from megatron.planner.timing.estimate import bytes_per_element
from megatron.planner.trace import that_counts

MICRO_BATCHES = 1, 4
_CACHE = 1 << 26
_MOST_SETS = 32
"""Total bytes of the sets of tensors that calls cycle through, and the maximum number of sets; at
least one set is used, whatever its size."""
# Size of the smallest kernel that is measured, as a share of the largest one of the same kind:
# smaller kernels take about `kernel_s`.
_LEAST_SHARE = 1 / 16
_VALUES = 99_991  # number of distinct values, since a GPU's clock rate depends on the operands


def compute_tasks(
    config: Config, device: torch.device, tensor_sizes: tuple[int, ...]
) -> list[FigureTask]:
    """List all tasks that measure a device with a model's shapes at these tensor-parallel sizes.

    Attention is also measured for other sequence lengths.
    """
    tasks: dict[tuple[str, tuple[float, ...]], FigureTask] = {}
    s = config.model.seq_length
    for tensor_size, micro_batch in itertools.product(tensor_sizes, MICRO_BATCHES):
        for task in _tasks(config, device, _calls(config, device, tensor_size, micro_batch, s)):
            tasks.setdefault((task.figure, task.arguments), task)
    for seq in (max(64, s // 4), max(64, s // 2), 2 * s):
        for task in _tasks(config, device, _calls(config, device, 1, 1, seq, ("layer",))):
            if task.figure.startswith("attention."):
                tasks.setdefault((task.figure, task.arguments), task)
    return [*tasks.values(), _update(config, device)]


def _calls(
    config: Config,
    device: torch.device,
    tensor_size: int,
    micro_batch: int,
    seq: int,
    kinds: tuple[str, ...] = ("embedding", "layer", "head"),
) -> list[Calls]:
    """List the computations of one micro-batch on one tensor rank, without recomputation.

    kinds  parts of the model (recorder.calls)
    """
    longest = max(seq, config.model.max_position_embeddings)
    one = replace(
        config,
        model=replace(config.model, seq_length=seq, max_position_embeddings=longest),
        batch=replace(config.batch, micro_batch_size=micro_batch),
        parallel=replace(
            config.parallel,
            tensor_model_parallel_size=tensor_size,
            sequence_parallel=False,
            tp_comm_overlap=False,
        ),
        recompute=RecomputeConfig(),
    )
    return [each for kind in kinds for each in calls(that_counts(one, kind), device.type, kind)]


# -- work made from operators without data ---------------------------------------------------------


def _with_data(operators: Sequence[Call], device: torch.device) -> list[Call]:
    """Return the same calls, on tensors with data.

    The tensors have the same shapes and strides, and share storages in the same way. Floats are
    between -1 and 1, and integers are valid indices into every matrix of the call.
    """
    values = torch.empty(_VALUES, device=device).uniform_(-1, 1)
    storages = dict[int, Tensor]()

    def made(most: int, t: Tensor) -> Tensor:
        if not is_empty(t):
            return t
        key = t.untyped_storage()._cdata
        count = t.untyped_storage().nbytes() // t.element_size()
        if key not in storages and t.is_floating_point():
            storages[key] = values.to(t.dtype).repeat(-(-count // _VALUES))[:count].clone()
        elif key not in storages:
            below = most if t.dtype in (torch.int32, torch.int64) else 1
            storages[key] = torch.randint(0, below, (count,), device=device).to(t.dtype)
        return storages[key].view(t.dtype).as_strided(t.shape, t.stride(), t.storage_offset())

    calls_with_data = list[Call]()
    for operator, args, kwargs in operators:
        sides = [
            min(a.shape)
            for a in args
            if isinstance(a, Tensor) and a.dim() > 1 and a.is_floating_point()
        ]
        kwargs_on_device = tree_map_only(torch.device, lambda _: device, kwargs)
        filled = partial(made, min(sides, default=1))
        calls_with_data.append((operator, *tree_map_only(Tensor, filled, (args, kwargs_on_device))))
    return calls_with_data


def _in_turn(operators: Sequence[Call], device: torch.device) -> Make:
    """Return a function that creates work; a call of it runs the operators on the next tensors."""
    storages = [t.untyped_storage() for t in tree_leaves(operators) if isinstance(t, Tensor)]
    n_bytes = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
    count = max(1, min(_MOST_SETS, _CACHE // max(1, n_bytes)))

    def make() -> Work:
        turn = itertools.cycle([_with_data(operators, device) for _ in range(count)])
        results = collections.deque[list[object]](maxlen=count)

        def work() -> object:
            with torch.no_grad():
                results.append([operator(*args, **kwargs) for operator, args, kwargs in next(turn)])
            return results[-1]

        return work

    return make


# -- figures ---------------------------------------------------------------------------------------


def _tasks(config: Config, device: torch.device, listed: Sequence[Calls]) -> Iterator[FigureTask]:
    """Yield a task per unbatched matrix product, attention pass and kind of memory-bound kernel.

    The larger kernels of a kind are measured together, as one point at their mean size.
    """
    dtype_name = config.precision.dtype_name
    kinds = dict[str, dict[tuple[Memory, object], Call]]()
    for work, operators in listed:
        if isinstance(work, Product) and work.batch == 1:
            # Write to an existing matrix: other work on the result, such as a bias, does not count.
            a, b = [x for x in operators[0][1] if isinstance(x, Tensor)][-2:]
            product = torch.mm, (a, b), {"out": a.new_empty(work.m, work.n)}
            yield FigureTask(
                f"products.{dtype_name}", work[:3], _in_turn([product], device), work.flops / 1e12
            )
        elif isinstance(work, Attention):
            yield FigureTask(
                f"attention.{dtype_name}.{'backward' if work.backward else 'forward'}",
                (as_long_as(work.seq, work.keys), work.head_dim),
                _in_turn(operators, device),
                attention_operations(work) / 1e12,
            )
        elif isinstance(work, Memory):
            kinds.setdefault(work.kind, {})[work, operators[0][0]] = operators[0]
    for kind, calls_by_work in kinds.items():
        least = _LEAST_SHARE * max(work.bytes for work, _ in calls_by_work)
        large = {work: call for work, call in calls_by_work.items() if work[0].bytes >= least}
        size = sum(work.bytes for work, _ in large)
        count = sum(work.kernels for work, _ in large)
        yield FigureTask(
            f"memory.{kind}", (size / count,), _in_turn([*large.values()], device), size / 1e9
        )


# -- the optimizer ---------------------------------------------------------------------------------


def _update(config: Config, device: torch.device) -> FigureTask:
    """Return the task that measures the gradient norm and the optimizer's update.

    The number of elements is about that of a layer, at least 2**20 and at most 2**24.
    """
    elements = max(1 << 20, min(12 * config.model.hidden_size**2, 1 << 24))
    dtype_name = config.precision.dtype_name
    kernels = config.kernels

    def work() -> Work:
        weights = torch.nn.Parameter(torch.zeros(elements, device=device))
        weights.grad = torch.ones_like(weights)
        groups = [{"params": [weights], "weight_decay": 0.0, **group_keys(None)}]
        fused = choose_fusions(kernels, device, dtype_name).optimizer and has_kernel(config)
        optimizer = build_optimizer(groups, config, device)
        create_state(optimizer, optimizer_state(config), device)
        if fused and dtype_name != "float32":
            copy = torch.zeros(elements, device=device, dtype=getattr(torch, dtype_name))
            optimizer.copies = {weights: copy}  # type: ignore[attr-defined]
        by_kernel = kernels.optimizer_implementation != "torch" and available(device)
        squares = scale_and_norm_ if by_kernel else sum_of_squares

        def run() -> None:
            assert weights.grad is not None
            math.sqrt(squares([weights.grad]))  # the host waits for the norm, as in a step
            optimizer.step()

        return run

    return FigureTask(
        "update_gb_per_s", (), work, elements * bytes_per_element(config, device.type) / 1e9
    )
