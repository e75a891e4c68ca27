"""The cost table on disk: plain JSON, written atomically, believed only after it was checked."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_adaptive.policy.cost import MAX_TOKENS, CostModel, CostTableError

FORMAT = "sglang-adaptive-cost"
VERSION = 1
MAX_BYTES = 8 << 20
MAX_POINTS = 4096
MAX_KV_POINTS = 256
MAX_WIDTHS = 16
MAX_MS = 1e6

_FIELDS = {"format", "version", "key", "capture_limit", "overhead_ms", "verify", "draft", "sampling"}
# Only where the server can draft fewer than K tokens.
_NARROW = "narrow_draft"


def save(model: CostModel, path: str | os.PathLike[str], key: Mapping[str, str]) -> None:
    """Write ``model`` for ``key``. A reader sees the old file or the new one, never a part. Raises ``OSError``."""
    record = {
        "format": FORMAT,
        "version": VERSION,
        "key": dict(key),
        "capture_limit": model.capture_limit,
        "overhead_ms": model.overhead_ms,
        "verify": {
            "tokens": model.tiers.tolist(),
            "kv_tokens": model.kv_points.tolist(),
            "ms": model.verify_ms.tolist(),
        },
        "draft": {"requests": model.draft_points.tolist(), "ms": model.draft_ms.tolist()},
        "sampling": {"tokens": model.sampling_points.tolist(), "ms": model.sampling_ms.tolist()},
    }
    if model.narrow_draft_ms:
        record[_NARROW] = {str(width): ms.tolist() for width, ms in model.narrow_draft_ms.items()}
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".cost-", suffix=".tmp", dir=folder)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load(path: str | os.PathLike[str], key: Mapping[str, str]) -> CostModel:
    """Read the table of ``key``.

    Raises ``FileNotFoundError`` where there is none, ``OSError``, and ``CostTableError`` when the file is corrupt, too
    large, of another version, measured on something else, or holds values that no table of ours can hold.
    """
    with open(path, "rb") as file:
        raw = file.read(MAX_BYTES + 1)
    _require(len(raw) <= MAX_BYTES, f"is larger than {MAX_BYTES} bytes")
    try:
        record = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CostTableError("The cost table is not valid JSON; it has to be profiled again.") from error
    _require(isinstance(record, dict) and record.get("format") == FORMAT, "is not a cost table")
    _require(record.get("version") == VERSION, f"has another version than {VERSION}")
    _require(set(record) - {_NARROW} == _FIELDS, "has missing or unknown fields")
    _require(record["key"] == dict(key), "was measured on another model, device, backend, graph set or version")

    verify = _section(record, "verify", {"tokens", "kv_tokens", "ms"})
    tiers = _points(verify["tokens"], "verify tokens", lowest=1)
    kv_points = _axis(verify["kv_tokens"], "verify kv_tokens")
    verify_ms = _milliseconds(verify["ms"], (tiers.size, kv_points.size), "verify")
    capture_limit = record["capture_limit"]
    _require(
        capture_limit is None or (_is_int(capture_limit) and 1 <= capture_limit <= MAX_TOKENS),
        "has a capture limit that is no token count",
    )
    overhead = record["overhead_ms"]
    _require(_is_number(overhead) and 0 <= overhead <= MAX_MS, "has an overhead that is no time in ms")
    draft, sampling = _section(record, "draft", {"requests", "ms"}), _section(record, "sampling", {"tokens", "ms"})
    draft_points = _points(draft["requests"], "draft requests", lowest=0)
    sampling_points = _points(sampling["tokens"], "sampling tokens", lowest=0)
    narrow = record.get(_NARROW, {})
    _require(isinstance(narrow, dict) and len(narrow) <= MAX_WIDTHS, "has a broken narrow_draft section")
    _require(
        all(width.isascii() and width.isdigit() and 1 <= int(width) <= MAX_TOKENS for width in narrow),
        "has narrow drafts of no number of tokens",
    )
    draft_ms = _milliseconds(draft["ms"], (draft_points.size,), "draft")
    narrow_ms = {int(width): _milliseconds(ms, (draft_points.size,), "narrow draft") for width, ms in narrow.items()}
    _require(all(bool((ms <= draft_ms).all()) for ms in narrow_ms.values()), "has narrow drafts that take longer")
    return CostModel(
        tiers,
        kv_points,
        verify_ms,
        draft_points,
        draft_ms,
        sampling_points,
        _milliseconds(sampling["ms"], (sampling_points.size,), "sampling"),
        float(overhead),
        capture_limit,
        narrow_ms,
    )


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise CostTableError(f"The cost table {complaint}; it has to be profiled again.")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _section(record: dict[str, Any], name: str, fields: set[str]) -> dict[str, Any]:
    section = record[name]
    _require(isinstance(section, dict) and set(section) == fields, f"has a broken {name} section")
    assert isinstance(section, dict)
    return section


def _points(values: Any, name: str, lowest: int) -> NDArray[np.int64]:
    _require(isinstance(values, list) and len(values) <= MAX_POINTS, f"has too many or no {name}")
    _require(all(_is_int(v) and lowest <= v <= MAX_TOKENS for v in values), f"has {name} that are no counts")
    points = np.array(values, np.int64)
    _require(bool((np.diff(points) > 0).all()), f"has {name} that do not increase")
    return points


def _axis(values: Any, name: str) -> NDArray[np.float64]:
    _require(isinstance(values, list) and 1 <= len(values) <= MAX_KV_POINTS, f"has too many or no {name}")
    _require(all(_is_number(v) and 0 <= v <= 1e12 for v in values), f"has {name} that are no counts")
    axis = np.array(values, np.float64)
    _require(bool((np.diff(axis) > 0).all()), f"has {name} that do not increase")
    return axis


def _milliseconds(values: Any, shape: tuple[int, ...], name: str) -> NDArray[np.float64]:
    rows = values if len(shape) == 2 else [values]
    _require(isinstance(values, list) and len(values) == shape[0], f"has a {name} table of another size")
    _require(all(isinstance(row, list) and len(row) == shape[-1] for row in rows), f"has a broken {name} table")
    # NaN fails the comparison, and Python's reader does accept the word NaN.
    _require(all(_is_number(v) and 0 <= v <= MAX_MS for row in rows for v in row), f"has {name} times out of range")
    table = np.array(values, np.float64).reshape(shape)
    _require(
        all(bool((np.diff(table, axis=axis) >= 0).all()) for axis in range(table.ndim)),
        f"has {name} times that fall with size",
    )
    return table
