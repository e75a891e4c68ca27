"""The shipped cost tables are what their derivation says, and a misjudged one is still a table."""

from __future__ import annotations

import numpy as np
import pytest
from simulator_cases import STEEP, TABLE

from sglang_adaptive.benchmarks.simulator import derive, tables
from sglang_adaptive.errors import AdaptiveError


def test_the_shipped_tables_are_what_their_derivation_says():
    for name, derived in derive.DERIVED.items():
        model, key = derived()
        shipped, shipped_key = tables.load_table(name)
        assert shipped_key == key
        for field in ("tiers", "kv_points", "verify_ms", "draft_points", "draft_ms"):
            np.testing.assert_allclose(getattr(shipped, field), getattr(model, field))
        assert (shipped.overhead_ms, shipped.capture_limit) == (model.overhead_ms, model.capture_limit)


def test_the_published_throughputs_come_back_from_the_table():
    for c, none, fixed in zip(derive.CONCURRENCY, derive.PUBLISHED["none"], derive.PUBLISHED["fixed 7"], strict=True):
        assert 1e3 * c / TABLE.point_ms(c, c, c, 0.0, draft=False) == pytest.approx(none, rel=0.04)
        with_seven = 1e3 * c * derive.ACCEPTED_WITH_7 / TABLE.point_ms(c, 8 * c, 8 * c, 0.0)
        assert with_seven == pytest.approx(fixed, rel=0.04)


@pytest.mark.parametrize("error", tables.ERRORS)
def test_a_misjudged_table_is_wrong_where_it_should_be_and_still_a_table(error):
    wrong, (low, high, draft) = tables.misjudged(STEEP, error), tables.ERRORS[error]
    assert wrong.verify_ms[0, 0] == pytest.approx(low * STEEP.verify_ms[0, 0])
    assert wrong.verify_ms[-1, 0] >= high * STEEP.verify_ms[-1, 0] - 1e-9
    assert wrong.draft_cost(1) == pytest.approx(draft * STEEP.draft_cost(1))
    assert (np.diff(wrong.verify_ms, axis=0) >= 0).all()


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"key": {}}', b"\xff"])
def test_a_file_that_is_no_table_is_one_clear_error(tmp_path, content):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(AdaptiveError, match="no usable cost table"):
        tables.load_table(str(tmp_path / "t.json"))
    with pytest.raises(AdaptiveError, match="There is no cost table 'nowhere'"):
        tables.load_table("nowhere")
