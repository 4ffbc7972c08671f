"""Variables that a job sets for torch, HIP and CUDA; the user's own are kept."""

from pathlib import Path

import pytest

from megatron.config import Config
from megatron.parallel.environment import TRACE_FILE, job_environment
from tests.helpers.fresh_python import run_python

TINY = dict(num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=8, vocab_size=32)
HANG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
RECORDER = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
BOTH = {"TORCH_NCCL_HIGH_PRIORITY": "1", **HANG, **RECORDER}
CUDA = {**BOTH, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
ROCM = {**BOTH, "GPU_MAX_HW_QUEUES": "8"}
ORDERED = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
TP = {"tensor_model_parallel_size": 2, "world_size": 2}


def chosen(build, user_environ=None, **settings):
    """Return the variables set for the duration of a job, and the lines about them."""
    environ = {**(user_environ or {})}
    with job_environment(Config.create(**TINY, **settings), environ, build) as lines:
        variables = dict(environ)
    assert environ == (user_environ or {}), "afterwards it is as it was"
    return variables, lines


@pytest.mark.parametrize(
    ("build", "settings", "expected"),
    [
        ("cuda", {}, CUDA),
        ("rocm", {}, ROCM),
        ("cuda", {"distributed_backend": "gloo"}, {}),
        ("cuda", {**TP, "sequence_parallel": True, "tp_comm_overlap": True}, {**CUDA, **ORDERED}),
        ("rocm", {**TP, "sequence_parallel": True}, ROCM),  # HIP does not read it
        (
            "cuda",
            {"hang_timeout": 0.0},
            {k: v for k, v in CUDA.items() if k not in HANG}
            | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"},
        ),
    ],
)
def test_what_is_set(build, settings, expected):
    variables, lines = chosen(build, **settings)
    assert variables == expected
    assert all(f"{name}={value}" in lines[0] for name, value in expected.items()) and bool(
        lines
    ) == bool(expected)


def test_the_flight_recorder_goes_to_the_runs_folder(tmp_path):
    variables, _ = chosen("rocm", save=str(tmp_path))
    assert Path(variables[TRACE_FILE[0]]).is_relative_to(tmp_path)


def test_what_the_user_has_set_stays_and_a_contradiction_is_told():
    user_set = {
        "GPU_MAX_HW_QUEUES": "4",
        "TORCH_NCCL_HIGH_PRIORITY": "1",
        "TORCH_FR_BUFFER_SIZE": "7",
    }
    variables, lines = chosen("rocm", user_set)
    # No older name beside TORCH_FR_BUFFER_SIZE.
    assert variables == {**user_set, **HANG, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    notes = " ".join(line for line in lines if line.startswith("note: "))
    assert (
        "GPU_MAX_HW_QUEUES=4" in notes
        and "TORCH_FR_BUFFER_SIZE=7" in notes
        and "HIGH_PRIORITY" not in notes
    )


def test_an_empty_value_is_none():
    assert chosen("rocm", {"GPU_MAX_HW_QUEUES": ""})[0]["GPU_MAX_HW_QUEUES"] == "8"


def torch_of(folder, cuda, hip, code):
    """Return code that installs a made-up torch: `code` runs when it is imported."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(code)
    (folder / "torch" / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.13.0'\ncuda: Optional[str] = "
        f"{cuda}\ngit_version = 'cf3'\nhip: Optional[str] = {hip}\n"
    )
    return f"import sys; sys.path.insert(0, {str(folder)!r})\n"


@pytest.mark.parametrize(
    ("cuda", "hip", "build"),
    [
        ("None", "None", None),
        ("'12.8'", "None", "cuda"),
        ("None", "'7.0.51831'", "rocm"),
    ],
)
def test_the_build_is_told_without_importing_torch(tmp_path, cuda, hip, build):
    code = torch_of(tmp_path, cuda, hip, "raise ImportError('torch was imported')\n")
    assert run_python(code + BUILD).strip() == str(build)


def test_pretrain_sets_them_before_it_imports_torch(tmp_path, monkeypatch):
    monkeypatch.delenv("GPU_MAX_HW_QUEUES", raising=False)
    seen = "import os\nprint(os.environ.get('GPU_MAX_HW_QUEUES'), flush=True)\nos._exit(0)\n"
    code = torch_of(tmp_path, "None", "'7.0.51831'", seen) + PRETRAIN
    assert run_python(code).split()[-1] == "8"


BUILD = "from megatron.parallel.environment import torch_build; print(torch_build())\n"
PRETRAIN = (
    "import megatron.program; megatron.program.run('--preset tiny --mock-data --train-iters "
    "1'.split())\n"
)
