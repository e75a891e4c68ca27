"""Attention and graphs of fixed width take the packed ones' place for one step, and never when they are stale."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from sglang.srt.environ import envs

from sglang_adaptive.runtime import widths
from sglang_adaptive.runtime.planner import StepPlanner
from sglang_adaptive.runtime.widths import FixedWidths

GIB = 1 << 30


class Graphs:
    ragged_verify_mode, max_bs = True, 256
    made: ClassVar[list[tuple[int, list[str], str]]] = []

    def __init__(self, runner, attn_backend=None, speculative_num_draft_tokens=None):
        self.width = speculative_num_draft_tokens
        Graphs.made.append((self.width, list(runner.capture_tail_hooks), envs.SGLANG_RAGGED_VERIFY_MODE.get()))


class Spec:
    def override(self, **values):
        return envs.SGLANG_RAGGED_VERIFY_MODE.override("compact")  # any context manager; the inner one says static


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.setattr(widths, "_unable", lambda _: None)
    monkeypatch.setattr(widths, "least_free_bytes", lambda: 10 * GIB)
    monkeypatch.setattr(widths, "get_spec", Spec)
    Graphs.made.clear()
    made = SimpleNamespace(
        device="cuda",
        attn_backend="packed attention",
        capture_tail_hooks=["accept in the graph"],
        page_size=1,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros((1, 8192), dtype=torch.int8)),
        _get_attention_backend=lambda init_new_workspace: object(),
    )
    made.decode_cuda_graph_runner = Graphs(made)
    Graphs.made.clear()
    return made


def test_each_width_is_captured_by_itself_without_the_hosts_hooks(runner):
    fixed = FixedWidths(runner, (8, 1), own=8)
    assert Graphs.made == [(8, [], "static"), (1, [], "static")]
    assert 8 in fixed and 1 in fixed and 4 not in fixed
    assert runner.capture_tail_hooks == ["accept in the graph"] and runner.attn_backend == "packed attention"


def test_a_tail_is_captured_with_the_graphs_of_its_width(runner):
    def write(*_):
        raise AssertionError("captured only")

    fixed = FixedWidths(runner, (8, 1), own=8, tails={1: write, 8: None})
    assert Graphs.made == [(8, [], "static"), (1, [write], "static")]
    assert fixed.has_tail(1) and not fixed.has_tail(8) and not fixed.has_tail(4)
    assert runner.capture_tail_hooks == ["accept in the graph"]
    runner.decode_cuda_graph_runner = Graphs(runner)
    assert not fixed.has_tail(1), "the host captured anew"


def test_without_graphs_no_tail_runs(runner):
    runner.decode_cuda_graph_runner = None
    assert not FixedWidths(runner, (1,), own=8, tails={1: print}).has_tail(1)


def test_a_width_is_in_place_meanwhile_and_gone_after_an_error(runner):
    fixed, packed = FixedWidths(runner, (8, 1), own=8), runner.decode_cuda_graph_runner
    with pytest.raises(ZeroDivisionError), fixed.active(1):
        assert runner.decode_cuda_graph_runner.width == 1 and runner.attn_backend != "packed attention"
        assert 8 in fixed, "what asks in the middle of the step gets the same answer as before"
        raise ZeroDivisionError
    assert runner.decode_cuda_graph_runner is packed and runner.attn_backend == "packed attention"


def test_graphs_that_the_host_captured_anew_make_ours_stale(runner):
    fixed = FixedWidths(runner, (8, 1), own=8)
    runner.decode_cuda_graph_runner = Graphs(runner)
    assert 8 not in fixed and 1 not in fixed


def test_with_little_memory_everything_stays_packed(runner, monkeypatch, caplog):
    monkeypatch.setattr(widths, "least_free_bytes", lambda: 3 * GIB + 1000)
    assert 8 not in FixedWidths(runner, (8, 1), own=8) and not Graphs.made
    assert "--mem-fraction-static" in caplog.text
    # 7 tables of 256 requests and 8192 pages, 4 bytes each, for either width
    monkeypatch.setattr(widths, "least_free_bytes", lambda: 3 * GIB + 2 * 7 * 4 * 256 * 8192)
    assert 8 in FixedWidths(runner, (8, 1), own=8)


def test_without_graphs_only_another_width_needs_an_attention_of_its_own(runner):
    runner.decode_cuda_graph_runner = None
    fixed = FixedWidths(runner, (8, 1), own=8)
    with fixed.active(8):
        assert runner.attn_backend == "packed attention"
    with fixed.active(1):
        assert runner.attn_backend != "packed attention" and runner.decode_cuda_graph_runner is None


def test_what_keeps_state_or_hooks_gets_no_second_attention(runner, monkeypatch):
    monkeypatch.undo()
    config = SimpleNamespace(hf_config=None)
    monkeypatch.setattr(widths, "mambaish_config", lambda model: None)
    plain = SimpleNamespace(model_config=config, server_args=SimpleNamespace(forward_hooks=None))
    assert widths._unable(plain) is None
    hooked = SimpleNamespace(model_config=config, server_args=SimpleNamespace(forward_hooks=[{}]))
    assert "--forward-hooks" in widths._unable(hooked)
    monkeypatch.setattr(widths, "mambaish_config", lambda model: object())
    assert "recurrent" in widths._unable(plain)


def test_a_uniform_step_asks_for_its_width_before_and_in_it(runner):
    planner = StepPlanner.__new__(StepPlanner)
    planner.gamma, planner.widths = 7, FixedWidths(runner, (8, 1), own=8)
    planner.decision = SimpleNamespace(uniform=True, width=0)
    with planner.fixed_width():
        assert planner.in_fixed_width and runner.decode_cuda_graph_runner.width == 8
        assert planner.layout(3, None) is None and planner._tier == 24
    planner.decision = SimpleNamespace(uniform=False, width=0)
    with planner.fixed_width():
        assert not planner.in_fixed_width and runner.attn_backend == "packed attention"


def test_a_width_that_is_added_is_captured_for_many_requests_only(runner, monkeypatch):
    asked = []

    def captured(*args, **kwargs):
        sizes, _ = widths.decode_cuda_graph_runner.get_batch_sizes_to_capture()
        asked.append(sizes)
        return Graphs(*args, **kwargs)

    monkeypatch.setattr(
        widths.decode_cuda_graph_runner, "get_batch_sizes_to_capture", lambda: ([1, 8, 16, 64], [1, 16])
    )
    fixed = FixedWidths(runner, (8, 1), own=8)
    monkeypatch.setattr(fixed, "_capture", lambda packed, backend, width: captured(runner, backend, width))
    fixed.add(4)
    assert 4 in fixed and asked == [[16, 64]]
    assert widths.decode_cuda_graph_runner.get_batch_sizes_to_capture() == ([1, 8, 16, 64], [1, 16])
    monkeypatch.setattr(widths, "least_free_bytes", lambda: 3 * GIB)
    fixed.add(2)
    assert 2 not in fixed and 8 in fixed


def test_a_step_that_verifies_all_of_a_shorter_draft_has_that_width(runner):
    planner = StepPlanner.__new__(StepPlanner)
    planner.gamma, planner.widths = 7, FixedWidths(runner, (8, 4, 1), own=8)
    drafts = {3}
    planner.drafts_narrow = drafts.__contains__
    planner.decision = SimpleNamespace(uniform=True, width=3)
    with planner.fixed_width():
        assert planner.in_fixed_width and runner.decode_cuda_graph_runner.width == 4
        assert planner.layout(3, None) is None and planner._tier == 12
    # The host captured its drafts anew: all K are drafted, and the step is packed.
    drafts.clear()
    with planner.fixed_width():
        assert not planner.in_fixed_width and runner.attn_backend == "packed attention"
