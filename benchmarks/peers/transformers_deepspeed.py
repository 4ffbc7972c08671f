"""Hugging Face's GPT-2 under DeepSpeed's ZeRO-1, combined as in their documentation.

It uses transformers' model with its scaled_dot_product_attention and torch's GELU (tanh form, the
same function as "gelu_new", which is a chain of operators), and torch's fused AdamW inside ZeRO-1,
which accumulates gradients in fp32, like all other sides. With `defaults` the activation is
"gelu_new" and gradients accumulate in bf16. DeepSpeed's start-up would compile an extension that is
not used here, unless all extensions are declared incompatible.
"""

from __future__ import annotations

import collections
import json
import os
import sys
import tempfile
import time
import warnings

if json.loads(sys.argv[1])["device"] == "cpu":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
# torch.compile is not used here, and DeepSpeed would spend 4 s on importing it
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
# a lock file left by another run would block this one
os.environ["TORCH_EXTENSIONS_DIR"] = tempfile.mkdtemp(prefix="torch_extensions_")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import deepspeed
import deepspeed.ops
import torch
from common import (
    BETAS,
    CLIP,
    EPSILON,
    LEARNING_RATE,
    Task,
    decay_groups,
    micro_batch,
    read_task,
    run_steps,
    world,
)
from transformers import GPT2Config, GPT2LMHeadModel


def settings(task: Task, size: int) -> dict[str, object]:
    """Return DeepSpeed's configuration."""
    return {
        "train_micro_batch_size_per_gpu": task.micro_batch,
        "gradient_accumulation_steps": task.accumulation,
        "train_batch_size": task.micro_batch * task.accumulation * size,
        "zero_optimization": {"stage": 1},
        "gradient_clipping": CLIP,
        "bf16": {"enabled": task.bf16},
        "steps_per_print": 10**9,
        **({} if task.defaults else {"data_types": {"grad_accum_dtype": "fp32"}}),
    }


def main() -> None:
    task = read_task()
    warnings.filterwarnings("ignore")
    _, size = world()
    deepspeed.ops.__compatible_ops__ = collections.defaultdict(bool)
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        os.environ.setdefault(name, value)
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=task.vocabulary,
        n_positions=task.sequence,
        n_embd=task.hidden,
        n_layer=task.layers,
        n_head=task.heads,
        activation_function="gelu_new" if task.defaults else "gelu_pytorch_tanh",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(
        decay_groups(model.parameters()), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, fused=True
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(task, size))

    def step() -> tuple[float, float]:
        total = torch.zeros((), device=task.device)
        steps_before = engine.global_steps
        for _ in range(task.accumulation):
            tokens, _ = micro_batch(task)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            total += loss.detach().float() / task.accumulation
            began = time.perf_counter()
            engine.step()
        assert engine.global_steps == steps_before + 1, "DeepSpeed took another number of steps"
        return total.item(), began

    run_steps(task, step)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
