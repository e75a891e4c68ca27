"""Confidences and outcomes of finished steps, from the device to the CPU, without ever waiting for a running step.

The CPU sizes step n while step n-1 runs, so the newest step it may look at is n-2 (n-1 when the host does not overlap).
That lag makes the sizing lossless: a budget never depends on a draft token that it may trim. It is the same on every
rank, too: a step is read when it is old enough, never when its copy happens to have arrived.

Requests move between the rows of a batch from step to step, so a row means nothing. State is keyed by the request slot,
and by the slot's generation, which the host raises each time it hands the slot to a new request.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

OVERLAP_LAG = 2
SYNC_LAG = 1


@dataclass(frozen=True)
class StepRecord:
    """A finished decode step of R requests with K drafts each, on the CPU.

    Attributes:
        iteration: the host's step counter when it ran.
        slots: [R] int64 request slots.
        generations: [R] int64 generation of each slot.
        kv_tokens: tokens in the batch's KV cache, as the decision saw them.
        confidence: [R, K] float32 live confidences; None for a step that did not draft.
        verify_lens: [R] int64 verified tokens, the anchor included.
        commit_lens: [R] int64 committed tokens, the bonus token included.
        step_ms: time since the step before it, in ms; where that was no decode step, since this one was launched.
        follows: whether it is the former.
        observed: False for a step that repeated a decision and was only counted: it has neither confidences nor a time.
        decision: what the policy had decided for it.
        tier: tokens of the graph that it ran in; 0 where that is not known.
        extra: [R, extra] float32 columns for the trace, where it is on.
    """

    iteration: int
    slots: np.ndarray
    generations: np.ndarray
    kv_tokens: float
    confidence: np.ndarray | None
    verify_lens: np.ndarray
    commit_lens: np.ndarray
    step_ms: float | None
    decision: Any = None
    tier: int = 0
    extra: np.ndarray | None = None
    follows: bool = True
    observed: bool = True

    @property
    def drafted(self) -> bool:
        """Whether the step had drafts to verify."""
        return self.confidence is not None or (not self.observed and self.decision.draft)

    @property
    def width(self) -> int:
        """Tokens drafted for each request; 0 is K. What ``confidence`` holds of further ones means nothing."""
        return _width(self.decision)


class _Landing:
    """Pinned memory on the CPU that one step at a time is copied to, and the event after its copies.

    A tensor for each thing that is copied, of its own type, so that the device neither converts nor packs anything.
    """

    def __init__(self, max_requests: int, gamma: int, extra: int, cuda: bool) -> None:
        sizes = {"confidence": gamma, "verify_lens": 1, "commit_lens": 1, "extra": extra}
        self._tensors: dict[str, torch.Tensor] = {}
        self._per_request, self._requests, self._cuda = sizes, max_requests, cuda
        self._rows: dict[str, torch.Tensor] = {}
        self.done = torch.cuda.Event() if cuda else None

    def begin(self, **values: torch.Tensor | None) -> None:
        """Start the copies of contiguous tensors [R] or [R, C], in stream order."""
        self._rows = {}
        for name, value in values.items():
            if value is None:
                continue
            room = self._tensors.get(name)
            if room is None or room.dtype != value.dtype or room.numel() < value.numel():
                most = max(self._requests * self._per_request[name], value.numel())
                room = torch.empty(most, dtype=value.dtype, pin_memory=self._cuda)
                self._tensors[name] = room
            rows = room[: value.numel()].view(value.shape)
            rows.copy_(value, non_blocking=True)
            self._rows[name] = rows
        if self.done is not None:
            self.done.record()

    def array(self, name: str) -> np.ndarray | None:
        """What was copied, as an array of its own; None where it was not."""
        rows = self._rows.get(name)
        return None if rows is None else rows.numpy().copy()


@dataclass
class _Flight:
    iteration: int
    slots: np.ndarray
    generations: np.ndarray
    kv_tokens: float
    landing: _Landing | None
    start: Any
    mark: Any
    decision: Any
    tier: int
    observed: bool

    @property
    def width(self) -> int:
        return _width(self.decision)


def _width(decision: Any) -> int:
    return int(getattr(decision, "width", 0))


class StepRelay:
    """Double-buffered copies of finished steps.

    Args:
        num_slots: request slots of the server.
        gamma: K, drafts per request.
        max_requests: most requests in a batch.
        device: where the steps run.
        lag: how many iterations old a step must be before it is read (``OVERLAP_LAG`` or ``SYNC_LAG``).
        extra: most columns that a step may carry besides.
        uncollected: most steps between two collections.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        gamma: int,
        max_requests: int,
        device: str,
        lag: int,
        extra: int = 0,
        uncollected: int = 0,
    ) -> None:
        self.gamma, self.lag = gamma, lag
        self._cuda = torch.device(device).type == "cuda"
        self._confidence = np.ones((num_slots, gamma), dtype=np.float32)
        self._generation = np.full(num_slots, -1, dtype=np.int64)
        # One for the step that runs, one for each step that is not old enough yet or waits, one to spare.
        depth = lag + 2 + uncollected
        self._landings = deque(_Landing(max_requests, gamma, extra, self._cuda) for _ in range(depth))
        self._flights: deque[_Flight] = deque()
        # A mark is read when the step after it is collected, so one more than the flights is in use; and two a step.
        self._marks = deque(torch.cuda.Event(enable_timing=True) for _ in range(2 * depth + 4)) if self._cuda else None
        self._last: _Flight | None = None
        self._start: Any = None

    def begin(self) -> None:
        """A decode step is about to be launched."""
        if self._start is not None and self._marks is not None:
            self._marks.append(self._start)
        self._start = self._mark()

    def publish(
        self,
        *,
        iteration: int,
        slots: np.ndarray,
        generations: np.ndarray,
        kv_tokens: float,
        confidence: torch.Tensor | None,
        verify_lens: torch.Tensor | None,
        commit_lens: torch.Tensor | None,
        decision: Any = None,
        tier: int = 0,
        extra: torch.Tensor | None = None,
    ) -> None:
        """Start the copies of a step just launched, in stream order. Device tensors: [R, K], [R], [R] and [R, extra].

        All of them are None for a step that did not draft: one token each, so there is nothing to copy. ``verify_lens``
        is None where the anchor and all drafts were verified. Of a shorter draft ``confidence`` may have its columns
        only.
        """
        landing, start, self._start = None, self._start, None
        if confidence is not None:
            landing = self._landing()
            landing.begin(
                confidence=confidence.float().contiguous(),
                verify_lens=verify_lens,
                commit_lens=commit_lens,
                extra=extra,
            )
        self._flights.append(
            _Flight(iteration, slots, generations, kv_tokens, landing, start, self._mark(), decision, tier, True)
        )

    def count(
        self,
        *,
        iteration: int,
        requests: int,
        commit_lens: torch.Tensor | None,
        decision: Any,
        tier: int,
        last: bool,
        verify_lens: torch.Tensor | None = None,
        slots: np.ndarray | None = None,
        generations: np.ndarray | None = None,
        kv_tokens: float = 0.0,
    ) -> None:
        """A step that is only counted was just launched; ``commit_lens`` and ``verify_lens`` [R] as in ``publish``. The
        next one will be published if it is the ``last`` such: its time counts from this one's end. Whose rows they are,
        and the ``kv_tokens``, only a trace asks."""
        landing = None
        if commit_lens is not None:
            landing = self._landing()
            landing.begin(commit_lens=commit_lens, verify_lens=verify_lens)
        mark = self._mark() if last else None
        if slots is None or generations is None:
            slots = generations = _nobody(requests)
        self._flights.append(
            _Flight(iteration, slots, generations, kv_tokens, landing, None, mark, decision, tier, False)
        )

    def _landing(self) -> _Landing:
        if not self._landings:
            raise RuntimeError("a step was published before the earlier ones were collected")
        return self._landings.popleft()

    def _mark(self) -> Any:
        if self._marks is None:
            return time.perf_counter()
        mark = self._marks.popleft()
        mark.record()
        return mark

    def _step_ms(self, flight: _Flight) -> tuple[float | None, bool]:
        """From the mark of the step before to this one's; from this one's start if another forward ran in between. And
        whether it is the former."""
        last, self._last = self._last, flight
        follows = last is not None and last.iteration == flight.iteration - 1 and last.mark is not None
        since = last.mark if last is not None and follows else flight.start
        ms = None
        if since is None or flight.mark is None:
            pass
        elif self._marks is None:
            ms = (flight.mark - since) * 1e3
        else:
            flight.mark.synchronize()
            ms = since.elapsed_time(flight.mark)
        if self._marks is not None:
            self._marks.extend(mark for mark in (flight.start, None if last is None else last.mark) if mark is not None)
        return ms if flight.observed else None, follows

    def collect(self, iteration: int) -> list[StepRecord]:
        """Steps that are old enough at ``iteration``, oldest first; their confidences become readable."""
        records = []
        while self._flights and self._flights[0].iteration <= iteration - self.lag:
            flight = self._flights.popleft()
            step_ms, follows = self._step_ms(flight)
            confidence, verify_lens, commit_lens, extra = self._land(flight)
            if confidence is not None:
                width = flight.width
                if width:
                    # The columns of what was not drafted hold an older step's, of whichever requests.
                    self._confidence[flight.slots, :width] = confidence[:, :width]
                else:
                    self._confidence[flight.slots] = confidence
                self._generation[flight.slots] = flight.generations
            records.append(
                StepRecord(
                    iteration=flight.iteration,
                    slots=flight.slots,
                    generations=flight.generations,
                    kv_tokens=flight.kv_tokens,
                    confidence=confidence,
                    verify_lens=verify_lens,
                    commit_lens=commit_lens,
                    step_ms=step_ms,
                    decision=flight.decision,
                    tier=flight.tier,
                    extra=extra,
                    follows=follows,
                    observed=flight.observed,
                )
            )
        return records

    def _land(self, flight: _Flight) -> tuple[np.ndarray | None, np.ndarray, np.ndarray, np.ndarray | None]:
        landing = flight.landing
        if landing is None:
            ones = np.ones(len(flight.slots), dtype=np.int64)
            return None, ones, ones, None
        if landing.done is not None:
            landing.done.synchronize()  # the host has processed this step's results: nothing is left to wait for
        confidence, extra = landing.array("confidence"), landing.array("extra")
        verify_lens, commit_lens = landing.array("verify_lens"), landing.array("commit_lens")
        self._landings.append(landing)
        if verify_lens is None:
            verify_lens = np.full(len(flight.slots), (flight.width or self.gamma) + 1)
        if confidence is not None and confidence.shape[1] < self.gamma:
            columns = np.zeros((len(confidence), self.gamma), confidence.dtype)
            columns[:, : confidence.shape[1]] = confidence
            confidence = columns
        return confidence, verify_lens.astype(np.int64), commit_lens.astype(np.int64), extra

    def read(self, slots: np.ndarray, generations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Newest readable confidences of these requests: [R, K] float32, and [R] bool, False where there are none."""
        # ``take`` gathers rows five times as fast as an index does.
        return self._confidence.take(slots, axis=0), self._generation[slots] == generations


_ZEROS = np.zeros(256, dtype=np.int64)


def _nobody(requests: int) -> np.ndarray:
    """[R] zeros in the place of slots that nobody will look at."""
    return _ZEROS[:requests] if requests <= _ZEROS.size else np.zeros(requests, dtype=np.int64)
