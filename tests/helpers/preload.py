"""Imports needed by every test process, done once by the fork server."""

import contextlib
import gc
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch._dynamo  # torch.utils.checkpoint imports it
import torch.distributed

torch.set_num_threads(1)

from megatron.engine.deepspeed_engine import import_deepspeed  # noqa: E402

import_deepspeed("cpu")  # a second that every process of every case would spend

# Imports needed by nearly every case: otherwise each of its processes would spend a second on them.
import hypothesis  # noqa: E402, F401
import numpy  # noqa: E402, F401
import pytest  # noqa: E402, F401

import megatron.checkpoint.load  # noqa: E402
import megatron.checkpoint.save  # noqa: E402
import megatron.model.gpt  # noqa: E402
import megatron.training.run.setup  # noqa: E402, F401
import tests.helpers.training  # noqa: E402, F401

with contextlib.suppress(ImportError):  # DeepSpeed's initialize uses it if present
    import deepspeed.module_inject.auto_ep_layer  # noqa: F401

gc.freeze()  # a collection in a forked process then looks only at its own objects
