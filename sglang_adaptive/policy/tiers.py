"""Which token counts get a CUDA graph of their own."""

from __future__ import annotations

# (up to this many tokens, a graph every so many): a step is padded to the next graph, so at most an eighth of it is
# padding, and a step of a few requests is hardly padded at all.
_SPACING = ((8, 1), (16, 2), (64, 4), (128, 8), (256, 16), (512, 32), (1024, 64), (2048, 128))
_BEYOND = 256


def token_tiers(largest: int, captured: list[int]) -> list[int]:
    """Sorted token counts from 1 to ``largest``, the host's own ``captured`` counts among them where they are sparse.

    ``largest`` is the most tokens a captured step may have: (K + 1) times the largest captured batch.
    """
    if largest < 1:
        raise ValueError(f"a graph of {largest} tokens cannot be captured")
    tiers, count = [], 0
    while count < largest:
        spacing = next((step for limit, step in _SPACING if count < limit), _BEYOND)
        count = min(count + spacing, largest)
        tiers.append(count)
    return sorted({*tiers, *(size for size in captured if size <= largest and size > _SPACING[-1][0])})
