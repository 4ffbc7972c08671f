"""The versions that `make prove ONLY=versions` runs with."""

from tests.prove.environments import NOT_OLDEST, bounds, environments


def test_the_oldest_of_everything_is_that_of_pyproject():
    """`bounds` fails if two lists in pyproject.toml have different bounds for a package."""
    lowest, (oldest, *_) = bounds(), environments()
    exact = dict(line.split("==") for line in (oldest.torch, *oldest.others))
    assert exact == {name: lowest[name] for name in lowest.keys() - set(NOT_OLDEST)}
    assert lowest.keys() > set(NOT_OLDEST)
