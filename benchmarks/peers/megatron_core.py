"""megatron-core from PyPI on CPUs: its GPT model, pipeline schedules, DDP, distributed optimizer.

megatron-core hard-codes the device "cuda" for its buffers. Its files are not changed: before its
import, torch's factories are patched here to map "cuda" to the CPU, and GPU-only functions do
nothing. Without Apex and Transformer Engine it falls back to torch's AdamW, which gets fused=True
here (megatron-core's own call would use the slow loop over tensors). GELU is torch's tanh form
instead of megatron-core's chain of element-wise operators.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import (
    BETAS,
    CLIP,
    EPSILON,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Task,
    micro_batch,
    read_task,
    run_steps,
    world,
)

CPU = torch.device("cpu")
FACTORIES = (
    "empty",
    "zeros",
    "ones",
    "full",
    "tensor",
    "arange",
    "rand",
    "randn",
    "linspace",
    "eye",
    "as_tensor",
)


class DummyStream(types.SimpleNamespace):
    """Dummy CUDA stream or event; all work counts as complete."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None

    def __enter__(self) -> DummyStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def on_the_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def made(*arguments: Any, **settings: Any) -> torch.Tensor:
        if settings.get("device") is not None and "cuda" in str(settings["device"]):
            settings["device"] = CPU
        return factory(*arguments, **settings)

    return made


def cuda_means_cpu() -> None:
    """Let code that was written for CUDA run on the CPU."""
    for name in FACTORIES:
        setattr(torch, name, on_the_cpu(getattr(torch, name)))
    cuda = torch.cuda
    for name in (
        "synchronize",
        "empty_cache",
        "set_device",
        "manual_seed",
        "reset_peak_memory_stats",
    ):
        # a separate function for each name: torch.compile keeps a table of them
        setattr(cuda, name, lambda *_, **__: None)
    cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]
    for name in ("Stream", "Event", "stream", "current_stream", "default_stream"):
        setattr(cuda, name, lambda *_, **__: DummyStream())
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    named = torch.Tensor.type

    def type_as_on_cuda(self: torch.Tensor, *arguments: Any, **settings: Any) -> Any:
        if arguments or settings:
            return named(self, *arguments, **settings)
        return named(self).replace("torch.", "torch.cuda.")

    torch.Tensor.type = type_as_on_cuda  # type: ignore[assignment,method-assign]


def build(task: Task) -> tuple[list[Any], Any]:
    """Return this process's model chunks in megatron-core's DDP, and its optimizer."""
    import megatron.core.optimizer as mcore_optimizer
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(
        task.tensor,
        task.pipeline,
        virtual_pipeline_model_parallel_size=task.chunks if task.chunks > 1 else None,
    )
    # Without dropout no random numbers are drawn on a device, so no generator has to be switched.
    tensor_parallel.random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    kind = torch.bfloat16 if task.bf16 else torch.float32
    config = TransformerConfig(
        num_layers=task.layers,
        hidden_size=task.hidden,
        num_attention_heads=task.heads,
        use_cpu_initialization=True,
        tensor_model_parallel_size=task.tensor,
        pipeline_model_parallel_size=task.pipeline,
        virtual_pipeline_model_parallel_size=task.chunks if task.chunks > 1 else None,
        bf16=task.bf16,
        params_dtype=kind,
        pipeline_dtype=kind,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_func=functools.partial(F.gelu, approximate="tanh"),
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        batch_p2p_comm=False,
        attention_softmax_in_fp32=True,
        deallocate_pipeline_outputs=True,
    )
    chunks: list[Any] = []
    for chunk in range(task.chunks):
        stage: dict[str, Any] = {"vp_stage": chunk} if task.chunks > 1 else {"vp_stage": None}
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            task.vocabulary,
            task.sequence,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stage),
            share_embeddings_and_output_weights=True,
            **stage,
        )
        for parameter in model.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(model.to(kind))
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
    )
    chunks = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    mcore_optimizer.Adam = functools.partial(torch.optim.AdamW, fused=True)
    optimizer = mcore_optimizer.get_megatron_optimizer(
        mcore_optimizer.OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_eps=EPSILON,
            clip_grad=CLIP,
            bf16=task.bf16,
            params_dtype=kind,
            use_distributed_optimizer=True,
        ),
        chunks,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return chunks, optimizer


def main() -> None:
    task = read_task()
    warnings.filterwarnings("ignore")
    cuda_means_cpu()
    rank, size = world()
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(1)
    chunks, optimizer = build(task)
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    mask = torch.triu(torch.ones(task.sequence, task.sequence, dtype=torch.bool), 1)[None, None]
    positions = torch.arange(task.sequence)[None].expand(task.micro_batch, -1)

    def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}  # the schedule divides `loss` in place

    def forward(
        _: Iterator[None], model: torch.nn.Module, *__: Any
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        tokens, targets = micro_batch(task)
        return model(tokens, positions, mask, labels=targets), loss_of

    schedule = get_forward_backward_func()
    last = size - 1 if task.pipeline > 1 else 0
    iterators: Any = [None] * task.chunks if task.chunks > 1 else None

    def step() -> tuple[float | None, float]:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = schedule(
            forward_step_func=forward,
            data_iterator=iterators,
            model=chunks if task.chunks > 1 else chunks[0],
            num_microbatches=task.accumulation,
            seq_length=task.sequence,
            micro_batch_size=task.micro_batch,
        )
        began = time.perf_counter()
        updated, _, _ = optimizer.step()
        assert updated, "megatron-core skipped the step"
        total = torch.tensor(
            sum(float(loss["loss"]) for loss in losses) / max(1, len(losses))
            if losses
            else math.nan
        )
        if task.pipeline > 1:
            dist.broadcast(total, last)
        return float(total), began

    run_steps(task, step)
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
