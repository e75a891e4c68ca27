"""What an arm may look at when it decides a step, and what it learns when the step is over."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_adaptive.benchmarks.simulator.traffic import Pool


@dataclass(frozen=True)
class Record:
    """A finished step of R requests; ``step_ms`` as a clock would show it, None where it says nothing. Of a step that
    is not ``observed`` nobody learns anything. ``width`` tokens were drafted for each request, 0 is K."""

    slots: np.ndarray
    requests: int
    non_draft_tokens: int
    kv_tokens: float
    confidence: np.ndarray | None
    verified: np.ndarray
    accepted: np.ndarray
    step_ms: float | None
    observed: bool = True
    width: int = 0


class Memory:
    """Confidences by slot, as the relay keeps them: a step's become readable when it is ``lag`` steps old."""

    def __init__(self, slots: int, gamma: int) -> None:
        self.confidence = np.ones((slots, gamma), np.float32)
        self.known = np.zeros(slots, bool)
        self.owner = np.full(slots, -1, np.int64)

    def start(self, slots: np.ndarray, owner: np.ndarray) -> None:
        """New requests own these slots."""
        self.owner[slots] = owner
        self.known[slots] = False


@dataclass(frozen=True)
class View:
    """One step before it runs. ``at`` [R] are the requests' rows in the pool; ``run`` [R] what no real policy knows."""

    pool: Pool
    memory: Memory
    slots: np.ndarray
    at: np.ndarray
    run: np.ndarray
    non_draft_tokens: int
    kv_tokens: float

    @property
    def requests(self) -> int:
        return int(self.slots.size)

    @property
    def gamma(self) -> int:
        return self.pool.gamma

    def stale(self) -> tuple[np.ndarray, np.ndarray]:
        """[R, K] confidences from at least ``lag`` steps ago, and [R] whether there are any."""
        return self.memory.confidence[self.slots], self.memory.known[self.slots]

    def live(self) -> np.ndarray:
        """[R, K] confidences of this step."""
        return self.pool.confidence[self.at]

    def clean(self) -> np.ndarray:
        """[R, K] what an unbiased head says of this step."""
        return self.pool.clean[self.at]

    def truth(self) -> np.ndarray:
        """[R, K] the probabilities of acceptance themselves."""
        return self.pool.truth[self.at]
