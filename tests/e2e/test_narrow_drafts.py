"""Drafts of fewer than K tokens, where K are made up to be dear: the output does not change, and all K come back."""

from __future__ import annotations

import costs
import pytest
from conftest import PROMPTS, TOKENS
from features import answers, outputs, penalised
from features import request as asked
from server import Server, speculative

pytestmark = pytest.mark.e2e

GRAMMARS = ({}, {"regex": "(h[0-9]{1,2}|e1[0-9]{0,2}){30}", "ignore_eos": False})


def said(answer):
    """Tokens of an answer and their log-probabilities."""
    logprobs, tokens, _ = zip(*answer["meta_info"]["output_token_logprobs"], strict=True)
    return list(tokens), pytest.approx(list(logprobs), abs=1e-3)


@pytest.mark.parametrize("kind", ["narrow", "narrow and whole"], ids=["trimmed", "whole"])
@pytest.mark.parametrize("schedule", [(), ("--disable-overlap-schedule",)], ids=["overlap", "sync"])
def test_shorter_drafts_change_no_output(tiny_pair, tmp_path, log_dir, expected_ids, tiny_plain_server, schedule, kind):
    target, draft = tiny_pair
    environment = costs.environment(tmp_path) | {"ADAPTIVE_TEST_COSTS": kind}
    with Server(target, *speculative(draft), *schedule, log_dir=log_dir, environment=environment) as server:
        for _ in range(3):
            assert server.greedy_ids(PROMPTS, TOKENS) == expected_ids
        assert outputs(server, penalised()) == outputs(tiny_plain_server, penalised())
        bodies = [asked(prompt, 24, return_logprob=True, **GRAMMARS[i % 2]) for i, prompt in enumerate(PROMPTS)]
        for our, their in zip(answers(server, bodies), answers(tiny_plain_server, bodies), strict=True):
            tokens, logprobs = said(their)
            assert [each[1] for each in our["meta_info"]["output_token_logprobs"]] == tokens
            assert [each[0] for each in our["meta_info"]["output_token_logprobs"]] == logprobs
        sampled = server.generate(PROMPTS, TOKENS, temperature=1.0, ignore_eos=True)
        assert all(len(answer["output_ids"]) == TOKENS for answer in sampled)
        state = server.adaptive_state()
    assert state["cost"]["narrow_draft_ms"].keys() == {"3"}
    narrow, drafting = state["narrow_draft_steps"], state["steps"] - state["decisions"]["not_drafted"]
    assert 0.5 * drafting < narrow < drafting, "most steps should draft three tokens, and the first ones all"
    # K tokens each but for the narrow steps; more than four verified of a request only where all were drafted.
    assert state["drafted_tokens"] < 7 * state["requests"]
    assert state["accept_length"] > 1.2
    assert not state["fallbacks"]["invalid_confidence"]
    whole = state["decisions"]["verify_all"]
    assert whole > 0.8 * drafting if kind == "narrow and whole" else whole < 0.2 * drafting
