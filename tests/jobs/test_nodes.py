"""Dead nodes of an allocation, found with a stub of srun."""

import os

import pytest

from megatron.jobs.runner import Inquiry
from tests.jobs.waiting import until

# Answers of srun to a task on the node behind -w.
ANSWERS = 'while [[ $1 != -w ]]; do shift; done; echo "answers $2"'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("srun", "dead"),
    [
        (ANSWERS, []),
        (
            f"{ANSWERS} | grep -v n2 || echo 'srun: error: Task launch failed on node n2' >&2",
            ["n2"],
        ),
        # No node starts a step: that is Slurm's fault.
        ("echo 'srun: error: Unable to create step for job 7: Access denied' >&2; exit 1", []),
        # Busy the first time; it answers when asked again.
        (f"if [[ ! -e $0.asked && $* == *n2* ]]; then touch $0.asked; exit 1; fi; {ANSWERS}", []),
    ],
)
def test_who_is_dead(srun, dead, tmp_path, monkeypatch):
    """A dead node is found by srun; n1, where the tuner runs, shows that srun itself works."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    (tmp_path / "srun").write_text(f"#!/bin/bash\n{srun}\n")
    (tmp_path / "srun").chmod(0o755)
    asked = Inquiry(["n2", "n3"])
    until(lambda: asked.dead is not None)
    assert asked.dead == dead
