"""Operators on tensors without data: messages are dropped, and memory is only counted.

Tensors of a GPU are torch's meta tensors. Those of a CPU are fake tensors
(torch._subclasses.fake_tensor): their device is "cpu", and the code branches on the device of a
tensor. The planner's recorder and the dry run build on this module.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import math
import unittest.mock
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.kernels.cost import Product, counts_as
from megatron.kernels.host_copy import HostCopy
from megatron.layers import experts, ring
from megatron.parallel import gradient_accumulator
from megatron.parallel.topology import Group
from megatron.planner.events import Alloc, Free

_aten = torch.ops.aten
_RESIZE = torch.UntypedStorage.resize_

Operator = torch._ops.OpOverload
Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


class OperatorRecorder(TorchDispatchMode):
    """Run operators on tensors without data, and observe their memory and messages.

    category    category of the memory that is allocated from now on; unless it is "activations",
                tensors whose rows have `vocabulary` elements count as "logits"
    vocabulary  length of those rows; -1 for none

    Subclasses override `run`, `allocated`, `freed`, `resized`, `sent` and `arrived` as needed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.category = "activations"
        self.vocabulary = -1
        self.number = 0  # number of the last storage seen
        self._seen: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._works: dict[int, Work] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps __torch_dispatch__ to keep its compiler out, and takes seconds to
        # import the compiler for that.
        return False

    def __torch_dispatch__(
        self, func: Operator, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        if func.namespace == "c10d":
            # A message holds its tensors until it is waited for, and never arrives earlier.
            work = Work(tensors_of(args), self)
            self._works[id(work)] = work
            self.sent(func._schema.name.partition("::")[2].rstrip("_"), args, work.tensors, work)
            return work.boxed() if len(func._schema.returns) == 1 else (args[0], work.boxed())
        if func is _aten._local_scalar_dense.default and is_empty(args[0]):
            # a finite number, so that no step is skipped
            return (
                False if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
            )
        if func is _aten.equal.default and is_empty(args[0]):
            return True
        if func is _aten._fused_sgd_.default and is_empty(args[0][0]):
            return None  # torch has no meta kernel for it, and it returns nothing
        kwargs = kwargs or {}
        to = torch.device(kwargs.get("device") or "meta")
        if func is _aten._to_copy.default and args[0].is_meta and to.type == "cpu":
            out = func(*args, **{**kwargs, "device": args[0].device})
            self.see(out, counts=False)  # host memory does not count
            return out
        return self.run(func, args, kwargs)

    def run(self, func: Operator, args: Arguments, kwargs: Keywords) -> object:
        """Run an operator, and record the memory of its results."""
        out = func(*args, **kwargs)
        self.see(out)
        return out

    def see(self, out: object, *, counts: bool = True) -> None:
        """Record the new storages of these results; without `counts`, only mark them as seen."""
        for tensor in tensors_of(out):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._seen or not storage.nbytes() or not self.follows(tensor):
                continue
            self.number += 1
            gone = functools.partial(self._forget, key, self.number)
            self._seen[key] = self.number, weakref.ref(storage, gone)
            if counts:
                category = self.category
                rows = tensor.dim() >= 2 and tensor.shape[-1] == self.vocabulary
                if rows and category != "activations":
                    category = "logits"
                self.allocated(Alloc(storage.nbytes(), self.number, category), tensor)

    def follows(self, tensor: Tensor) -> bool:
        """Return whether to record the memory of this tensor."""
        return is_empty(tensor)

    def number_of(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage; None if it is not recorded."""
        return self._seen.get(tensor.untyped_storage()._cdata, (None,))[0]

    def live_bytes(self) -> int:
        """Return the total bytes of all live storages."""
        return sum(
            storage.nbytes() for _, ref in self._seen.values() if (storage := ref()) is not None
        )

    def _forget(self, key: int, number: int, _: object) -> None:
        del self._seen[key]
        self.freed(Free(number))

    def allocated(self, step: Alloc, tensor: Tensor, /) -> None:
        """Handle a storage's allocation by the operator that returned this tensor."""

    def freed(self, step: Free) -> None:
        """Handle a storage's release; also called for storages that do not count."""

    def resized(self, number: int, has_memory: bool) -> None:
        """Handle a storage whose memory was freed, or allocated again."""

    def resize(self, storage: torch.UntypedStorage, n_bytes: int) -> object:
        """Replace UntypedStorage.resize_."""
        number, _ = self._seen.get(storage._cdata, (0, None))
        self.resized(number, bool(n_bytes))
        return _RESIZE(storage, n_bytes)

    def sent(self, name: str, args: Arguments, tensors: list[Tensor], work: Work) -> None:
        """Handle a posted message: torch's name for it, and the tensors it reads and writes."""

    def arrived(self, work: Work) -> None:
        """Handle a wait for a message."""

    def finish(self, work: Work) -> None:
        self._works.pop(id(work), None)
        self.arrived(work)


class Work(dist.Work):
    """Handle for a message that arrives when it is waited for. The follower may set `number`."""

    def __init__(self, tensors: list[Tensor], follower: OperatorRecorder) -> None:
        super().__init__()
        self.tensors = tensors
        self.number = 0
        self._follower = follower
        self._done = False

    def wait(self, timeout: object = None) -> bool:
        self.tensors = []
        self._done = True
        self._follower.finish(self)
        return True

    def is_completed(self) -> bool:
        return self._done


def group_of(args: Arguments) -> Any:
    """Return the process group among the arguments of a message."""
    return dist.ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject)))


def is_empty(tensor: Tensor) -> bool:
    """Return whether a tensor has no data."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def tensors_of(values: object) -> list[Tensor]:
    """List the tensors in nested values."""
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Replace scaled_dot_product_attention with a GPU's fused kernel, which stores no scores.

    This is flash attention for 16-bit tensors without a mask, otherwise the memory-efficient
    kernel. torch itself would choose the unfused implementation for meta tensors.
    """
    if attn_mask is None and q.dtype != torch.float32:
        out: Tensor = _aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, is_causal, scale=scale
        )[0]
        return out
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    keep = torch.is_grad_enabled()
    attended: Tensor = _aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, keep, dropout_p, is_causal, scale=scale
    )[0]
    return attended


def _add_in_fp32(total: Tensor, dy: Tensor, x: Tensor, _: float) -> None:
    """Replace gradient_accumulator.add_in_fp32, which some torch builds cannot run without data.

    A prediction assumes a GPU whose torch has this function, whatever the local torch supports. The
    kernel reads and writes the sum in fp32.
    """
    tokens, rows = dy.shape
    columns = x.shape[1]
    moved = 2 * total.nbytes - total.numel() * x.element_size()
    with counts_as(Product(rows, columns, tokens, moved=moved)):
        torch.mm(dy.t(), x, out=total.view(x.dtype)[:, :columns])


# -- layers without data ---------------------------------------------------------------------------


_BLOCKS = ring.Ring.blocks


def _first_block(self: ring.Ring, step: int, q: Tensor) -> Iterator[ring.RingBlock]:
    """Replace Ring.blocks: return only a step's first block.

    The work of the whole step is declared around it (counts_as).
    """
    return itertools.islice(_BLOCKS(self, step, q), 1)


def _one_by_one(operations: Iterable[dist.P2POp]) -> list[dist.Work | None]:
    """Replace dist.batch_isend_irecv, which needs the backend of a tensor's device."""
    return [each.op(each.tensor, each.peer, each.group) for each in operations]


def _even(total: int, count: int) -> list[int]:
    return [total // count + (i < total % count) for i in range(count)]


def rows_to_ranks(tokens: int, topk: int, ranks: int, each: int) -> int:
    """Return the expected number of (token, rank) pairs, if tokens choose their experts at random.

    A token goes once to each of the `ranks` ranks that has, among its own `each` experts, at least
    one of the `topk` that the token chose. The same formula applies to nodes and their experts.

    >>> rows_to_ranks(1000, 8, 4, 64)
    3614
    """
    none = math.comb((ranks - 1) * each, topk) / math.comb(ranks * each, topk)
    return round(tokens * ranks * (1 - none))


def _as_list(x: Tensor) -> object:
    """Replace torch.Tensor.tolist, which reads memory."""
    return [_as_list(row) for row in x.unbind()] if x.dim() else x.item()


def _even_numbers(
    copy: HostCopy, choices: Sequence[int], hops: Sequence[Group], each: int
) -> list[int]:
    """Replace experts.read_numbers: return equal numbers of rows, as if tokens chose at random."""
    copy.read()
    tokens, topk = choices
    result = list[int]()
    members = 1
    ranks = math.prod(hop.size for hop in hops)
    for hop in hops:
        members *= hop.size
        pairs = rows_to_ranks(tokens, topk, members, each * ranks // members)
        result += 2 * _even(pairs, hop.size)
    return result + _even(tokens * topk, each)


def _apply(
    module: torch.nn.Module,
    function: Callable[[Tensor], Tensor],
    recurse: bool = True,
) -> torch.nn.Module:
    """Replace torch.nn.Module._apply, so that parameters stay the same objects.

    For fake tensors torch would create new ones, without the attributes of the old ones.
    """
    for each in module.modules() if recurse else [module]:
        with torch.no_grad():
            for p in each._parameters.values():
                if p is not None:
                    p.data = function(p)
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = function(buffer)
    return module


@contextlib.contextmanager
def without_data(device: str, follower: OperatorRecorder) -> Iterator[None]:
    """Return a context in which tensors on `device` have no data, and `follower` runs operators.

    device  "cpu", or "meta" for a GPU
    """
    sgd = importlib.import_module("torch.optim.sgd")  # torch deletes it from its package
    replaced: list[tuple[object, str, object]] = [
        (torch.UntypedStorage, "resize_", lambda *args: follower.resize(*args)),
        (Tensor, "tolist", _as_list),
        # torch's check that the device supports a fused optimizer
        (sgd, "_device_dtype_check_for_fused", unittest.mock.DEFAULT),
        (experts, "read_numbers", _even_numbers),
        (ring.Ring, "blocks", _first_block),
        (dist, "batch_isend_irecv", _one_by_one),
    ]
    with contextlib.ExitStack() as stack:
        if device == "cpu":
            # DeepSpeed queries the alignment of its flat weights, whose address is 0.
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            replaced.append((torch.nn.Module, "_apply", _apply))
        else:
            # Our layers look this function up in torch.nn.functional at each call. A
            # TorchFunctionMode would be inactive in backward passes.
            attention = torch.nn.functional, "scaled_dot_product_attention", _fused_attention
            replaced += [attention, (gradient_accumulator, "add_in_fp32", _add_in_fp32)]
        for patched in replaced:
            stack.enter_context(unittest.mock.patch.object(*patched))
        stack.enter_context(follower)
        yield
