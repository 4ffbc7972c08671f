"""Number of random examples of a property test."""

from __future__ import annotations

from hypothesis import settings

_PLAIN = 25


def examples(count: int) -> settings:
    """Return settings for `count` examples in `make test`, 40 times as many in a campaign.

    The campaign is `make prove ONLY=hypothesis`. Use this only for tests whose examples cost more
    or less than those of others: tests without it run 25 and 1,000.
    """
    return settings(max_examples=max(1, count * settings.default.max_examples // _PLAIN))  # type: ignore[union-attr]
