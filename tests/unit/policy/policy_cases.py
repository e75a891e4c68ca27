"""Instances and brute-force answers for the policy tests."""

import numpy as np
from hypothesis import strategies as st

from sglang_adaptive.policy.cost import CostModel, VerifySample

# Sixteenths and small integers add, multiply and compare exactly in float64: ties are ties, not almost ties.
SIXTEENTHS = st.integers(0, 16).map(lambda n: n / 16)


def staircase(tiers, ms, capture_limit=None, kv=(0.0,), draft=(), sampling=(), overhead_ms=0.0):
    samples = [VerifySample(tier, point, cost) for tier, cost in zip(tiers, ms, strict=True) for point in kv]
    return CostModel.from_samples(samples, draft, sampling, overhead_ms, capture_limit or tiers[-1])


@st.composite
def survivals(draw, most_requests=6, most_drafts=5):
    requests, width = draw(st.integers(1, most_requests)), draw(st.integers(1, most_drafts))
    rows = [sorted(draw(st.lists(SIXTEENTHS, min_size=width, max_size=width)), reverse=True) for _ in range(requests)]
    return np.array(rows, np.float64)


@st.composite
def staircases(draw, tokens=48):
    """A captured staircase that reaches ``tokens``, with costs in whole ms, flat steps included."""
    tiers = sorted({*draw(st.lists(st.integers(1, tokens), min_size=1, max_size=8)), tokens})
    rises = draw(st.lists(st.integers(0, 4), min_size=len(tiers), max_size=len(tiers)))
    return staircase(tiers, np.cumsum([1 + rises[0], *rises[1:]]).tolist())


def stairs_cost(model, tokens):
    """Cost of a pass of ``tokens``, read off the table one tier after the other."""
    for tier, ms in zip(model.tiers, model.verify_ms[:, 0], strict=True):
        if tokens <= tier:
            return float(ms)
    raise AssertionError("the staircases of these tests cover every step")


def best_budget(survival, model, anchors, rate=None):
    """The largest of the best budgets, and its value, by trying every one."""
    falling = sorted(survival.ravel().tolist(), reverse=True)
    best = None
    for budget in range(len(falling) + 1):
        expected = survival.shape[0] + sum(falling[:budget])
        cost = stairs_cost(model, anchors + budget)
        value = expected / cost if rate is None else expected - rate * cost
        if best is None or value >= best[1]:
            best = (budget, value)
    return best


def size(engine, confidence, fresh=None, prefill=0, kv=0.0, **options):
    confidence = np.asarray(confidence, np.float64)
    requests = confidence.shape[0]
    fresh = np.ones(requests, bool) if fresh is None else np.array(fresh)
    return engine.size(
        confidence, requests=requests, non_draft_tokens=requests + prefill, kv_tokens=kv, fresh=fresh, **options
    )


def observe(engine, requests, budget, committed, ms=None, **options):
    engine.observe(
        requests=requests,
        non_draft_tokens=requests,
        draft_tokens=budget,
        kv_tokens=0.0,
        committed_tokens=committed,
        step_ms=ms,
        **options,
    )
