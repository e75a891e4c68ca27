"""DSPARK_ADAPTIVE with EAGLE, EAGLE3 and MTP drafts: the output without speculation, trimming or not drafting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import costs
import numpy as np
import pytest
import tiny_language as language
from conftest import PROMPTS, TOKENS
from features import borrow_costs, outputs, penalised, request
from scipy.stats import chi2_contingency
from server import Server, failed_start, speculative

from sglang_adaptive import ALGORITHM
from sglang_adaptive.launch.client import RequestFailed

pytestmark = pytest.mark.e2e

REGEX = "(h[0-9]{1,2}|e1[0-9]{0,2}){30}"


@pytest.fixture(scope="module")
def eagle_server(tiny_eagle3_pair, tmp_path_factory, log_dir: Path) -> Iterator[Server]:
    """EAGLE3 with overlapped scheduling, trimming. Nothing but the algorithm and the draft is given."""
    target, draft = tiny_eagle3_pair
    environment = costs.environment(tmp_path_factory.mktemp("eagle"))
    with Server(target, *speculative(draft), "--sleep-on-idle", log_dir=log_dir, environment=environment) as server:
        yield server


@pytest.fixture(scope="module")
def eagle_costs(eagle_server: Server) -> Path:
    """The cache folder of the server above."""
    return Path(eagle_server._environment["SGLANG_ADAPTIVE_CACHE_DIR"])


def test_it_is_active_and_says_so(eagle_server: Server):
    state = eagle_server.adaptive_state()
    assert state["active"] and state["family"] == "EAGLE3"
    info = eagle_server.server_info()
    assert info["speculative_algorithm"] == ALGORITHM
    assert (info["speculative_num_steps"], info["speculative_num_draft_tokens"], info["speculative_eagle_topk"]) == (
        *(5, 6),
        1,
    )
    assert info["disable_overlap_schedule"] is False


def test_greedy_output_is_that_without_speculation_while_it_trims(eagle_server: Server, expected_ids):
    before = eagle_server.adaptive_state()
    assert eagle_server.greedy_ids(PROMPTS, TOKENS) == expected_ids
    assert eagle_server.greedy_ids(PROMPTS, TOKENS) == expected_ids  # from cached prefixes
    after = eagle_server.adaptive_state()
    assert after["decisions"]["trimmed"] > before["decisions"]["trimmed"]
    requests, verified, committed = (
        after[key] - before[key] for key in ("requests", "verify_tokens", "committed_tokens")
    )
    assert requests < verified < requests * 6, "nothing was trimmed, or everything was"
    assert committed / requests > 1.2
    assert "verify len:" in eagle_server.log_text()


def test_easy_requests_get_more_of_the_budget_than_hard_ones(eagle_server: Server):
    easy = language.random_prompts(6, seed=3, kinds=(language.EASY,))
    hard = language.random_prompts(6, seed=3, kinds=(language.HARD,))
    answers = eagle_server.generate(easy + hard, 48, temperature=0.0, ignore_eos=True)
    steps = [answer["meta_info"]["spec_verify_ct"] for answer in answers]
    assert sum(steps[:6]) < sum(steps[6:]), "easy text should take fewer steps"


def test_logprobs_and_structured_output_are_those_without_speculation(eagle_server: Server, tiny_plain_server: Server):
    def logprobs(server: Server) -> list[float]:
        answers = server.generate(PROMPTS[:4], 24, temperature=0.0, ignore_eos=True, return_logprob=True)
        return [value[0] for answer in answers for value in answer["meta_info"]["output_token_logprobs"]]

    def texts(server: Server) -> list[str]:
        return [answer["text"] for answer in server.generate(PROMPTS[:4], 24, temperature=0.0, regex=REGEX)]

    assert logprobs(eagle_server) == pytest.approx(logprobs(tiny_plain_server), abs=1e-4)
    assert texts(eagle_server) == texts(tiny_plain_server)


def test_sampled_output_has_the_distribution_of_the_target(tiny_plain_server: Server, eagle_server: Server):
    prompt = language.random_prompts(1, seed=5, kinds=(language.HARD,))[0]

    def draws(server: Server) -> np.ndarray:
        answers = [
            answer for _ in range(15) for answer in server.generate([prompt] * 40, 6, temperature=1.0, ignore_eos=True)
        ]
        return np.array([answer["output_ids"] for answer in answers])

    plain, ours = draws(tiny_plain_server), draws(eagle_server)
    pvalues = []
    for position in range(1, plain.shape[1]):
        counts = [np.bincount(drawn[:, position], minlength=language.VOCAB) for drawn in (plain, ours)]
        often = (counts[0] + counts[1]) >= 20
        table = np.array([[*count[often], count[~often].sum()] for count in counts])
        table = table[:, table.sum(axis=0) > 0]
        assert table.shape[1] >= 3, f"position {position} leaves too little to chance"
        pvalues.append(chi2_contingency(table).pvalue)
    assert min(pvalues) > 1e-3 / len(pvalues), pvalues


def test_nothing_stays_behind(eagle_server: Server):
    eagle_server.client.flush_cache()
    free = eagle_server.free_kv_tokens()
    eagle_server.generate(PROMPTS[:6], 40, temperature=1.0)
    eagle_server.free_kv_tokens()
    eagle_server.client.flush_cache()
    assert eagle_server.free_kv_tokens() == free


def test_steps_without_a_draft_and_retractions_change_nothing(
    tiny_eagle3_pair, eagle_costs, tmp_path, log_dir, expected_ids
):
    """Drafting is made hopeless: the server stops drafting and probes now and then, and requests are retracted."""
    target, draft = tiny_eagle3_pair
    environment = costs.environment(costs.hopeless(eagle_costs, tmp_path), skip_draft="on")
    environment |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"}
    with Server(target, *speculative(draft), log_dir=log_dir, environment=environment) as server:
        free = server.free_kv_tokens()
        answers = server.generate(PROMPTS, TOKENS, temperature=0.0, ignore_eos=True)
        assert [answer["output_ids"] for answer in answers] == expected_ids
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0, "no request was retracted"
        texts = [answer["text"] for answer in server.generate(PROMPTS[:3], 2 * TOKENS, temperature=0.0, regex=REGEX)]
        assert len(texts) == 3
        state = server.adaptive_state()
        server.client.flush_cache()
        assert server.free_kv_tokens() == free
    assert state["decisions"]["not_drafted"] > 50
    assert state["decisions"]["trimmed"] + state["decisions"]["verify_all"] > 3, "it never probed"
    # What a probe drafts is good only if the steps without a draft kept the draft's state current.
    accepted, verified = sum(state["accepted_per_position"]), sum(state["verified_per_position"])
    assert accepted > 0.3 * verified


def test_two_ranks_agree(tiny_eagle3_pair, tmp_path, log_dir, expected_ids):
    target, draft = tiny_eagle3_pair
    arguments = (*speculative(draft), "--tp", "2")
    with Server(target, *arguments, log_dir=log_dir, environment=costs.environment(tmp_path)) as server:
        ids = server.greedy_ids(PROMPTS[:12], TOKENS)
        state = server.adaptive_state()
    assert ids == expected_ids[:12]
    assert [rank["rank"] for rank in state["ranks"]] == [0, 1]
    assert state["decisions"]["trimmed"] > 0


def test_an_eagle_draft_and_an_adapter(
    tiny_eagle_pair, eagle_costs, adapters, adapted_ids, tmp_path, log_dir, expected_ids
):
    """Of the draft nothing but its path is given; costs are those of the EAGLE3 draft."""
    target, draft = tiny_eagle_pair
    environment = costs.environment(borrow_costs(eagle_costs, tmp_path, family="EAGLE", draft=str(draft)))
    (name, folder), *_ = adapters.items()
    arguments = (*speculative(draft), "--lora-paths", f"{name}={folder}")
    with Server(target, *arguments, log_dir=log_dir, environment=environment) as server:
        assert "step costs read from" in server.log_text()
        assert server.greedy_ids(PROMPTS, TOKENS) == expected_ids
        state, info = server.adaptive_state(), server.server_info()
        bodies = [
            request(prompt, 40, **({"lora_path": name} if adapter else {}))
            for prompt in PROMPTS[:6]
            for adapter in (True, False)
        ]
        found = [ids for ids, _, _ in outputs(server, bodies)]
        assert found[::2] == adapted_ids[name]
        assert found[1::2] == [ids[:40] for ids in expected_ids[:6]]
    assert state["family"] == "EAGLE" and info["speculative_num_steps"] == 5
    assert info["disable_overlap_schedule"] is False
    assert state["decisions"]["trimmed"] > 0
    assert state["requests"] < state["verify_tokens"] < state["requests"] * 6, "nothing was trimmed, or everything was"
    # The later drafts of a chain follow from the draft's own hidden states.
    assert state["accept_length"] > 1.2 and state["accepted_per_position"][-1] > 0


def test_trees_and_uneven_chains_are_refused_in_one_sentence(tiny_eagle3_pair, log_dir):
    target, draft = tiny_eagle3_pair
    for wrong, word in (
        (("--speculative-eagle-topk", "2"), "trees"),
        (("--speculative-num-steps", "3", "--speculative-num-draft-tokens", "8"), "drop one of the two"),
    ):
        status, output = failed_start(target, *speculative(draft), *wrong, log_dir=log_dir)
        assert status != 0
        last = output.strip().splitlines()[-1]
        assert last.startswith("sglang_adaptive:") and word in last


def test_penalties_are_exact_and_min_p_is_refused(eagle_server: Server, tiny_plain_server: Server):
    assert outputs(eagle_server, penalised()) == outputs(tiny_plain_server, penalised())
    with pytest.raises(RequestFailed, match=r"400: .*drop min_p from the request"):
        eagle_server.generate(PROMPTS[:1], 8, temperature=1.0, min_p=0.1)
    assert eagle_server.greedy_ids(PROMPTS[:1], 8) == tiny_plain_server.greedy_ids(PROMPTS[:1], 8)
