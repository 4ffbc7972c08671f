"""Imported once by the fork server: what every test process needs."""
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed

torch.set_num_threads(1)

from megatron.engine.deepspeed_setup import import_deepspeed  # noqa: E402

import_deepspeed("cpu")  # a second that every process of every case would spend
