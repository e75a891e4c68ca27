"""Which steps wait for the grammars of the step before: those in which requests with one decode beside prompts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_adaptive.runtime.serving import catch_up


def barriers(mode: ForwardMode, has_grammar: bool) -> int:
    """How often a step calls the host's barrier."""
    called = []
    catch_up(SimpleNamespace(forward_mode=mode, has_grammar=has_grammar), lambda: called.append(True))
    return len(called)


def test_the_hosts_barrier_is_called_before_mixed_steps_with_grammars_only():
    assert barriers(ForwardMode.MIXED, True) == 1
    others = [(ForwardMode.MIXED, False), (ForwardMode.EXTEND, True), (ForwardMode.DECODE, True)]
    assert [barriers(*step) for step in others] == [0, 0, 0]


def test_without_overlap_a_mixed_step_looks_for_no_grammar():
    """There is no barrier then, and nothing of the batch is asked."""
    batch = SimpleNamespace()
    catch_up(batch, None)
    assert vars(batch) == {}
    with pytest.raises(AttributeError):
        catch_up(batch, lambda: None)
