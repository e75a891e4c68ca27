"""A trace as a server would write it, made in a second: the real policy and recorder, made-up costs and drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sglang_adaptive.policy.cost import CostModel, VerifySample
from sglang_adaptive.policy.engine import Engine, PolicyConfig
from sglang_adaptive.runtime.relay import StepRecord
from sglang_adaptive.runtime.trace import TraceRecorder

GAMMA = 7
TIERS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
LOADS = (1, 2, 4, 8, 16, 32, 64, 96, 48, 12, 3, 1)


def staircase_ms(tokens: int) -> float:
    """Milliseconds of a verification: free up to 64 tokens, then dear."""
    tier = next(tier for tier in TIERS if tier >= tokens)
    return 4.0 + 0.055 * max(0, tier - 48)


def records(steps: int, seed: int = 0, loads: tuple[int, ...] = LOADS, doubt: float = 1.5) -> list[StepRecord]:
    """Finished steps under ``loads``, equally long each. The head is too sure of itself by a factor ``doubt`` in
    log-odds; measured times are the table's, a tenth longer and with noise."""
    rng = np.random.default_rng(seed)
    cost = CostModel.from_samples(
        [VerifySample(tier, 0.0, staircase_ms(tier)) for tier in TIERS], [(1, 1.2), (96, 1.6)], capture_limit=TIERS[-1]
    )
    engine = Engine(PolicyConfig(), cost, GAMMA)
    made = []
    for iteration in range(steps):
        requests = loads[iteration * len(loads) // steps]
        odds = rng.normal(1.2, 1.3, (requests, 1)) + rng.normal(0, 0.5, (requests, GAMMA))
        truth = 1 / (1 + np.exp(-odds))
        confidence = 1 / (1 + np.exp(-doubt * odds))
        fresh = np.ones(requests, bool)
        kv_tokens = 200.0 * requests
        decision = engine.size(
            confidence, requests=requests, non_draft_tokens=requests, kv_tokens=kv_tokens, fresh=fresh
        )
        # The slots go to the best prefixes over the batch, as on the device.
        survival = np.cumprod(confidence, axis=1)
        best = np.argsort(-survival, axis=None, kind="stable")[: decision.budget]
        verified = np.bincount(best // GAMMA, minlength=requests)
        would = np.cumprod(rng.random(truth.shape) < truth, axis=1).sum(axis=1)
        accepted = np.minimum(would, verified)
        drafted = decision.draft
        measured = (staircase_ms(requests + int(verified.sum())) + 1.4 * drafted) * 1.1 * rng.lognormal(0, 0.05)
        made.append(
            StepRecord(
                iteration=iteration,
                slots=np.arange(requests),
                generations=np.zeros(requests, np.int64),
                kv_tokens=kv_tokens,
                confidence=confidence.astype(np.float32) if drafted else None,
                verify_lens=verified + 1,
                commit_lens=accepted + 1,
                step_ms=None if iteration % 97 == 0 else float(measured),
                decision=decision,
            )
        )
        engine.observe(
            requests=requests,
            non_draft_tokens=requests,
            draft_tokens=int(verified.sum()),
            kv_tokens=kv_tokens,
            committed_tokens=int(accepted.sum()) + requests,
            step_ms=made[-1].step_ms,
            drafted=drafted,
            confidence=confidence if drafted else None,
            verified=verified,
            accepted=accepted,
        )
    return made


def write(path: Path, steps: list[StepRecord], meta: dict[str, str] | None = None) -> Path:
    """The trace of ``steps`` at ``path``."""
    recorder = TraceRecorder(path, GAMMA, meta={"model": "sample", **(meta or {})})
    for step in steps:
        while not recorder._waiting.empty() and recorder._waiting.qsize() > 4000:
            pass
        recorder.record(step, step.decision)
    recorder.close()
    return path
