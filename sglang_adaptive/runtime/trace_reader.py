"""Reads traces, and trusts nothing in them."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.policy.logistic import sigmoid
from sglang_adaptive.runtime.trace_format import (
    BLOCK,
    DRAFTED,
    FEATURED,
    FEATURES,
    HEAD,
    MAGIC,
    MAX_BLOCK_BYTES,
    MAX_GAMMA,
    ROW_TYPE,
    STEP,
    STEP_TYPE,
)


@dataclass(frozen=True)
class Trace:
    """A trace in memory.

    Attributes:
        gamma: K.
        meta: text by name, from the server.
        reasons: names of ``steps["reason"]``.
        steps: [S] ``STEP_TYPE``.
        rows: [N] ``ROW_TYPE``; those of step s are ``rows[start[s]:start[s + 1]]``.
        start: [S + 1] int64.
        confidence: [N, K] float32 raw confidences; NaN rows where the step did not draft.
        max_probability, entropy, margin: [N, K] float32; NaN rows where the step has no features.
        lost: steps that could not be recorded.
        truncated: the file ends in the middle of a block.
    """

    gamma: int
    meta: dict[str, str]
    reasons: list[str]
    steps: np.ndarray
    rows: np.ndarray
    start: np.ndarray
    confidence: np.ndarray
    max_probability: np.ndarray
    entropy: np.ndarray
    margin: np.ndarray
    lost: int
    truncated: bool


def read_trace(path: str | os.PathLike[str], max_bytes: int = 4 << 30) -> Trace:
    """Read a trace. Raises AdaptiveError for a file that is no trace, is damaged, or is larger than ``max_bytes`` once
    unpacked; nothing in the file is ever executed."""
    try:
        with open(path, "rb") as file:
            return _read(file, os.fstat(file.fileno()).st_size, max_bytes)
    except OSError as error:
        raise AdaptiveError(f"Cannot read the trace {path} ({error.strerror}).") from error
    except _Broken as error:
        raise AdaptiveError(f"{path} {error}; give a file that a server wrote with the option trace.") from error


class _Broken(Exception):
    pass


def _read(file: BinaryIO, size: int, max_bytes: int) -> Trace:
    if file.read(len(MAGIC)) != MAGIC:
        raise _Broken("is no trace")
    first = _next_block(file, size)
    if first is None or first[0] != HEAD:
        raise _Broken("has no head")
    gamma, reasons, meta = _head(first[4])
    parts, lost, unpacked, truncated = [], 0, 0, False
    while file.tell() < size:
        block = _next_block(file, size)
        if block is None:
            truncated = True
            break
        tag, steps, _, lost_here, payload = block
        if tag != STEP:
            raise _Broken(f"has a block of an unknown kind before byte {file.tell()}")
        raw = _unpack(payload)
        unpacked += len(raw)
        if unpacked > max_bytes:
            raise _Broken(f"is larger than {max_bytes} bytes once unpacked")
        parts.append(_decode(raw, steps, gamma, len(reasons)))
        lost += lost_here
    if not parts:
        parts = [_decode(b"", 0, gamma, len(reasons))]
    steps_, rows, *tables = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    start = np.concatenate([[0], np.cumsum(steps_["requests"], dtype=np.int64)])
    return Trace(gamma, meta, reasons, steps_, rows, start, *tables, lost=lost, truncated=truncated)


def _next_block(file: BinaryIO, size: int) -> tuple[bytes, int, int, int, bytes] | None:
    """Tag, steps, CRC, lost and payload; None where the file ends within the block."""
    head = file.read(BLOCK.size)
    if len(head) < BLOCK.size:
        return None
    tag, steps, length, crc, lost = BLOCK.unpack(head)
    if tag not in (HEAD, STEP) or length > MAX_BLOCK_BYTES:
        raise _Broken(f"is damaged before byte {file.tell()}")
    payload = file.read(length)
    if len(payload) < length:
        return None
    if zlib.crc32(payload) != crc:
        if file.tell() == size:
            return None
        raise _Broken(f"is damaged before byte {file.tell()}")
    return tag, steps, crc, lost, payload


def _head(payload: bytes) -> tuple[int, list[str], dict[str, str]]:
    try:
        record = json.loads(payload)
        gamma, reasons, meta = record["gamma"], record["reasons"], record["meta"]
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise _Broken("has a broken head") from error
    fits = type(gamma) is int and 1 <= gamma <= MAX_GAMMA and isinstance(reasons, list) and isinstance(meta, dict)
    if not fits or not all(isinstance(text, str) for text in [*reasons, *meta, *meta.values()]):
        raise _Broken("has a broken head")
    return gamma, reasons, meta


def _unpack(payload: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(payload, MAX_BLOCK_BYTES)
    except zlib.error as error:
        raise _Broken("is damaged") from error
    if not unpacker.eof:
        raise _Broken("has a block that is too large")
    return raw


def _decode(raw: bytes, count: int, gamma: int, reasons: int) -> tuple[np.ndarray, ...]:
    if count * STEP_TYPE.itemsize > len(raw):
        raise _Broken("has a block that is too short")
    steps = np.frombuffer(raw, STEP_TYPE, count)
    at = count * STEP_TYPE.itemsize
    requests = steps["requests"].astype(np.int64)
    drafted = np.repeat(steps["flags"] & DRAFTED, requests).astype(bool) if requests.sum() <= len(raw) else None
    if drafted is None or (steps["reason"] >= reasons).any():
        raise _Broken("has impossible values")
    featured = np.repeat(steps["flags"] & FEATURED, requests).astype(bool)
    width = 2 * gamma
    expected = (
        at + drafted.size * ROW_TYPE.itemsize + int(drafted.sum()) * width + int(featured.sum()) * FEATURES * width
    )
    if expected != len(raw):
        raise _Broken("has a block of another size than it says")
    rows = np.frombuffer(raw, ROW_TYPE, drafted.size, at)
    at += drafted.size * ROW_TYPE.itemsize
    if (rows["verified"] > gamma).any() or (rows["accepted"] > rows["verified"]).any():
        raise _Broken("has impossible values")
    confidence = np.frombuffer(raw, "<f2", int(drafted.sum()) * gamma, at).reshape(-1, gamma)
    features = np.frombuffer(raw, "<f2", int(featured.sum()) * FEATURES * gamma, at + confidence.nbytes)
    features = features.reshape(-1, gamma, FEATURES)
    return (
        steps,
        rows,
        _spread(sigmoid(confidence.astype(np.float32)), drafted),
        _spread(sigmoid(features[..., 0].astype(np.float32)), featured),
        _spread(features[..., 1].astype(np.float32), featured),
        _spread(features[..., 2].astype(np.float32), featured),
    )


def _spread(values: np.ndarray, where: np.ndarray) -> np.ndarray:
    table = np.full((where.size, values.shape[1]), np.nan, np.float32)
    table[where] = values
    return table
