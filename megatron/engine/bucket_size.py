"""How large a bucket of gradients is. Needs no torch: what times a step before it runs asks, too."""
from __future__ import annotations

_SMALLEST = 4_000_000
_PER_RANK = 1_000_000


def bucket_elements(most: int, ranks: int) -> int:
    """Elements at which a bucket over `ranks` data-parallel ranks is closed; at most `most`, unless that is 0.

    A million for each rank, so that each gets a message that is worth its latency (4 MB in fp32) and a checkpoint has
    few pieces; 4 million, where the ranks are few, so that many buckets can be on their way during a backward pass.
    """
    size = max(_SMALLEST, ranks * _PER_RANK)
    return min(most, size) if most else size
