"""Which token counts get a CUDA graph of their own.

A step is padded to the next graph, so a trim that does not reach the next smaller one saves nothing. Whole blocks alone
(multiples of K+1) are coarse where few requests run, and needlessly fine where many do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# (up to this many tokens, a graph every so many): at most an eighth of a step is padding, and a step of a few requests
# is hardly padded at all. Matrix units work on blocks of 64 or 128 rows, so finer steps above that rarely pay.
_SPACING = ((8, 1), (16, 2), (64, 4), (128, 8), (256, 16), (512, 32), (1024, 64), (2048, 128))
_BEYOND = 256


def token_tiers(largest: int, captured: Sequence[int] = (), most: int | None = None) -> list[int]:
    """Sorted token counts from 1 to ``largest``, which is the most tokens that a captured step may have.

    Of the host's own ``captured`` counts those beyond the fine part are kept: whole batches are padded to nothing.
    ``most`` bounds their number, by leaving out those whose steps the next one serves with the least padding.
    Raises ValueError where there is nothing to capture.
    """
    if largest < 1 or (most is not None and most < 1):
        raise ValueError(f"no graph: at most {largest} tokens, at most {most} graphs")
    tiers, count = [], 0
    while count < largest:
        spacing = next((step for limit, step in _SPACING if count < limit), _BEYOND)
        count = min(count + spacing, largest)
        tiers.append(count)
    tiers = sorted({*tiers, *(size for size in captured if _SPACING[-1][0] < size <= largest)})
    while most is not None and len(tiers) > most:
        # Without a tier the next one serves from one token above the tier before: that step is padded the most.
        padding = [after / (before + 1) for before, after in zip([0, *tiers], tiers[1:], strict=False)]
        del tiers[padding.index(min(padding))]
    return tiers


def paying_tiers(tiers: Sequence[int], ms: Sequence[float], least: float, whole: Sequence[int] = ()) -> list[int]:
    """Of sorted ``tiers`` with measured step times those that are worth their graph, for the next start.

    A tier is worth it where it saves at least the fraction ``least`` of the time of the next one that is kept; the
    largest always is, and so are ``whole`` ones, which steps that verify everything meet.
    """
    if len(tiers) != len(ms) or not tiers:
        raise ValueError(f"{len(tiers)} tiers with {len(ms)} times")
    kept, price = [tiers[-1]], ms[-1]
    for tier, time in zip(reversed(tiers[:-1]), reversed(ms[:-1]), strict=True):
        if tier in whole or time <= price * (1.0 - least):
            kept.append(tier)
            price = min(price, time)
    return kept[::-1]


def padding(tiers: Sequence[int], tokens: int) -> int:
    """Tokens that are computed for nothing when a step of ``tokens`` runs in the smallest of ``tiers`` that holds it.

    Raises ValueError where none does.
    """
    place = bisect_left(tiers, tokens)
    if place == len(tiers):
        raise ValueError(f"no graph holds {tokens} tokens, the largest {tiers[-1] if tiers else 0}")
    return tiers[place] - tokens
