"""Metrics file and trackers of a run: callbacks on rank 0 that record its events.

TensorBoard, Weights & Biases and MLflow get the same scalars under the same names (events.scalars).
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.errors import ConfigError
from megatron.metrics_file import strict_json
from megatron.parallel.environment import natural_number
from megatron.protocols import Callback
from megatron.training.report import mlflow_writer
from megatron.training.report.events import End, Event, Start, scalars
from megatron.untrusted import without_waiting

_WAITING = 1000  # events by which a slow tracker may lag behind
_CLOSE_S = 30.0  # how long the end of a run waits for trackers, which end side by side
_FLUSH_S = 30  # seconds of TensorBoard's data that a killed run may lose
_LOGIN_S = 30.0  # time that Weights & Biases waits for an answer on a terminal
_MLFLOW = "mlflow-skinny sqlalchemy alembic"  # the last two are for a store in a local file

Say = Callable[[str], object]


class JsonLines(Callback):
    """The metrics file: one JSON object per line, {"event": ..., "time": seconds since 1970, ...}.

    Numbers are not rounded. Each subclass of events.Event is one kind of record. A resumed run
    appends to the same file. Every record is written immediately, so a killed run loses nothing
    that it reported. NaN and infinity are written as null, because JSON has no such numbers; the
    field `nan` counts iterations with such a loss.

    Raises ConfigError if the file cannot be opened; the message names `flag`, which selected it. If
    the disk fills up later, records are lost but the run continues; `warn` is called once.
    """

    def __init__(self, path: str | Path, *, flag: str = "--metrics-file", warn: Say = print):
        self.path = Path(path)
        self._warn: Say | None = warn
        # whether the last record was cut short, because the run was killed or the disk was full
        self._torn = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: io.RawIOBase = open(  # noqa: SIM115 - open for the whole run
                self.path, "ab", buffering=0, opener=without_waiting
            )
            if self._file.tell() > 0:
                with open(self.path, "rb") as written:
                    written.seek(-1, os.SEEK_END)
                    self._torn = written.read(1) != b"\n"
        except OSError as error:
            raise ConfigError(
                f"{flag}: {self.path}: {error.strerror}: choose a place that is writable"
            ) from error

    def on_event(self, event: Event) -> None:
        """Append the record of an event."""
        line = (strict_json(event.as_record()) + "\n").encode()
        line = b"\n" + line if self._torn else line
        try:
            self._torn = (self._file.write(line) or 0) < len(line)
            reason = "No space left on device" if self._torn else None
        except OSError as error:
            self._torn = True
            reason = error.strerror or str(error)
        if reason and self._warn is not None:
            self._warn(
                f" warning: records are lost because {self.path} cannot be written: {reason}"
            )
            self._warn = None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(eq=False)
class Background(Callback):
    """Passes events to a callback in a thread, so that the callback cannot stop or slow the run.

    At most `size` events wait; further ones are lost. An exception turns the callback off. The
    thread that publishes the events reports each of these problems once through `say`, with the
    `name` of the callback and the `remedy`. `finish` requests the end, and `close` waits for it
    with `wait(event, seconds)`, which returns whether the event was set in that time.
    """

    callback: Callback
    name: str
    remedy: str
    say: Say
    size: int = _WAITING
    wait: Callable[[threading.Event, float], bool] = threading.Event.wait

    def __post_init__(self) -> None:
        self._waiting: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._published = self._delivered = 0
        self._noted = set[str]()
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._deadline = 0.0
        # A thread that hangs must not keep the process alive.
        threading.Thread(target=self._work, name=self.name, daemon=True).start()

    def _work(self) -> None:
        try:
            while (event := self._waiting.get()) is not None:
                self.callback.on_event(event)
                self._delivered += 1
            self.callback.close()
        except BaseException as error:
            self._error = error
            with suppress(BaseException):
                self.callback.close()
        self._ended.set()

    def on_event(self, event: Event) -> None:
        """Pass an event on, without waiting."""
        self._published += 1
        if self._error is not None:
            self._note_error()
        elif self._waiting.qsize() < self.size:
            self._waiting.put(event)
        else:
            self._note("takes too long: some of the following events are lost")

    def finish(self) -> None:
        """Request the end: the callback takes the waiting events, and closes."""
        self._waiting.put(None)
        self._deadline = time.monotonic() + _CLOSE_S

    def close(self) -> None:
        """Wait for the end of the thread, for a limited time, and report lost events."""
        ended = self.wait(self._ended, max(0.0, self._deadline - time.monotonic()))
        if not ended and isinstance(self.callback, MLflow):
            self.callback.kill()
        if self._error is not None:
            self._note_error()
        elif not ended or self._delivered < self._published:
            late = "" if ended else " and has not ended in time"
            self._note(f"has taken {self._delivered} of {self._published} events{late}")

    def _note_error(self) -> None:
        error = f"{type(self._error).__name__}: {self._error}"
        self._note(f"is off from now on, and the run continues: {error}")

    def _note(self, what: str) -> None:
        if what not in self._noted:
            self._noted.add(what)
            self.say(f" note: {self.name} {what}: {self.remedy}")


def trackers(config: Config, say: Say) -> list[Background]:
    """Return the trackers that the flags select, and the user's callbacks that have an on_event.

    Each is in a Background. Raises ConfigError if a package is missing or a folder cannot be
    created.
    """
    logging = config.logging
    selected = list[tuple[Callback, str, str]]()
    if logging.tensorboard_dir:
        remedy = f"make room in --tensorboard-dir {logging.tensorboard_dir}, or choose another"
        selected.append((TensorBoard(config), "TensorBoard", remedy))
    if logging.wandb_project:
        remedy = "check the connection and the key, or set WANDB_MODE=offline and sync later"
        selected.append((WandB(config), "Weights & Biases", remedy))
    if logging.mlflow_tracking_uri or logging.mlflow_experiment_name:
        selected.append((MLflow(config), "MLflow", "check --mlflow-tracking-uri"))
    for callback in config.pieces.callbacks:
        kind = type(callback)
        if getattr(kind, "on_event", Callback.on_event) is not Callback.on_event:
            name = f"on_event of {kind.__module__}.{kind.__qualname__}"
            selected.append((callback, name, "correct it"))
    return [Background(*one, say) for one in selected]


class TensorBoard(Callback):
    """Writes into --tensorboard-dir. A resumed run hides the points that it computes again."""

    def __init__(self, config: Config) -> None:
        self._flags = config.logging
        self._folder = config.logging.tensorboard_dir or "."
        self._writer: Any = None
        self._board = _package("torch.utils.tensorboard", "--tensorboard-dir", "tensorboard")
        try:
            os.makedirs(self._folder, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--tensorboard-dir {self._folder}: {error.strerror}: choose another"
            ) from error

    def on_event(self, event: Event) -> None:
        """Write the scalars of an event; at the start, write the configuration."""
        if isinstance(event, Start):
            resumed_at = event.iteration + 1 if event.iteration else None
            writer = self._writer = self._board.SummaryWriter(
                self._folder,
                purge_step=resumed_at,
                max_queue=self._flags.tensorboard_queue_size,
                flush_secs=_FLUSH_S,
            )
            rows = [f"| {name} | {value} |" for name, value in event.settings().items()]
            table = "\n".join(["| setting | value |", "|---|---|", *rows])
            writer.add_text("configuration", table, event.iteration, walltime=event.time)
        for iteration, values in scalars(event, self._flags.tensorboard_log_interval).items():
            for name, value in values.items():
                self._writer.add_scalar(name, value, iteration, walltime=event.time)

    def close(self) -> None:
        """Write buffered data."""
        if self._writer is not None:
            self._writer.close()


class WandB(Callback):
    """Logs to --wandb-project. A resumed run continues the run whose id is next to metrics.jsonl.

    The number of the next step is kept there, too: offline, without a server to supply it, steps
    would begin at 0 again, and a later upload would replace earlier entries.
    """

    def __init__(self, config: Config) -> None:
        self._wandb = _package("wandb", "--wandb-project", "wandb")
        self._flags = config.logging
        self._name = config.logging.wandb_exp_name or _name_of(config)
        self._id = _beside(config, "wandb_run_id")
        self._step_file = _beside(config, "wandb_step")
        self._step = 0
        self._folder = config.logging.wandb_save_dir or config.checkpoint.save or "."
        self._exit_code = 1

    def on_event(self, event: Event) -> None:
        """Log the scalars of an event by iteration; at the start, log the configuration."""
        if isinstance(event, Start):
            known = _known(self._id, event)
            id_ = known or secrets.token_hex(4)
            os.makedirs(self._folder, exist_ok=True)
            run = self._wandb.init(
                project=self._flags.wandb_project,
                entity=self._flags.wandb_entity,
                name=self._name,
                dir=self._folder,
                id=id_,
                resume="allow" if known else None,
                config=event.settings(),
                # do not capture the log
                settings=self._wandb.Settings(
                    console="off", login_timeout=_LOGIN_S, resumed=known is not None
                ),
            )
            before = _known(self._step_file, event) if known else None
            self._step = max(run.starting_step, natural_number(before or "") or 0)
            # Steps of Weights & Biases only increase; iterations go back in a rollback.
            self._wandb.define_metric("*", step_metric="iteration")
            _remember(self._id, id_)
        if isinstance(event, End):
            self._exit_code = 0
        points = scalars(event, self._flags.tensorboard_log_interval)
        for iteration, values in points.items():
            self._wandb.log({"iteration": iteration, **values}, step=self._step)
            self._step += 1
        if points:
            _remember(self._step_file, str(self._step))

    def close(self) -> None:
        """End the run; it counts as failed if there was no End event."""
        self._wandb.finish(exit_code=self._exit_code)


class MLflow(Callback):
    """Logs to --mlflow-tracking-uri through mlflow_writer, in a process of its own."""

    def __init__(self, config: Config) -> None:
        if importlib.util.find_spec("mlflow") is None:
            raise _missing("mlflow", "--mlflow-tracking-uri or --mlflow-experiment-name", _MLFLOW)
        self._flags = config.logging
        self._name = config.logging.mlflow_run_name or _name_of(config)
        self._id = _beside(config, "mlflow_run_id")
        self._writer: subprocess.Popen[str] | None = None

    def on_event(self, event: Event) -> None:
        """Log the scalars of an event by iteration; at the start, log the configuration."""
        if isinstance(event, Start):
            # In a separate session, so that Ctrl-C reaches only the training process, which then
            # reports the end of the run.
            self._writer = subprocess.Popen(
                [sys.executable, "-P", mlflow_writer.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            begin = mlflow_writer.Begin(
                uri=self._flags.mlflow_tracking_uri,
                experiment=self._flags.mlflow_experiment_name or "megatron",
                name=self._name,
                id_file=None if self._id is None else str(self._id),
                resumes=event.iteration > 0,
                params={name: str(value) for name, value in event.settings().items()},
            )
            self._send(begin)
        if points := scalars(event, self._flags.tensorboard_log_interval):
            self._send([int(1000 * event.time), points])
        if isinstance(event, End):
            self._send("FINISHED")

    def _send(self, message: object) -> None:
        assert self._writer is not None and self._writer.stdin is not None, "a run begins first"
        try:
            print(json.dumps(message), file=self._writer.stdin, flush=True)
        except OSError:
            self.close()

    def close(self) -> None:
        """Wait until everything is written. Raises RuntimeError with the writer's error."""
        if self._writer is not None and self._writer.returncode is None:
            output, _ = self._writer.communicate()
            if code := self._writer.returncode:
                raise RuntimeError(output.strip() or f"the writer ended with code {code}")

    def kill(self) -> None:
        """End the writer immediately."""
        if self._writer is not None:
            self._writer.kill()


def _name_of(config: Config) -> str | None:
    return Path(config.checkpoint.save).name if config.checkpoint.save else None


def _beside(config: Config, name: str) -> Path | None:
    """Return a tracker's file `name` next to metrics.jsonl; None without a metrics file."""
    return config.metrics_path and config.metrics_path.with_name(name)


def _known(file: Path | None, start: Start) -> str | None:
    """Return the contents of a tracker's file; None for a new run, or if there is no file."""
    return file.read_text().strip() if start.iteration and file and file.is_file() else None


def _remember(file: Path | None, id_: str) -> None:
    if file is not None:
        file.write_text(id_)


def _package(module: str, flag: str, package: str) -> Any:
    """Import a tracker's module. Raises ConfigError if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(module, flag, package, f" ({error})") from error


def _missing(module: str, flag: str, package: str, why: str = "") -> ConfigError:
    return ConfigError(
        f"{flag}: {module} cannot be imported{why}: pip install {package}, or remove the flag"
    )
