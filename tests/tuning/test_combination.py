"""One combination: what its names are, what a constraint may be, what makes no other layout of it."""
from __future__ import annotations

import pytest

from megatron.errors import ConfigError
from tests.tuning.small_spaces import ONE, Read, complete, config_of, found_of, reasons


@pytest.mark.parametrize(
    ("rule", "is_now"), [("processes % (2 * tp)", "0"), ("schedule", "'1f1b'"), ("train_data_path", "none")]
)
def test_a_constraint_is_true_or_false(read: Read, rule: str, is_now: str) -> None:
    """4 % 2 is 0, which counts as false, where TP divides: what was meant is the contrary."""
    space = read(f"[parameters]\ntp = [1, 2]\n[constraints]\n'it divides' = '{rule}'")
    with pytest.raises(ConfigError) as found:
        found_of(space)
    assert f"[constraints] 'it divides': '{rule}' is {is_now}, neither true nor false" in str(found.value)


def test_names_know_what_derived_ones_decide(read: Read) -> None:
    text = """
    [parameters]
    tp = [1, 2]
    pp = [1, 2]
    [derived]
    gbs = "4"
    chunks = "pp"
    no-sequence-parallel = "tp == 1"
    recompute = "'full:block:2' if tp > 1 else 'none'"
    [constraints]
    "as they are" = "sp == (tp > 1) and (recompute_num_layers == 2 if tp > 1 else recompute_granularity == 'none')"
    "two layers in a chunk" = "num_layers_per_virtual_pipeline_stage == (2 if pp > 1 else none)"
    """
    found = found_of(read(text))
    assert [c.key for c in found.candidates] == ["tp=1,pp=1", "tp=1,pp=2", "tp=2,pp=1", "tp=2,pp=2"]
    ran = [config_of(c) for c in found.candidates]
    assert [c.recompute.recompute_granularity for c in ran] == [None, None, "full", "full"]
    assert [(c.parallel.sequence_parallel, c.parallel.num_chunks) for c in ran] == [
        (False, 1), (False, 2), (True, 1), (True, 2)
    ]  # fmt: skip


def test_settings_of_what_is_off_make_no_other_layout(read: Read) -> None:
    text = """
    [parameters]
    tp = [2]
    sp = [true]
    tp-comm-overlap = [false, true]
    tp-comm-overlap-chunks = [2, 4]
    recompute-granularity = ["none", "full"]
    recompute-num-layers = [1, 2, 4]
    """
    found = found_of(read(text))
    assert len(found.candidates) == (1 + 2) * (1 + 3) and complete(found)
    assert reasons(found) == {"the same as another one": 2 * 2 * 2 * 3 - 12}


def test_a_longer_sequence_is_more_tokens_a_step(read: Read) -> None:
    text = "[parameters]\nseq-length = [32, 64]\nnum-layers = [4, 8]\ngbs = [4, 8]"
    flags = ONE.replace("--seq-length 64 ", "").replace("--num-layers 8 ", "")
    found = {tuple(c.values.values()): c for c in found_of(read(text, flags)).candidates}
    assert {(s, layers, b): c.tokens for (s, layers, b), c in found.items()} == {
        (s, layers, b): s * b for s in (32, 64) for layers in (4, 8) for b in (4, 8)
    }  # fmt: skip
