"""GPU path measured on a machine without one: host waits by line, and idle gaps."""

import warnings
from pathlib import Path

import pytest
import torch

from benchmarks import idle_gaps, step_waits
from megatron.config import parse_args
from tests.helpers.launching import ROOT

# ---- host waits ----------------------------------------------------------------------------------


def lines(waits):
    """Return the waits by line of this file."""
    here = str(Path(__file__).relative_to(ROOT))
    return {int(line.removeprefix(f"{here}:")): n for (line, _), n in waits.counts.items()}


class Asking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * gradient.sum().item()


def test_what_would_wait_for_a_device_is_counted_at_its_line_also_in_a_backward_pass():
    x = torch.ones(3, requires_grad=True)
    with step_waits.StepWaits("cpu", (__file__,)) as waits:
        (x * 2).sum().backward()
        x[1:].exp().cumsum(0).detach().to(torch.bfloat16, copy=True).index_select(
            0, torch.zeros(1, dtype=torch.int64)
        )
        assert not waits.counts
        Asking.apply(x).sum().backward()
    assert lines(waits) == {Asking.backward.__code__.co_firstlineno + 2: 1}
    x.sum().item()
    assert sum(waits.counts.values()) == 1


def test_what_torch_says_of_a_device_is_counted_each_time(monkeypatch):
    """Count each wait that torch reports.

    It warns of them from C++, but not of all calls; other warnings remain.
    """
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    waits = step_waits.StepWaits("cuda", (__file__,))
    with pytest.warns(UserWarning, match="another") as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        waits.__enter__()
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        torch.cuda.synchronize()
        warnings.warn("another", stacklevel=1)
        waits.__exit__()
    first = min(lines(waits))
    assert lines(waits) == {first: 3, first + 1: 1} and len(seen) == 1
    assert modes == ["warn", "default"]


def test_every_training_looked_at_is_one_that_pretrain_gpt_takes():
    trainings = [
        training
        for device, devices in (("cpu", 0), ("cuda", 1), ("cuda", 2))
        for training in step_waits.trainings(device, devices)
    ]
    for training in trainings:
        config = parse_args([*training.arguments, "--save", "saved"], training.ranks)
        assert config.batch.train_iters == 2 * config.logging.log_interval
    assert {training.ranks for training in trainings} == {1, 2}


# ---- idle gaps -----------------------------------------------------------------------------------


def event(category, name, start, length, stream=7):
    """Return a complete trace event, in microseconds."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": length,
        "tid": 1,
        "args": {"stream": stream},
    }


def test_gaps_are_those_of_the_busiest_stream_and_name_what_the_host_did():
    """Gaps are those of the busiest stream and name the host's activity.

    Kernels run at 0 to 100, in parallel 10 to 20 and 50 to 120, then 300 to 400 and 405 to 500:
    idle from 120 to 300, and for 5.
    """
    trace = [
        event("kernel", "a", 0, 100),
        event("kernel", "in a", 10, 10),
        event("kernel", "b", 50, 70),
        event("gpu_memcpy", "c", 300, 100),
        event("kernel", "d", 405, 95),
        event("kernel", "elsewhere", 130, 20, stream=9),
        event("cpu_op", "aten::item", 110, 200),
        event("cuda_runtime", "cudaStreamSynchronize", 200, 50),
        event("cpu_op", "aten::add", 390, 5),
        {"ph": "M", "name": "process_name"},
    ]
    stream = idle_gaps.fold(trace)
    assert (stream.name, stream.busy_ms, stream.span_ms) == (
        "stream 7",
        pytest.approx(0.315),
        pytest.approx(0.5),
    )
    longest, short = stream.gaps
    assert (longest.before, longest.after, longest.host) == (
        "b",
        "c",
        ("aten::item", "cudaStreamSynchronize"),
    )
    assert longest.ms == pytest.approx(0.18) and short.ms == pytest.approx(0.005) and not short.host
    summary, sizes, gaps = idle_gaps.tables(stream, 2)
    assert [row[1:] for row in sizes[1:3]] == [["0.5", "0.00"], ["0.0", "0.00"]] and sizes[3][
        1:
    ] == ["0.5", "0.09"]
    assert summary[1][3:] == ["37.0 %", "2.5"] and len(gaps) == 3  # 5 pieces of work in 2 steps
