"""What requests are like: how many drafts each step would accept, and what the confidence head says of them.

Everything is a property of a request's output position, not of a step, so all arms of a comparison get the same work:
whichever way an arm reaches position t, the draft of the token at t has the same fate there. Every position is drafted
and decided at most once (accepted, or rejected and replaced, or skipped over as the bonus token), so this is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.policy.logistic import logit, sigmoid


@dataclass(frozen=True)
class Kind:
    """Requests of one kind: mean log-odds that a first draft is accepted, and how far that drifts over the text."""

    mean: float
    drift: float


KINDS: Mapping[str, Kind] = {
    "easy": Kind(3.2, 0.5),
    "hard": Kind(0.5, 0.5),
    "mixed": Kind(1.9, 1.5),
    "weak": Kind(-0.7, 0.5),
}


@dataclass(frozen=True)
class Traffic:
    """A generative model of requests.

    The log-odds of accepting draft j at position t are ``mean + drift(t) + texture(t) - depth * j``: an
    Ornstein-Uhlenbeck drift with the standard deviation of its kind and a correlation length of ``drift_tokens``, and
    independent normal texture. The head's raw log-odds are ``head_scale`` times that, plus ``head_bias``, plus normal
    noise of ``head_noise``; the confidence is then multiplied by ``head_factor`` (1.3: 30 % overconfident).
    ``shares`` of the kinds; output lengths are uniform in ``output_tokens``, prompts log-normal around
    ``prompt_tokens``.
    """

    shares: tuple[tuple[str, float], ...] = (("easy", 0.4), ("hard", 0.4), ("mixed", 0.2))
    drift_tokens: float = 64.0
    texture: float = 1.0
    depth: float = 0.08
    head_scale: float = 1.0
    head_bias: float = 0.0
    head_noise: float = 0.7
    head_factor: float = 1.0
    output_tokens: tuple[int, int] = (128, 384)
    prompt_tokens: int = 512


TRAFFIC: Mapping[str, Traffic] = {
    "mixed": Traffic(),
    "easy": Traffic(shares=(("easy", 1.0),)),
    "hard": Traffic(shares=(("hard", 1.0),)),
    "weak": Traffic(shares=(("weak", 1.0),)),
    "drifting": Traffic(shares=(("mixed", 1.0),)),
}


@dataclass(frozen=True)
class Pool:
    """Requests ready to be simulated; one flat row per output position.

    ``start``, ``length`` and ``prompt`` [N] per request; ``run`` [T] drafts that a step at this position would accept
    if it verified all; float32 [T, K]: ``confidence`` is what the server sees there, ``clean`` what an unbiased head
    would say, and ``truth`` the probability of acceptance itself.
    """

    gamma: int
    start: np.ndarray
    length: np.ndarray
    prompt: np.ndarray
    run: np.ndarray
    confidence: np.ndarray
    clean: np.ndarray
    truth: np.ndarray


def generate(traffic: Traffic, gamma: int, seed: int, requests: int = 2048) -> Pool:
    """``requests`` requests of ``traffic``; the same for the same arguments."""
    rng = np.random.default_rng([seed, 77])
    names = [name for name, _ in traffic.shares]
    share = np.array([weight for _, weight in traffic.shares])
    kind = rng.choice(len(names), requests, p=share / share.sum())
    mean = np.array([KINDS[name].mean for name in names])[kind]
    drift_sd = np.array([KINDS[name].drift for name in names])[kind]
    length = rng.integers(traffic.output_tokens[0], traffic.output_tokens[1] + 1, requests)
    prompt = np.maximum(traffic.prompt_tokens * np.exp(rng.normal(0.0, 0.5, requests)), 1).astype(np.int64)

    longest = int(length.max()) + gamma
    keep = np.exp(-1.0 / traffic.drift_tokens)
    drift = np.empty((longest, requests))
    drift[0] = rng.normal(size=requests)
    shocks = rng.normal(0.0, np.sqrt(1.0 - keep**2), (longest, requests))
    for at in range(1, longest):
        drift[at] = keep * drift[at - 1] + shocks[at]
    odds = mean + drift_sd * drift + rng.normal(0.0, traffic.texture, drift.shape)
    noise = rng.normal(0.0, traffic.head_noise, drift.shape)
    luck = logit(rng.random(drift.shape))

    inside = np.arange(longest)[:, None] < length + gamma
    flat = [np.ascontiguousarray(table.T)[inside.T] for table in (odds, noise, odds - luck)]
    start = np.concatenate([[0], np.cumsum(length + gamma)[:-1]])
    depth = traffic.depth * np.arange(gamma)
    true, heard, margin = (_ahead(column, gamma) for column in flat)
    run = _runs(margin > depth)
    clean = true - depth + heard
    raw = sigmoid(traffic.head_bias + traffic.head_scale * clean).astype(np.float32)
    raw = np.clip(traffic.head_factor * raw, 0.0, np.float32(1 - 1e-4)) if traffic.head_factor != 1.0 else raw
    clean, truth = (sigmoid(odds).astype(np.float32) for odds in (clean, true - depth))
    return Pool(gamma, start, length, prompt, run, raw, clean, truth)


def wrong_head(traffic: Traffic, factor: float) -> Traffic:
    """The same requests with confidences that are ``factor`` times what they should be."""
    return replace(traffic, head_factor=factor)


def named(name: str) -> Traffic:
    """A kind of traffic by name. Raises AdaptiveError."""
    if name not in TRAFFIC:
        raise AdaptiveError(f"There is no traffic {name!r}; give one of {', '.join(TRAFFIC)}, or a trace.")
    return TRAFFIC[name]


def _ahead(values: np.ndarray, gamma: int) -> np.ndarray:
    """[T, K]: the K values from each position on; the last ones are padded and never used."""
    padded = np.concatenate([values, np.zeros(gamma, values.dtype)])
    return np.stack([padded[j : j + values.size] for j in range(gamma)], axis=1)


def _runs(passed: np.ndarray) -> np.ndarray:
    return np.logical_and.accumulate(passed, axis=1).sum(axis=1).astype(np.int64)
