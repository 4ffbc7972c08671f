"""When a value is slow, and whose links are at fault."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.preflight.measure.rules import attribute, limit_of, partners, quantile, ring_pairs

ALL_RANKS = 9408 * 8


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_quantiles_are_numpys(values: list[float], q: float) -> None:
    assert quantile(sorted(values), q) == pytest.approx(np.quantile(values, q), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("spread", [0.01, 0.05])
@pytest.mark.parametrize("size", [8, 512, ALL_RANKS])
def test_normal_noise_accuses_nobody_and_a_slow_one_is_found(size: int, spread: float) -> None:
    random = np.random.default_rng(0)
    for _ in range(3 if size == ALL_RANKS else 200):
        values = random.normal(100, 100 * spread, size)
        limit = limit_of(values.tolist(), 0.6)
        assert limit is not None
        assert not (values < limit.slow).any()
    values[0] = 15  # far outside of any spread here
    limit = limit_of(values.tolist(), 0.6)
    assert limit is not None
    assert (values < limit.slow).tolist() == [True] + [False] * (size - 1)


@pytest.mark.parametrize("slow", [1, 3, 8])
def test_up_to_half_of_all_may_be_slow(slow: int) -> None:
    values = [30.0] * slow + [100.0 + k / 10 for k in range(16 - slow)]
    limit = limit_of(values, 0.6)
    assert limit is not None
    assert limit.slow == pytest.approx(60, rel=0.02)
    assert limit.reference == pytest.approx(100, rel=0.02)


def test_the_band_and_the_others_both_count() -> None:
    usual = [105.0 + k / 100 for k in range(100)]
    band = limit_of([*usual, 85.0], 0.75, 90.0, "band")
    assert band is not None
    assert (band.slow, band.basis, band.general) == (90.0, "band", "")
    low_band = limit_of(usual, 0.75, 20.0, "band")
    assert low_band is not None
    assert low_band.slow == pytest.approx(0.75 * 105.5, rel=0.01)  # the stricter of the two
    below = limit_of(usual, 0.75, 200.0, "band")  # the fault of none of them
    assert below is not None
    assert below.slow < 90
    assert "200" in below.general
    assert limit_of([], 0.5) is None


@given(st.integers(0, 40))
def test_each_host_meets_both_neighbours_once(count: int) -> None:
    hosts = [f"h{k}" for k in range(count)]
    rounds = ring_pairs(hosts)
    for pairs in rounds:
        met = [host for pair in pairs for host in pair]
        assert len(met) == len(set(met))
    edges = [frozenset(pair) for pairs in rounds for pair in pairs]
    expected = {frozenset((hosts[k], hosts[(k + 1) % count])) for k in range(count)} if count > 1 else set()
    assert len(edges) == len(set(edges))
    assert set(edges) == expected
    assert len(rounds) <= 3


def test_two_slow_pairings_accuse_and_one_does_not() -> None:
    """0-1-2-3 in a ring."""
    verdict = attribute({(0, 1): 1.0, (1, 2): 1.0, (2, 3): 10.0, (3, 0): 10.0}, 5.0)
    assert (verdict.accused, verdict.unclear, verdict.links) == ({1}, frozenset(), ())
    verdict = attribute({(0, 1): 1.0, (1, 2): 10.0, (2, 3): 10.0, (3, 0): 10.0}, 5.0)  # a bad cable between two groups
    assert (verdict.accused, verdict.unclear, verdict.links) == (frozenset(), frozenset(), ((0, 1),))
    verdict = attribute({(0, 1): 1.0, (1, 2): 10.0}, 5.0)  # slow with one, who is good, is not enough
    assert (verdict.accused, verdict.unclear) == (frozenset(), {0})
    verdict = attribute({(0, 1): 1.0, (1, 2): 1.0, (2, 0): 1.0, (3, 4): 10.0}, 5.0)  # nor are two whom nobody knows
    assert (verdict.accused, verdict.unclear) == (frozenset(), {0, 1, 2})


@given(st.integers(3, 24), st.data())
def test_exactly_the_bad_are_found(count: int, data: st.DataObject) -> None:
    """Pairs are slow if they touch a bad rank: after the ring and two rounds for suspects all of them are named, and
    nobody else, if the ring has two good ranks side by side and as many good ranks as suspects."""
    bad = data.draw(st.sets(st.integers(0, count - 1), max_size=count // 3))
    ranks = [str(k) for k in range(count)]
    assume(any(k not in bad and (k + 1) % count not in bad for k in range(count)))

    def measure(pairs: list[tuple[str, str]]) -> dict[tuple[int, int], float]:
        return {(int(a), int(b)): 1.0 if {int(a), int(b)} & bad else 10.0 for a, b in pairs}

    values = measure([pair for pairs in ring_pairs(ranks) for pair in pairs])
    verdict = attribute(values, 5.0)
    for _ in range(2):
        doubtful = [str(rank) for rank in sorted(verdict.accused | verdict.unclear)]
        good = [str(rank) for rank in sorted(verdict.proven)]
        assume(len(doubtful) < len(good))
        values |= measure(partners(doubtful, good, {frozenset(map(str, pair)) for pair in values}))
        verdict = attribute(values, 5.0)
    assert verdict.accused == bad
    assert not verdict.unclear
    assert not verdict.links
