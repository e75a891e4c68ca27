"""On a CUDA GPU: greedy tokens are those of fixed-length verification also in steps that draft fewer than K tokens."""

from __future__ import annotations

from typing import Any

import pytest
from greedy_answers import ask, assert_no_worse, drafting
from server import Server, speculative
from test_backends import COMMON, PROMPTS, TOKENS, pair  # noqa: F401

from sglang_adaptive.benchmarks.equality import agreement

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["narrow", "narrow and whole"], ids=["trimmed", "whole"])
def test_greedy_tokens_of_shorter_drafts(pair: Any, log_dir, tmp_path, kind: str):  # noqa: F811
    """K tokens are made up to be dear to draft, so that most steps draft three."""
    target, draft = pair
    arguments = ("--attention-backend", "fa3", *COMMON)
    with Server(target, *speculative(draft, "DSPARK"), *arguments, log_dir=log_dir) as server:
        together = ask(server, PROMPTS, TOKENS, len(PROMPTS))
        control = agreement(together, ask(server, PROMPTS, TOKENS, 4))
    environment = drafting(tmp_path, SGLANG_ADAPTIVE_COST_CORRECTION="off", ADAPTIVE_TEST_COSTS=kind)
    with Server(target, *speculative(draft), *arguments, log_dir=log_dir, environment=environment) as server:
        found = agreement(together, ask(server, PROMPTS, TOKENS, len(PROMPTS)))
        state, log = server.adaptive_state(), server.log_text()
    print(f"\nshorter drafts ({kind}): ours {found}; stock against itself {control}; {state['decisions']}")
    assert "step costs are made up" in log and "capturing drafts of 3 tokens" in log
    drafting_steps = state["steps"] - state["decisions"]["not_drafted"]
    assert 0.5 * drafting_steps < state["narrow_draft_steps"] < drafting_steps
    whole = state["decisions"]["verify_all"]
    assert whole > 0.8 * drafting_steps if kind == "narrow and whole" else whole < 0.2 * drafting_steps
    assert_no_worse(found, control, TOKENS)
