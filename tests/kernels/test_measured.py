"""Choices on a CPU by the times of a measurement, and by the defaults without one."""

import dataclasses
import json
import os

import pytest
import torch

from megatron.config.training import KernelConfig
from megatron.kernels import choose, library, measured_times
from megatron.kernels.measured_times import MeasuredTimes
from tests.kernels.test_choose import load, named

CPU = torch.device("cpu")
SECONDS = {
    "layer_norm bfloat16": {"fused": 2.0, "torch": 1.0},
    "layer_norm float32": {"fused": 1.0, "torch": 2.0},
    "rms_norm bfloat16": {"fused": 1.02, "torch": 1.0},
    "attention float32 512": {"torch": 1.0, "64": 3.0, "128": 2.0},
    "attention float32 4096": {"torch": 4.0, "64": 5.0, "256": 3.0},
    "windowed attention float32 2048": {"torch": 1.0, "128": 2.0},
    "keys float32": {"copied": 1.0, "in place": 2.0},
}


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Path at which measurements are looked for; a library is loaded."""
    load(monkeypatch, "cpu")
    monkeypatch.setenv(measured_times.OVERRIDE, str(tmp_path / "times.json"))
    measured_times.forget()
    yield tmp_path / "times.json"
    measured_times.forget()


def of_this_machine(**changed):
    """Return a measurement that counts here, but for what is changed."""
    one = MeasuredTimes(
        SECONDS,
        torch.get_num_threads(),
        "2026-01-31",
        str(torch.__version__),
        library.find("cpu").build,
    )
    return dataclasses.replace(one, **changed)


def choices():
    """Return the fused operators, attention and blocks by length in fp32, and copies of keys."""

    def attention(length, windowed=False):
        features = choose.AttentionFeatures(windowed=windowed)
        return choose.choose_attention(KernelConfig(), CPU, "float32", length, features)

    fused = {
        f"{name} {dtype}"
        for dtype in ("float32", "bfloat16")
        for name in named(choose.choose_fusions(KernelConfig(), CPU, dtype))
        if name in choose.NORMS
    }
    lengths = 256, 1024, 2048, 8192
    return (
        fused,
        [*map(attention, lengths), attention(2048, windowed=True)],
        [choose.block_length("float32", length) for length in lengths],
        choose.copies_keys("float32"),
    )


DEFAULTS = (
    {"layer_norm bfloat16", "rms_norm bfloat16", "rms_norm float32"},
    ["blocked", "torch", "torch", "torch", "blocked"],
    [64, 128, 128, 128],
    False,
)


def test_the_fastest_is_chosen(file):
    """A default that is as fast stays; a length takes the times of the nearest one.

    1,024 is nearer to 512 than to 4,096, and 2,048 to 4,096.
    """
    assert choices() == DEFAULTS
    measured_times.write(file, of_this_machine())
    measured_times.forget()
    assert choices() == (
        {"layer_norm float32", "rms_norm bfloat16", "rms_norm float32"},
        ["torch", "torch", "blocked", "blocked", "torch"],
        [128, 128, 256, 256],
        True,
    )
    assert "2026-01-31" in measured_times.find().line
    wish = KernelConfig(norm_implementation="fused", attention_backend="torch")
    assert choose.choose_fusions(wish, CPU, "bfloat16").layer_norm
    assert choose.choose_attention(wish, CPU, "float32", 8192) == "torch"


def test_the_nearest_number_of_threads_counts(file):
    """A measurement replaces that of as many threads; those of another torch go."""
    threads = torch.get_num_threads()
    slow = {"layer_norm bfloat16": {"fused": 9.0, "torch": 1.0}}
    measured_times.write(file, of_this_machine(torch="1.0"))
    measured_times.write(file, of_this_machine(threads=16 * threads))
    measured_times.write(file, of_this_machine(threads=3 * threads))
    measured_times.write(file, of_this_machine(threads=3 * threads, seconds=slow))
    assert [one.threads // threads for one in measured_times.read(file)] == [16, 3]
    measured_times.forget()
    assert measured_times.find().seconds == slow


DAMAGED = [
    ("torch", "1.0"),
    ("kernels", "other"),
    ("seconds", {"attention float32 512": {"fused": 1.0}}),
    ("seconds", {"layer_norm float32": {"torch": "1"}}),
    ("seconds", {"layer_norm float32": [1.0]}),
    ("threads", 0),
    ("date", "\x1b[2J"),
]


def test_what_does_not_count_is_said(file):
    """Without a measurement that counts, a line says why, and the defaults are chosen."""
    right = dataclasses.asdict(of_this_machine())
    entries = [None, *({**right, name: value} for name, value in DAMAGED)]
    texts = [json.dumps({"measurements": [entry]}).encode() for entry in entries]
    for text in (*texts, b"", b"[]", b"{}", b"{", b"\xff", b"[" * 10_000):
        file.write_bytes(text)
        measured_times.forget()
        line = measured_times.find().line
        assert choices() == DEFAULTS and str(file) in line and measured_times.COMMAND in line, text
    file.unlink()
    os.mkfifo(file)
    measured_times.forget()
    assert choices() == DEFAULTS and str(file) in measured_times.find().line
    file.unlink()
    measured_times.forget()
    assert measured_times.COMMAND in measured_times.find().line
