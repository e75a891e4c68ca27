"""Which steps wait for the grammars of the step before: those in which requests with one decode beside prompts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_adaptive.runtime.serving import catch_up


@pytest.mark.parametrize(
    ("mode", "has_grammar", "waits"),
    [
        (ForwardMode.MIXED, True, True),
        (ForwardMode.MIXED, False, False),
        (ForwardMode.EXTEND, True, False),
        (ForwardMode.DECODE, True, False),
    ],
)
def test_the_hosts_barrier_is_called_before_mixed_steps_with_grammars(mode, has_grammar, waits):
    called = []
    batch = SimpleNamespace(forward_mode=mode, has_grammar=has_grammar)
    catch_up(batch, lambda: called.append(True))
    assert bool(called) is waits


def test_without_overlap_there_is_no_barrier():
    catch_up(SimpleNamespace(forward_mode=ForwardMode.MIXED, has_grammar=True), None)
