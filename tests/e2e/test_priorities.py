"""A server whose budget is scarce: requests of a higher priority take fewer steps, and nobody's output changes.

At the end it is killed under load, and started again.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import costs
import features
import pytest
import requests
import tiny_language as language
from features import answers
from features import request as asked
from server import Server, speculative

from sglang_adaptive.launch.client import RequestFailed

pytestmark = pytest.mark.e2e

REQUESTS, TOKENS, ROOMY = 16, 96, 40
FLAGS = ("--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", "1000")
PROMPTS = language.random_prompts(REQUESTS // 2, seed=5, kinds=(language.EASY,))


def make_scarce(folder: Path) -> None:
    """Up to ``ROOMY`` tokens a step costs the same, and one more costs a hundred times as much: all that the requests
    can verify together are 24 drafts of 112, whatever they are worth."""
    for path in folder.glob("cost-*.json"):
        table = json.loads(path.read_text())
        verify = table["verify"]
        verify["tokens"] = [1, ROOMY, ROOMY + 1, 512]
        verify["ms"] = [[ms for _ in verify["kv_tokens"]] for ms in (20.0, 20.0, 2000.0, 4000.0)]
        path.write_text(json.dumps(table))


@pytest.fixture(scope="module")
def scarce_server(tiny_pair: tuple[Path, Path], dear_costs: Path, tmp_path_factory, log_dir: Path) -> Iterator[Server]:
    target, draft = tiny_pair
    folder = features.borrow_costs(dear_costs, tmp_path_factory.mktemp("scarce"))
    make_scarce(folder)
    environment = costs.environment(folder, priority_weight="9")
    with Server(target, *speculative(draft), *FLAGS, log_dir=log_dir, environment=environment) as server:
        yield server


def steps_and_ids(server: Server, priorities: tuple[int, int]) -> tuple[list[int], list[int], list[list[int]]]:
    """Steps of each prompt's two requests, which have these priorities, and the ids that came out."""
    bodies = [asked(prompt, TOKENS, priority=priority) for prompt in PROMPTS for priority in priorities]
    found = answers(server, bodies)
    steps = [each["meta_info"]["spec_verify_ct"] for each in found]
    return steps[::2], steps[1::2], [each["output_ids"] for each in found]


def test_a_higher_priority_takes_fewer_steps_and_changes_no_output(scarce_server: Server, tiny_plain_server: Server):
    """Each prompt is asked twice at the same time, so the two requests differ in nothing but their priority."""
    expected = [ids for ids in tiny_plain_server.greedy_ids(PROMPTS, TOKENS) for _ in "01"]
    before = scarce_server.adaptive_state()
    none, also_none, ids = steps_and_ids(scarce_server, (0, 0))
    assert ids == expected
    low, high, ids = steps_and_ids(scarce_server, (0, 1))
    print("low", low, sum(low), "high", high, sum(high))
    assert ids == expected
    state = scarce_server.adaptive_state()
    assert state["decisions"]["trimmed"] > before["decisions"]["trimmed"]
    assert max(high) < min(low), (high, low)
    assert sum(high) < 0.75 * sum(low), (high, low)
    assert 0.9 < sum(none) / sum(also_none) < 1 / 0.9, "without a priority the halves should be served alike"


def test_a_scheduler_that_is_killed_under_load_and_a_server_that_is_started_again(
    scarce_server: Server, tiny_plain_server: Server
):
    """Every request gets an end, nothing of the old server is left, and the new one reads the costs that were kept."""
    server = scarce_server
    free, (rank,) = server.free_kv_tokens(), server.adaptive_state()["ranks"]
    ends: list[str] = []

    def wait_for(prompt: str) -> None:
        try:
            server.client.post("/generate", asked(prompt, 900))
            ends.append("answered")
        except (requests.RequestException, RequestFailed) as error:
            ends.append(type(error).__name__)

    threads = [threading.Thread(target=wait_for, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    before = server.adaptive_state()["steps"]
    while server.adaptive_state()["steps"] < before + 10:
        time.sleep(0.1)
    os.kill(rank["pid"], signal.SIGKILL)
    assert server.wait_exit(60) != 0
    for thread in threads:
        thread.join(60)
    assert len(ends) == len(threads) and "answered" not in ends, ends
    server.stop()

    server.start()
    server.wait_ready(300)
    assert server.greedy_ids(PROMPTS, TOKENS) == tiny_plain_server.greedy_ids(PROMPTS, TOKENS)
    state = server.adaptive_state()
    assert state["cost"]["verify_tokens"] == [1, ROOMY, ROOMY + 1, 512], "it did not read the table that it had"
    assert state["ranks"][0]["pid"] != rank["pid"] and state["decisions"]["trimmed"] > 0
    assert server.free_kv_tokens() == free
