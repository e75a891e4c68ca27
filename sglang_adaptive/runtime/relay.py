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
        step_ms: time since the step before it, in ms; None where that was no decode step.
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


@dataclass
class _Flight:
    iteration: int
    slots: np.ndarray
    generations: np.ndarray
    kv_tokens: float
    host: torch.Tensor | None
    done: Any
    mark: Any
    decision: Any
    tier: int


class StepRelay:
    """Double-buffered copies of finished steps.

    Args:
        num_slots: request slots of the server.
        gamma: K, drafts per request.
        max_requests: most requests in a batch.
        device: where the steps run.
        lag: how many iterations old a step must be before it is read (``OVERLAP_LAG`` or ``SYNC_LAG``).
        extra: most columns that a step may carry besides.
    """

    def __init__(self, *, num_slots: int, gamma: int, max_requests: int, device: str, lag: int, extra: int = 0) -> None:
        self.gamma, self.lag = gamma, lag
        self._cuda = torch.device(device).type == "cuda"
        self._confidence = np.ones((num_slots, gamma), dtype=np.float32)
        self._generation = np.full(num_slots, -1, dtype=np.int64)
        # One buffer for the step that runs, one for each step that is not old enough yet, one to spare.
        depth = lag + 2
        self._buffers = deque(
            torch.empty(max_requests * (gamma + 2 + extra), dtype=torch.float32, pin_memory=self._cuda)
            for _ in range(depth)
        )
        self._flights: deque[_Flight] = deque()
        self._stream = torch.cuda.Stream() if self._cuda else None
        # A mark is read when the step after it is collected, so one more than the flights is in use.
        self._marks = deque(torch.cuda.Event(enable_timing=True) for _ in range(depth + 2)) if self._cuda else None
        self._last: _Flight | None = None

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
        """Start the copy of a step just launched, in stream order. Device tensors: [R, K], [R], [R] and [R, extra].

        All of them are None for a step that did not draft: one token each, so there is nothing to copy.
        """
        host = done = None
        if confidence is not None:
            columns = [confidence.float(), verify_lens.float().unsqueeze(1), commit_lens.float().unsqueeze(1)]
            packed = torch.cat(columns if extra is None else [*columns, extra], dim=1)
            host = self._take_buffer(*packed.shape)
            done = self._start_copy(packed, host)
        mark = self._mark()
        self._flights.append(_Flight(iteration, slots, generations, kv_tokens, host, done, mark, decision, tier))

    def _start_copy(self, packed: torch.Tensor, host: torch.Tensor) -> Any:
        if not self._cuda:
            host.copy_(packed)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host.copy_(packed, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        # The allocator must not hand the memory out again while the side stream reads it.
        packed.record_stream(self._stream)
        return done

    def _mark(self) -> Any:
        if self._marks is None:
            return time.perf_counter()
        mark = self._marks.popleft()
        mark.record()
        return mark

    def _step_ms(self, flight: _Flight) -> float | None:
        """Time between the marks of this step and the one before it, if no other forward ran in between."""
        last, self._last = self._last, flight
        if last is None:
            return None
        ms = None
        if last.iteration == flight.iteration - 1:
            if self._marks is None:
                ms = (flight.mark - last.mark) * 1e3
            else:
                flight.mark.synchronize()
                ms = last.mark.elapsed_time(flight.mark)
        if self._marks is not None:
            self._marks.append(last.mark)
        return ms

    def _take_buffer(self, rows: int, columns: int) -> torch.Tensor:
        if not self._buffers:
            raise RuntimeError("a step was published before the earlier ones were collected")
        buffer = self._buffers.popleft()
        if buffer.numel() < rows * columns:
            buffer = torch.empty(rows * columns, dtype=torch.float32, pin_memory=self._cuda)
        # Contiguous: the copy into a strided destination would wait.
        return buffer[: rows * columns].view(rows, columns)

    def collect(self, iteration: int) -> list[StepRecord]:
        """Steps that are old enough at ``iteration``, oldest first; their confidences become readable."""
        records = []
        while self._flights and self._flights[0].iteration <= iteration - self.lag:
            flight = self._flights.popleft()
            step_ms = self._step_ms(flight)
            confidence, verify_lens, commit_lens, extra = self._land(flight)
            if confidence is not None:
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
                )
            )
        return records

    def _land(self, flight: _Flight) -> tuple[np.ndarray | None, np.ndarray, np.ndarray, np.ndarray | None]:
        if flight.host is None:
            ones = np.ones(len(flight.slots), dtype=np.int64)
            return None, ones, ones, None
        if flight.done is not None:
            flight.done.synchronize()  # the host has processed this step's results: nothing is left to wait for
        rows = flight.host.numpy().copy()
        base = flight.host._base
        self._buffers.append(flight.host if base is None else base)
        past = self.gamma + 2
        lens = rows[:, self.gamma : past].astype(np.int64)
        extra = rows[:, past:] if rows.shape[1] > past else None
        return rows[:, : self.gamma], lens[:, 0], lens[:, 1], extra

    def read(self, slots: np.ndarray, generations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Newest readable confidences of these requests: [R, K] float32, and [R] bool, False where there are none."""
        # ``take`` gathers rows five times as fast as an index does.
        return self._confidence.take(slots, axis=0), self._generation[slots] == generations
