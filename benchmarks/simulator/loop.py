"""Requests, engines and their clocks: runs one arm through one scenario."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from sglang_adaptive.benchmarks.simulator.arms import Arm, Plan
from sglang_adaptive.benchmarks.simulator.traffic import Pool
from sglang_adaptive.benchmarks.simulator.view import Memory, Record, View
from sglang_adaptive.policy.cost import CostModel

LAG = 2
TRIM_MS = 0.02


@dataclass(frozen=True)
class Scenario:
    """A load.

    Closed loop: ``concurrency`` requests are always there. Open loop: ``arrivals_per_s`` requests arrive as a Poisson
    process and at most ``concurrency`` run per engine, the others wait. The run ends after ``tokens`` output tokens.
    ``prefill``: "none" leaves prompts out, "separate" runs them in steps of their own while decoding waits, "mixed"
    adds up to ``chunk`` prompt tokens to decode steps. ``router`` over ``engines``: "round-robin" or "least-loaded".
    Clocks that arms see wobble by ``clock_noise``, and one step in 500 seems eight times as long (a preempted one);
    what counts is the table's time. ``host_ms`` is the least that a step takes, because the host has so much to do for
    it: one without a draft, one that verifies all that was drafted, and one that trims. No table knows of it.
    """

    concurrency: int
    tokens: int
    arrivals_per_s: float | None = None
    engines: int = 1
    router: str = "round-robin"
    prefill: str = "none"
    chunk: int = 512
    clock_noise: float = 0.02
    host_ms: tuple[float, float, float] = (0.0, 0.0, 0.0)


@dataclass
class Outcome:
    """``ms`` of simulated time for ``tokens`` output tokens; ``curve`` holds (tokens, ms) at 20 equal shares of the
    tokens. ``steps`` counts engine steps, ``plain`` those that did not draft, ``ragged`` those that were trimmed;
    ``drafts`` were verified, ``accepted`` of them accepted, over ``rows`` requests in steps. ``latency_ms`` and
    ``token_ms`` (per output token) of the requests that finished."""

    tokens: int = 0
    ms: float = 0.0
    steps: int = 0
    plain: int = 0
    ragged: int = 0
    rows: int = 0
    drafts: int = 0
    accepted: int = 0
    curve: list[tuple[int, float]] = field(default_factory=list)
    latency_ms: list[float] = field(default_factory=list)
    token_ms: list[float] = field(default_factory=list)


class Requests:
    """Hands out the pool's requests, in an order that depends on the seed only."""

    def __init__(self, pool: Pool, seed: int) -> None:
        self.order = np.random.default_rng([seed, 79]).permutation(pool.length.size)
        self.next = 0

    def take(self) -> int:
        self.next += 1
        return int(self.order[(self.next - 1) % self.order.size])


class Replica:
    """One engine: its slots, its clock, its policy."""

    def __init__(self, arm: Arm, table: CostModel, pool: Pool, scenario: Scenario, seed: int) -> None:
        slots = scenario.concurrency
        self.arm, self.table, self.pool, self.scenario = arm, table, pool, scenario
        self.tables = drafting(table, pool.gamma)
        self.rng = np.random.default_rng([seed, 80])
        self.now = 0.0
        self.memory = Memory(slots, pool.gamma)
        self.free = list(range(slots))[::-1]
        self.running = np.zeros(0, np.int64)
        self.waiting: deque[tuple[int, float]] = deque()
        self.prefilling: deque[tuple[int, int]] = deque()
        self.flights: deque[Record] = deque()
        self.owners: deque[np.ndarray] = deque()
        self.request = np.zeros(slots, np.int64)
        self.position = np.zeros(slots, np.int64)
        self.arrived = np.zeros(slots)
        self.born = 0
        self.backlog = 0
        self.broken_clock = True

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.prefilling) + self.running.size

    def start_in_the_middle(self, request: int, rng: np.random.Generator) -> None:
        """A request that is already under way, so that the run begins in a steady state."""
        slot = self._occupy(request, 0.0)
        self.position[slot] = rng.integers(0, self.pool.length[request])
        self.running = np.append(self.running, slot)

    def _occupy(self, request: int, arrived: float) -> int:
        slot = self.free.pop()
        self.request[slot], self.position[slot], self.arrived[slot] = request, 0, arrived
        self.born += 1
        self.memory.start(np.array([slot]), np.array([self.born]))
        return slot

    def admit(self) -> None:
        """Waiting requests get slots, and their prompts their time."""
        mode = self.scenario.prefill
        started, prompt = [], 0
        while self.waiting and self.free and self.waiting[0][1] <= self.now:
            request, arrived = self.waiting.popleft()
            slot = self._occupy(request, arrived)
            if mode == "mixed":
                self.prefilling.append((slot, int(self.pool.prompt[request])))
            else:
                started.append(slot)
                prompt += int(self.pool.prompt[request])
        if started:
            self.running = np.concatenate([self.running, np.array(started)])
            if mode == "separate":
                self.now += self.table.point_ms(0, prompt, len(started), 0.0, draft=False)
                self.broken_clock = True

    def step(self, outcome: Outcome) -> list[int]:
        """Run one step; returns the slots whose requests are done."""
        prompt, ready = self._prompt_tokens()
        slots = self.running
        at = self.pool.start[self.request[slots]] + self.position[slots]
        kv_tokens = float((self.pool.prompt[self.request[slots]] + self.position[slots]).sum())
        run = self.pool.run[at]
        view = View(self.pool, self.memory, slots, at, run, slots.size + prompt, kv_tokens)
        if self.arm.learns:
            self._collect()
        if slots.size:
            plan = self.arm.decide(view)
            accepted = np.minimum(plan.verify, run)
            self._account(view, plan, accepted, outcome)
        else:
            self.now += self.table.point_ms(0, prompt, 0, 0.0, draft=False)
            accepted = slots
            self.broken_clock = True
        if ready:
            self.running = np.concatenate([self.running, np.array(ready)])
        return self._commit(slots, accepted)

    def _prompt_tokens(self) -> tuple[int, list[int]]:
        """Prompt tokens of this step, and the slots that are ready to decode after it."""
        room, ready = self.scenario.chunk, []
        while self.prefilling and room:
            slot, left = self.prefilling.popleft()
            part = min(left, room)
            room -= part
            if part < left:
                self.prefilling.appendleft((slot, left - part))
            else:
                ready.append(slot)
        return self.scenario.chunk - room, ready

    def _collect(self) -> None:
        while len(self.flights) >= LAG:
            record, owners = self.flights.popleft(), self.owners.popleft()
            if not record.observed:
                continue
            if record.confidence is not None:
                same = self.memory.owner[record.slots] == owners
                heard = record.width or self.pool.gamma
                self.memory.confidence[record.slots[same], :heard] = record.confidence[same, :heard]
                self.memory.known[record.slots[same]] = True
            self.arm.learn(record)

    def _account(self, view: View, plan: Plan, accepted: np.ndarray, outcome: Outcome) -> None:
        verify, draft, ragged = plan.verify, plan.draft, plan.ragged
        drafts, requests = int(verify.sum()), view.requests
        tokens = view.non_draft_tokens + drafts
        table = self.tables[plan.width]
        ms = table.point_ms(requests, tokens, requests + drafts, view.kv_tokens, draft) + TRIM_MS * ragged
        ms = max(ms, self.scenario.host_ms[0 if not draft else 2 if ragged else 1])
        self.now += ms
        outcome.steps += 1
        outcome.rows += requests
        outcome.plain += not draft
        outcome.ragged += ragged
        outcome.drafts += drafts
        outcome.accepted += int(accepted.sum())
        outcome.tokens += requests + int(accepted.sum())
        if not self.arm.learns:
            return
        seen = (
            ms * np.exp(self.rng.normal(0.0, self.scenario.clock_noise)) * (8.0 if self.rng.random() < 0.002 else 1.0)
        )
        step_ms = None if self.broken_clock else float(seen)
        confidence = view.live() if draft else None
        self.broken_clock = False
        self.flights.append(
            Record(
                view.slots,
                requests,
                view.non_draft_tokens,
                view.kv_tokens,
                confidence,
                verify,
                accepted,
                step_ms,
                plan.observed,
                plan.width,
            )
        )
        self.owners.append(self.memory.owner[view.slots])

    def _commit(self, slots: np.ndarray, accepted: np.ndarray) -> list[int]:
        self.position[slots] += accepted + 1
        over = self.position[slots] >= self.pool.length[self.request[slots]]
        if not over.any():
            return []
        done = slots[over].tolist()
        gone = np.zeros(self.request.size, bool)
        gone[done] = True
        self.running = self.running[~gone[self.running]]
        self.free.extend(done)
        return done


def drafting(table: CostModel, gamma: int) -> dict[int, CostModel]:
    """What steps cost that draft so many tokens for each request, 0 being ``gamma``, as far as ``table`` has shorter
    drafts: between those that it has along straight lines, and never less than the shortest."""
    known = {**table.narrow_draft_ms, gamma: table.draft_ms}
    widths = sorted(known)
    costs = np.stack([known[width] for width in widths])
    tables = {0: table}
    for width in range(1, gamma) if table.narrow_draft_ms else ():
        ms = np.array([np.interp(width, widths, column) for column in costs.T])
        tables[width] = replace(table, draft_ms=ms, narrow_draft_ms={})
    return tables


def simulate(make_arm: Callable[[], Arm], table: CostModel, pool: Pool, scenario: Scenario, seed: int) -> Outcome:
    """Run one arm through one scenario. ``make_arm`` is called once per engine."""
    rng = np.random.default_rng([seed, 81])
    replicas = [Replica(make_arm(), table, pool, scenario, seed + 1000 * n) for n in range(scenario.engines)]
    requests, outcome = Requests(pool, seed), Outcome()
    turn = iter(range(10**12))

    def route(arrived: float) -> None:
        if scenario.router == "least-loaded":
            target = min(replicas, key=lambda replica: replica.load)
        else:
            target = replicas[next(turn) % len(replicas)]
        target.waiting.append((requests.take(), arrived))
        if not (target.running.size or target.prefilling):
            target.now = max(target.now, arrived)

    next_arrival = np.inf
    if scenario.arrivals_per_s is None:
        for _ in range(scenario.concurrency):
            target = min(replicas, key=lambda replica: replica.load)
            target.start_in_the_middle(requests.take(), rng)
    else:
        next_arrival = 0.0
    marks = deque(scenario.tokens * (n + 1) // 20 for n in range(20))
    while outcome.tokens < scenario.tokens:
        busy = [replica for replica in replicas if replica.load]
        replica = min(busy, key=lambda each: each.now) if busy else None
        if scenario.arrivals_per_s and (replica is None or next_arrival <= replica.now):
            route(next_arrival)
            next_arrival += rng.exponential(1e3 / scenario.arrivals_per_s)
            continue
        assert replica is not None
        replica.admit()
        for slot in replica.step(outcome):
            request, latency = replica.request[slot], replica.now - replica.arrived[slot]
            if replica.arrived[slot] > 0:
                outcome.latency_ms.append(float(latency))
                outcome.token_ms.append(float(latency / pool.length[request]))
            if scenario.arrivals_per_s is None:
                route(replica.now)
        while marks and outcome.tokens >= marks[0]:
            marks.popleft()
            outcome.curve.append((outcome.tokens, max(each.now for each in replicas)))
    outcome.ms = max(replica.now for replica in replicas)
    return outcome
