"""The folder of the cost tables when it cannot be written, or holds what nobody put there."""

from __future__ import annotations

import errno
import json
import os

import pytest

from sglang_adaptive.policy.cost import CostModel
from sglang_adaptive.runtime import profiler

KEY = {"target": "../../etc/passwd", "draft": "x\n/../y"}


@pytest.fixture
def cost() -> CostModel:
    return CostModel.empty()


def test_a_folder_that_cannot_be_is_one_warning(tmp_path, caplog, cost):
    (tmp_path / "file").write_text("")
    with caplog.at_level("WARNING"):
        profiler._save(cost, tmp_path / "file" / "cost-1.json", KEY)
    assert len(caplog.records) == 1 and "cannot be kept" in caplog.text
    assert sorted(os.listdir(tmp_path)) == ["file"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_is_full_leaves_the_old_table_and_nothing_else(tmp_path, caplog, cost, monkeypatch, code):
    path = tmp_path / "cost-1.json"
    profiler._save(cost, path, KEY)
    old = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with caplog.at_level("WARNING"):
        profiler._save(cost, path, {**KEY, "more": "x"})
    assert len(caplog.records) == 1 and "the next start profiles again" in caplog.text
    assert path.read_bytes() == old and os.listdir(tmp_path) == ["cost-1.json"]


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -1.0, 1e300, 10**400, "1", None, [[1.0]], {"__reduce__": "os.system"}, True],
    ids=str,
)
def test_a_hostile_value_is_one_warning(tmp_path, caplog, cost, value):
    path = tmp_path / "cost-1.json"
    profiler._save(cost, path, KEY)
    assert profiler._load(path, KEY) is not None
    table = json.loads(path.read_text())
    for section in ("overhead_ms", "capture_limit", "verify"):
        if section == "capture_limit" and value is None:
            continue
        path.write_text(json.dumps({**table, section: value}))
        caplog.clear()
        with caplog.at_level("WARNING"):
            assert profiler._load(path, KEY) is None, section
        assert len(caplog.records) == 1 and "profiling again" in caplog.text


def test_a_deeply_nested_table_is_one_warning(tmp_path, caplog):
    path = tmp_path / "cost-1.json"
    path.write_text("[" * 200_000 + "]" * 200_000)
    with caplog.at_level("WARNING"):
        assert profiler._load(path, KEY) is None
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("times", "enough"),
    [
        ([], False),
        ([50.0], False),
        ([50.0, 51.0], True),
        ([50.0, 70.0], False),
        ([50.0, 70.0, 51.0], True),
        ([4.0, 4.0, 4.0, 4.0], False),
        ([4.0, 4.0, 4.0, 4.0, 4.0], True),
        ([9.0, 9.0, 9.0, 9.0], True),
    ],
)
def test_a_long_call_is_timed_twice_and_once_more_where_the_two_differ(times, enough):
    assert profiler._enough(times) == enough
