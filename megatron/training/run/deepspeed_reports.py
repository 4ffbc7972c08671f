"""Reports that DeepSpeed's JSON file selects: monitors, comms logger and flops profiler."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.errors import ConfigError
from megatron.parallel.flight import KINDS, CallRecord, DeviceCalls, DeviceEvent, HostEvent
from megatron.protocols import Callback
from megatron.training.report.events import StepRecord
from megatron.training.run.state import Run
from megatron.training.safety.bad_steps import loss_over_ranks

_OPERATIONS = {
    b"all_reduce": "all_reduce",
    b"all_gather": "all_gather_into_tensor",
    b"reduce_scatter": "reduce_scatter_tensor",
    b"all_to_all": "all_to_all_single",
}
"""DeepSpeed's names for our collectives; its logger ends the process if it gets an unknown name."""


class LoggedCalls(DeviceCalls):
    """A meter of the flight recorder that measures how long this rank waits for each collective.

    On a GPU, the host waits for its current stream before and after each call. It does not wait for
    the whole device, where a message may wait for another that the host has yet to send.
    """

    def __init__(self, new_event: Callable[[], DeviceEvent], on_host: bool = False) -> None:
        super().__init__(new_event, on_host)
        self._spent: dict[tuple[int, int], tuple[CallRecord, float]] = {}
        self._before = dict(self._spent)  # of the previous step

    def enter(self, call: CallRecord, waits: bool = False) -> None:
        self._finish()
        super().enter(call, waits)
        self._entered_s = time.perf_counter()

    def leave(self) -> None:
        if self._entered is not None:
            self._finish()
            call = self._entered[0]
            key = (call.kind, call.sequence)
            calls = (
                self._before if key in self._before else self._spent
            )  # a call comes twice: start and wait
            _, spent_s = calls.get(key, (call, 0.0))
            calls[key] = call, spent_s + time.perf_counter() - self._entered_s
        super().leave()

    def _finish(self) -> None:
        if not self.on_host:
            torch.cuda.current_stream().synchronize()

    def next_step(self) -> list[tuple[CallRecord, float]]:
        """Return the collectives of the previous step with their seconds; all have ended."""
        complete = list(self._before.values())
        self._before = self._spent
        self._spent = {}
        return complete


class _Operators(TorchDispatchMode):
    """A mode without an effect of its own: inside it, nodes in C++ leave their work to Python.

    DeepSpeed's profiler counts the calls of torch's functions from Python.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch's compiler would be imported

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DeepSpeedReports(Callback):
    """Supplies DeepSpeed's reports with data of a run that DeepSpeed's engine does not have.

    DeepSpeed's own step writes the learning rate to its monitors.
    """

    def __init__(self, run: Run) -> None:
        self._sections: dict[str, Any] = dict(run.config.engine.extra or {})
        self._deepspeed = run.engine.deepspeed
        self._stop_profile: Callable[[], None] | None = None
        self._calls: LoggedCalls | None = None

    def _wants(self, section: str) -> bool:
        return bool(self._sections.get(section, {}).get("enabled"))

    def on_start(self, run: Run) -> None:
        if not self._wants("comms_logger"):
            return
        self._communication: Any = importlib.import_module("deepspeed.comm")
        if not hasattr(self._communication, "comms_logger"):
            raise ConfigError(
                "comms_logger: this DeepSpeed lacks deepspeed.comm.comms_logger, which logs calls: "
                "remove comms_logger from --deepspeed_config, and read the phases in --metrics-file"
            )
        on_host = run.topology.device.type == "cpu"
        # with timing enabled, because the timeline uses this meter, too
        new_event = HostEvent if on_host else partial(torch.cuda.Event, enable_timing=True)
        self._calls = LoggedCalls(new_event, on_host)
        run.topology.flight.meter = self._calls

    def _log_calls(self, run: Run, calls: LoggedCalls) -> None:
        logger = self._communication.comms_logger
        sizes = {group.kind: group.size for group in run.topology.groups}
        for call, spent_s in calls.next_step():
            name = _OPERATIONS.get(call.name)
            kind = KINDS[call.kind]
            if name is not None and (logger.prof_all or name in logger.prof_ops):
                # DeepSpeed multiplies the sizes of the two *_tensor calls by the number of ranks
                ranks = sizes.get(kind, 1) if name.endswith("_tensor") else 1
                label = f"{name} | [{kind}]" if logger.debug else name
                logger.append(name, label, 1000 * spent_s, call.size_bytes // ranks)

    def before_step(self, run: Run) -> None:
        engine = self._deepspeed
        due = run.progress.iteration == engine.flops_profiler_profile_step()
        if not (due and self._wants("flops_profiler") and run.topology.world.is_first):
            return
        module = importlib.import_module("deepspeed.profiling.flops_profiler")
        (chunk, *_) = run.engine.chunks.children()
        profiler = module.FlopsProfiler(chunk, engine, engine.flops_profiler_recompute_fwd_factor())
        operators = ExitStack()
        operators.enter_context(_Operators())  # type: ignore[no-untyped-call]
        profiler.start_profile()

        def stop() -> None:
            self._stop_profile = None
            handle.remove()
            operators.close()
            profiler.stop_profile()

        def report(*_: object) -> None:
            stop()
            profiler.print_model_profile(
                profile_step=run.progress.iteration,
                module_depth=engine.flops_profiler_module_depth(),
                top_modules=engine.flops_profiler_top_modules(),
                detailed=engine.flops_profiler_detailed(),
                output_file=engine.flops_profiler_output_file(),
            )
            profiler.end_profile()

        handle = chunk.register_forward_hook(report)
        self._stop_profile = stop

    def after_step(self, run: Run) -> None:
        if self._stop_profile is not None:  # a graph was replayed, which calls no hook
            self._stop_profile()
        if self._calls is not None:
            self._log_calls(run, self._calls)

    def on_step(self, run: Run, step: StepRecord) -> None:
        if not self._deepspeed.monitor.enabled:
            return
        values = {"train_loss": loss_over_ranks(run, step)}
        if run.config.precision.fp16:
            values["loss_scale"] = step.loss_scale
        self._deepspeed.monitor.write_events(
            [
                (f"Train/Samples/{name}", value, step.consumed_samples)
                for name, value in values.items()
                if value is not None
            ]
        )

    def on_end(self, run: Run) -> None:
        if self._calls is not None:
            self._log_calls(run, self._calls)  # of the last step
            self._log_calls(run, self._calls)  # and of everything after it
            self._communication.log_summary()
