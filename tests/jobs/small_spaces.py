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


def enumerated(space, flags="", machine=FOUR, **more):
    return enumerate_candidates(space, shlex.split(flags), machine, **{"predict": False, **more})


def config_of(candidate):
    return parse_args([*candidate.flags, "--mock-data", "--train-iters", "8"], candidate.processes)


def reasons(enumeration):
    return dict(enumeration.rejections.counts)


def complete(enumeration, space):
    """Check that every combination is a candidate or was rejected for a reason, with an example."""
    assert all(example for _, example in enumeration.rejections.nearest.values())
    assert enumeration.rejections.nearest.keys() == enumeration.rejections.counts.keys()
    assert [c.index for c in enumeration.candidates] == list(range(len(enumeration.candidates)))
    assert len({c.key for c in enumeration.candidates}) == len(enumeration.candidates)
    return len(enumeration.candidates) + sum(reasons(enumeration).values()) == space.combinations
