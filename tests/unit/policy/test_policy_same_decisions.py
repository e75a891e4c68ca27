"""The sizing is written for speed. Here it is written for reading, and both decide a long run of steps alike."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_adaptive.policy import budget as reasons
from sglang_adaptive.policy.budget import Decision
from sglang_adaptive.policy.cost import CostModel, VerifySample
from sglang_adaptive.policy.engine import Engine, PolicyConfig

STEPS = 400
LIMIT = 1.0 / (1.0 + np.exp(12.0))


class PlainEngine(Engine):
    """The same engine with its array work done one value at a time."""

    def _believed(self, confidence, fresh):
        typical = self.profile.mean
        if self.gate.skipping and typical is not None:
            return np.array([typical for _ in fresh])
        unknown = self._prior if typical is None else typical
        if self.config.trust_new:
            unknown = np.ones(self.gamma)
        return np.array([self._chain(row) if known else unknown for row, known in zip(confidence, fresh, strict=True)])

    def _survival(self, confidence, within):
        return np.array([self._chain(row) for row in confidence])

    def _chain(self, row):
        alive, chain = 1.0, []
        for position, value in enumerate(row):
            alive *= self._calibrated(position, value) if 0 <= value <= 1 else 0.0
            chain.append(alive)
        return chain

    def _calibrated(self, position, value):
        if self.calibration.is_identity or not self.config.calibrate:
            return float(value)
        offset, slope = self.calibration.coefficients[:, position].astype(np.float32)
        one = np.float32(1)
        # An array, since numpy's float32 log and exp of a lone number may differ from that of an array.
        clipped = np.array([min(max(np.float32(value), np.float32(LIMIT)), one - np.float32(LIMIT))])
        odds = np.log(clipped / (one - clipped))
        return 1.0 / float((one + np.exp(-(slope * odds + offset)))[0])

    def _best_drafting(self, alive, cost, non_draft_tokens, kv_tokens, weights):
        requests, config = alive.shape[0], self.config
        falling = sorted(alive[:, : self._most].ravel().tolist(), reverse=True)
        rate = self._rate_in_force(requests)
        best, expected, values, costs = 0, float(requests), [], []
        for drafts in range(len(falling) + 1):
            if drafts:
                expected += falling[drafts - 1]
            ms = plain_ms(cost, requests, non_draft_tokens + drafts, requests + drafts, kv_tokens)
            ms += config.trim_ms if drafts < len(falling) else 0.0
            costs.append((expected, ms))
            values.append(expected / ms if rate is None else expected - rate * ms)
            if values[-1] >= values[best]:
                best = drafts
        gain = (values[best] - values[-1]) / (values[-1] if rate is None else rate * costs[-1][1])
        trimmed = self._previous is not None and self._previous.reason == reasons.TRIMMED
        all_drafts = len(falling)
        # No budget expects more than verifying everything does, so the costs alone may say that no trim can gain.
        nothing = plain_ms(cost, requests, non_draft_tokens, requests, kv_tokens)
        least_gain = config.min_gain / 2 if trimmed else config.min_gain
        if costs[-1][1] <= nothing * (1 + least_gain):
            reason, gain, best = reasons.LOW_LOAD, 0.0, all_drafts
        elif best == all_drafts:
            reason, gain = reasons.ALL_WORTH, 0.0
        elif gain <= least_gain:
            reason, gain, best = reasons.SMALL_GAIN, 0.0, all_drafts
        else:
            reason = reasons.TRIMMED
        expected, ms = costs[best]
        return Decision(best, True, best == alive.size, expected, ms, reason, gain)


def plain_ms(cost: CostModel, requests: int, tokens: int, rows: int, kv_tokens: float) -> float:
    """Read off the table: the next larger tier, a line between contexts, a line for sampling, tiers for the draft."""
    tier = next(n for n, size in enumerate(cost.tiers) if size >= tokens)
    left = max(n for n in range(len(cost.kv_points) - 1) if cost.kv_points[n] <= max(kv_tokens, cost.kv_points[0]))
    share = max(0.0, (kv_tokens - cost.kv_points[left]) / (cost.kv_points[left + 1] - cost.kv_points[left]))
    low, high = cost.verify_ms[tier, left], cost.verify_ms[tier, left + 1]
    sampling = float(np.interp(rows, cost.sampling_points, cost.sampling_ms))
    draft = next(ms for size, ms in zip(cost.draft_points, cost.draft_ms, strict=True) if size >= requests)
    return float(low + share * (high - low) + sampling + cost.overhead_ms + draft)


def table(rng: np.random.Generator, most: int, drafts: int) -> CostModel:
    largest = most * (drafts + 1)
    contexts = np.linspace(0.0, most * 1024.0, 5)
    per_token = rng.uniform(0.02, 0.04)
    samples = [
        VerifySample(int(tokens), kv, (5.0 + per_token * tokens + 2e-5 * kv) * rng.uniform(0.98, 1.02))
        for tokens in np.unique(np.geomspace(1, largest, 24).astype(int))
        for kv in contexts
    ]
    draft = [(1, 0.5), (most // 2, 0.8), (most, 1.1)]
    return CostModel.from_samples(samples, draft, [(1, 0.1), (largest, 0.3)], 0.1, largest)


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (0, {}),
        (1, {"objective": "rate"}),
        (2, {"trust_new": True, "trim_ms": 0.05}),
        (3, {"calibrate": False, "correct_costs": False, "min_gain": 0.05}),
        (4, {"max_len": 4}),
    ],
)
def test_fast_and_plain_sizing_decide_a_long_run_alike(seed, options):
    rng, most, drafts = np.random.default_rng(seed), 24, 5
    cost = table(rng, most, drafts)
    fast, plain = (kind(PolicyConfig(**options), cost, drafts) for kind in (Engine, PlainEngine))
    seen, requests = [], most
    for n in range(STEPS):
        if n % 80 == 0:
            # From a handful, where everything is verified, to a full batch, where much is trimmed.
            requests = int(rng.integers(2, most + 1)) if n else most
        confidence = rng.beta(3.0, 1.5, (requests, drafts)).astype(np.float32)
        confidence[rng.random(confidence.shape) < 0.02] = 1.0
        if n % 29 == 0:
            confidence[rng.integers(requests), rng.integers(drafts)] = rng.choice([np.nan, -0.5, 2.0, np.inf])
        fresh = rng.random(requests) > 0.1
        kv_tokens = float(rng.uniform(0.2, 1.2) * requests * 1024.0)
        step = {"requests": requests, "non_draft_tokens": requests, "kv_tokens": kv_tokens}
        ours, wanted = (engine.size(confidence, fresh=fresh, **step) for engine in (fast, plain))
        assert (ours.budget, ours.draft, ours.uniform, ours.reason) == (
            wanted.budget, wanted.draft, wanted.uniform, wanted.reason
        ), n  # fmt: skip
        found = (ours.expected_tokens, ours.predicted_ms, ours.gain)
        assert found == pytest.approx((wanted.expected_tokens, wanted.predicted_ms, wanted.gain), rel=1e-9, abs=1e-12)
        seen.append(ours.reason)
        verified = np.full(requests, ours.budget // requests)
        valid = np.where((confidence >= 0) & (confidence <= 1), confidence, 0)
        passed = np.logical_and.accumulate(rng.random(confidence.shape) < 0.85 * valid, axis=1).sum(axis=1)
        accepted, tokens = np.minimum(verified, passed), requests + int(verified.sum())
        outcome = {
            "draft_tokens": tokens - requests,
            "committed_tokens": requests + int(accepted.sum()),
            "step_ms": 1.1 * cost.point_ms(requests, tokens, tokens, kv_tokens, ours.draft) * rng.uniform(0.95, 1.05),
            "drafted": ours.draft,
            "confidence": confidence if ours.draft else None,
        }
        for engine in (fast, plain):
            engine.observe(**step, **outcome, verified=verified, accepted=accepted)
    assert fast.gate.skipping == plain.gate.skipping
    assert seen.count(reasons.TRIMMED) > STEPS // 10 and len(set(seen)) >= 2
