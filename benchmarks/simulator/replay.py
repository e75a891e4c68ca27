"""Requests as a trace recorded them, for the simulator."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from sglang_adaptive.benchmarks.calibration_methods import Steps, head_and_distribution, headless
from sglang_adaptive.benchmarks.simulator.traffic import Pool
from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.policy.calibration import Calibration
from sglang_adaptive.runtime.trace import Trace, read_trace

_LEAST_TOKENS = 8
# What a policy may hear instead of a trace's own confidences: TRACE@NAME, each made before the step was known.
HEARD = {"distribution": headless, "head+distribution": head_and_distribution}


def split(name: str) -> tuple[str, str]:
    """The path of ``PATH`` or ``PATH@HEARD``, and what is heard, or nothing."""
    if "@" not in name or Path(name).exists():
        return name, ""
    path, _, heard = name.rpartition("@")
    return path, heard


def is_trace(name: str) -> bool:
    """Whether ``name`` is a file, with or without what is heard of it. Raises AdaptiveError for what is unknown."""
    path, heard = split(name)
    if not Path(path).exists() or (heard and heard not in HEARD):
        if heard:
            raise AdaptiveError(f"There is no trace {path!r}, or nothing {heard!r} in it; of {', '.join(HEARD)}.")
        return False
    return True


def from_file(name: str, seed: int) -> Pool:
    """The requests of the trace ``PATH`` or ``PATH@HEARD``."""
    path, heard = split(name)
    trace = read_trace(path)
    return from_trace(trace, seed, heard=_heard(path, heard) if heard else None)


@lru_cache(maxsize=4)
def _heard(path: str, what: str) -> np.ndarray:
    """As the trace's ``confidence``. Raises AdaptiveError where it has no features of drafts."""
    trace = read_trace(path)
    steps = Steps.of(trace)
    if not steps.has_features:
        raise AdaptiveError("The trace knows nothing of the draft's distributions: record it with the policy off.")
    confidence = trace.confidence.copy()
    spans = zip(trace.start[:-1].tolist(), trace.start[1:].tolist(), strict=True)
    drafted = [(begin, end) for begin, end in spans if end > begin and np.isfinite(confidence[begin:end]).any()]
    for (begin, end), values in zip(drafted, HEARD[what](steps, 0), strict=True):
        confidence[begin:end] = values
    return confidence


def from_trace(trace: Trace, seed: int, prompt_tokens: int = 512, heard: np.ndarray | None = None) -> Pool:
    """The trace's requests as a ``Pool``; ``heard`` [N, K] takes the place of the confidences that a server sees.

    A recorded step says which of its tokens were accepted and which one was rejected and replaced. What it does not
    say, the fate of the token after the last verified one where all were accepted, is drawn with the (calibrated)
    confidence of that draft; a token that no draft covered takes the next step's first confidence. A simulated step
    that begins inside a recorded one hears the rest of its confidences and then those of the next. Raises AdaptiveError
    for a trace with too little in it.
    """
    gamma, rng = trace.gamma, np.random.default_rng([seed, 78])
    drafted = np.isfinite(trace.confidence).all(axis=1)
    rows, raw = trace.rows[drafted], trace.confidence[drafted].astype(np.float64)
    order = np.lexsort([np.flatnonzero(drafted), rows["generation"], rows["slot"]])
    rows, raw = rows[order], raw[order]
    seen = raw if heard is None else heard[drafted].astype(np.float64)[order]
    believed = _calibrated(raw, rows["verified"].astype(np.int64), rows["accepted"].astype(np.int64))
    edges = np.flatnonzero((np.diff(rows["slot"].astype(np.int64)) != 0) | (np.diff(rows["generation"]) != 0)) + 1

    passed, confidences, length = [], [], []
    for mine in np.split(np.arange(rows.size), edges):
        fate, confidence = _tokens(seen[mine], believed[mine], rows[mine], rng)
        if len(fate) >= _LEAST_TOKENS + gamma:
            passed.append(fate)
            confidences.append(confidence)
            length.append(len(fate) - gamma)
    if not passed:
        raise AdaptiveError("The trace has no request with enough drafted steps; record a longer one.")
    flat = np.concatenate(passed)
    ahead = np.concatenate([flat, np.zeros(gamma, bool)])
    run = np.logical_and.accumulate([ahead[j : j + flat.size] for j in range(gamma)], axis=0).sum(axis=0)
    sizes = np.array(length)
    start = np.concatenate([[0], np.cumsum(sizes + gamma)[:-1]])
    confidence = np.concatenate(confidences).astype(np.float32)
    return Pool(gamma, start, sizes, np.full(sizes.size, prompt_tokens), run, *[confidence] * 3)


def _tokens(
    heard: np.ndarray, believed: np.ndarray, rows: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Per output token of one request: whether its draft passes [T], and the confidences of a step there [T, K]."""
    gamma = heard.shape[1]
    fate: list[bool] = []
    confidence: list[np.ndarray] = []
    for at, (row, own) in enumerate(zip(rows, heard, strict=True)):
        accepted, verified = int(row["accepted"]), int(row["verified"])
        following = heard[min(at + 1, len(heard) - 1)]
        if accepted < verified:
            last = False
        elif verified < gamma:
            last = bool(rng.random() < believed[at, verified])
        else:
            last = bool(rng.random() < believed[min(at + 1, len(heard) - 1), 0])
        fate += [True] * accepted + [last]
        whole = np.concatenate([own, following])
        confidence += [whole[offset : offset + gamma] for offset in range(accepted + 1)]
    return np.array(fate), np.array(confidence)


def _calibrated(raw: np.ndarray, verified: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    calibration = Calibration(raw.shape[1])
    for begin in range(0, len(raw), 64):
        part = slice(begin, begin + 64)
        calibration.observe(raw[part], verified[part], accepted[part])
    nothing = np.zeros(0, np.int64)
    for _ in range(64):
        calibration.observe(raw[:0], nothing, nothing)
    return calibration.apply(raw)
