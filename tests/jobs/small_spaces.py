"""Spaces of a small model on four processes, and their candidates."""

import shlex

from megatron.config import parse_args
from megatron.jobs.candidate_layouts import Machine, enumerate_candidates

MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 512 "
    "--lr 1e-3 --tokenizer-type NullTokenizer"
)
ONE = f"{MODEL} --micro-batch-size 1"
FOUR = Machine(None, 4, 1)


def found_of(space, flags="", machine=FOUR, **more):
    return enumerate_candidates(space, shlex.split(flags), machine, **{"predict": False, **more})


def config_of(candidate):
    return parse_args([*candidate.flags, "--mock-data", "--train-iters", "8"], candidate.processes)


def reasons(found):
    return dict(found.rejections.counts)


def complete(found, space):
    """Check that every combination is a candidate or was rejected for a reason, with an example."""
    assert all(example for _, example in found.rejections.nearest.values())
    assert found.rejections.nearest.keys() == found.rejections.counts.keys()
    assert [c.index for c in found.candidates] == list(range(len(found.candidates)))
    assert len({c.key for c in found.candidates}) == len(found.candidates)
    return len(found.candidates) + sum(reasons(found).values()) == space.combinations
