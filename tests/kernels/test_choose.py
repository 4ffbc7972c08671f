"""Operators that go through the kernels: by flags, by library, and on a CPU by measurements."""

from pathlib import Path

import torch

from megatron.config.training import KernelConfig
from megatron.kernels import choose, library
from megatron.kernels.choose import (
    ALL,
    EVERY_TYPE,
    HOST_FASTER,
    NORMS,
    OPERATORS,
    Fusions,
    choose_fusions,
)

CUDA = torch.device("cuda")
CPU = torch.device("cpu")
MODEL = dict(num_layers=1, hidden_size=32, num_attention_heads=4, seq_length=16, vocab_size=50)


def load(monkeypatch, *device_types):
    """Pretend that a library is loaded for these kinds of device alone."""

    def find(device_type):
        if device_type in device_types:
            return library.KernelLibrary(Path("/lib/l.so"), "hip", "gfx90a", "", object())
        return library.KernelLibrary(None, "", "", "nobody built one")

    monkeypatch.setattr(library, "find", find)


def named(fusions):
    return {name for name in OPERATORS if getattr(fusions, name)}


def test_nothing_without_a_library(monkeypatch):
    """Nothing is chosen without a library, or with that of another device."""
    load(monkeypatch)
    kernels = KernelConfig(norm_implementation="fused", optimizer_implementation="fused")
    assert (
        choose_fusions(kernels, CUDA, "bfloat16")
        == choose_fusions(kernels, CPU, "float32")
        == Fusions()
    )
    load(monkeypatch, "cpu")
    for device in (CUDA, torch.device("meta")):
        assert choose_fusions(KernelConfig(), device, "bfloat16") == Fusions()


def test_everything_on_a_gpu(monkeypatch):
    load(monkeypatch, "cuda")
    assert all(
        choose_fusions(KernelConfig(), CUDA, dtype) == ALL
        for dtype in ("float32", "float16", "bfloat16")
    )
    assert choose_fusions(KernelConfig(), CUDA, "float64") == Fusions()


def test_each_flag_switches_its_own_operator(monkeypatch):
    load(monkeypatch, "cuda")
    for values, *names in (
        (dict(masked_softmax_fusion=False), "masked_softmax"),
        (dict(bias_gelu_fusion=False), "bias_activation"),
        (dict(bias_dropout_fusion=False), "bias_dropout"),
        (dict(persist_layer_norm=False), *NORMS),
        (dict(rope_fusion=False), "rotary"),
        (dict(cross_entropy_loss_fusion=False), "cross_entropy"),
        (dict(moe_permute_fusion=False), "permute"),
        (dict(norm_implementation="torch"), *NORMS),
        (dict(optimizer_implementation="torch"), "optimizer"),
    ):
        assert named(choose_fusions(KernelConfig(**values), CUDA, "bfloat16")) == {*OPERATORS} - {
            *names
        }


def test_a_cpu_takes_what_is_faster_there(monkeypatch):
    load(monkeypatch, "cpu")
    assert set(HOST_FASTER) == set(OPERATORS)
    for dtype in EVERY_TYPE:
        faster = {name for name in OPERATORS if dtype in HOST_FASTER[name]}
        assert named(choose_fusions(KernelConfig(), CPU, dtype)) == faster
    for name, setting in (("layer_norm", "norm"), ("rms_norm", "norm"), ("optimizer", "optimizer")):
        monkeypatch.setitem(choose.HOST_FASTER, name, ("bfloat16",))
        assert not getattr(choose_fusions(KernelConfig(), CPU, "float32"), name)
        assert getattr(choose_fusions(KernelConfig(), CPU, "bfloat16"), name)
        wished = KernelConfig(**{f"{setting}_implementation": "fused"})
        assert getattr(choose_fusions(wished, CPU, "float32"), name)
    assert choose_fusions(KernelConfig(), None, "float32") == choose_fusions(
        KernelConfig(), CPU, "float32"
    )


def finding(usable):
    return choose.OptionalPackage("apex", "1", usable, "" if usable else "not found", "")


def test_apex_only_when_asked_for_and_there(monkeypatch):
    load(monkeypatch, "cuda")
    wish = KernelConfig(norm_implementation="apex", optimizer_implementation="apex")
    monkeypatch.setattr(choose, "fused_norm", lambda device_type: finding(True))
    monkeypatch.setattr(choose, "fused_adam", lambda device_type: finding(True))
    assert not choose_fusions(KernelConfig(), CUDA, "bfloat16").apex_norm
    chosen = choose_fusions(wish, CUDA, "bfloat16")
    assert chosen.apex_norm and named(chosen) == {*OPERATORS} - {*NORMS, "optimizer"}
    monkeypatch.setattr(choose, "fused_norm", lambda device_type: finding(False))
    monkeypatch.setattr(choose, "fused_adam", lambda device_type: finding(False))
    assert choose_fusions(wish, CUDA, "bfloat16") == ALL
