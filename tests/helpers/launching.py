"""Processes of pretrain_gpt.py started as by a launcher, each rank's output in its own file."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers.processes import fork_context, free_port, limit_s, rank_environment

ROOT = Path(__file__).resolve().parents[2]

TINY = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr "
    "1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100 "
    "--make-vocab-size-divisible-by 8 --log-interval 1 --eval-iters 0 --num-workers 0"
).split()

_LAUNCHERS = ("SLURM_", "OMPI_", "PMI", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")


class Outcome(NamedTuple):
    """Exit code of one process (negative: the signal); standard output and error together."""

    code: int
    output: str


class Script:
    """Script in a process forked from one that has imported torch and DeepSpeed.

        with Script("pretrain_gpt.py", arguments, folder / "log") as script:
            ...
            outcome = script.wait()

    A process that still runs at the end of the block is killed. Use a real `python` only to test
    imports or start-up.
    """

    def __init__(
        self,
        script: str,
        arguments: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        arm: Any = None,
    ) -> None:
        """Start the script.

        log  file for its output and errors
        env  variables in addition to those of this process, without a launcher's
        arm  (function, *args): a module's top-level function, called in the process before the
             script
        """
        base = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
        variables = {
            **base,
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "100",
            "PYTHONUNBUFFERED": "1",
            **(env or {}),
        }
        self.log = log
        self.process = fork_context.Process(
            target=_run_script,
            args=(script, list(arguments), str(log), variables, arm),
            daemon=False,
        )
        self.process.start()

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.join()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def output(self) -> str:
        """Return the output so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """Wait for the script to end; fail the test if it takes longer than `timeout_s`."""
        timeout_s = timeout_s or limit_s()
        self.process.join(timeout_s)
        code = self.process.exitcode
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR2)  # prints its stacks
            self.process.join(1.0)
            raise AssertionError(
                f"{self.log.name} did not end within {timeout_s:.0f} s:\n{self.output[-6000:]}"
            )
        return Outcome(code, self.output)


def _run_script(
    script: str,
    arguments: list[str],
    log: str,
    variables: dict[str, str],
    arm: tuple[Any, ...] | None,
) -> None:
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.register(signal.SIGUSR2, os.dup(2))  # a test may redirect standard error
    sys.stdin = open(os.devnull)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115 - as Python's own
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = [script, *arguments]
    sys.path[0:0] = [str((ROOT / script).parent)]
    code: object = 0
    try:
        if arm is not None:
            arm[0](*arm[1:])
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as end:
        code = end.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def launch(
    n: int,
    arguments: Sequence[str],
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    absent: Sequence[int] = (),
    script: str = "pretrain_gpt.py",
    arm: Mapping[int, tuple[Any, ...]] | None = None,
) -> list[Outcome | None]:
    """Start n ranks, wait for them and return their outcomes.

    absent  ranks that are not started, whose outcomes are None
    arm     {rank: (function, *args)}, called in that rank's process before the script

    A rank that outlives the time limit fails the test: nothing may hang.
    """
    port = free_port()
    end = time.monotonic() + (timeout_s or limit_s())
    with tempfile.TemporaryDirectory() as folder:
        scripts: list[Script | None] = [
            None
            if rank in absent
            else Script(
                script,
                arguments,
                Path(folder, f"rank_{rank}.log"),
                {**(rank_environment(rank, n, port) if n > 1 else {}), **(env or {})},
                (arm or {}).get(rank),
            )
            for rank in range(n)
        ]
        outcomes: list[Outcome | None] = []
        try:
            for s in scripts:
                left_s = max(1.0, end - time.monotonic())
                outcomes.append(s.wait(left_s) if s is not None else None)
            return outcomes
        except AssertionError as error:
            raise AssertionError(f"{error}\nranks before it: {outcomes}") from None
        finally:
            for s in scripts:
                if s is not None:
                    s.__exit__()
