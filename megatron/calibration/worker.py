"""One measuring process: `python -m megatron.calibration.worker JOB`, with JOB as processes.py makes it."""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from megatron.config.command_line import parse_plan
from megatron.parallel.launch import detect_launch, select_device
from megatron.training.failures import leave, run_guarded


def work(job: dict[str, Any]) -> None:
    """Measure what the job asks for and write it. Raises MegatronError."""
    launch, config = detect_launch(), parse_plan(job["argv"])
    found: Any
    if job["what"] == "host":
        from megatron.calibration.host import host_seconds
        from megatron.training.setup import set_up_host

        device = select_device(launch, config.parallel.distributed_backend)
        set_up_host(config, device, launch)
        found = host_seconds(config, device, job["seconds"])._asdict()
    else:
        from megatron.calibration.session import run

        measured = run(config, launch, job["seconds"])
        found = None if measured is None else measured.as_json()
    if launch.rank == 0:
        Path(job["out"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    leave(run_guarded(lambda: work(json.loads(sys.argv[1])), 0, "error"))
