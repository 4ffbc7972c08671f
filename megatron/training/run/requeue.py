"""--requeue: the job goes back into Slurm's queue."""
from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Mapping

from megatron.parallel.environment import job_name
from megatron.parallel.slurm import ask_slurm


def requeue(environ: Mapping[str, str], say: Callable[[str], object]) -> bool:
    """Put the job of this process back into the queue; whether Slurm took it. What went wrong is said.

    Called by one rank as the last thing it does: Slurm ends the processes of the job at once. A job that somebody
    cancelled is not running any more and stays cancelled; one that ran into its time limit goes back.
    """
    job = job_name(environ)
    if not job:
        say(" note: --requeue does nothing: this is no Slurm job")
        return False
    ended = _why_ended(job)
    if ended:
        say(f" note: job {job} is not put back into the queue: it is {ended}, so somebody ended it")
        return False
    try:
        answer = ask_slurm("scontrol", "requeue", job)
        # Slurm ends the processes of a job that it has put back: at times scontrol before it has its answer.
        taken = answer.returncode in (0, -signal.SIGTERM)
        reason = None if taken else answer.stderr.strip() or f"exit code {answer.returncode}"
    except FileNotFoundError:
        reason = "scontrol is not there"
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(error)
    if reason is not None:
        say(f" ERROR: job {job} could not be put back into the queue: {' '.join(reason.split())}. Start it again by "
            f"hand; sbatch --requeue, or the site, may have to allow it")  # fmt: skip
        return False
    say(f" job {job} is back in the queue")
    return True


def _why_ended(job: str) -> str | None:
    """The state of a job that is not running any more; None while it runs, and when squeue does not say."""
    try:
        answer = ask_slurm("squeue", "-h", "-j", job, "-o", "%T %r")
    except (OSError, subprocess.SubprocessError):
        return None
    state, _, why = answer.stdout.strip().partition(" ")
    if answer.returncode or state in ("", "RUNNING") or why.startswith("TimeLimit"):
        return None
    return state
