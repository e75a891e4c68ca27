"""Drafts that mislead, clients that leave, and a scheduler that dies: the output stays right, or the server ends."""

from __future__ import annotations

import os
import signal
import threading
import time

import costs
import fault_drafts
import features
import pytest
import requests
import tiny_language as language
from conftest import PROMPTS, TOKENS
from features import answers, request
from server import Server, speculative

pytestmark = pytest.mark.e2e

STUBBORN = language.FIRST_EASY + 5


def ratio(server: Server, name: str, bodies: list[dict]) -> tuple[float, list[list[int]]]:
    """How much of the counter ``name`` there was per request and step while ``bodies`` ran, and what they answered."""
    before = server.adaptive_state()
    ids = [answer["output_ids"] for answer in answers(server, bodies)]
    # The last steps of a burst are counted when later ones run.
    server.greedy_ids(["e1"], 4)
    after = server.adaptive_state()
    return (after[name] - before[name]) / (after["requests"] - before["requests"]), ids


@pytest.fixture(scope="module")
def stubborn_server(tiny_pair, dear_costs, tmp_path_factory, log_dir):
    """A draft that is always wrong, or always right for requests that are biased to say what it says."""
    target, draft = tiny_pair
    draft = fault_drafts.stubborn(draft, tmp_path_factory.mktemp("stubborn") / "draft", STUBBORN)
    folder = features.borrow_costs(dear_costs, tmp_path_factory.mktemp("cache"), draft=str(draft))
    with Server(target, *speculative(draft), log_dir=log_dir, environment=costs.environment(folder)) as server:
        yield server


def test_a_draft_that_is_always_right(stubborn_server: Server):
    bodies = [request(prompt, 200, logit_bias={str(STUBBORN): 100.0}) for prompt in PROMPTS[:6]]
    ratio(stubborn_server, "committed_tokens", bodies)  # it learns to trust the head more than it says
    before = stubborn_server.adaptive_state()
    committed, ids = ratio(stubborn_server, "committed_tokens", bodies)
    assert ids == [[STUBBORN] * 200] * 6
    assert committed > 3, "hardly anything of what is always accepted was verified"
    after = stubborn_server.adaptive_state()
    verified, output = (after[name] - before[name] for name in ("verify_tokens", "committed_tokens"))
    assert output > 0.9 * verified, "something that is always right was rejected"


def test_penalties_end_a_run_where_they_should(stubborn_server: Server, tiny_plain_server: Server):
    """The draft would go on with its token; where in the window that is wrong hangs on the penalties."""
    bodies = [
        request(prompt, 60, logit_bias={str(STUBBORN): 20.0 + 3 * i}, **penalty)
        for i, prompt in enumerate(PROMPTS[:5])
        for penalty in ({"frequency_penalty": 2.0}, {"frequency_penalty": 0.9, "presence_penalty": 2.0})
    ]
    before = stubborn_server.adaptive_state()
    ours, plain = answers(stubborn_server, bodies), answers(tiny_plain_server, bodies)
    assert [each["output_ids"] for each in ours] == [each["output_ids"] for each in plain]
    runs = {next(at for at, token in enumerate(each["output_ids"]) if token != STUBBORN) for each in plain}
    assert len(runs) > 5 and max(runs) > 12
    after = stubborn_server.adaptive_state()
    assert after["accepted_tokens"] - before["accepted_tokens"] > 40


def test_a_draft_that_is_always_wrong(stubborn_server: Server, expected_ids):
    bodies = [request(prompt, TOKENS) for prompt in PROMPTS]
    _, ids = ratio(stubborn_server, "verify_tokens", bodies)
    assert ids == expected_ids
    for _ in range(4):
        verified, ids = ratio(stubborn_server, "verify_tokens", bodies)
        assert ids == expected_ids
    committed, _ = ratio(stubborn_server, "committed_tokens", bodies)
    assert committed < 1.05
    assert verified < 1.5, "it goes on verifying what is never accepted"


def test_a_storm_of_clients_that_leave(stubborn_server: Server, expected_ids):
    server = stubborn_server
    server.client.flush_cache()
    free = server.free_kv_tokens()

    def leave(i: int) -> None:
        body = {**request(PROMPTS[i % 24], 300), "stream": True}
        try:
            with requests.post(f"{server.client.url}/generate", json=body, stream=True, timeout=(60, 60)) as answer:
                for _ in range(i % 3):
                    next(answer.iter_lines())
        except (requests.RequestException, StopIteration):
            pass

    threads = [threading.Thread(target=leave, args=(i,)) for i in range(60)]
    for thread in threads:
        thread.start()
    assert server.greedy_ids(PROMPTS[:4], TOKENS) == expected_ids[:4]
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert server.greedy_ids(PROMPTS[4:8], TOKENS) == expected_ids[4:8]
    server.free_kv_tokens()
    server.client.flush_cache()
    assert server.free_kv_tokens() == free


def test_confidences_that_are_nan_and_a_scheduler_that_is_killed(
    tiny_pair, dear_costs, tmp_path, log_dir, expected_ids
):
    target, draft = tiny_pair
    draft = fault_drafts.without_confidence(draft, tmp_path / "draft")
    folder = features.borrow_costs(dear_costs, tmp_path / "cache", draft=str(draft))
    with Server(target, *speculative(draft), log_dir=log_dir, environment=costs.environment(folder)) as server:
        for _ in range(2):
            assert server.greedy_ids(PROMPTS, TOKENS) == expected_ids
        drawn = answers(server, [request(prompt, 16, temperature=1.0) for prompt in PROMPTS[:8]])
        assert all(len(answer["output_ids"]) == 16 for answer in drawn)
        free = server.free_kv_tokens()
        server.client.flush_cache()
        assert server.free_kv_tokens() >= free
        state = server.adaptive_state()
        assert state["active"] and state["steps"] > 50
        assert "Traceback" not in server.log_text()

        (rank,) = state["ranks"]
        os.kill(rank["pid"], signal.SIGKILL)
        assert server.wait_exit(60) != 0
        deadline = time.monotonic() + 20
        while server.processes():
            assert time.monotonic() < deadline, "processes of a dead server live on"
            time.sleep(0.2)
