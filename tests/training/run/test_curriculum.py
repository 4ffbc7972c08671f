"""curriculum_learning of a DeepSpeed JSON: sequences that grow during the run."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.config.phases import parse_curriculum
from megatron.data.datasets import Datasets
from megatron.data.gpt_dataset import MockDataset
from megatron.data.sampler import make_micro_batch
from megatron.training.run.describe import describe_length
from megatron.training.run.schedules import BatchSchedule, LengthSchedule, Progress
from tests.helpers.processes import run_processes
from tests.helpers.tiny import one_stage, records, run, tiny, values


def entries(kind, least, most, **config):
    return dict(
        curriculum_type="seqlen",
        min_difficulty=least,
        max_difficulty=most,
        schedule_type=kind,
        schedule_config=config,
    )


def ramp(kind, least, most, total, step, **config):
    return entries(kind, least, most, total_curriculum_step=total, difficulty_step=step, **config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "curriculum",
    [
        ramp("fixed_linear", 72, 2048, 27638, 8),
        ramp("fixed_linear", 8, 64, 3, 8),
        ramp("fixed_linear", 5, 64, 100, 16),
        ramp("fixed_linear", 64, 64, 9, 8),
        ramp("fixed_root", 8, 1024, 999, 8, root_degree=2),
        ramp("fixed_root", 80, 1024, 77, 16, root_degree=3),
        entries("fixed_discrete", 8, 64, difficulty=[8, 32, 64], max_step=[5, 10]),
    ],
)
def test_lengths_are_those_of_deepspeed(curriculum):
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

    scheduler = CurriculumScheduler(curriculum)
    schedule = LengthSchedule(parse_curriculum(curriculum))
    end = schedule.changes[-1][0] + 20
    expected = [scheduler.update_difficulty(i) for i in range(1, end)]
    assert [schedule.at(i) for i in range(1, end)] == expected
    batches = BatchSchedule(1, ((0, 2),))
    for start in (0, 2, end - 5):
        stretches = schedule.stretches(batches, start, 2 * start, end - 1)
        ahead = [(length, 2 * n == samples) for length, n, samples in stretches for _ in range(n)]
        assert ahead == [(length, True) for length in expected[start:]]


FIELDS = dict(
    num_layers=3,
    num_attention_heads=4,
    hidden_size=32,
    seq_length=32,
    init_method_std=0.3,
    hidden_dropout=0.1,
    curriculum_learning=ramp("fixed_linear", 8, 32, 4, 8),  # 8, 16, 24, 32 tokens
    train_iters=None,
    train_tokens=4 * (8 + 16 + 24 + 32) + 1,  # the next step reaches it
    eval_iters=1,
    eval_interval=2,
    micro_batch_size=2,
)
LENGTHS = [8, 16, 24, 32, 32]


def test_the_tokens_that_are_cut_off_are_said():
    config = tiny(**FIELDS)
    batches = BatchSchedule.from_config(config)
    for first, cut in ((0, 4 * (24 + 16 + 8)), (2, 4 * 8), (3, None)):
        lines = []
        reporter = SimpleNamespace(console=SimpleNamespace(say_wrapped=lines.append))
        done = Progress(first, 4 * first, 4 * sum(LENGTHS[:first]))
        describe_length(config, batches, Datasets(), done, 5, 4 * sum(LENGTHS), reporter)
        assert len(lines) == (1 if cut is None else 2) and (cut is None or f" {cut} " in lines[1])


def figures(folder, ranks=1, **fields):
    run_processes(ranks, run, {**FIELDS, **fields, "save": str(folder), "load": str(folder)})
    found = records(folder)
    state = json.loads((folder / "iter_0000005" / "state.json").read_text())["state"]
    return [
        np.array(values(found[kind], "iteration", "lm_loss"))
        for kind in ("iteration", "validation")
    ], state


@pytest.mark.slow
def test_every_layout_trains_on_the_same_growing_sequences(tmp_path):
    """The second of three stages reads no data; all of them get messages of other shapes."""
    one, state = figures(tmp_path / "one")
    reported = records(tmp_path / "one")["iteration"]
    assert values(reported, "seq_length") == [(length,) for length in LENGTHS]
    assert state["consumed_tokens"] == state["scheduled_tokens"] == 4 * sum(LENGTHS)
    layouts = (
        (3, dict(pipeline_model_parallel_size=3, num_workers=2, reset_position_ids=False)),
        (4, dict(tensor_model_parallel_size=2, sequence_parallel=True, context_parallel_size=2)),
    )
    for number, (ranks, layout) in enumerate(layouts):
        folder = tmp_path / str(number)
        if number == 0:  # in two parts
            fields = {**FIELDS, **layout, "save": str(folder), "exit_interval": 3}
            run_processes(ranks, run, fields)
        other, counters = figures(folder, ranks, **layout, attention_dropout=0.0)
        for ours, theirs in zip(one, other, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5)
        assert counters["consumed_tokens"] == state["consumed_tokens"]


@pytest.mark.slow
def test_a_step_trains_on_the_first_tokens_of_its_samples(tmp_path):
    (losses, _), _ = figures(tmp_path, hidden_dropout=0.0)
    chunk = one_stage(tiny(**FIELDS | {"hidden_dropout": 0.0})).eval()
    data = MockDataset("train", 20, 32, 24, 1234)
    with torch.no_grad():
        batch = make_micro_batch(np.stack([data[i][:9] for i in range(4)]))
        assert losses[0][1] == pytest.approx(chunk(batch, None).item(), rel=1e-5)
