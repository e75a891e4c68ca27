import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import staircase, staircases, stairs_cost

from sglang_adaptive.policy import cost_file
from sglang_adaptive.policy.cost import CostModel, CostTableError, VerifySample

KEY = {"model": "tiny", "device": "cpu"}


def cost_of(model, tokens, kv=0.0):
    return float(model.step_ms(0, tokens, np.array([0]), kv, draft=False)[0])


@settings(max_examples=300, deadline=None)
@given(staircases(), st.integers(0, 8))
def test_a_count_between_tiers_costs_what_the_next_tier_costs(model, anchors):
    budgets = np.arange(48 - anchors + 1)
    wanted = [stairs_cost(model, anchors + b) for b in budgets]
    assert model.step_ms(anchors, anchors, budgets, 0.0).tolist() == wanted
    shuffled = np.random.default_rng(0).permutation(budgets)
    assert model.step_ms(anchors, anchors, shuffled, 0.0).tolist() == [wanted[b] for b in shuffled]


def test_121_tokens_cost_what_the_128_graph_costs():
    model = staircase([64, 120, 128], [3.0, 5.0, 7.0])
    assert [cost_of(model, t) for t in (64, 65, 120, 121, 128)] == [3.0, 5.0, 5.0, 7.0, 7.0]
    assert [model.tier(t) for t in (1, 64, 65, 121, 128, 129)] == [64, 64, 120, 128, 128, 129]


def test_above_the_capture_limit_it_interpolates_and_never_blends_across():
    model = staircase([8, 16, 32, 64], [1.0, 2.0, 10.0, 18.0], capture_limit=16)
    assert cost_of(model, 16) == 2.0
    assert [cost_of(model, t) for t in (17, 24, 32)] == [10.0, 10.0, 10.0]
    assert [cost_of(model, t) for t in (48, 64, 128)] == pytest.approx([14.0, 18.0, 34.0])


def test_above_the_capture_limit_without_samples_the_stairs_go_on():
    model = staircase([8, 16, 32], [1.0, 2.0, 4.0])
    assert [cost_of(model, t) for t in (32, 33, 40)] == pytest.approx([4.0, 4.125, 5.0])


def test_without_graphs_it_interpolates():
    samples = [VerifySample(t, 0, ms) for t, ms in ((1, 1.0), (9, 5.0), (17, 13.0))]
    model = CostModel.from_samples(samples, [(1, 1.0), (3, 2.0)], [], 0.0, None)
    assert [cost_of(model, t) for t in (1, 5, 9, 13, 17, 18)] == pytest.approx([1.0, 3.0, 5.0, 9.0, 13.0, 14.0])
    assert [model.draft_cost(r) for r in (1, 2, 3, 5)] == pytest.approx([1.0, 1.5, 2.0, 3.0])
    assert model.tier(13) == 13


def test_the_parts_add_up_and_the_draft_can_be_left_out():
    model = staircase([4, 8], [1.0, 2.0], draft=[(1, 0.5), (4, 0.75)], sampling=[(2, 0.25), (6, 0.5)], overhead_ms=3.0)
    assert model.step_ms(2, 3, np.array([0, 4]), 0.0).tolist() == [1 + 0.75 + 0.25 + 3, 2 + 0.75 + 0.5 + 3]
    assert model.step_ms(2, 3, np.array([0]), 0.0, draft=False).tolist() == [1 + 0.25 + 3]
    assert model.step_ms(2, 3, np.zeros(0, np.int64), 0.0).shape == (0,)


def test_a_sample_set_becomes_monotone_over_tokens_and_kv():
    samples = [VerifySample(8, 0, 5.0), VerifySample(16, 0, 4.0), VerifySample(8, 100, 4.5), VerifySample(16, 100, 9.0)]
    model = CostModel.from_samples(samples, [(1, 2.0), (2, 1.0)], [(1, 2.0), (2, 1.0)], 0.0, 16)
    assert model.verify_ms.tolist() == [[4.0, 4.5], [4.0, 9.0]]
    assert model.draft_ms.tolist() == model.sampling_ms.tolist() == [1.0, 1.0]


@st.composite
def timings(draw):
    """Verify times [tiers, contexts] and the times of a list, in sixteenths of a ms, which fall at will."""
    shape = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    cells = draw(st.lists(st.integers(0, 64), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    line = draw(st.lists(st.integers(0, 64), min_size=1, max_size=8))
    return np.array(cells).reshape(shape) / 16, np.array(line) / 16


def profiled(grid, line, left_out=()):
    """The table of a profile with one sample a point: tier 8 (i + 1), context 100 j, and n + 1 requests or rows."""
    cells = [(at, ms) for at, ms in np.ndenumerate(grid) if at not in left_out]
    verify = [VerifySample(8 * (i + 1), 100.0 * j, ms) for (i, j), ms in cells]
    listed = [(n + 1, ms) for n, ms in enumerate(line)]
    return CostModel.from_samples(verify, listed, listed, 0.0, 64, {1: listed})


def never_falls(model):
    tables = (model.verify_ms, model.verify_ms.T, model.draft_ms, model.sampling_ms, model.narrow_draft_ms[1])
    return all(bool((np.diff(table, axis=0) >= 0).all()) for table in tables)


@settings(max_examples=300, deadline=None)
@given(timings())
def test_a_point_costs_the_least_that_it_or_a_larger_one_was_measured_to(case):
    grid, line = case
    model = profiled(grid, line)
    assert never_falls(model)
    assert model.verify_ms.tolist() == [[grid[i:, j:].min() for j in range(grid.shape[1])] for i in range(len(grid))]
    for table in (model.draft_ms, model.sampling_ms, model.narrow_draft_ms[1]):
        assert table.tolist() == [line[n:].min() for n in range(line.size)]


@settings(max_examples=300, deadline=None)
@given(timings(), st.data())
def test_with_points_left_out_none_costs_more_than_a_larger_one_was_measured_to(case, data):
    grid, line = case
    places = list(np.ndindex(grid.shape))
    left_out = data.draw(st.sets(st.sampled_from(places), max_size=len(places) - 1))
    model = profiled(grid, line, left_out)
    assert never_falls(model) and model.verify_ms.min() >= 0.0
    for i, j in set(places) - left_out:
        smaller = model.verify_ms[model.tiers <= 8 * (i + 1)][:, model.kv_points <= 100.0 * j]
        assert smaller.max() <= grid[i, j]


@settings(max_examples=300, deadline=None)
@given(timings(), st.data())
def test_one_slow_sample_moves_no_other_point(case, data):
    grid, line = np.cumsum(np.cumsum(case[0], axis=0), axis=1), np.cumsum(case[1])
    model = profiled(grid, line)
    assert model.verify_ms.tolist() == grid.tolist() and model.draft_ms.tolist() == line.tolist()
    at = data.draw(st.sampled_from(list(np.ndindex(grid.shape))))
    n = data.draw(st.integers(0, line.size - 1))
    slow_grid, slow_line = grid.copy(), line.copy()
    slow_grid[at] += 1000.0
    slow_line[n] += 1000.0
    slow = profiled(slow_grid, slow_line)
    others = np.ones(grid.shape, bool)
    others[at] = False
    assert slow.verify_ms[others].tolist() == grid[others].tolist()
    for table in (slow.draft_ms, slow.sampling_ms):
        assert np.delete(table, n).tolist() == np.delete(line, n).tolist()
        # It is bounded by the next point; the largest has none, and is believed.
        assert table[n] == (line[n + 1] if n + 1 < line.size else slow_line[n])


def test_a_profile_that_was_disturbed_as_on_a_gpu():
    tiers, ms = [384, 416, 448, 480, 512], [12.0, 12.5, 21.9, 13.5, 14.0]
    model = staircase(tiers, ms, draft=[(1, 7.2), (2, 1.25), (4, 1.5), (8, 2.0)])
    assert model.verify_ms[:, 0].tolist() == [12.0, 12.5, 13.5, 13.5, 14.0]
    assert model.draft_ms.tolist() == [1.25, 1.25, 1.5, 2.0]


def test_wild_samples_do_not_move_a_point():
    quiet = [VerifySample(8, 0, ms) for ms in (1.0, 1.01, 0.99, 1.0, 1.02)]
    wild = [VerifySample(8, 0, ms) for ms in (90.0, float("nan"), float("inf"), -5.0)]
    model = CostModel.from_samples([*quiet, *wild, VerifySample(16, 0, 2.0)], (), (), 0.0, 16)
    assert model.verify_ms[0, 0] == pytest.approx(1.0, abs=0.011)


def test_context_length_is_interpolated_and_goes_on_beyond_the_profile():
    samples = [VerifySample(t, kv, base + kv / 100) for t, base in ((8, 1.0), (16, 2.0)) for kv in (100, 200, 400)]
    model = CostModel.from_samples(samples, (), (), 0.0, 16)
    assert [cost_of(model, 8, kv) for kv in (0, 100, 150, 400, 800)] == pytest.approx([2.0, 2.0, 2.5, 5.0, 9.0])


def test_tiers_profiled_at_different_contexts_share_their_slope():
    samples = [VerifySample(8, 100, 2.0), VerifySample(8, 300, 4.0), VerifySample(16, 200, 5.0)]
    model = CostModel.from_samples(samples, (), (), 0.0, 16)
    assert [cost_of(model, 16, kv) for kv in (100, 200, 300)] == pytest.approx([4.0, 5.0, 6.0])


def test_what_is_informative():
    assert staircase([8, 16], [1.0, 2.0]).is_informative
    assert not staircase([8, 16], [1.0, 1.0]).is_informative
    assert not staircase([8], [1.0]).is_informative
    assert not CostModel.empty().is_informative
    assert CostModel.empty(2.0).step_ms(1, 1, np.arange(3), 0.0).tolist() == [2.0] * 3


def test_a_step_beyond_any_table_is_an_error():
    with pytest.raises(ValueError, match="beyond"):
        cost_of(staircase([8, 16], [1.0, 2.0]), 1 << 21)


def saved(tmp_path, **changes):
    path = tmp_path / "cost.json"
    model = staircase([8, 16], [1.5, 2.25], kv=(0.0, 1024.0), draft=[(1, 0.5)], sampling=[(1, 0.125)], overhead_ms=0.75)
    model.save(path, KEY)
    if changes:
        record = json.loads(path.read_text())
        for dotted, value in changes.items():
            *outer, last = dotted.split("__")
            target = record
            for name in outer:
                target = target[name]
            target[last] = value
        path.write_text(json.dumps(record))
    return path, model


def test_a_table_survives_the_disk(tmp_path):
    path, model = saved(tmp_path)
    again = CostModel.load(path, KEY)
    for name in ("tiers", "kv_points", "verify_ms", "draft_points", "draft_ms", "sampling_points", "sampling_ms"):
        before, after = getattr(model, name), getattr(again, name)
        assert before.dtype == after.dtype and before.tolist() == after.tolist()
    assert (again.overhead_ms, again.capture_limit) == (0.75, 16)
    assert [p.name for p in tmp_path.iterdir()] == ["cost.json"]


def test_an_empty_model_survives_the_disk(tmp_path):
    CostModel.empty().save(tmp_path / "sub" / "cost.json", KEY)
    assert not CostModel.load(tmp_path / "sub" / "cost.json", KEY).is_informative


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path, _ = saved(tmp_path)
    before = path.read_bytes()
    monkeypatch.setattr(cost_file.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        staircase([8, 16], [3.0, 4.0]).save(path, KEY)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["cost.json"]


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "other"},
        {"version": 2},
        {"narrow_draft": []},
        {"narrow_draft": {"0": [1.0]}},
        {"narrow_draft": {"-3": [1.0]}},
        {"narrow_draft": {"3": [2.0]}},
        {"narrow_draft": {str(width): [] for width in range(1, 18)}},
        {"extra": 1},
        {"key": {"model": "tiny", "device": "cuda"}},
        {"key": None},
        {"capture_limit": -1},
        {"capture_limit": True},
        {"capture_limit": 1.5},
        {"overhead_ms": -0.1},
        {"overhead_ms": float("nan")},
        {"verify": []},
        {"verify__tokens": [16, 8]},
        {"verify__tokens": [0, 16]},
        {"verify__tokens": [8, 1 << 30]},
        {"verify__tokens": [8, 16.0]},
        {"verify__tokens": list(range(1, 5000))},
        {"verify__kv_tokens": []},
        {"verify__kv_tokens": [0.0, float("inf")]},
        {"verify__kv_tokens": [5.0, 5.0]},
        {"verify__ms": [[1.5, 1.5]]},
        {"verify__ms": [[1.5, 1.5], [2.0]]},
        {"verify__ms": [[1.5, 1.5], [1.0, 2.0]]},
        {"verify__ms": [[1.5, 1.0], [2.0, 2.0]]},
        {"verify__ms": [[1.5, 1.5], [2.0, float("nan")]]},
        {"verify__ms": [[1.5, 1.5], [2.0, float("inf")]]},
        {"verify__ms": [[-1.5, 1.5], [2.0, 2.0]]},
        {"verify__ms": [["1", 1.5], [2.0, 2.0]]},
        {"draft__ms": [1e9]},
        {"draft__requests": [-1]},
        {"draft__ms": None},
        {"sampling": {"tokens": [1], "ms": [1.0], "code": "x"}},
        {"sampling__ms": [[1.0]]},
    ],
    ids=str,
)
def test_a_broken_table_is_refused_in_one_sentence(tmp_path, changes):
    path, _ = saved(tmp_path, **changes)
    with pytest.raises(CostTableError) as error:
        CostModel.load(path, KEY)
    assert str(error.value).startswith("The cost table") and "\n" not in str(error.value)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"null", b'{"version": 1}', b"1" * 9000])
def test_garbage_is_refused(tmp_path, raw):
    path = tmp_path / "cost.json"
    path.write_bytes(raw)
    with pytest.raises(CostTableError):
        CostModel.load(path, KEY)


def test_an_absurdly_large_file_is_not_parsed(tmp_path):
    path, _ = saved(tmp_path)
    path.write_bytes(path.read_bytes() + b" " * (cost_file.MAX_BYTES + 1))
    with pytest.raises(CostTableError, match="larger"):
        CostModel.load(path, KEY)


def test_a_missing_file_is_no_broken_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        CostModel.load(tmp_path / "none.json", KEY)
