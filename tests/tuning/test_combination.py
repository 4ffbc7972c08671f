"""One combination: what its names are, what a constraint may be, what makes no other layout of it."""
from __future__ import annotations

import pytest

from megatron.errors import ConfigError
from tests.tuning.small_spaces import ONE, Read, found_of


@pytest.mark.parametrize(
    ("rule", "is_now"), [("processes % (2 * tp)", "0"), ("schedule", "'1f1b'"), ("train_data_path", "none")]
)
def test_a_constraint_is_true_or_false(read: Read, rule: str, is_now: str) -> None:
    """4 % 2 is 0, which counts as false, where TP divides: what was meant is the contrary."""
    space = read(f"[parameters]\ntp = [1, 2]\n[constraints]\n'it divides' = '{rule}'")
    with pytest.raises(ConfigError) as found:
        found_of(space)
    assert all(word in str(found.value) for word in ("it divides", rule, is_now))


def test_a_longer_sequence_is_more_tokens_a_step(read: Read) -> None:
    text = "[parameters]\nseq-length = [32, 64]\nnum-layers = [4, 8]\ngbs = [4, 8]"
    flags = ONE.replace("--seq-length 64 ", "").replace("--num-layers 8 ", "")
    found = {tuple(c.values.values()): c for c in found_of(read(text, flags)).candidates}
    assert {(s, layers, b): c.tokens for (s, layers, b), c in found.items()} == {
        (s, layers, b): s * b for s in (32, 64) for layers in (4, 8) for b in (4, 8)
    }  # fmt: skip
