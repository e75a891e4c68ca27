"""The trace: what goes in comes out, and nothing that happens to the file reaches the serving or the reader."""

from __future__ import annotations

import dataclasses
import errno
import os
import pickle
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.observe.summary import summarise
from sglang_adaptive.policy.budget import LOW_LOAD, TRIMMED, Decision
from sglang_adaptive.runtime import trace, trace_format
from sglang_adaptive.runtime.relay import StepRecord
from sglang_adaptive.runtime.trace import TraceRecorder, read_trace
from sglang_adaptive.runtime.trace_format import BLOCK, COUNTED, DECIDED, DRAFTED, FEATURED, HEAD, MAGIC, STEP, UNIFORM

GAMMA = 3
DECISION = Decision(4, True, False, 5.5, 2.25, TRIMMED, 0.125)


def step(iteration: int, requests: int = 2, confidence: np.ndarray | None = None, **changes: object) -> StepRecord:
    values = {
        "iteration": iteration,
        "slots": np.arange(requests) + 7,
        "generations": np.arange(requests) + 100 * iteration,
        "kv_tokens": 64.0 * iteration,
        "confidence": np.full((requests, GAMMA), 0.75, np.float32) if confidence is None else confidence,
        "verify_lens": np.full(requests, 3),
        "commit_lens": np.full(requests, 2),
        "step_ms": 1.5,
    }
    return StepRecord(**{**values, **changes})


def recorded(path: Path, *steps: StepRecord, **options: object) -> TraceRecorder:
    recorder = TraceRecorder(path, GAMMA, **options)
    for each in steps:
        recorder.record(each, DECISION)
    recorder.close()
    return recorder


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    raw = np.array([[0.1, 0.5, 0.999], [1.0, 0.0, np.nan]], np.float32)
    recorder = TraceRecorder(tmp_path / "t", GAMMA, meta={"model": "m"})
    recorder.record(step(4, confidence=raw, tier=8), DECISION)
    recorder.record(step(5, 3, verify_lens=np.ones(3, int), commit_lens=np.ones(3, int), step_ms=None), None)
    recorder.close()
    found = read_trace(tmp_path / "t")
    assert (found.gamma, found.meta, found.lost, found.truncated) == (GAMMA, {"model": "m"}, 0, False)
    assert found.start.tolist() == [0, 2, 5]
    first, second = found.steps
    assert (first["iteration"], first["tier"], first["budget"], first["kv_tokens"]) == (4, 8, 4, 256.0)
    assert (first["step_ms"], first["predicted_ms"], first["expected_tokens"], first["gain"]) == (1.5, 2.25, 5.5, 0.125)
    assert (first["flags"], found.reasons[first["reason"]]) == (DRAFTED | DECIDED, TRIMMED)
    assert second["flags"] == DRAFTED and np.isnan(second["step_ms"]) and np.isnan(second["predicted_ms"])
    assert found.rows["slot"].tolist() == [7, 8, 7, 8, 9]
    assert found.rows["generation"].tolist() == [400, 401, 500, 501, 502]
    assert found.rows["verified"].tolist() == [2, 2, 0, 0, 0]
    assert found.rows["accepted"].tolist() == [1, 1, 0, 0, 0]
    np.testing.assert_allclose(found.confidence[0], raw[0], rtol=2e-3)
    np.testing.assert_allclose(found.confidence[1, :2], [1.0, 0.0], atol=1e-5)
    assert np.isnan(found.confidence[1, 2])
    assert np.isnan(found.entropy).all()


def test_steps_without_drafts_and_with_features(tmp_path: Path) -> None:
    maximum, entropy, margin = (np.full((2, GAMMA), value, np.float32) for value in (0.25, 1.5, 0.5))
    margin[0, 0] = np.inf
    extra = np.hstack([maximum, entropy, margin, np.array([[0.0], [0.75]], np.float32)])
    recorder = TraceRecorder(tmp_path / "t", GAMMA)
    plain = step(1, verify_lens=np.ones(2, int), commit_lens=np.ones(2, int))
    recorder.record(
        StepRecord(**{**plain.__dict__, "confidence": None}), Decision(0, False, True, 2.0, 1.0, "an unknown reason")
    )
    recorder.record(step(2, extra=extra), DECISION)
    recorder.close()
    found = read_trace(tmp_path / "t")
    assert found.steps["flags"].tolist() == [DECIDED | UNIFORM, DRAFTED | DECIDED | FEATURED]
    assert found.reasons[found.steps["reason"][0]] == "other"
    assert np.isnan(found.confidence[:2]).all() and np.isfinite(found.confidence[2:]).all()
    assert np.isnan(found.max_probability[:2]).all()
    np.testing.assert_allclose(found.max_probability[2:], maximum, rtol=2e-3)
    np.testing.assert_allclose(found.entropy[2:], entropy)
    np.testing.assert_allclose(found.margin[2:], np.minimum(margin, trace_format.MARGIN_LIMIT))
    assert np.isnan(found.rows["temperature"][:2]).all() and found.rows["temperature"][2:].tolist() == [0.0, 0.75]


def test_a_block_is_written_while_the_server_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_WRITE_EVERY_S", 0.01)
    recorder = TraceRecorder(tmp_path / "t", GAMMA)
    recorder.record(step(1), DECISION)
    deadline = time.monotonic() + 20
    while not read_trace(tmp_path / "t").steps.size and time.monotonic() < deadline:
        time.sleep(0.01)
    assert recorder.recording
    assert read_trace(tmp_path / "t").steps["iteration"].tolist() == [1]
    recorder.close()


def test_a_later_change_of_the_batch_does_not_reach_the_trace(tmp_path: Path) -> None:
    slots = np.array([1, 2])
    recorder = TraceRecorder(tmp_path / "t", GAMMA)
    recorder.record(step(1, slots=slots), DECISION)
    slots[:] = 9
    recorder.close()
    assert read_trace(tmp_path / "t").rows["slot"].tolist() == [1, 2]


def test_every_truncation_is_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_BLOCK_STEPS", 2)
    recorded(tmp_path / "t", *(step(n) for n in range(6)))
    whole = (tmp_path / "t").read_bytes()
    head = len(MAGIC) + BLOCK.size + BLOCK.unpack(whole[8 : 8 + BLOCK.size])[2]
    seen = set()
    for end in range(head, len(whole) + 1):
        (tmp_path / "cut").write_bytes(whole[:end])
        found = read_trace(tmp_path / "cut")
        assert found.steps["iteration"].tolist() == list(range(len(found.steps)))
        assert found.truncated or len(found.steps) in (0, 2, 4, 6)
        seen.add((len(found.steps), found.truncated))
    assert {(0, False), (2, False), (4, False), (6, False), (2, True), (4, True)} <= seen
    # A file system that lost the last pages leaves zeros.
    (tmp_path / "cut").write_bytes(whole[:-5] + bytes(5))
    assert read_trace(tmp_path / "cut").truncated


def test_the_size_is_bounded_and_one_line_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    noise = np.random.default_rng(0).random((200, GAMMA), np.float32)
    recorder = TraceRecorder(tmp_path / "t", GAMMA, max_bytes=20_000)
    for n in range(2000):
        recorder.record(step(n, 200, noise), DECISION)
    recorder.close()
    recorder._thread.join(20)
    recorder.record(step(1), DECISION)
    assert (tmp_path / "t").stat().st_size <= 20_000
    assert not recorder.recording
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "limit of 20000 bytes" in caplog.text
    read_trace(tmp_path / "t")


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    recorder = TraceRecorder(tmp_path / "t", GAMMA)
    recorder._file.close()
    recorder._file = Full()
    recorder.record(step(1), DECISION)
    recorder.close()
    for n in range(5):
        recorder.record(step(n), DECISION)
    assert not recorder.recording
    assert len(caplog.records) == 1 and "No space left" in caplog.text


@pytest.mark.parametrize("obstacle", ["folder", "missing", "foreign"])
def test_a_place_that_cannot_be_written_is_one_warning(
    tmp_path: Path, obstacle: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t" if obstacle != "missing" else tmp_path / "no" / "t"
    if obstacle == "folder":
        path.mkdir()
    if obstacle == "foreign":
        path.write_text("somebody's notes")
    recorder = recorded(path, step(1))
    assert not recorder.recording
    assert len(caplog.records) == 1
    if obstacle == "foreign":
        assert path.read_text() == "somebody's notes"


def test_a_step_that_cannot_be_encoded_ends_the_recording_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = recorded(tmp_path / "t", step(1, verify_lens=np.ones(5, int)))
    assert not recorder.recording and len(caplog.records) == 1
    assert read_trace(tmp_path / "t").steps.size == 0


def test_an_earlier_trace_is_kept(tmp_path: Path) -> None:
    recorded(tmp_path / "t", step(1))
    recorded(tmp_path / "t", step(2))
    assert read_trace(tmp_path / "t").steps["iteration"].tolist() == [2]
    assert read_trace(tmp_path / "t.previous").steps["iteration"].tolist() == [1]


def test_steps_that_do_not_fit_the_queue_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_WAITING_STEPS", 3)
    monkeypatch.setattr(TraceRecorder, "_run", lambda self: None)
    recorder = TraceRecorder(tmp_path / "t", GAMMA)
    for n in range(8):
        recorder.record(step(n), DECISION)
    assert recorder._lost == 5
    monkeypatch.undo()
    monkeypatch.setattr(trace, "_WRITE_EVERY_S", 0.01)
    entries = [recorder._waiting.get() for _ in range(3)]
    recorder._write_block(entries)
    recorder._file.close()
    assert read_trace(tmp_path / "t").lost == 5


def block(tag: bytes, payload: bytes, steps: int = 0) -> bytes:
    return BLOCK.pack(tag, steps, len(payload), zlib.crc32(payload), 0) + payload


GOOD_HEAD = block(HEAD, b'{"gamma": 3, "reasons": ["other"], "meta": {}}')
TAIL = block(STEP, zlib.compress(b""))
HUGE_STEP = np.zeros(1, trace_format.STEP_TYPE)
HUGE_STEP["requests"] = 2**32 - 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a trace at all",
        pickle.dumps(print),
        MAGIC,
        MAGIC + TAIL,
        MAGIC + block(HEAD, b"[" * 100_000),
        MAGIC + block(HEAD, b'{"gamma": 0, "reasons": [], "meta": {}}'),
        MAGIC + block(HEAD, b'{"gamma": 3, "reasons": [1], "meta": {}}'),
        MAGIC + block(HEAD, b'{"gamma": 3, "reasons": [], "meta": []}'),
        MAGIC + block(HEAD, b"\xff\xfe"),
        MAGIC + GOOD_HEAD + BLOCK.pack(STEP, 1, 2**31, 0, 0) + b"x" * 99,
        MAGIC + GOOD_HEAD + block(b"EVIL", b"") + TAIL,
        MAGIC + GOOD_HEAD + GOOD_HEAD,
        MAGIC + GOOD_HEAD + block(STEP, b"not compressed") + TAIL,
        MAGIC + GOOD_HEAD + block(STEP, zlib.compress(bytes(65 << 20))),
        MAGIC + GOOD_HEAD + block(STEP, zlib.compress(b""), steps=2**32 - 1),
        MAGIC + GOOD_HEAD + block(STEP, zlib.compress(HUGE_STEP.tobytes()), steps=1),
        MAGIC + GOOD_HEAD + block(STEP, zlib.compress(bytes(trace_format.STEP_TYPE.itemsize + 1)), steps=1),
        MAGIC + GOOD_HEAD + struct.pack("<4sIIII", STEP, 0, 3, 1, 0) + b"abc" + TAIL,
    ],
)
def test_a_hostile_file_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(AdaptiveError, match="give a file that a server wrote"):
        read_trace(tmp_path / "t")


def test_impossible_outcomes_are_refused(tmp_path: Path) -> None:
    steps, rows = np.zeros(1, trace_format.STEP_TYPE), np.zeros(1, trace_format.ROW_TYPE)
    steps["requests"], rows["verified"], rows["accepted"] = 1, 1, 2
    raw = steps.tobytes() + rows.tobytes()
    (tmp_path / "t").write_bytes(MAGIC + GOOD_HEAD + block(STEP, zlib.compress(raw), steps=1))
    with pytest.raises(AdaptiveError, match="impossible values"):
        read_trace(tmp_path / "t")


def test_unpacking_is_bounded_and_a_missing_file_is_named(tmp_path: Path) -> None:
    recorded(tmp_path / "t", *(step(n) for n in range(9)))
    with pytest.raises(AdaptiveError, match="larger than 100 bytes"):
        read_trace(tmp_path / "t", max_bytes=100)
    with pytest.raises(AdaptiveError, match="No such file"):
        read_trace(tmp_path / "no")


def test_a_step_that_was_only_counted_has_its_rows_and_no_confidences(tmp_path: Path) -> None:
    whole = Decision(6, True, True, 3.0, 2.0, LOW_LOAD)
    # Verified in full, as a step that repeats such a decision is.
    counted = step(4, step_ms=None, decision=whole, observed=False, verify_lens=np.full(2, GAMMA + 1))
    counted = dataclasses.replace(counted, confidence=None)
    recorder = TraceRecorder(tmp_path / "t", GAMMA)
    recorder.record(counted, whole)
    recorder.close()
    found = read_trace(tmp_path / "t")
    assert found.steps["flags"].tolist() == [COUNTED | DECIDED | UNIFORM]
    assert found.rows["slot"].tolist() == [7, 8] and found.rows["verified"].tolist() == [GAMMA, GAMMA]
    assert found.rows["accepted"].tolist() == [1, 1]
    assert np.isnan(found.confidence).all() and np.isnan(found.steps["step_ms"]).all()
    assert summarise(found).drafted_steps == 1
