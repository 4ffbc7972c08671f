"""Runs in which copies on several ranks differ: they end, and nothing of them is saved."""

import pytest

from tests.helpers.custom_layer import put
from tests.helpers.launching import TINY, launch
from tests.helpers.poison import flipped

pytestmark = pytest.mark.slow


def ends(arguments, arm, *named):
    for outcome in launch(2, [*TINY, "--train-iters", "6", *arguments.split()], arm=arm):
        assert outcome.code == 2 and "Traceback" not in outcome.output, outcome
        assert all(word in outcome.output for word in named), outcome


def with_custom_layer(declared):
    from megatron.training.run import setup

    put(pytest.MonkeyPatch(), setup, declared)  # for the rest of the process


def test_a_wrong_declaration_ends_the_run_after_its_first_step(tmp_path):
    arguments = f"--tensor-model-parallel-size 2 --save {tmp_path} --save-interval 1"
    arm = dict.fromkeys(range(2), (with_custom_layer, {"head_norm.weight": False}))
    ends(arguments, arm, "ConfigError", "heads.0.head_norm.weight")
    assert not list(tmp_path.glob("iter_*"))


def test_copies_are_compared_at_the_interval_and_a_save_under_way_is_completed(
    tmp_path,
):
    arguments = (
        "--tensor-model-parallel-size 2 --check-weight-hash-across-dp-replicas-interval 3 "
        f"--save {tmp_path} --save-interval 2 --async-save"
    )
    arm = {1: (flipped, "final_layernorm.weight", 3)}
    ends(
        arguments,
        arm,
        "DifferingCopiesError",
        "final_layernorm.weight",
        "iteration 3",
        "rank 0 ",
        "rank 1 ",
    )
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000002"]


def test_copies_are_compared_before_a_save(tmp_path):
    arguments = f"--bf16 --overlap-param-gather --save {tmp_path} --save-interval 2"
    name = "layers.1.mlp.dense_h_to_4h.weight"
    ends(
        arguments,
        {1: (flipped, name, 4)},
        "DifferingCopiesError",
        name,
        "iteration 4",
        "rank 0 ",
        "rank 1 ",
    )
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000002"]
