"""From what a client saw of its requests to the numbers of one cell."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang_adaptive.benchmarks.stats import percentiles, ratio

if TYPE_CHECKING:
    from sglang_adaptive.benchmarks.load import Request

NOT_COUNTED = {"rank", "ranks", "options", "cost", "version", "algorithm", "active"}


def tokens_until(stamps: Sequence[tuple[float, int]], moment: float) -> float:
    """Output tokens of one request at ``moment`` (s), linear between its chunks; 0 before the first."""
    if not stamps or moment < stamps[0][0]:
        return 0.0
    for (early, before), (late, after) in itertools.pairwise(stamps):
        if moment < late:
            return before + (after - before) * (moment - early) / (late - early)
    return float(stamps[-1][1])


def summarize(
    requests: Sequence[Request],
    window: tuple[float, float],
    before: dict[str, Any],
    after: dict[str, Any],
) -> dict[str, Any]:
    """Aggregates of one cell.

    ``tok_s`` is output tokens per second inside ``window``, ``tok_s_whole`` the same from the first request to the last
    chunk; ``tok_s_user`` is what one user sees while decoding: tokens after the first over the time that they took,
    over all requests. Times are in ms. ``accept_length`` and ``verify_length`` are tokens per request and step, the
    anchor included; ``ms_per_step`` is decode time over steps. ``before`` and ``after`` are server states whose
    adaptive counters are subtracted.
    """
    begin, end = window
    seen = [request for request in requests if request.stamps]
    inside = [request for request in seen if request.stamps[-1][0] > begin and request.stamps[0][0] < end]
    decoding = [request for request in inside if len(request.stamps) > 1]
    decode_seconds = sum(request.stamps[-1][0] - request.stamps[0][0] for request in decoding)
    decode_tokens = sum(request.stamps[-1][1] - request.stamps[0][1] for request in decoding)
    whole_seconds = max(r.stamps[-1][0] for r in seen) - min(r.sent for r in seen) if seen else None
    window_tokens = sum(tokens_until(r.stamps, end) - tokens_until(r.stamps, begin) for r in inside)
    errors = [request.error for request in requests if request.error]
    tpot = [(r.stamps[-1][0] - r.stamps[0][0]) / (r.stamps[-1][1] - r.stamps[0][1]) for r in decoding]
    steps, step_seconds = _steps(decoding)
    return {
        "seconds": end - begin,
        "tok_s": ratio(window_tokens, end - begin),
        "tok_s_whole": ratio(sum(request.stamps[-1][1] for request in seen), whole_seconds),
        "tok_s_user": ratio(decode_tokens, decode_seconds),
        "ttft_ms": percentiles([r.stamps[0][0] - r.sent for r in seen if begin <= r.stamps[0][0] <= end], 1e3),
        "tpot_ms": percentiles(tpot, 1e3),
        "e2e_ms": percentiles(
            [r.stamps[-1][0] - r.sent for r in inside if r.done and not r.cut and r.stamps[-1][0] <= end], 1e3
        ),
        "ms_per_step": ratio(step_seconds * 1e3, steps) or ratio(decode_seconds * 1e3, decode_tokens),
        "requests": len(requests),
        "completed": sum(request.done and not request.cut and request.error is None for request in requests),
        "cut": sum(request.cut for request in requests),
        "errors": len(errors),
        "error_examples": sorted(set(errors))[:3],
        "prompt_tokens": sum(r.meta.get("prompt_tokens") or 0 for r in seen),
        "output_tokens": sum(r.stamps[-1][1] for r in seen),
        **speculation(seen, before.get("sglang_adaptive") or {}, after.get("sglang_adaptive") or {}),
    }


def _steps(decoding: Sequence[Request]) -> tuple[int, float]:
    """Verify steps and the decode seconds of the requests whose steps are known."""
    known = [request for request in decoding if request.meta.get("spec_verify_ct")]
    return (
        sum(request.meta["spec_verify_ct"] for request in known),
        sum(request.stamps[-1][0] - request.stamps[0][0] for request in known),
    )


def speculation(seen: Sequence[Request], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What the requests and our counters say of speculation; None where there is none.

    The host reports ``spec_verify_ct`` with a request's last chunk only. The first output token comes from the prefill
    and belongs to no step.
    """
    known = [request.meta for request in seen if request.meta.get("spec_verify_ct")]
    steps = sum(meta["spec_verify_ct"] for meta in known)
    tokens = sum(meta["completion_tokens"] - 1 for meta in known)
    capped = [meta for meta in known if meta.get("spec_cap_length")]
    if capped:
        verified = sum(meta["spec_cap_length"] * meta["spec_verify_ct"] for meta in capped)
        verify_length = ratio(verified, sum(meta["spec_verify_ct"] for meta in capped))
    else:
        proposed = sum(meta.get("spec_num_proposed_drafts") or 0 for meta in known)
        verify_length = ratio(proposed + steps, steps)
    counted = difference(before, after)
    if counted.get("requests"):
        verify_length = ratio(counted.get("verify_tokens"), counted["requests"])
    return {
        "accept_length": ratio(tokens, steps),
        "verify_length": verify_length,
        "budget": ratio(counted.get("verify_tokens", 0) - counted.get("requests", 0), counted.get("steps")),
        "accepted_histogram": _added([meta.get("spec_correct_drafts_histogram") or [] for meta in known]),
        "adaptive": counted or None,
    }


def _added(rows: Sequence[Sequence[int]]) -> list[int]:
    width = max(map(len, rows), default=0)
    return [sum(row[place] for row in rows if place < len(row)) for place in range(width)]


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Whole numbers and ms in ``after``, alone, listed or nested, less what ``before`` had; the rest is left out."""
    result: dict[str, Any] = {}
    for key, value in after.items():
        earlier = before.get(key)
        if key in NOT_COUNTED or isinstance(value, bool):
            continue
        if isinstance(value, int) or (isinstance(value, float) and key.endswith("_ms")):
            result[key] = value - (earlier or 0)
        elif isinstance(value, dict):
            result[key] = difference(earlier or {}, value)
        elif isinstance(value, list) and all(isinstance(item, int) for item in value):
            result[key] = [item - old for item, old in zip(value, earlier or [0] * len(value), strict=True)]
    return result
