"""Effective training time: the closed form against the simulation, which shares no formula with it."""

from dataclasses import replace
from statistics import fmean, stdev

import pytest

from megatron.errors import ConfigError
from megatron.planner.effective_time import LongRun, best_interval_s, effective_time
from megatron.planner.effective_time_simulation import simulate_month, simulate_months
from megatron.planner.faults import KINDS, fault_rates, fault_records, origins_of_rates
from tools.effective_time import advice, main

DETECTION = {"process": 2, "device": 2, "node": 22, "network": 60, "hang": 300, "slow": 3600}
RUN = LongRun(nodes=1024, rates=fault_rates("llama3"), detection_s=DETECTION)
RUNS = {
    "no spares": RUN,
    "replicas are dropped": replace(RUN, spare_nodes=8, replicas=32, droppable=4),
    "many nodes": replace(RUN, nodes=9216, spare_nodes=64),
    "time limits and a queue": replace(RUN, spare_nodes=8, job_s=43200.0, queue_s=3600.0),
    "no local checkpoints": replace(RUN, local_steps=0, spare_nodes=50),
    "repairs": replace(RUN, nodes=9216, spare_nodes=192, machine_nodes=9472, job_s=43200.0),
    "corruption and hangs": replace(
        RUN, rates={"corruption": 5e-3, "hang": 3e-3, "slow": 3e-3, "maintenance": 1e-3}
    ),
    "compressed time": replace(
        RUN,
        nodes=16,
        rates={"device": 1.0, "node": 0.5},
        disk_steps=20,
        in_recovery=False,
        end_s=30.0,
        spare_nodes=2,
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_closed_form_equals_the_simulation(name):
    """To four standard errors, and 0.2 % of the time for what the closed form neglects."""
    months = simulate_months(RUNS[name], 40)
    for share, expected in effective_time(RUNS[name]).items():
        simulated = [getattr(month.shares, share) for month in months]
        tolerance = 4 * stdev(simulated) / len(simulated) ** 0.5 + 2e-3
        assert fmean(simulated) == pytest.approx(expected, abs=tolerance), share


def test_a_run_without_faults_only_saves():
    run = replace(RUN, rates={}, local_steps=10, local_stall_s=1.0, disk_stall_s=0.0, start_s=0.0)
    run = replace(run, disk_lag_s=0.0)
    assert effective_time(run).effective == pytest.approx(100 / 101)
    month = simulate_month(run, "0")
    assert month.shares.effective == pytest.approx(100 / 101, rel=1e-4)
    assert sum(month.faults.values()) == 0


def test_shares_of_a_simulated_month_add_up_and_depend_on_the_seed_alone():
    month = simulate_month(RUN, "1")
    assert sum(share for _, share in month.shares.items()) == pytest.approx(1.0)
    assert simulate_month(RUN, "1") == month != simulate_month(RUN, "2")


def test_best_interval_loses_least():
    """Against a search over intervals with the closed form, to a tenth of a percent of the loss."""
    base = replace(RUN, rates={"process": 8e-3}, step_s=1.0, local_stall_s=4.0, local_lag_s=0.0)
    base = replace(base, disk_stall_s=0.0)

    def at(steps):
        return effective_time(replace(base, local_steps=steps, disk_steps=20 * steps)).effective

    best = best_interval_s(4.0, base.rate("process"))
    assert at(round(best)) == pytest.approx(
        max(at(steps) for steps in range(50, 1000, 5)), rel=1e-5
    )


def test_published_counts():
    """Table 5 of Llama 3's paper has 419 interruptions, and ByteRobust's table 1 55,365 incidents."""
    records = fault_records()
    assert records["llama3"].counts().total() == 419
    assert sum(cause.count for cause in records["byterobust-platform"].causes) == 55_365
    kinds = {cause.kind for record in records.values() for cause in record.causes}
    assert kinds <= {*KINDS, "none"}
    assert all(record.basis in ("read", "quoted") for record in records.values())
    with pytest.raises(ConfigError, match="choose from llama3"):
        fault_rates("frontier")


def test_rates_add_to_a_source_only_what_it_lacks():
    """419 faults of Llama 3 in 2,048 x 54 node-days; 5,035 and 442 beside 40,306 elsewhere."""
    rates, origins = fault_rates("llama3"), origins_of_rates("llama3")
    assert {kind for kind in rates if origins[kind] != "llama3"} == {"slow", "storage"}
    own = 419 / (2048 * 54)
    assert sum(r for k, r in rates.items() if origins[k] == "llama3") == pytest.approx(own)
    listed = 55_365 - 9_582 - 5_035 - 442  # incidents of the platform but changes, storage, slow
    assert rates["storage"] == pytest.approx(own * 5_035 / listed)
    assert rates["slow"] == pytest.approx(own * 442 / listed)


def test_recommended_restarts():
    """A device fault costs two: 25 of them have the mean 50 and the standard deviation 2 x 5."""
    run = replace(RUN, rates={"device": 25 / 1024}, days=1.0)
    assert any("at least 90 " in line for line in advice(run))
    (month,) = simulate_months(run, 1)
    month = replace(month, restarts=100)
    assert any("at least 100 " in line for line in advice(run, [month]))


def test_a_machine_with_too_few_nodes_is_refused(capsys):
    words = "--nodes 9400 --machine-nodes 9408 --months 0".split()
    assert main(words) == 2
    assert "in repair" in capsys.readouterr().err


def test_the_tool_prints_tables_of_80_columns(capsys):
    words = "--nodes 1024 --spare-nodes 8 --replicas 128 --droppable 4 --months 5".split()
    assert main(words) == 0
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 80
    assert "effective" in output
