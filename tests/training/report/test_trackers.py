"""Metrics file, trackers and the user's on_event: what they write, and what their failure costs."""

import errno
import importlib.util
import io
import json
import math
import os
import shutil
import struct
import sys
import threading
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.config.pieces import load_callbacks
from megatron.errors import ConfigError
from megatron.metrics_file import read_records
from megatron.training.report import trackers
from megatron.training.report.events import (
    CheckpointFailed,
    Iteration,
    StepRecord,
    scalars,
)
from megatron.training.report.trackers import Background, JsonLines, TensorBoard
from tests.helpers.launching import TINY, launch
from tests.helpers.processes import run_processes
from tests.helpers.tiny import records, tiny, values


def interval(first, last, **changes):
    """Return the event of steps `first` to `last`, with the loss 4 / i of step i; 4 was skipped."""
    steps = [
        StepRecord(i, 16 * i, 128 * i, 16, i / 8, None, i == 4, 2.0**i, 0.25 * i)
        for i in range(first, last + 1)
    ]
    omitted = ("loss", "skipped", "counted")
    of_last = {k: v for k, v in vars(steps[-1]).items() if k not in omitted}
    fields = dict(
        total_iterations=9, seq_length=8, lm_loss=None, skipped=1, nan=0, step_time_s=0.25,
        samples_per_s=64.0, tokens_per_s=512.0, tokens_per_s_per_device=256.0, model_tflops=3.0,
        hardware_tflops=4.0, mfu=None, hfu=0.5, memory_bytes=99, memory_rank=0, reserved_bytes=120,
        steps=steps, step_losses=[4.0 / step.iteration for step in steps],
    )  # fmt: skip
    return Iteration(**{**of_last, **fields, **changes})


# --- events


def test_each_fact_is_one_scalar():
    event = interval(
        1,
        4,
        phases_ms={"forward": {"min": 1.0, "mean": 2.0, "max": 4.0}},
        stage_memory_bytes=[7, 8],
        sources={"web=1": {"epochs": 0.5, "tokens": 64}},
    )
    points = scalars(event, every=2)
    assert list(points) == [2, 4] and points[2]["lm loss"] == 2.0
    fourth = points[4]
    assert "lm loss" not in fourth and "mfu" not in fourth  # skipped, and unknown
    # MLflow's file store has a file for each name, and a folder for what precedes a slash
    assert not [(a, b) for a in fourth for b in fourth if b.startswith(f"{a}/")]
    expected = {
        "grad-norm": 1.0,
        "loss-scale": 16.0,
        "phase-ms/forward/mean": 2.0,
        "phase-ms/forward/max": 4.0,
        "stage-mem-max-allocated-bytes/1": 8,
        "data/web_1/epochs": 0.5,
        "data/web_1/tokens": 64,
    }
    assert expected.items() <= fourth.items()
    # no step of the interval is due, but its own figures are
    ((at3, third),) = scalars(interval(3, 3), every=2).items()
    assert at3 == 3 and "lm loss" not in third and third["iteration-time"] == 0.25


# --- metrics file


def test_metrics_file_appends_and_survives_a_cut_line(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    first = JsonLines(path)
    first.on_event(interval(1, 1, time=12.5, lm_loss=1 / 3, grad_norm=math.inf, mfu=math.nan))
    # Flushed: readable while the run continues.
    (record,) = read_records(path)
    assert (record["event"], record["time"], record["lm_loss"]) == ("iteration", 12.5, 1 / 3)
    assert record["grad_norm"] is None is record["mfu"]
    first.close()
    with open(path, "a") as file:
        file.write('{"event": "iterat')  # killed during the write
    resumed = JsonLines(path)
    resumed.on_event(CheckpointFailed(iteration=2, reason="full"))
    resumed.close()
    assert [r["event"] for r in read_records(path)] == ["iteration", "checkpoint_failed"]
    json.loads(path.read_text().splitlines()[-1])


def test_metrics_file_that_cannot_be_written_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="metrics-file.*file/metrics.jsonl"):
        JsonLines(tmp_path / "file" / "metrics.jsonl")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="fifo"):
        JsonLines(tmp_path / "fifo")


def test_a_disk_that_is_full_for_a_while_loses_records_and_not_the_run(tmp_path):
    class Disk(io.RawIOBase):
        """Disk that takes 40 bytes of the second record and nothing of the third."""

        def __init__(self):
            self.content = b""
            self.calls = 0

        def write(self, data):
            self.calls += 1
            if self.calls == 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            chunk = bytes(data)[: 40 if self.calls == 2 else None]
            self.content += chunk
            return len(chunk)

    messages = []
    metrics = JsonLines(tmp_path / "m.jsonl", warn=messages.append)
    disk = Disk()
    metrics._file = disk
    (tmp_path / "full.jsonl").write_text('{"event": "iterat')
    # A run resumed on it writes nothing before there is a record.
    JsonLines(tmp_path / "full.jsonl")
    assert (tmp_path / "full.jsonl").read_text() == '{"event": "iterat'
    for iteration in range(1, 6):
        metrics.on_event(CheckpointFailed(iteration=iteration, reason="x" * 40))
    (tmp_path / "m.jsonl").write_bytes(disk.content)
    assert [r["iteration"] for r in read_records(tmp_path / "m.jsonl")] == [1, 4, 5]
    assert len(messages) == 1 and str(tmp_path / "m.jsonl") in messages[0]


# --- a tracker that fails


@pytest.mark.parametrize(
    ("goes_on", "seen", "share"), [(False, [0], "0 of 11"), (True, [0, 1, 2, 3], "4 of 11")]
)
def test_a_tracker_that_hangs_delays_nothing_and_says_how_much_it_lost(goes_on, seen, share):
    messages = []
    received = []
    hangs = threading.Event()
    ends = threading.Event()

    def hang(event):
        received.append(event.iteration)
        hangs.set()
        ends.wait()

    wait = threading.Event.wait if goes_on else lambda *_: False
    tracker = SimpleNamespace(on_event=hang, close=lambda: None)
    behind = Background(tracker, "It", "DO", messages.append, size=3, wait=wait)
    for i in range(11):
        behind.on_event(CheckpointFailed(iteration=i, reason=""))  # three of ten wait
        hangs.wait()
    assert len(messages) == 1 and "It" in messages[0] and "DO" in messages[0]
    if goes_on:
        ends.set()
    behind.finish()
    behind.close()
    assert received == seen and len(messages) == 2 and share in messages[1]
    ends.set()


def test_what_a_tracker_needs_is_looked_for_before_training(tmp_path, monkeypatch):
    for package, flag in (("wandb", "wandb_project"), ("mlflow", "mlflow_experiment_name")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ConfigError, match=f"{flag.replace('_', '-')}.*pip install {package}"):
            trackers.trackers(tiny(**{flag: "p"}), print)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--tensorboard-dir.*file/x"):
        TensorBoard(tiny(tensorboard_dir=str(tmp_path / "file/x")))


def test_a_callback_that_cannot_be_made_is_a_user_error():
    for name in "Class no.such.module:Class math:Class datetime:date datetime:timedelta".split():
        with pytest.raises(ConfigError, match=f"--callback {name}"):
            load_callbacks([name])


def imported_trackers(rank):
    return {"mlflow", "wandb", "tensorboard"} & sys.modules.keys()


@pytest.mark.slow
def test_no_tracker_is_imported_unless_it_is_asked_for():
    """DeepSpeed would import MLflow. The process is forked from one that has imported what runs do."""
    assert importlib.util.find_spec("mlflow") and run_processes(1, imported_trackers) == [set()]


BROKEN = """
import errno, os
import megatron

class Throws(megatron.Callback):
    def on_event(self, event):
        raise ValueError("thrown")

class Full(megatron.Callback):
    def on_event(self, event):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
"""


def wait_for_trackers(folder):
    """Find modules in `folder`, and wait for trackers without a time limit."""
    sys.path.insert(0, folder)
    *defaults, _ = trackers.Background.__init__.__defaults__
    trackers.Background.__init__.__defaults__ = (*defaults, threading.Event.wait)


@pytest.mark.slow
def test_broken_callbacks_change_no_loss_and_end_normally_with_a_note_each(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    losses = []
    names = ["Throws", "Full"]
    for flags in ([], ["--callback", *(f"broken:{name}" for name in names)]):
        folder = tmp_path / f"run{len(flags)}"
        (outcome,) = launch(
            1,
            [*TINY, "--metrics-file", str(folder / "metrics.jsonl"), *flags],
            arm={0: (wait_for_trackers, str(tmp_path))},
        )
        assert outcome.code == 0, outcome
        by_event = records(folder)
        assert "end" in by_event
        losses.append(values(by_event["iteration"], "lm_loss"))
        for name in names:
            notes = [line for line in outcome.output.splitlines() if f"broken.{name}" in line]
            assert len([n for n in notes if n.startswith(" note: on_event of")]) == bool(flags)
    assert losses[0] == losses[1] and len(losses[0]) == 4


# --- what is written, read back with the libraries of the trackers


def in_tensorboard(folder):
    """Return the points of every scalar, and the configuration."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), purge_orphaned_data=True)
    events.Reload()
    scalars = {
        name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]
    }
    (*_, text) = events.Tensors("configuration/text_summary")
    return scalars, text.tensor_proto.string_val[0].decode()


def wandb_records(path):
    """Yield the records of a file of Weights & Biases: protocol buffers in the frames of LevelDB.

    A frame has a checksum, a length and a kind: whole, first, middle or last part of a record. No
    frame crosses a block of 32 KiB.
    """
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    at = 7
    payload = b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        payload += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(payload)
            payload = b""


def in_wandb(folder):
    """Return (id, exit code, configuration) of each file, and the points of every scalar.

    The steps of all files together count up from 0, and all but the first are resumed.
    """
    runs = []
    points = defaultdict(list)
    steps = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=os.path.getmtime):
        id_ = ""
        code = -1
        config = {}
        for record in wandb_records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                id_ = record.run.run_id
                assert record.run.resumed == bool(runs)
                config |= {u.key: json.loads(u.value_json) for u in record.run.config.update}
            elif kind == "exit":
                code = record.exit.exit_code
            elif kind == "history":
                steps.append(record.history.step.num)
                items = {
                    i.key or "/".join(i.nested_key): json.loads(i.value_json)
                    for i in record.history.item
                }
                for name, value in items.items():
                    if name != "iteration" and not name.startswith("_"):
                        points[name].append((items["iteration"], value))
        runs.append((id_, code, config))
    assert steps == list(range(len(steps)))
    return runs, points


def in_mlflow(uri):
    """Return the only run, and the points of every scalar."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    (experiment,) = [e for e in client.search_experiments() if e.name != "Default"]
    (run,) = client.search_runs([experiment.experiment_id])
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return run, {name: [(m.step, m.value) for m in of] for name, of in history.items()}


def in_jsonl(path):
    """Return the points that the records of a run with --log-interval 1 stand for."""
    points = defaultdict(list)
    names = {
        "lm_loss": "lm loss", "grad_norm": "grad-norm", "learning_rate": "learning-rate",
        "global_batch_size": "batch-size", "consumed_tokens": "consumed-tokens",
        "tokens_per_s": "tokens-per-second", "step_time_s": "iteration-time",
        "model_tflops": "throughput", "memory_bytes": "mem-max-allocated-bytes",
    }  # fmt: skip
    for record in read_records(path):
        at = record.get("iteration")
        if record["event"] == "iteration":
            for field, name in names.items():
                points[name].append((at, record[field]))
        elif record["event"] == "validation" and record["dataset"] == "valid":
            points["lm loss validation"].append((at, record["lm_loss"]))
            points["lm loss validation ppl"].append((at, record["perplexity"]))
        elif record["event"] == "checkpoint":
            points["save-time"].append((at, record["elapsed_s"]))
    return points


TOLD = """
import os
import megatron

class Tells(megatron.Callback):
    def __init__(self):
        self.seen = []
    def on_event(self, event):
        self.seen.append(event.event)
    def close(self):
        print(f"rank {os.environ.get('RANK', 0)} was told:", *self.seen, flush=True)
    def on_end(self, run):
        print(f"rank {run.topology.rank} ended", flush=True)
"""


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """Return the folder of a run with all trackers, of 2 ranks, and resumed on one."""
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "told.py").write_text(TOLD)
    arguments = [
        *TINY, "--eval-iters", "1", "--eval-interval", "2", "--log-params-norm",
        "--save", str(folder / "a run"), "--load", str(folder / "a run"),
        "--tensorboard-dir", str(folder / "tb"),
        "--wandb-project", "p", "--wandb-save-dir", str(folder / "wb"),
        "--mlflow-tracking-uri", f"sqlite:///{folder}/mlflow.db", "--callback", "told:Tells",
    ]  # fmt: skip
    env = {"WANDB_MODE": "offline", "MLFLOW_DISABLE_TELEMETRY": "true"}
    arm = dict.fromkeys(range(2), (wait_for_trackers, str(folder)))
    for ranks, iterations in ((2, 4), (1, 6)):
        if ranks == 1:  # a newer checkpoint is broken, which is an event before the start
            broken = folder / "a run" / "iter_0000005"
            shutil.copytree(folder / "a run" / "iter_0000004", broken)
            os.truncate(broken / "__0_0.distcp", 10)
            broken.with_name("latest_checkpointed_iteration.txt").write_text("5\n")
        flags = [*arguments, "--train-iters", str(iterations)]
        outcomes = launch(ranks, flags, env=env, arm=arm)
        assert [o.code for o in outcomes] == [0] * ranks, outcomes
        (folder / f"log{ranks}").write_text("".join(o.output for o in outcomes))
    return folder


@pytest.fixture(scope="module")
def expected(tracked):
    points = in_jsonl(tracked / "a run" / "metrics.jsonl")
    assert [at for at, _ in points["lm loss"]] == [1, 2, 3, 4, 5, 6]
    return points


@pytest.mark.slow
def test_a_callback_of_ones_own_hears_on_rank_0_what_the_metrics_file_has(tracked):
    written = [r["event"] for r in read_records(tracked / "a run" / "metrics.jsonl")]
    second = written.index("end") + 1
    assert written[second : second + 2] == ["rejected_checkpoint", "start"]
    for ranks, expected in ((2, written[:second]), (1, written[second:])):
        lines = (tracked / f"log{ranks}").read_text().splitlines()
        closed = sorted(line.split() for line in lines if "was told:" in line)
        assert [(int(words[1]), words[4:]) for words in closed] == [
            (rank, expected if rank == 0 else []) for rank in range(ranks)
        ]
        assert len([line for line in lines if line.endswith(" ended")]) == ranks
        assert not [line for line in lines if line.startswith(" note:") and "event" in line]


@pytest.mark.slow
def test_tensorboard_has_what_the_metrics_file_has(tracked, expected):
    points, configuration = in_tensorboard(tracked / "tb")
    single = {n: [(at, float(np.float32(v))) for at, v in p] for n, p in expected.items()}
    assert {name: points[name] for name in expected} == single
    assert not [name for name in points if " vs " in name] and "params-norm" in points
    assert "| num_layers | 4 |" in configuration


@pytest.mark.slow
def test_weights_and_biases_has_what_the_metrics_file_has(tracked, expected):
    runs, points = in_wandb(tracked / "wb")
    assert {name: points[name] for name in expected} == expected
    (first, code, config), (second, code_again, _) = runs
    assert first == second != "" and (code, code_again) == (0, 0)
    assert config["num_layers"] == 4 and config["train_iters"] == 4


@pytest.mark.slow
def test_mlflow_has_what_the_metrics_file_has(tracked, expected):
    run, points = in_mlflow(f"sqlite:///{tracked}/mlflow.db")  # of which there is one
    assert {name: points[name] for name in expected} == expected
    assert set(points) == set(in_tensorboard(tracked / "tb")[0])
    assert (run.info.run_name, run.info.status) == ("a run", "FINISHED")
    assert run.data.params["num_layers"] == "4"
