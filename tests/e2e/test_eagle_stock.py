"""The host's own EAGLE3 and MTP drafts on the CPU platform: the plain server's output in fewer steps.

What the adaptive algorithm does with these drafts is compared with this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import tiny_language as language
from conftest import PROMPTS, TOKENS
from server import Server, failed_start, speculative

pytestmark = pytest.mark.e2e

CHAIN = ("--speculative-eagle-topk", "1", "--speculative-num-steps", "4", "--speculative-num-draft-tokens", "5")
REGEX = "(h[0-9]{1,2}|e1[0-9]{0,2}){30}"


@pytest.fixture(scope="module", params=["eagle3", "mtp"])
def stock_server(request: pytest.FixtureRequest, log_dir: Path) -> Iterator[Server]:
    """EAGLE3 with overlapped scheduling; the target's own MTP layer without."""
    if request.param == "eagle3":
        target, draft = request.getfixturevalue("tiny_eagle3_pair")
        arguments = speculative(draft, "EAGLE3")
    else:
        target = request.getfixturevalue("tiny_mtp_target")
        arguments = ["--speculative-algorithm", "NEXTN", "--disable-overlap-schedule"]
    with Server(target, *arguments, *CHAIN, "--sleep-on-idle", log_dir=log_dir) as server:
        assert server.server_info()["disable_overlap_schedule"] is (request.param == "mtp")
        yield server


def tokens_a_step(server: Server, prompts: Sequence[str], tokens: int = TOKENS) -> tuple[list[list[int]], float]:
    """Greedy continuations, and how many tokens a request gains in a decode step."""
    answers = server.generate(prompts, tokens, temperature=0.0, ignore_eos=True)
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    # The first token comes from the prompt's own forward.
    return [answer["output_ids"] for answer in answers], (tokens - 1) * len(prompts) / steps


def test_greedy_output_is_that_without_speculation(stock_server: Server, expected_ids):
    ids, gained = tokens_a_step(stock_server, PROMPTS)
    assert ids == expected_ids
    assert gained > 1.3
    again, _ = tokens_a_step(stock_server, PROMPTS)  # from cached prefixes
    assert again == expected_ids


def test_easy_text_is_foreseen_and_hard_text_is_not(stock_server: Server):
    easy, hard = (
        tokens_a_step(stock_server, language.random_prompts(6, seed=3, kinds=(kind,)), 48)[1]
        for kind in (language.EASY, language.HARD)
    )
    assert easy > 2.0
    assert easy > hard + 0.8


def test_greedy_requests_beside_sampled_ones_stay_greedy(stock_server: Server, expected_ids):
    bodies = [
        {"temperature": 0.0} if row % 2 == 0 else {"temperature": 1.0, "top_k": 16, "top_p": 0.99} for row in range(8)
    ]
    options = [{"max_new_tokens": TOKENS, "ignore_eos": True, **body} for body in bodies]
    # One request of several prompts: they run in one batch.
    answers = stock_server.client.post("/generate", {"text": PROMPTS[:8], "sampling_params": options})
    ids = [answer["output_ids"] for answer in answers]
    assert ids[::2] == expected_ids[:8:2]
    assert ids[1::2] != expected_ids[1:8:2], "nothing was sampled"


def test_logprobs_are_those_without_speculation(stock_server: Server, tiny_plain_server: Server):
    def logprobs(server: Server) -> list[float]:
        answers = server.generate(PROMPTS[:4], 24, temperature=0.0, ignore_eos=True, return_logprob=True)
        return [value[0] for answer in answers for value in answer["meta_info"]["output_token_logprobs"]]

    assert logprobs(stock_server) == pytest.approx(logprobs(tiny_plain_server), abs=1e-4)


def test_structured_output_is_that_without_speculation(stock_server: Server, tiny_plain_server: Server):
    def texts(server: Server) -> list[str]:
        return [a["text"] for a in server.generate(PROMPTS[:4], 24, temperature=0.0, regex=REGEX)]

    assert texts(stock_server) == texts(tiny_plain_server)


def test_nothing_stays_behind(stock_server: Server):
    stock_server.free_kv_tokens()
    stock_server.client.flush_cache()
    free = stock_server.free_kv_tokens()
    stock_server.generate(PROMPTS[:6], 40, temperature=1.0)
    stock_server.free_kv_tokens()
    stock_server.client.flush_cache()
    assert stock_server.free_kv_tokens() == free


def test_trees_are_refused_before_weights_load(tiny_eagle3_pair, log_dir):
    target, draft = tiny_eagle3_pair  # the host's default for this architecture is a tree
    status, output = failed_start(target, *speculative(draft, "EAGLE3"), log_dir=log_dir)
    assert status != 0
    assert "--speculative-eagle-topk 1" in output.strip().splitlines()[-1]
