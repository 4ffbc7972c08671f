"""No file of a checkpoint runs code: a pickle in any file and format, under any reader.

The interpreter itself reports every class or function that a pickle looks up (the audit event
"pickle.find_class").
"""

import contextlib
import io
import json
import math
import os
import pickle
import runpy
import shutil
import sys

import pytest
import torch

from megatron.checkpoint.files import digest, write_manifest
from megatron.checkpoint.load import load_weights
from megatron.parallel.layout import Layout
from megatron.parallel.topology import Topology
from tests.checkpoint.written import make
from tests.engine import toy
from tests.helpers.launching import ROOT, TINY, launch
from tests.tools.conversion import megatron_deepspeed

TRACKER = "latest_checkpointed_iteration.txt"
_watching = []


class Runs:
    """Unpickle to the result of a call."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.system, (f"touch {self.trace}",)


def watch(log=None):
    """Record each name that a pickle asks for, from now on, in the file or in `watched`."""

    def hook(event, arguments):
        if event == "pickle.find_class":
            named = ".".join(map(str, arguments[1:]))
            if log is not None:
                with open(log, "a") as file:
                    file.write(f"{named}\n")
            for seen in _watching:
                seen.append(named)

    sys.addaudithook(hook)


@pytest.fixture(scope="module")
def hooked():
    watch()


@contextlib.contextmanager
def watched(trace):
    """Fail where a pickle looked up anything, or the call in the payload was made."""
    seen = []
    _watching.append(seen)
    try:
        yield
    finally:
        _watching.remove(seen)
    assert seen == [] and not trace.exists()


def payloads(trace):
    """Return a pickle, and both kinds of files that torch.save makes of it."""
    out = {"pickle": pickle.dumps({"args": Runs(trace)}, 2)}
    for name, zipped in (("torch", True), ("old torch", False)):
        file = io.BytesIO()
        torch.save({"args": Runs(trace)}, file, _use_new_zipfile_serialization=zipped)
        out[name] = file.getvalue()
    return out


SMALL = ["state.json", "config.json", "passport.json", "boxes.json", "boxes_00000.json"]


def instead_of(name):
    """Write the payload in place of a file, and a manifest that matches it."""

    def plant(folder, payload):
        (folder / name).write_bytes(payload)
        if name != "manifest.json":
            write_manifest(folder, [*SMALL, *([] if name in SMALL else [name])])

    return plant


def in_data(folder, payload):
    """Write the payload as all shards of a data file.

    It is padded to the bytes of their numbers, with valid digests.
    """
    content = payload + bytes((folder / "__0_0.distcp").stat().st_size)
    (folder / "__0_0.distcp").write_bytes(content)
    lists = json.loads((folder / "boxes_00000.json").read_text())
    for stored in lists.values():
        for box in stored["boxes"]:
            if box[2] == "__0_0.distcp":
                length = max(len(payload), 4 * math.prod(box[1]))
                box[3:] = [0, length, digest(content[:length])]
    (folder / "boxes_00000.json").write_text(json.dumps(lists))
    write_manifest(folder, SMALL, generation=9)


def of_an_old_format(form):
    """Return a function that plants a pickle in a checkpoint of an older format.

    The formats are those before the first release.
    """

    def plant(folder, payload):
        (folder / ".metadata").write_bytes(payload)
        (folder / "manifest.json").unlink()
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps({**state, "format": form}))
        if form == 1:
            (folder / "boxes.json").unlink()

    return plant


PLANTED = {
    **{name: instead_of(name) for name in (".metadata", "manifest.json", *SMALL)},
    "data": in_data,
    "format 1": of_an_old_format(1),
    "format 2": of_an_old_format(2),
    "tracker": lambda folder, payload: None,
}


@pytest.mark.parametrize("kind", PLANTED)
def test_our_own_format(tmp_path, hooked, capsys, kind):
    inspect = runpy.run_path(str(ROOT / "tools" / "inspect_checkpoint.py"))["main"]
    topology = Topology.from_layout(Layout(), 0, device=torch.device("cpu"))
    values = {f"master.{name}": torch.ones(shape) for name, shape in toy.SHAPES.items()}
    trace = tmp_path / "trace"
    for form, payload in payloads(trace).items():
        if form != "pickle" and kind != "data":
            continue  # elsewhere torch.load is not used
        root = tmp_path / form
        good = make(root, 1, values)
        bad = make(root, 9999999, values)
        PLANTED[kind](bad, payload)
        if kind == "tracker":
            (root / TRACKER).write_bytes(payload)
        with watched(trace):
            for arguments in (
                [root, "--verify"],
                [root],
                [bad, "--norms", "--provenance"],
                ["--diff", bad, good],
            ):
                assert inspect(list(map(str, arguments))) in (0, 1)
            loaded = load_weights(root, toy.build(topology), topology)
            # Unneeded data is not read; where something else is broken, the older one is loaded.
            assert loaded.folder == (
                bad if kind in (".metadata", "passport.json", "tracker") else good
            )
    assert "Traceback" not in capsys.readouterr().err


def foreign(root, name, payload):
    """Return a folder of DeepSpeed's or Megatron's, valid except for the payload in one file."""
    weights = {"language_model.pooler.weight": torch.ones(2)}
    state = {
        "args": megatron_deepspeed.arguments("gpt"),
        "iteration": 3,
        "module": weights,
        "model": weights,
    }
    group = "global_step3" if "_states" in name else "iter_0000003/mp_rank_00"
    (root / group).mkdir(parents=True)
    names = {"mp_rank_00_model_states.pt"} if "_states" in name else {"model_optim_rng.pt"}
    for each in names:
        torch.save(state, root / group / each)
    if name in ("common.pt", ".metadata"):
        shutil.rmtree(root / group)
        group = "iter_0000003"
        torch.save(state, root / group / "common.pt")
        (root / group / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (root / "latest").write_text("global_step3" if "_states" in name else "iter_0000003")
    (root / ("latest" if name == "latest" else f"{group}/{name}")).write_bytes(payload)


@pytest.mark.parametrize(
    "name",
    [
        "mp_rank_00_model_states.pt",
        "layer_01-model_00-model_states.pt",
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "model_optim_rng.pt",
        "common.pt",
        ".metadata",
        "latest",
    ],
)
def test_foreign_formats(tmp_path, hooked, capsys, name):
    convert = runpy.run_path(str(ROOT / "tools" / "convert_checkpoint.py"))["main"]
    trace = tmp_path / "trace"
    for form, payload in payloads(trace).items():
        foreign(tmp_path / form, name, payload)
        with watched(trace):
            for more in ([str(tmp_path / "new")], ["--dry-run", "--plain-class", "posix.system"]):
                assert convert([str(tmp_path / form), *more]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow
def test_whole_programs(tmp_path):
    """Resume a run and generate text.

    Planted checkpoints are reported as broken, and the one before loads.
    """
    run = tmp_path / "run"
    trace = tmp_path / "trace"
    log = tmp_path / "log"
    flags = [*TINY, "--train-iters", "2", "--save", str(run)]
    (trained,) = launch(1, flags)
    assert trained is not None and trained.code == 0, trained
    (run / TRACKER).unlink()  # it would make the others be ignored
    for number, plant in enumerate((of_an_old_format(1), of_an_old_format(2), in_data), 9999997):
        plant(
            shutil.copytree(run / "iter_0000002", run / f"iter_{number}"), payloads(trace)["pickle"]
        )
    armed = {0: (watch, str(log))}
    metrics = tmp_path / "metrics.jsonl"
    words = f"--load {run} --tokens 2 --allow-older --metrics-file {metrics} --prompt 5".split()
    (text,) = launch(1, words, script="tools/generate_text.py", arm=armed)
    (resumed,) = launch(1, [*flags, "--load", str(run), "--train-iters", "3"], arm=armed)
    for ended in (text, resumed):
        assert ended is not None and ended.code == 0, ended
        assert all(f"iter_{number}" in ended.output for number in (9999997, 9999998, 9999999))
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [r["event"] for r in records] == [*["rejected_checkpoint"] * 3, "generate"]
    assert {r["instead"] for r in records[:3]} == {str(run / "iter_0000002")}
    assert not trace.exists() and not log.exists(), log.read_text()
