"""Phases of the data that begin during a run, in its metrics file."""

import numpy as np
import pytest

from tests.helpers.indexed import write_documents
from tests.helpers.processes import run_processes
from tests.helpers.tiny import records, run

pytestmark = pytest.mark.slow


def test_a_phase_is_recorded_once_at_the_step_that_reaches_it(tmp_path):
    a, b = (write_documents(tmp_path / name, [range(12)] * 40, np.int32) for name in ("a", "b"))
    save = str(tmp_path / "run")
    fields = dict(
        save=save,
        load=save,
        mock_data=False,
        split="1",
        train_iters=12,
        exit_interval=4,
        skip_train_iteration_range=("10-11",),
        # samples of 8 tokens: from samples 5, 25 and 38 on, in steps 2, 7, and 10 of 4 samples
        blend_schedule=f"0: 1 {a} 3 {b}, 40: {b}, 200: 1 {a} 1 {b}, 300: {a}",
    )
    for _ in range(3):
        run_processes(1, run, fields)
    events = records(tmp_path / "run")["data"]
    begun = {
        event["iteration"]: [(phase["position"], phase["tokens"]) for phase in event["phases"]]
        for event in events
        if "phases" in event
    }
    assert begun == {2: [(0, 0), (5, 40)], 7: [(25, 200)], 11: [(38, 304)]}
    blends = [phase["blend"] for event in events for phase in event.get("phases", ())]
    assert blends == [{a: 0.25, b: 0.75}, {b: 1.0}, {a: 0.5, b: 0.5}, {a: 1.0}]
    at_step_7 = next(event for event in events if event["iteration"] == 7)["sources"]
    # 1 and 4 of the first 5 samples, 20 of b, and 2 and 1 of the next 3
    assert [at_step_7[name]["samples"] for name in (a, b)] == [3, 25]
