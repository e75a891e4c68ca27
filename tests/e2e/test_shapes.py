"""Shapes of load that broke speculative decoding elsewhere: who is in the batch, and how it changes."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny_language as language
from conftest import PROMPTS, TOKENS
from features import answers, request
from server import Server

pytestmark = pytest.mark.e2e


def test_twelve_prompts_that_must_not_be_mixed_up(adaptive_server: Server, tiny_plain_server: Server):
    """Each begins with words of its own; whoever got another's cache, draft or verdict would go on otherwise."""
    prompts = language.random_prompts(12, seed=77, kinds=(language.HARD, language.EASY, language.MIXED), words=40)
    expected = tiny_plain_server.greedy_ids(prompts, 20)
    assert len({tuple(ids) for ids in expected}) >= 11
    for turn in range(20):
        order = [(i * 5 + turn) % 12 for i in range(12)]
        ids = adaptive_server.greedy_ids([prompts[i] for i in order], 20)
        assert ids == [expected[i] for i in order], f"round {turn}"


def test_a_batch_that_shrinks_from_64_to_1(adaptive_server: Server, tiny_plain_server: Server):
    prompts = language.random_prompts(64, seed=78)
    bodies = [request(prompt, 4 + i) for i, prompt in enumerate(prompts)]
    ours, plain = answers(adaptive_server, bodies), answers(tiny_plain_server, bodies)
    assert [each["output_ids"] for each in ours] == [each["output_ids"] for each in plain]


def test_requests_that_trickle_in(adaptive_server: Server, expected_ids):
    """Every step has other rows: requests of 3 to 40 tokens start one after another."""
    lengths = [3 + (7 * i) % 38 for i in range(48)]

    def one(i: int) -> list[int]:
        time.sleep(0.02 * i)
        return adaptive_server.greedy_ids([PROMPTS[i % 24]], lengths[i])[0]

    with ThreadPoolExecutor(48) as pool:
        ids = list(pool.map(one, range(48)))
    assert ids == [expected_ids[i % 24][: lengths[i]] for i in range(48)]


@pytest.mark.parametrize("concurrency", [1, 4, 8])
def test_output_at_a_few_concurrencies(adaptive_server: Server, expected_ids, concurrency: int):
    for first in range(0, 8, concurrency):
        ids = adaptive_server.greedy_ids(PROMPTS[first : first + concurrency], TOKENS)
        assert ids == expected_ids[first : first + concurrency]


def test_hundreds_of_short_requests_leave_nothing_behind(adaptive_server: Server, expected_ids):
    server = adaptive_server
    server.client.flush_cache()
    free = server.free_kv_tokens()
    for turn in range(5):
        bodies = [request(PROMPTS[i % 24], 1 + (i + turn) % 4) for i in range(96)]
        ids = [each["output_ids"] for each in answers(server, bodies)]
        assert ids == [expected_ids[i % 24][: 1 + (i + turn) % 4] for i in range(96)]
    server.client.flush_cache()
    assert server.free_kv_tokens() == free
