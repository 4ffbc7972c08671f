"""How many random examples a property test looks at."""

from __future__ import annotations

from hypothesis import settings

_PLAIN = 25


def examples(count: int) -> settings:
    """`count` of them in `make test`, 40 times as many in `make prove ONLY=hypothesis`.

    Only for tests whose examples are dearer or cheaper than others': plain tests look at 25 and
    1,000.
    """
    return settings(max_examples=max(1, count * settings.default.max_examples // _PLAIN))  # type: ignore[union-attr]
