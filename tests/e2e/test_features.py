"""What a request may ask for: each feature gives what it gives without speculation, while the server trims."""

from __future__ import annotations

import math

import costs
import features
import pytest
import tiny_language as language
from conftest import PROMPTS, TOKENS
from features import PENALTIES, answers, outputs, penalised
from features import request as asked
from server import Server, speculative

pytestmark = pytest.mark.e2e


# ---------------------------------------------------------------------------------------------------- what is returned
def test_logprobs_are_those_without_speculation(adaptive_server: Server, tiny_plain_server: Server):
    bodies = [asked(prompt, 32, return_logprob=True, top_logprobs_num=3) for prompt in PROMPTS[:6]]
    bodies += [asked(prompt, 32) for prompt in PROMPTS[6:9]]
    before = adaptive_server.adaptive_state()["decisions"]["trimmed"]
    ours, plain = answers(adaptive_server, bodies), answers(tiny_plain_server, bodies)
    for our, their in zip(ours, plain, strict=True):
        assert our["output_ids"] == their["output_ids"]
    for our, their in zip(ours[:6], plain[:6], strict=True):
        logprobs, expected = (each["meta_info"]["output_token_logprobs"] for each in (our, their))
        assert [each[1] for each in logprobs] == our["output_ids"]
        assert [each[0] for each in logprobs] == pytest.approx([each[0] for each in expected], abs=1e-3)
        for top, known in zip(*(each["meta_info"]["output_top_logprobs"] for each in (our, their)), strict=True):
            assert len(top) == 3
            assert [each[0] for each in top] == pytest.approx([each[0] for each in known], abs=1e-3)
            assert top[0][1] == known[0][1]
    assert adaptive_server.adaptive_state()["decisions"]["trimmed"] > before


def test_logprobs_of_chats(adaptive_server: Server, tiny_plain_server: Server):
    ours, plain = (
        server.chat(PROMPTS[:4], 24, logprobs=True, top_logprobs=2) for server in (adaptive_server, tiny_plain_server)
    )
    for our, their in zip(ours, plain, strict=True):
        found, expected = (each["choices"][0]["logprobs"]["content"] for each in (our, their))
        assert [each["token"] for each in found] == [each["token"] for each in expected]
        assert [each["logprob"] for each in found] == pytest.approx([each["logprob"] for each in expected], abs=1e-3)
        assert all(len(each["top_logprobs"]) == 2 for each in found)


def test_streams_hold_every_token_once(adaptive_server: Server, tiny_plain_server: Server):
    body = asked(PROMPTS[0], 60)
    (expected,) = answers(tiny_plain_server, [body])
    heard = features.events(adaptive_server, "/generate", body)
    lengths = [len(event["output_ids"]) for event in heard]
    assert heard[-1]["text"] == expected["text"] and heard[-1]["output_ids"] == expected["output_ids"]
    assert lengths == sorted(lengths) and len(heard) > 3
    assert all(expected["text"].startswith(event["text"]) for event in heard)

    body = {"model": "default", "prompt": PROMPTS[1], "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    pieces = features.events(adaptive_server, "/v1/completions", body)
    whole = tiny_plain_server.client.post("/v1/completions", body)
    assert "".join(piece["choices"][0]["text"] for piece in pieces if piece["choices"]) == whole["choices"][0]["text"]


def test_parallel_samples(adaptive_server: Server, tiny_plain_server: Server):
    body = asked(PROMPTS[2], 24, n=3)
    (ours,), (plain,) = answers(adaptive_server, [body]), answers(tiny_plain_server, [body])
    assert len(ours) == 3
    assert [each["output_ids"] for each in ours] == [each["output_ids"] for each in plain]
    drawn = answers(adaptive_server, [asked(PROMPTS[2], 24, n=4, temperature=1.0)])[0]
    assert len({tuple(each["output_ids"]) for each in drawn}) > 1


# ---------------------------------------------------------------------------------------------------- when it ends
def test_stop_strings_and_stop_tokens(adaptive_server: Server, tiny_plain_server: Server):
    """The stop is somewhere in the middle of what is accepted at once."""
    bodies = []
    for place, answer in enumerate(answers(tiny_plain_server, [asked(prompt, 48) for prompt in PROMPTS[:8]])):
        words, token = answer["text"].split()[20 + place : 22 + place], answer["output_ids"][12 + place]
        bodies += [
            asked(PROMPTS[place], 48, stop=[" ".join(words)]),
            asked(PROMPTS[place], 48, stop_token_ids=[token], ignore_eos=False),
            asked(PROMPTS[place], 48, stop=["nowhere", words[0]], no_stop_trim=True),
        ]
    ours = outputs(adaptive_server, bodies)
    assert ours == outputs(tiny_plain_server, bodies)
    assert all(reason["type"] == "stop" for _, _, reason in ours)


def test_end_of_text_and_its_postponement(adaptive_server: Server, tiny_plain_server: Server):
    """With a bias that makes the end the likeliest token it comes at once, or as soon as it may."""
    bias = {str(language.EOS): 40.0}
    bodies = [
        asked(prompt, 48, ignore_eos=False, logit_bias=bias, min_new_tokens=minimum)
        for prompt, minimum in zip(PROMPTS[:6], (0, 1, 2, 9, 17, 30), strict=True)
    ]
    ours = outputs(adaptive_server, bodies + penalised()[:4])[:6]
    assert ours == outputs(tiny_plain_server, bodies)
    assert [len(ids) for ids, _, _ in ours] == [1, 2, 3, 10, 18, 31]
    assert all(reason["type"] == "stop" for _, _, reason in ours)


# ---------------------------------------------------------------------------------------------------- what is chosen
def test_penalties_are_exact_at_every_position(adaptive_server: Server, tiny_plain_server: Server):
    bodies = penalised()
    ours = outputs(adaptive_server, bodies)
    assert ours == outputs(tiny_plain_server, bodies)
    plain = [asked(body["text"], body["sampling_params"]["max_new_tokens"]) for body in bodies]
    changed = [a != b for a, b in zip(ours, outputs(adaptive_server, plain), strict=True)]
    assert not any(changed[::5]) and sum(changed) >= 9, "the penalties make too little difference to be a test"


def test_the_host_is_a_token_late_under_overlap(tiny_pair, log_dir, tiny_plain_server: Server, expected_ids):
    """Why the reference does not overlap; the README says so. Without penalties both say the same."""
    token = language.FIRST_EASY + 3
    body = asked(PROMPTS[1], 40, frequency_penalty=2.0, logit_bias={str(token): 25.0})
    with Server(tiny_pair[0], log_dir=log_dir) as overlapped:
        assert overlapped.server_info()["disable_overlap_schedule"] is False
        assert overlapped.greedy_ids(PROMPTS, TOKENS) == expected_ids
        late, exact = (outputs(server, [body])[0][0] for server in (overlapped, tiny_plain_server))
    others = [next(place for place, said in enumerate(ids) if said != token) for ids in (late, exact)]
    assert others[0] == others[1] + 1


def test_penalties_alone_and_next_to_a_logit_bias(adaptive_server: Server, tiny_plain_server: Server):
    bias = {str(language.FIRST_EASY + 3): 3.0, str(language.FIRST_HARD): -5.0}
    for options in PENALTIES.values():
        body = asked(PROMPTS[3], 40, **{"logit_bias": bias, **options})
        assert outputs(adaptive_server, [body]) == outputs(tiny_plain_server, [body])


def test_penalties_show_in_the_logprobs(adaptive_server: Server, tiny_plain_server: Server):
    body = asked(PROMPTS[4], 24, return_logprob=True, **PENALTIES["both"])
    (ours,), (plain,) = answers(adaptive_server, [body]), answers(tiny_plain_server, [body])
    found, expected = (each["meta_info"]["output_token_logprobs"] for each in (ours, plain))
    assert [each[1] for each in found] == [each[1] for each in expected]
    assert [each[0] for each in found] == pytest.approx([each[0] for each in expected], abs=1e-3)


@pytest.mark.parametrize("others", [{}, {"top_p": 0.9}, {"top_k": 12}], ids=["alone", "top_p", "top_k"])
def test_min_p_bounds_every_token(adaptive_server: Server, others: dict):
    """Each token is at least ``min_p`` times as likely as the likeliest; at 1 that is greedy decoding."""
    greedy = [ids for ids, _, _ in outputs(adaptive_server, [asked(prompt, 24) for prompt in PROMPTS[:4]])]
    bodies = [asked(prompt, 24, temperature=1.0, min_p=1.0, **others) for prompt in PROMPTS[:4]]
    assert [ids for ids, _, _ in outputs(adaptive_server, bodies)] == greedy

    def distances(min_p: float) -> list[float]:
        """Each token's logprob less that of the likeliest."""
        prompt = language.random_prompts(1, seed=5, kinds=(language.HARD,))[0]
        body = asked(prompt, 24, temperature=2.0, min_p=min_p, return_logprob=True, top_logprobs_num=1, **others)
        found = [answer["meta_info"] for answer in answers(adaptive_server, [body] * 12)]
        pairs = [zip(info["output_token_logprobs"], info["output_top_logprobs"], strict=True) for info in found]
        return [token[0] - top[0][0] for pair in pairs for token, top in pair]

    bound = math.log(0.05) - 1e-3
    assert min(distances(0.05)) >= bound
    assert len({round(distance, 3) for distance in distances(0.05)}) > 10, "nothing was left to chance"
    if not others:
        assert min(distances(0.0)) < bound, "min_p makes no difference here"


def test_logit_bias(adaptive_server: Server, tiny_plain_server: Server):
    bodies = [
        asked(prompt, 32, logit_bias={str(language.FIRST_EASY + i): 4.0, str(language.FIRST_HARD + i): -9.0})
        for i, prompt in enumerate(PROMPTS[:6])
    ]
    assert outputs(adaptive_server, bodies) == outputs(tiny_plain_server, bodies)


REGEX = "(h[0-9]{1,2}|e1[0-9]{0,2}){30}"


def test_structured_output(adaptive_server: Server, tiny_plain_server: Server):
    bodies = [asked(prompt, 40, regex=REGEX, ignore_eos=False) for prompt in PROMPTS[:5]]
    bodies += [asked(prompt, 40) for prompt in PROMPTS[5:8]]
    assert outputs(adaptive_server, bodies) == outputs(tiny_plain_server, bodies)


def test_structured_output_in_steps_whose_budget_is_0(tiny_pair, dear_costs, log_dir, tiny_plain_server: Server):
    """A server that drafts in every step and verifies no draft token in any."""
    target, draft = tiny_pair
    environment = costs.environment(dear_costs, max_verify_len="1")
    bodies = [asked(prompt, 40, regex=REGEX, ignore_eos=False) for prompt in PROMPTS[:5]]
    bodies += [asked(prompt, 30, return_logprob=True) for prompt in PROMPTS[5:7]]
    with Server(target, *speculative(draft), log_dir=log_dir, environment=environment) as server:
        assert outputs(server, bodies) == outputs(tiny_plain_server, bodies)
        state = server.adaptive_state()
    assert state["verify_length"] == 1.0 and state["decisions"]["trimmed"] > 20


# ---------------------------------------------------------------------------------------------------- how it is served
def test_cached_prefixes(adaptive_server: Server, tiny_plain_server: Server):
    long = " ".join(language.random_prompts(4, seed=21, words=60))
    adaptive_server.client.flush_cache()
    (first,) = answers(adaptive_server, [asked(long)])
    again = answers(adaptive_server, [asked(long), asked(f"{long} e7")])
    expected = answers(tiny_plain_server, [asked(long), asked(f"{long} e7")])
    assert first["meta_info"]["cached_tokens"] == 0
    assert all(each["meta_info"]["cached_tokens"] > 50 for each in again)
    assert [each["output_ids"] for each in again] == [each["output_ids"] for each in expected]
    assert first["output_ids"] == expected[0]["output_ids"]


def test_a_request_that_ends_exactly_at_the_context_length(adaptive_server: Server, tiny_plain_server: Server):
    """With pages of one token; ``test_odd_flags`` does the same with large pages."""
    bodies = features.up_to_the_context_length()
    ours = outputs(adaptive_server, bodies)
    assert ours == outputs(tiny_plain_server, bodies)
    left = features.left_of_the_context(ours)
    assert len(set(left)) == 1 and 0 <= left[0] <= 2, left
