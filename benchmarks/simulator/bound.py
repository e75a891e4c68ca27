"""What one request at a time can attain, computed instead of simulated.

``python -m sglang_adaptive.benchmarks.simulator.bound`` prints, per cost table and traffic, the expected tokens/s of

* the best fixed length, or no drafter where that is better,
* ``informed``: argmax of E/C per step, from the true probabilities of that step's drafts,
* ``attainable``: the best of all policies that know the true probabilities of the whole text, by dynamic programming,
* ``clairvoyant``: argmax of tokens per ms per step, from the outcomes of that step's drafts.

No policy without the outcomes can be above ``attainable``: that, over ``clairvoyant``, bounds how close anyone comes.
"""

from __future__ import annotations

import sys

import numpy as np

from sglang_adaptive.benchmarks.simulator.loop import TRIM_MS
from sglang_adaptive.benchmarks.simulator.tables import load_table, names
from sglang_adaptive.benchmarks.simulator.traffic import TRAFFIC, Pool, generate, named
from sglang_adaptive.policy.cost import CostModel

GAMMA = 7


def attainable(pool: Pool, table: CostModel) -> dict[str, float]:
    """Expected tokens per s of the policies above, and of each fixed length, at one request at a time.

    Backwards over output positions: the expected ms V(t) from position t to a request's end. With v drafts of which a
    pass, a step costs C(v) and leads to V(t + a + 1); K + 1 choices of v, and the step without a drafter.
    """
    gamma, requests = pool.gamma, pool.length.size
    longest = int(pool.length.max())
    choices = {**{f"fixed-{v}": v for v in range(1, gamma + 1)}, "none": gamma + 1}
    rest = {name: np.zeros((longest + gamma + 1, requests)) for name in (*choices, *_CHOOSERS)}
    for at in range(longest - 1, -1, -1):
        live = np.flatnonzero(pool.length > at)
        chance = _chances(pool.truth[pool.start[live] + at].astype(np.float64))
        ms = _step_ms(table, pool.prompt[live] + at, gamma)
        for name, left in rest.items():
            ahead = left[at + 1 : at + gamma + 2, live].T
            spent = ms + _after(ahead, chance)
            if name in choices:
                left[at, live] = spent[:, choices[name]]
            else:
                left[at, live] = _CHOOSERS[name](ms, ahead, chance, spent)
    tokens = int(pool.length.sum())
    return {name: 1e3 * tokens / float(left[0].sum()) for name, left in rest.items()}


def _chances(truth: np.ndarray) -> np.ndarray:
    """[n, K + 1]: that exactly so many of all K drafts would pass."""
    alive = np.concatenate([np.ones((len(truth), 1)), np.cumprod(truth, axis=1), np.zeros((len(truth), 1))], axis=1)
    return alive[:, :-1] - alive[:, 1:]


def _passed(gamma: int) -> np.ndarray:
    """[K + 2, K + 1]: how many drafts are accepted by choice, when so many would pass; the last choice drafts none."""
    verified = np.append(np.arange(gamma + 1), 0)
    return np.minimum(verified[:, None], np.arange(gamma + 1))


def _step_ms(table: CostModel, kv_tokens: np.ndarray, gamma: int) -> np.ndarray:
    """[n, K + 2] ms by choice; contexts are told apart in steps of 64 tokens."""
    known: dict[int, list[float]] = {}
    for kv in {int(kv) // 64 for kv in kv_tokens}:
        drafted = [table.point_ms(1, 1 + v, 1 + v, 64.0 * kv) + TRIM_MS * (v < gamma) for v in range(gamma + 1)]
        known[kv] = [*drafted, table.point_ms(1, 1, 1, 64.0 * kv, draft=False)]
    return np.array([known[int(kv) // 64] for kv in kv_tokens])


def _after(ahead: np.ndarray, chance: np.ndarray) -> np.ndarray:
    """[n, K + 2] expected ms after the step, by choice."""
    return np.einsum("nvp,np->nv", ahead[:, _passed(chance.shape[1] - 1)], chance)


def _attain(ms: np.ndarray, ahead: np.ndarray, chance: np.ndarray, spent: np.ndarray) -> np.ndarray:
    return spent.min(axis=1)


def _informed(ms: np.ndarray, ahead: np.ndarray, chance: np.ndarray, spent: np.ndarray) -> np.ndarray:
    expected = 1 + np.einsum("vp,np->nv", _passed(chance.shape[1] - 1), chance)
    return np.take_along_axis(spent, (expected / ms).argmax(axis=1)[:, None], axis=1)[:, 0]


def _clairvoyant(ms: np.ndarray, ahead: np.ndarray, chance: np.ndarray, spent: np.ndarray) -> np.ndarray:
    passed = _passed(chance.shape[1] - 1)
    best = ((1 + passed) / ms[:, :, None]).argmax(axis=1)
    row, would = np.arange(len(ms))[:, None], np.arange(chance.shape[1])
    then = ms[row, best] + ahead[row, passed[best, would]]
    return np.asarray((then * chance).sum(axis=1))


_CHOOSERS = {"informed": _informed, "attainable": _attain, "clairvoyant": _clairvoyant}


def main() -> int:
    """Print the table."""
    lines = [
        "| table | traffic | best fixed or none, tok/s | informed | attainable | clairvoyant | informed / attainable | "
        "attainable / clairvoyant | best fixed / attainable |",
        "| --- | --- |" + " ---: |" * 7,
    ]
    for name in names():
        table, _ = load_table(name)
        for kind in TRAFFIC:
            found = attainable(generate(named(kind), GAMMA, 0), table)
            fixed, knowing = max(v for k, v in found.items() if k not in _CHOOSERS), [found[k] for k in _CHOOSERS]
            informed, best, clairvoyant = knowing
            ratios = (informed / best, best / clairvoyant, fixed / best)
            shown = [*(f"{value:.1f}" for value in (fixed, *knowing)), *(f"{ratio:.3f}" for ratio in ratios)]
            lines.append(" | ".join(["| " + name, kind, *shown]) + " |")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
