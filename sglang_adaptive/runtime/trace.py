"""Records a trace of every decode step, in the format of ``trace_format``, without ever disturbing the serving."""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import stat
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sglang_adaptive import __version__
from sglang_adaptive.policy.budget import Decision
from sglang_adaptive.policy.logistic import logit
from sglang_adaptive.runtime.relay import StepRecord
from sglang_adaptive.runtime.trace_features import DraftFeatures
from sglang_adaptive.runtime.trace_format import (
    BLOCK,
    COUNTED,
    DECIDED,
    DRAFTED,
    FEATURED,
    HEAD,
    MAGIC,
    MARGIN_LIMIT,
    REASONS,
    ROW_TYPE,
    STEP,
    STEP_TYPE,
    UNIFORM,
)
from sglang_adaptive.runtime.trace_reader import Trace, read_trace

__all__ = ["Trace", "TraceRecorder", "describe", "read_trace"]

logger = logging.getLogger(__name__)

_BLOCK_STEPS = 256
_BLOCK_ROWS = 1 << 15
_WAITING_STEPS = 4096
_WRITE_EVERY_S = 1.0
_CLOSE_WAIT_S = 5.0


class TraceRecorder:
    """Writes the trace of one server; nothing that happens to the file ever reaches the caller.

    ``record`` only hands the step over; a thread of its own encodes and writes, a block at a time, at least once per
    second. Steps that come while 4096 of them wait are lost, and the trace says how many. When the file reaches
    ``max_bytes`` or cannot be written, one line is logged and recording ends. A trace that is there already is kept as
    ``<path>.previous``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        gamma: int,
        max_bytes: int = 256 << 20,
        meta: Mapping[str, str] | None = None,
    ) -> None:
        self.path, self.gamma, self.max_bytes = Path(path), gamma, max_bytes
        self._lost = self._written = 0
        self._waiting: queue.Queue[_Entry | None] = queue.Queue(_WAITING_STEPS)
        self._on = True
        head = json.dumps({"gamma": gamma, "reasons": REASONS, "meta": dict(meta or {})}).encode()
        try:
            self._file: BinaryIO = _create(self.path)
            self._write(MAGIC + BLOCK.pack(HEAD, 0, len(head), zlib.crc32(head), 0) + head)
        except OSError as error:
            self._off(f"Cannot write the trace {self.path} ({error}); nothing is recorded.")
            return
        self._thread = threading.Thread(target=self._run, name="adaptive-trace", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def recording(self) -> bool:
        return self._on

    def record(self, step: StepRecord, decision: Decision | None) -> None:
        """Take a finished step and the decision that it ran with, once per step and in order.

        The step's ``extra`` are ``trace_features.draft_columns``, or None.
        """
        if not self._on:
            return
        # The host may reuse the memory of slots and generations before the block is written.
        entry = _Entry(step, decision, np.array(step.slots), np.array(step.generations))
        try:
            self._waiting.put_nowait(entry)
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Write what waits, and close. More calls do nothing."""
        if not self._on:
            return
        self._on = False
        try:
            self._waiting.put(None, timeout=_CLOSE_WAIT_S)
        except queue.Full:
            return
        self._thread.join(_CLOSE_WAIT_S)

    def _run(self) -> None:
        try:
            with self._file:
                more = True
                while more:
                    entries, more = self._next_entries()
                    if entries and not self._write_block(entries):
                        return
        except Exception as error:  # whatever it is, serving goes on
            self._off(f"Cannot write the trace {self.path} ({error}); recording ends here.")

    def _next_entries(self) -> tuple[list[_Entry], bool]:
        """A block's worth of steps, or those of one second; False once the recorder is closed."""
        entries: list[_Entry] = []
        rows = 0
        first = self._waiting.get()
        while first is not None:
            entries.append(first)
            rows += len(first.slots)
            if len(entries) >= _BLOCK_STEPS or rows >= _BLOCK_ROWS:
                return entries, True
            try:
                first = self._waiting.get(timeout=_WRITE_EVERY_S)
            except queue.Empty:
                return entries, True
        return entries, False

    def _write_block(self, entries: list[_Entry]) -> bool:
        payload = zlib.compress(_encode(entries, self.gamma), 1)
        lost, self._lost = self._lost, 0
        block = BLOCK.pack(STEP, len(entries), len(payload), zlib.crc32(payload), lost) + payload
        if self._written + len(block) > self.max_bytes:
            self._off(f"The trace {self.path} has reached its limit of {self.max_bytes} bytes; recording ends here.")
            return False
        self._write(block)
        return True

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._written += len(data)

    def _off(self, line: str) -> None:
        self._on = False
        logger.warning(line)


@dataclass(frozen=True)
class _Entry:
    step: StepRecord
    decision: Decision | None
    slots: np.ndarray
    generations: np.ndarray


def describe(model_runner: Any) -> dict[str, str]:
    """What a trace's ``meta`` says of the server of a host's model runner: names, never whole paths."""
    arguments = model_runner.server_args
    models = {"model": arguments.model_path, "draft": arguments.speculative_draft_model_path}
    names = {name: Path(str(path)).name for name, path in models.items()}
    return {
        "sglang_adaptive": __version__,
        **names,
        "device": str(model_runner.device),
        "dtype": str(model_runner.dtype).removeprefix("torch."),
    }


def _create(path: Path) -> BinaryIO:
    """A new file; an earlier trace moves aside, anything else that is there is left alone."""
    if path.exists():
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError("it is no regular file")
        with path.open("rb") as file:
            if path.stat().st_size and file.read(len(MAGIC)) != MAGIC:
                raise OSError("a file that is no trace is in its place")
        path.replace(path.with_name(path.name + ".previous"))
    return open(path, "xb", buffering=0)


def _encode(entries: list[_Entry], gamma: int) -> bytes:
    steps = np.zeros(len(entries), STEP_TYPE)
    rows = np.zeros(sum(len(entry.slots) for entry in entries), ROW_TYPE)
    at = 0
    for mine, entry in zip(steps, entries, strict=True):
        step, decision, requests = entry.step, entry.decision, len(entry.slots)
        seen = step.confidence is not None
        drafted = DRAFTED * seen | COUNTED * (step.drafted and not seen) | FEATURED * (step.extra is not None)
        mine["iteration"], mine["requests"], mine["tier"] = step.iteration, requests, step.tier
        mine["kv_tokens"] = step.kv_tokens
        mine["step_ms"] = np.nan if step.step_ms is None else step.step_ms
        mine["flags"] = drafted
        mine["predicted_ms"] = mine["expected_tokens"] = mine["gain"] = np.nan
        if decision is not None:
            mine["budget"], mine["gain"] = decision.budget, decision.gain
            mine["predicted_ms"], mine["expected_tokens"] = decision.predicted_ms, decision.expected_tokens
            mine["reason"] = REASONS.index(decision.reason) if decision.reason in REASONS else 0
            mine["flags"] |= DECIDED | UNIFORM * decision.uniform
        block = rows[at : at + requests]
        block["slot"], block["generation"] = entry.slots, entry.generations
        block["verified"] = np.clip(step.verify_lens - 1, 0, gamma)
        block["accepted"] = np.clip(step.commit_lens - 1, 0, block["verified"])
        block["temperature"] = np.nan if step.extra is None else DraftFeatures.of(step.extra, gamma).temperature
        at += requests
    confidence = [entry.step.confidence for entry in entries if entry.step.confidence is not None]
    featured = [DraftFeatures.of(entry.step.extra, gamma) for entry in entries if entry.step.extra is not None]
    maxima = _log_odds([each.max_probability for each in featured], gamma)
    spreads = _joined([each.entropy for each in featured], gamma)
    margins = np.minimum(_joined([each.margin for each in featured], gamma), MARGIN_LIMIT)
    features = np.stack([maxima, spreads, margins], axis=2).astype("<f2")
    return b"".join(part.tobytes() for part in (steps, rows, _log_odds(confidence, gamma), features))


def _joined(parts: list[Any], gamma: int) -> np.ndarray:
    return np.concatenate(parts).reshape(-1, gamma) if parts else np.zeros((0, gamma), np.float32)


def _log_odds(parts: list[Any], gamma: int) -> np.ndarray:
    probability = _joined(parts, gamma).astype(np.float64)
    inside = (probability >= 0.0) & (probability <= 1.0)
    return logit(np.where(inside, probability, np.nan)).astype("<f2")
