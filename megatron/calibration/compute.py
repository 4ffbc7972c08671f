"""What one device computes: products over a model's shapes, attention, memory-bound kernels, the optimizer's update.

All of it through the operators that training calls, forward and backward. Inputs of memory-bound kernels come out of
the kernel before, as in a layer, and outputs are kept until the backward pass, so that caches see what they see there.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from megatron.calibration.tasks import TERA, Make, Task, Work
from megatron.engine.optimizer import build_optimizer, create_state
from megatron.engine.optimizer_state import OPTIMIZERS
from megatron.engine.zero import square
from megatron.kernels.choose import Fusions, choose_attention, choose_fusions
from megatron.kernels.library import available
from megatron.kernels.ops.activation import bias_activation
from megatron.kernels.ops.embedding import add_rows_, reference_
from megatron.kernels.ops.optimizer import scale_and_norm_
from megatron.layers.attention import flash_attention, torch_attention
from megatron.layers.blocked_attention import blocked_attention
from megatron.layers.context import LayerContext
from megatron.layers.cross_entropy import combine, gradient_, local_statistics
from megatron.layers.dropout import bias_dropout_add
from megatron.layers.mlp import activate
from megatron.layers.norm import Norm

if TYPE_CHECKING:
    from megatron.config import Config

CHAIN = 8
"""Kernels of one kind in a row, forward and then backward."""
_BYTES = (1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
_LARGEST = 1 << 28  # bytes of what is made for a task on a CPU; a GPU takes any
_OPERATIONS = 2e10  # of one product on a CPU; larger ones are cut to fewer tokens, which their rates do not see
_PRODUCTS_BYTES, _MOST_PRODUCTS = 1 << 26, 32  # of the matrices that are taken in turn
_VALUES = 99_991  # different ones in a tensor


class Maker:
    """Makes tensors of the run's format on its device."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        self.dtype_name = config.precision.dtype_name
        self.dtype: torch.dtype = getattr(torch, self.dtype_name)
        self.width = self.dtype.itemsize
        self.fusions: Fusions = choose_fusions(config.kernels, device, self.dtype_name)

        self._values = torch.empty(_VALUES, device=device).uniform_(-1, 1)

    def __call__(self, *shape: int, grad: bool = False, fp32: bool = False) -> torch.Tensor:
        """Values between -1 and 1, again and again the same: a GPU's clock depends on what it multiplies."""
        count = math.prod(shape)
        values = self._values.to(torch.float32 if fp32 else self.dtype)
        return values.repeat(-(-count // _VALUES))[:count].view(shape).requires_grad_(grad)


def compute_tasks(config: Config, device: torch.device, tensor_sizes: tuple[int, ...] = (1,)) -> list[Task]:
    """All tasks of one device, for the shapes of a model cut over these tensor-parallel sizes."""
    make = Maker(config, device)
    return [
        *_products(make, tensor_sizes), *_attention(make), *_copies(make), *_norms(make), *_activations(make),
        *_residuals(make), *_losses(make), *_embeddings(make), *_updates(make),
    ]  # fmt: skip


# -- matrix products ---------------------------------------------------------------------------------------------------


def weight_shapes(config: Config, tensor_sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """[out, in] of the weights of one rank: projection, attention's output, MLP in and out, output layer."""
    model = config.model
    found: dict[tuple[int, int], None] = {}
    h, f, d = model.hidden_size, model.ffn_hidden_size, model.kv_channels
    rows = (model.num_attention_heads + 2 * model.num_key_value_heads) * d
    for t in tensor_sizes:
        vocabulary = -(-(model.vocab_size or 50257) // (128 * t)) * 128
        up = f * (2 if model.swiglu else 1) // t
        for shape in ((rows // t, h), (h, model.num_attention_heads * d // t), (up, h), (h, f // t), (vocabulary, h)):
            found[shape] = None
    return list(found)


def _products(make: Maker, tensor_sizes: tuple[int, ...]) -> Iterator[Task]:
    figure, s = f"products.{make.dtype_name}", make.config.model.seq_length
    done = set()
    for tokens in (s, 4 * s):
        for n, k in weight_shapes(make.config, tensor_sizes):
            rows = tokens
            while make.device.type == "cpu" and rows > 64 and 2.0 * rows * n * k > _OPERATIONS:
                rows //= 2
            for m_, n_, k_, kind in ((rows, n, k, "forward"), (rows, k, n, "input"), (n, k, rows, "weight")):
                if (m_, n_, k_) in done:
                    continue
                done.add((m_, n_, k_))
                yield Task(figure, (m_, n_, k_), _product(make, m_, n_, k_, kind), 2.0 * m_ * n_ * k_, TERA)


def _product(make: Maker, m: int, n: int, k: int, kind: str) -> Make:
    """y = x W^T, dx = dy W or dW = dy^T x, with the matrices stored as the layers have them.

    All three are others in each call, as in a model that no cache holds: on a CPU that costs some percent.
    """

    def work() -> Work:
        many = max(1, min(_MOST_PRODUCTS, _PRODUCTS_BYTES // ((m * k + n * k + m * n) * make.width)))
        first = [make(k, m).t() if kind == "weight" else make(m, k) for _ in range(many)]
        second = [make(n, k).t() if kind == "forward" else make(k, n) for _ in range(many)]
        turns = itertools.cycle(zip(first, second, [make(m, n) for _ in range(many)], strict=True))

        def run() -> None:
            a, b, out = next(turns)
            torch.mm(a, b, out=out)

        return run

    return work


# -- attention ---------------------------------------------------------------------------------------------------------


def _attention(make: Maker) -> Iterator[Task]:
    """Rates as planning/rates.py counts: half of all pairs, 2.5 times the operations in the backward pass."""
    config = make.config
    model, s, d = config.model, config.model.seq_length, config.model.kv_channels
    for seq in sorted({max(64, s // 4), max(64, s // 2), s, 2 * s}):
        backend = choose_attention(config.kernels, make.device, make.dtype_name, seq)
        if backend == "unfused":
            continue
        heads = max(1, min(model.num_attention_heads, (1 << 22) // (seq * d)))
        operations = 2.0 * heads * seq * seq * d
        for direction, share in (("forward", 1.0), ("backward", 2.5)):
            figure = f"attention.{make.dtype_name}.{direction}"
            run = _core(make, backend, seq, heads, d, backward=direction == "backward")
            yield Task(figure, (seq, d), run, operations * share, TERA)


def _core(make: Maker, backend: str, seq: int, heads: int, d: int, *, backward: bool) -> Make:
    def work() -> Work:
        mixed = make(seq, 1, heads, 3, d, grad=True)

        def forward() -> torch.Tensor:
            if backend == "blocked":
                return blocked_attention((mixed,), None, None, 0.0, None, make.fusions.attention_block)
            q, k, v = (x.squeeze(3) for x in mixed.split(1, dim=3))
            return (flash_attention if backend == "flash" else torch_attention)(q, k, v, None, None, 0.0)

        if not backward:
            return forward
        out = forward()
        gradient = torch.ones_like(out)
        return lambda: torch.autograd.grad(out, mixed, gradient, retain_graph=True)

    return work


# -- memory-bound kernels ----------------------------------------------------------------------------------------------


def _sizes(make: Maker, columns: int) -> Iterator[int]:
    """Rows of `columns` elements, for tensors of the sizes of _BYTES."""
    for size in _BYTES:
        if make.device.type == "cuda" or size <= _LARGEST // CHAIN // 4:
            yield max(1, size // (columns * make.width))


Kernel = Callable[..., torch.Tensor]
Start = Callable[[], tuple[torch.Tensor, tuple[torch.Tensor, ...]]]


def _chained(step: Kernel, start: Start) -> Make:
    """CHAIN times one kernel forward, then all of them backward."""

    def work() -> Work:
        x, fixed = start()

        def run() -> None:
            y = x
            for _ in range(CHAIN):
                y = step(y, *fixed)
            torch.autograd.backward(y, torch.ones_like(y))
            for leaf in (x, *fixed):
                leaf.grad = None

        return run

    return work


def _copies(make: Maker) -> Iterator[Task]:
    for size in _BYTES:
        count = size // make.width

        def work(count: int = count) -> Work:
            # More tensors than a cache holds, as the buffers of a step are.
            many = max(2, min(64, (1 << 26) // (count * make.width)))
            tensors = [make(count) for _ in range(many)]
            place = iter(range(1 << 60))

            def run() -> None:
                i = next(place)
                tensors[(i + 1) % many].copy_(tensors[i % many])

            return run

        yield Task("memory.copy", (2.0 * size,), work, 2.0 * size)


def _norms(make: Maker) -> Iterator[Task]:
    """Forward reads and writes one tensor, backward reads two and writes one."""
    model = make.config.model
    h = model.hidden_size
    for rows in _sizes(make, h):

        def start(rows: int = rows) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
            return make(rows, h, grad=True), ()

        context = LayerContext(
            LayerContext.single().tensor, LayerContext.single(device=make.device).parameters, fusions=make.fusions
        )
        norm = Norm(context, "norm", h, model.normalization, model.layernorm_epsilon).to(make.dtype)
        size = 5.0 * rows * h * make.width
        yield Task("memory.norm", (size / 2,), _chained(norm, start), size, calls=CHAIN)


def _activations(make: Maker) -> Iterator[Task]:
    model = make.config.model
    f, kind, fused = model.ffn_hidden_size, model.activation, make.fusions.bias_activation
    gated = kind == "swiglu"
    columns = f * (2 if gated else 1)
    for rows in _sizes(make, columns):
        many = CHAIN // 2

        def work(rows: int = rows, many: int = many) -> Work:
            ups = [make(rows, columns, grad=True) for _ in range(many)]
            bias = make(columns) if model.add_bias_linear else None
            gradient = make(rows, f)

            def run() -> None:
                outs = []
                for up in ups:
                    plain = up if bias is None else up + bias
                    outs.append(bias_activation(up, bias, kind) if fused else activate(plain, kind))
                for out in outs[::-1]:
                    torch.autograd.backward(out, gradient)
                for up in ups:
                    up.grad = None

            return run

        # Forward and backward, each of torch's operators reading its inputs and writing its results once.
        ins = 2 if gated else 1
        if fused:
            size, kernels = float(rows * f * make.width * (6 + 2 * ins if gated else 5)), 2
        else:
            size, kernels = float(rows * f * make.width * (18 if gated else 5)), 6 if gated else 2
        yield Task("memory.activation", (size / kernels,), work, size, calls=many)


def _residuals(make: Maker) -> Iterator[Task]:
    """residual + (x + bias): forward reads two and writes one; backward reads one and writes none but sums."""
    h = make.config.model.hidden_size
    fused = make.fusions.bias_dropout
    for rows in _sizes(make, h):

        def start(rows: int = rows) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
            return make(rows, h, grad=True), (make(h, grad=True), make(rows, h))

        def step(y: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return bias_dropout_add(y, bias, residual, 0.0, None, fused)

        size = 5.0 * rows * h * make.width
        yield Task("memory.residual", (size / 2,), _chained(step, start), size, calls=CHAIN)


def _losses(make: Maker) -> Iterator[Task]:
    """Statistics of a chunk's logits and their gradient in place: the logits are read twice and written once."""
    v = -(-(make.config.model.vocab_size or 50257) // 128) * 128
    fused = make.fusions.cross_entropy
    for rows in (128, 512) if make.device.type == "cpu" else (1024, 4096):

        def work(rows: int = rows) -> Work:
            context = LayerContext.single()
            logits, labels = make(rows, v), torch.zeros(rows, dtype=torch.long, device=make.device)
            gradients = torch.ones(rows, device=make.device)

            def run() -> None:
                statistics = local_statistics(logits, labels, 0, v, fused)
                maximum, total, _ = combine(statistics, context.tensor)
                gradient_(logits, labels, maximum, total, gradients, 0, v, fused)

            return run

        size = rows * v * (3.0 * make.width if fused else 4.0 * make.width + 68)
        yield Task("memory.loss", (size / (2 if fused else 11),), work, size)


def _embeddings(make: Maker) -> Iterator[Task]:
    """Rows of a table looked up, and rows added to its fp32 sum."""
    h = make.config.model.hidden_size
    v = make.config.model.vocab_size or 50257
    for tokens in (256, 2048):

        def work(tokens: int = tokens) -> Work:
            table, total = make(v, h), make(v, h, fp32=True)
            rows = torch.randint(0, v, (tokens,), device=make.device)
            gradient = make(tokens, h, fp32=True)
            add = reference_ if total.device.type == "cpu" else add_rows_  # as megatron.layers.embedding has it

            def run() -> None:
                torch.nn.functional.embedding(rows, table)
                add(total, rows, gradient)

            return run

        size = tokens * h * (2.0 * make.width + 12.0)
        yield Task("memory.embedding", (size / 2,), work, size)


# -- the optimizer -----------------------------------------------------------------------------------------------------


def update_bytes(config: Config, fusions: Fusions) -> float:
    """Read and written for each element by norm and update, as planning/timing/update.py counts."""
    if config.precision.dtype_name == "float32":
        return 32.0
    return 34.0 if fusions.optimizer and config.precision.bf16 else 38.0


def _updates(make: Maker) -> Iterator[Task]:
    """Norm of the gradients and AdamW over the elements of a layer or more."""
    model = make.config.model
    layer = 12 * model.hidden_size**2
    elements = max(1 << 20, min(layer, 1 << 24))

    def work() -> Work:
        weights = torch.nn.Parameter(torch.zeros(elements, device=make.device))
        weights.grad = torch.ones_like(weights)
        groups = [{"params": [weights], "decays": True}]
        fused = make.fusions.optimizer
        adam = build_optimizer(
            groups, make.config.optimizer, make.device, make.config.kernels.optimizer_implementation, fused
        )
        create_state(adam, OPTIMIZERS["adam"])
        if fused and make.dtype != torch.float32:
            adam.copies = {weights: torch.zeros(elements, device=make.device, dtype=make.dtype)}  # type: ignore[attr-defined]
        own = make.config.kernels.optimizer_implementation != "torch" and available(make.device)
        squares = scale_and_norm_ if own else square

        def run() -> None:
            assert weights.grad is not None
            math.sqrt(squares([weights.grad]))  # the host waits for the norm, as in a step
            adam.step()

        return run

    yield Task("update_gb_per_s", (), work, elements * update_bytes(make.config, make.fusions))
