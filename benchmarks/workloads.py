"""Workloads of `make bench`: models, batches and layouts (cases), and programs (sides).

W1  GPT-2 124M, one process on all threads: bf16 and fp32, sequences of 512 and 1024
W2  tensor parallel, W3 pipeline parallel, W4 data parallel with ZeRO-1: 6 layers of 512 on two
    processes, which share the threads; W0, their reference, is the same model and batch on one
    process
W5  pipelines of eight, 16 layers of 256: what activations in flight cost

W2 to W4 have a vocabulary of 8,192: with 50,304 the output layer costs as much as 8 layers, and a
pipeline of two would mainly measure its last stage. All sides of a case train on the same number of
tokens per step, with AdamW on fp32 master weights, gradient clipping and no dropout. FLOPs are
counted by megatron/model/formulas.py for every side.
"""

from __future__ import annotations

import bisect
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.shared import ROOT
from megatron.config import Config
from megatron.model.formulas import ModelSizes


@dataclass(frozen=True)
class Side:
    """Program that runs a case, with its settings.

    program     pretrain_gpt.py or a file of benchmarks/peers
    flags       further flags of pretrain_gpt.py
    compiled    whether a peer uses torch.compile
    chunks      chunks per pipeline rank
    untouched   nothing is set in its environment
    defaults    its libraries use their defaults, even if these are slower
    less        work that it omits compared with the others
    once        whether it is a variant of another side, started in the first round only
    root        clone whose pretrain_gpt.py runs
    version_of  side that it is compared with, if it is another version; None: the first of the case
    """

    name: str
    program: str = "pretrain_gpt.py"
    flags: tuple[str, ...] = ()
    compiled: bool = False
    chunks: int = 1
    untouched: bool = False
    defaults: bool = False
    less: str = ""
    once: bool = False
    root: Path = ROOT
    version_of: Side | None = None


@dataclass(frozen=True)
class WorkloadCase:
    """Model, batch and layout, with the sides that run them.

    micro_batch    samples of a micro-batch
    micro_batches  micro-batches of one replica in a step
    sides          programs; the first is ours
    steps          measured steps of a start
    largest        whether the memory is the largest process's, and not the sum
    """

    workload: str
    name: str
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    micro_batch: int
    micro_batches: int
    dtype: str
    sides: tuple[Side, ...]
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    device: str = "cpu"
    steps: int = 2
    largest: bool = False

    @property
    def processes(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.micro_batch * self.micro_batches * self.data

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.sequence

    @cached_property
    def sizes(self) -> ModelSizes:
        from megatron.model.gpt import model_sizes  # imports torch

        config = Config.create(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            seq_length=self.sequence,
            vocab_size=self.vocabulary,
        )
        return model_sizes(config)

    @property
    def parameters(self) -> int:
        return self.sizes.parameters()

    @property
    def flops(self) -> float:
        """Model FLOPs of a step; attention counts all pairs of positions, as in log and papers."""
        return self.sizes.flops_per_token() * self.tokens


AS_THEY_COME = (
    "bf16 gradients are summed in bf16, DeepSpeed's default; GELU is a chain of "
    "operators, transformers' default"
)
ALL_WEIGHTS = "no ZeRO: every process updates all weights"
OURS = Side("ours")
UNTOUCHED = Side("ours, nothing set", untouched=True, once=True)
EAGER, COMPILED = (
    Side("torch, eager", "plain.py"),
    Side("torch, compiled", "plain.py", compiled=True),
)
TRANSFORMERS = Side("transformers + DeepSpeed", "transformers_deepspeed.py")
TRANSFORMERS_DEFAULTS = replace(
    TRANSFORMERS,
    name="transformers + DeepSpeed, defaults",
    defaults=True,
    less=AS_THEY_COME,
    once=True,
)
MEGATRON_CORE = Side("megatron-core", "megatron_core.py")
DDP = replace(EAGER, name="torch, DDP", less=ALL_WEIGHTS)
# One measured step: each takes seconds.
GPT2: dict[str, Any] = dict(
    workload="W1", layers=12, hidden=768, heads=12, vocabulary=50304, steps=1
)
SMALL: dict[str, Any] = dict(
    layers=6, hidden=512, heads=8, vocabulary=8192, sequence=512, dtype="bf16"
)


def cpu_cases() -> list[WorkloadCase]:
    """List all cases of a run on CPUs. In fp32, four times as slow, a step is one micro-batch."""
    chunked = ("--num-layers-per-virtual-pipeline-stage", "1")
    pipelines = (
        replace(OURS, name="ours, 1F1B"),
        replace(OURS, name="ours, interleaved", flags=chunked, chunks=3),
        replace(OURS, name="ours, zero-bubble", flags=("--enable-zbh1-pipeline",)),
        replace(MEGATRON_CORE, name="megatron-core, 1F1B"),
        replace(MEGATRON_CORE, name="megatron-core, interleaved", chunks=3),
    )
    shapes = (
        replace(OURS, name="ours, 1F1B"),
        replace(OURS, name="ours, V-half", flags=("--pipeline-schedule", "v-half")),
    )
    both = (OURS, EAGER, COMPILED)
    every = (OURS, UNTOUCHED, EAGER, COMPILED, TRANSFORMERS, TRANSFORMERS_DEFAULTS, MEGATRON_CORE)
    replicas = (OURS, UNTOUCHED, DDP, TRANSFORMERS, MEGATRON_CORE)
    # dtype, sequence, micro-batch size, micro-batches, sides
    gpt2 = [
        ("bf16", 512, 2, 2, every),
        ("bf16", 1024, 1, 2, (*both, TRANSFORMERS)),
        ("fp32", 512, 2, 1, both),
        ("fp32", 1024, 1, 1, both),
    ]
    alone = WorkloadCase(
        **SMALL, workload="W0", name="one process", micro_batch=2, micro_batches=4, sides=(OURS,)
    )
    tensor = (OURS, MEGATRON_CORE)
    return [
        *(
            WorkloadCase(
                **GPT2,
                name=f"{dtype} s={sequence}",
                sequence=sequence,
                micro_batch=size,
                micro_batches=count,
                dtype=dtype,
                sides=sides,
            )
            for dtype, sequence, size, count, sides in gpt2
        ),
        alone,
        replace(alone, workload="W2", name="TP=2", tensor=2, sides=tensor),
        replace(
            alone,
            workload="W3",
            name="PP=2",
            micro_batch=1,
            micro_batches=8,
            pipeline=2,
            sides=pipelines,
        ),
        replace(alone, workload="W4", name="DP=2 ZeRO-1", micro_batches=2, data=2, sides=replicas),
        replace(
            alone,
            workload="W5",
            name="PP=8",
            layers=16,
            hidden=256,
            vocabulary=1024,
            micro_batch=4,
            micro_batches=16,
            pipeline=8,
            largest=True,
            sides=shapes,
        ),
    ]


def quick(case: WorkloadCase) -> WorkloadCase:
    """Return the case with a tiny model, to see that everything runs."""
    layers = min(case.layers, 2 * case.pipeline + 2 if case.pipeline > 1 else 2)
    return replace(
        case, layers=layers, hidden=64, heads=4, vocabulary=512, sequence=case.sequence // 8
    )


TORCH_KERNELS = (
    "--norm-implementation torch --optimizer-implementation torch --no-bias-gelu-fusion "
    "--no-bias-dropout-fusion --no-persist-layer-norm --no-cross-entropy-loss-fusion"
).split()
CUDA_SIDES = (OURS, Side("ours, torch's kernels", flags=(*TORCH_KERNELS,)), EAGER, COMPILED)
CUDA_PEERS = (*CUDA_SIDES, TRANSFORMERS)
BYTES_PER_PARAMETER = 18  # bf16 weight, fp32 master, gradient and two moments
ACTIVATIONS_SHARE = 0.35  # of the device's memory that the largest model leaves for everything else


def cuda_cases(memory_bytes: int) -> list[WorkloadCase]:
    """Return the cases of a GPU: 124M, 1.3B, and the deepest model of width 2560 that fits.

    A model that does not fit is left out.
    """
    room = (1 - ACTIVATIONS_SHARE) * memory_bytes
    small = WorkloadCase(
        workload="G1",
        name="124M",
        layers=12,
        hidden=768,
        heads=12,
        vocabulary=50304,
        sequence=1024,
        micro_batch=16,
        micro_batches=2,
        dtype="bf16",
        device="cuda",
        sides=CUDA_PEERS,
    )
    wide = replace(small, layers=24, hidden=2048, heads=16, micro_batch=4)
    cases = [small, replace(wide, workload="G2", name="1.3B")]
    deep = replace(small, hidden=2560, heads=20, micro_batch=1, sides=CUDA_SIDES)
    deeper = [replace(deep, workload="G3", name="largest", layers=n) for n in range(2, 129)]
    fitting = bisect.bisect(deeper, room / BYTES_PER_PARAMETER, key=lambda case: case.parameters)
    cases = [case for case in cases if case.parameters * BYTES_PER_PARAMETER <= room]
    cases += deeper[:fitting][-1:]
    return [replace(case, name=f"{case.name} ({case.parameters / 1e9:.2f}B)") for case in cases]
