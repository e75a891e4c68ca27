"""Losslessness at temperature 1, by statistics: what comes out must be distributed as the target says.

The example is the DSpark paper's (App. A): target (0.7, 0.3), drafter (0.5, 0.5). A rule that looks at a draft token
before it decides whether to verify it turns the target into (0.85, 0.15).
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from policy_cases import staircase

from sglang_adaptive.policy.allocation import allocate
from sglang_adaptive.policy.engine import Engine, PolicyConfig

TARGET = np.array([0.7, 0.3])
DRAFT = np.array([0.5, 0.5])
# Chance to be accepted, over the draft token: sum of min(target, draft).
BLIND = 0.8
# Critical values of the chi-square distribution at p = 0.001.
CRITICAL = {1: 10.83, 3: 16.27}


@dataclass
class Verified:
    tokens: list[int]
    accepted: int


def verify(drafted, count, random):
    """Speculative sampling of the first ``count`` drafts (Leviathan et al. 2023): accepted ones, then one more."""
    out = []
    for token in drafted[:count]:
        if random.random() >= min(1.0, TARGET[token] / DRAFT[token]):
            left_over = np.maximum(TARGET - DRAFT, 0)
            return Verified([*out, int(random.choice(2, p=left_over / left_over.sum()))], len(out))
        out.append(int(token))
    return Verified([*out, int(random.random() < TARGET[1])], len(out))


def chi_square(counts, probabilities):
    expected = np.sum(counts) * np.asarray(probabilities)
    return float(((counts - expected) ** 2 / expected).sum())


def is_target(tokens):
    """Single tokens and pairs of neighbours: the stream must be independent draws of the target."""
    tokens = np.asarray(tokens)
    pairs = tokens[: tokens.size // 2 * 2].reshape(-1, 2) @ [2, 1]
    single = chi_square(np.bincount(tokens, minlength=2), TARGET)
    double = chi_square(np.bincount(pairs, minlength=4), np.outer(TARGET, TARGET).ravel())
    return single < CRITICAL[1] and double < CRITICAL[3]


def head(drafted):
    """A sound head: the confidence at position 2 knows the draft token at position 1, the one at 1 knows nothing."""
    return np.array([BLIND, 0.95 if drafted[0] == 0 else 0.05])


def serve(steps, *, anticipating, seed=7):
    """One request through the engine and the allocation; returns the first token of every step and the stream."""
    # Two good drafts are worth 2.2 ms, one good and one bad are not: the size follows the first draft token.
    engine = Engine(PolicyConfig(min_gain=0.0, skip_draft=False, explore_steps=0), staircase([1, 3], [1.0, 2.2]), 2)
    random = np.random.default_rng(seed)
    firsts, stream, last = [], [], None
    for _ in range(steps):
        drafted = random.choice(2, size=2, p=DRAFT)
        live = head(drafted)
        seen = live if anticipating or last is None else last
        decision = engine.size(
            seen[None, :],
            requests=1,
            non_draft_tokens=1,
            kv_tokens=0.0,
            fresh=np.array([anticipating or last is not None]),
        )
        length = int(allocate(torch.tensor(live[None, :], dtype=torch.float32), decision.budget)[0])
        result = verify(drafted, length - 1, random)
        firsts.append(result.tokens[0])
        stream += result.tokens
        last = live
    return np.array(firsts), stream


def test_the_planted_anticipating_rule_is_caught():
    firsts, stream = serve(6000, anticipating=True)
    counts = np.bincount(firsts, minlength=2)
    assert chi_square(counts, TARGET) > 20 * CRITICAL[1]
    assert chi_square(counts, [0.85, 0.15]) < CRITICAL[1]
    assert not is_target(stream)


def test_the_shipped_rule_reproduces_the_target():
    firsts, stream = serve(6000, anticipating=False)
    assert chi_square(np.bincount(firsts, minlength=2), TARGET) < CRITICAL[1]
    assert is_target(stream)


def test_the_shipped_rule_did_vary_its_budget():
    """Otherwise the test above would prove nothing."""
    _, stream = serve(500, anticipating=False)
    _, anticipated = serve(500, anticipating=True)
    assert 500 < len(stream) < 1500 and len(stream) != len(anticipated)


@pytest.mark.parametrize("sound", [True, False])
def test_live_allocation_under_a_given_budget(sound):
    """Requests compete for a budget with this step's confidences. Lossless with a head that knows only what is before
    a token; a head that knows the token itself is caught."""
    random = np.random.default_rng(11)
    streams = [[] for _ in range(3)]
    for _ in range(3000):
        drafted = random.choice(2, size=(3, 2), p=DRAFT)
        confidence = np.stack([head(row) for row in drafted])
        # The requests are not alike, so that the first draft tokens compete too.
        confidence[:, 0] *= [1.0, 0.9, 0.5]
        if not sound:
            confidence[:, 0] = np.where(drafted[:, 0] == 0, 0.9, 0.1)
        lengths = allocate(torch.tensor(confidence, dtype=torch.float32), 3).numpy()
        assert lengths.sum() == 6
        for stream, row, length in zip(streams, drafted, lengths, strict=True):
            stream += verify(row, length - 1, random).tokens
    assert all(is_target(stream) for stream in streams) == sound
