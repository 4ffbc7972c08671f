"""Bad input through the program: one clear error on every rank, soon, without traceback or hang.

The refusals are tested where they are decided: tests/config, tests/data.
"""

import pytest

from megatron.parallel import rendezvous
from tests.helpers.launching import TINY, launch

pytestmark = pytest.mark.slow

REAL = [word for word in TINY if word != "--mock-data"]


def serve_briefly():
    """Arm a process: rank 0 stays to serve the store of the others for a moment only."""
    rendezvous._LINGER_S = 0.5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (  # all problems at once
            [*TINY, "--num-attention-heads", "5", "--fp16", "--bf16", "--seq-length", "64"],
            ["num-attention-heads", "fp16", "max-position-embeddings"],
        ),
        # found late
        ([*REAL, "--data-path", "no/such/corpus", "--split", "90,10,0"], ["no/such/corpus"]),
        ([*TINY, "--save", "/dev/null/x"], ["ConfigError: --save /dev/null/x"]),
    ],
    ids=["configuration", "data", "folder"],
)
def test_an_error_is_clear_on_every_rank(arguments, words):
    for outcome in launch(2, arguments, arm=dict.fromkeys(range(2), (serve_briefly,))):
        assert outcome is not None and outcome.code == 2, outcome
        assert "Traceback" not in outcome.output and "Error" in outcome.output
        assert all(word in outcome.output for word in words), outcome.output


def test_a_rank_that_never_starts_is_named():
    outcome, _ = launch(2, [*TINY, "--distributed-timeout-minutes", "0.02"], absent=[1])
    assert outcome is not None and outcome.code == 2, outcome
    assert "rank 1" in outcome.output and "Traceback" not in outcome.output
