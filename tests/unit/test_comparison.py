"""How the quickstart compares texts and counts."""

import pytest

from sglang_adaptive.launch import comparison


def step(token: str, logprob: float, **rivals: float) -> dict:
    """One token of a chat reply's ``logprobs``, with its rivals by text."""
    ranked = [(token, logprob), *rivals.items()]
    return {
        "token": token,
        "bytes": list(token.encode()),
        "logprob": logprob,
        "top_logprobs": [{"token": text, "bytes": list(text.encode()), "logprob": value} for text, value in ranked],
    }


STEPS = [step("The", -0.1, A=-2.0), step("é", -0.5, cat=-0.7), step("!", -0.3, dog=-4.0)]


def test_equal_texts():
    assert comparison.judge("Theé!", "Theé!", STEPS, 0.25) == comparison.Verdict(True, False, "identical")


def test_a_near_rival_is_a_rounding_tie():
    verdict = comparison.judge("Thecat sat", "Theé!", STEPS, 0.25)
    assert (verdict.same, verdict.tie) == (False, True)
    assert "token 2" in verdict.why and "0.200" in verdict.why


def test_the_same_rival_is_no_tie_at_full_precision():
    verdict = comparison.judge("Thecat sat", "Theé!", STEPS, 1e-3)
    assert (verdict.same, verdict.tie) == (False, False)


@pytest.mark.parametrize("text", ["Theé dog", "Theédog", "something else", "", "The"])
def test_other_departures_are_no_ties(text):
    assert not comparison.judge(text, "Theé!", STEPS, 0.25).tie


def test_a_text_that_goes_on_is_told():
    verdict = comparison.judge("Theé! And", "Theé!", STEPS, 0.25)
    assert (verdict.same, verdict.tie) == (False, False) and "goes on" in verdict.why


def test_since_takes_differences_of_counters_only():
    before = {
        "steps": 3,
        "accepted": [1, 2],
        "decisions": {"trimmed": 1},
        "active": True,
        "cost": {"ms": [[1.0]]},
        "bias": [None],
    }
    after = {
        "steps": 8,
        "accepted": [4, 2],
        "decisions": {"trimmed": 5},
        "active": True,
        "cost": {"ms": [[2.0]]},
        "bias": [0.1],
    }
    assert comparison.since(before, after) == {
        "steps": 5,
        "accepted": [3, 0],
        "decisions": {"trimmed": 4},
        "cost": {},
    }


def test_table_shows_what_was_measured():
    replies = [{"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": 40}}] * 2
    plain, adaptive = comparison.answers_of(replies, 4.0), comparison.answers_of(replies, 2.0)
    counters = {
        "steps": 20,
        "requests": 40,
        "verify_tokens": 140,
        "committed_tokens": 80,
        "verified_per_position": [40, 40, 20, 0],
        "accepted_per_position": [30, 10, 0, 0],
        "decisions": {"verify_all": 2, "trimmed": 18, "not_drafted": 0},
    }
    text = comparison.table(plain, adaptive, counters)
    rows = {line[:38].strip(): " ".join(line[38:].split()) for line in text.splitlines()}
    assert rows["tokens in all answers"] == "80 80"
    assert rows["tokens/s, all requests together"] == "20.0 40.0 2.00 times the speed of no speculation"
    assert rows["decode steps"] == "- 20 2.0 requests in a step on average"
    assert rows["tokens verified per request and step"].startswith("1.00 3.50 of 5: 4 drafts")
    assert rows["tokens out per request and step"].startswith("1.00 2.00")
    assert "by position: 1: 75%  2: 25%  3: 0%  4: -" in text
    assert "of the steps: 2 verified every draft, 18 verified only the drafts worth their cost" in text


def test_the_explanation_warns_of_speeds_on_a_cpu_only():
    assert "says nothing about a GPU" in " ".join(comparison.explanation({"device": "cpu"}).split())
    assert "GPU" not in comparison.explanation({"device": "cuda"})
