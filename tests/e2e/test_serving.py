"""DSPARK_ADAPTIVE on real servers: it is active, it trims, and it changes no output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import costs
import numpy as np
import pytest
import requests
import tiny_language as language
from conftest import PROMPTS, TOKENS
from features import outputs, penalised
from scipy.stats import chi2_contingency
from server import Server, speculative

from sglang_adaptive import ALGORITHM

pytestmark = pytest.mark.e2e


def difference(before: dict, after: dict, name: str) -> int:
    return after[name] - before[name]


def test_it_is_active_and_says_so(adaptive_server: Server):
    info = adaptive_server.server_info()
    state = adaptive_server.adaptive_state()
    assert info["speculative_algorithm"] == ALGORITHM
    assert state["active"] and state["algorithm"] == ALGORITHM
    assert [rank["rank"] for rank in state["ranks"]] == [0]
    assert f"{ALGORITHM} is active on 1 rank(s)" in adaptive_server.log_text()


def test_greedy_output_is_that_without_speculation_while_it_trims(adaptive_server: Server, expected_ids):
    before = adaptive_server.adaptive_state()
    assert adaptive_server.greedy_ids(PROMPTS, TOKENS) == expected_ids
    after = adaptive_server.adaptive_state()
    assert after["decisions"]["trimmed"] > before["decisions"]["trimmed"]
    requests_seen = difference(before, after, "requests")
    verified = difference(before, after, "verify_tokens")
    assert requests_seen < verified < requests_seen * 8, "nothing was trimmed, or everything was"
    assert difference(before, after, "committed_tokens") / requests_seen > 1.2


def test_easy_requests_get_more_of_the_budget_than_hard_ones(adaptive_server: Server):
    easy = language.random_prompts(6, seed=3, kinds=(language.EASY,))
    hard = language.random_prompts(6, seed=3, kinds=(language.HARD,))
    answers = adaptive_server.generate(easy + hard, 48, temperature=0.0, ignore_eos=True)
    steps = [answer["meta_info"]["spec_verify_ct"] for answer in answers]
    assert sum(steps[:6]) < sum(steps[6:]), "easy text should take fewer steps"


def test_greedy_output_is_equal_without_overlap(tiny_pair, dear_costs, log_dir, expected_ids, tiny_plain_server):
    target, draft = tiny_pair
    environment = costs.environment(dear_costs)
    arguments = (*speculative(draft), "--disable-overlap-schedule")
    with Server(target, *arguments, log_dir=log_dir, environment=environment) as server:
        assert server.greedy_ids(PROMPTS, TOKENS) == expected_ids
        assert outputs(server, penalised()) == outputs(tiny_plain_server, penalised())
        state = server.adaptive_state()
    assert state["decisions"]["trimmed"] > 0 and state["accept_length"] > 1.2


def test_steps_without_a_draft_change_nothing_either(
    tiny_pair, dear_costs, tmp_path, log_dir, expected_ids, tiny_plain_server
):
    """Drafting is made hopeless: the server stops drafting, and probes now and then whether it pays again."""
    target, draft = tiny_pair
    environment = costs.environment(costs.hopeless(dear_costs, tmp_path), skip_draft="on")
    with Server(target, *speculative(draft), log_dir=log_dir, environment=environment) as server:
        assert server.greedy_ids(PROMPTS, TOKENS) == expected_ids
        assert server.greedy_ids(PROMPTS[:3], 2 * TOKENS)
        assert outputs(server, penalised()) == outputs(tiny_plain_server, penalised())
        decisions = server.adaptive_state()["decisions"]
        free = server.free_kv_tokens()
        server.client.flush_cache()
        assert server.free_kv_tokens() == free
    assert decisions["not_drafted"] > 50
    assert decisions["trimmed"] + decisions["verify_all"] > 3, "it never probed"


def test_sampled_output_has_the_distribution_of_the_target(tiny_plain_server: Server, adaptive_server: Server):
    """Temperature 1: what follows one prompt, drawn many times with and without speculation, position by position."""
    prompt = language.random_prompts(1, seed=5, kinds=(language.HARD,))[0]

    def draws(server: Server) -> np.ndarray:
        answers = [
            answer for _ in range(15) for answer in server.generate([prompt] * 40, 6, temperature=1.0, ignore_eos=True)
        ]
        return np.array([answer["output_ids"] for answer in answers])

    plain, ours = draws(tiny_plain_server), draws(adaptive_server)
    pvalues = []
    for position in range(1, plain.shape[1]):
        counts = [np.bincount(drawn[:, position], minlength=language.VOCAB) for drawn in (plain, ours)]
        often = (counts[0] + counts[1]) >= 20
        table = np.array([[*count[often], count[~often].sum()] for count in counts])
        table = table[:, table.sum(axis=0) > 0]
        assert table.shape[1] >= 3, f"position {position} leaves too little to chance"
        pvalues.append(chi2_contingency(table).pvalue)
    assert min(pvalues) > 1e-3 / len(pvalues), pvalues


def test_requests_that_come_go_and_vanish_leave_nothing_behind(adaptive_server: Server):
    server = adaptive_server
    server.client.flush_cache()
    free = server.free_kv_tokens()
    url = f"{server.client.url}/generate"

    def disconnect() -> None:
        body = {"text": PROMPTS[0], "stream": True, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        with requests.post(url, json=body, stream=True, timeout=60) as answer:
            next(answer.iter_lines())

    threads = [threading.Thread(target=disconnect) for _ in range(4)]
    aborted = [f"abort-{i}" for i in range(4)]
    for rid in aborted:
        threads.append(threading.Thread(target=server.generate, args=([PROMPTS[1]], 400), kwargs={"rid": rid}))
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    joined = server.greedy_ids(PROMPTS[2:6], 40)
    for rid in aborted:
        requests.post(f"{server.client.url}/abort_request", json={"rid": rid}, timeout=30)
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert joined == server.greedy_ids(PROMPTS[2:6], 40)
    server.free_kv_tokens()
    server.client.flush_cache()
    assert server.free_kv_tokens() == free


def test_retracted_requests_finish_with_the_right_output(
    tiny_pair, dear_costs, log_dir, expected_ids, tiny_plain_server
):
    """With pages of 64 tokens; ``test_eagle`` retracts with pages of one."""
    target, draft = tiny_pair
    # The host's own switch for tests: it retracts requests every few steps, as it does when the KV pool runs full.
    environment = costs.environment(dear_costs) | {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
    arguments = (*speculative(draft), "--page-size", "64")
    with Server(target, *arguments, log_dir=log_dir, environment=environment) as server:
        free = server.free_kv_tokens()
        answers = server.generate(PROMPTS, TOKENS, temperature=0.0, ignore_eos=True)
        assert [answer["output_ids"] for answer in answers] == expected_ids
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0, "no request was retracted"
        # The host forgets at a retraction what it counted, so the reference is a server that retracts nothing.
        assert outputs(server, penalised()) == outputs(tiny_plain_server, penalised())
        state = server.adaptive_state()
        server.client.flush_cache()
        assert server.free_kv_tokens() == free
    assert state["decisions"]["trimmed"] > 0 and state["accept_length"] > 1.2


SCHEMA = {
    "type": "object",
    "properties": {"animal": {"enum": ["cat", "dog", "hen"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["animal", "legs"],
    "additionalProperties": False,
}


def test_the_real_pair(smollm2_pair, log_dir, tmp_path):
    """Chats, and an answer that has to follow a JSON schema."""
    target, draft = smollm2_pair
    structured = {"response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}}

    def answers(server: Server) -> list[str]:
        found = server.chat(questions, 64) + server.chat(["Describe a cat as JSON."], 48, **structured)
        return [answer["choices"][0]["message"]["content"] for answer in found]

    questions = ["List five animals.", "Why is the sky blue?", "How do I boil an egg?", "Write a poem about the sea."]
    common = ["--max-running-requests", "8", "--max-total-tokens", "4096"]
    # Whether drafting pays depends on the machine; here it drafts, and trims only where much is to be gained.
    environment = {
        "SGLANG_ADAPTIVE_CACHE_DIR": str(tmp_path),
        "SGLANG_ADAPTIVE_PROFILE_SECONDS": "10",
        "SGLANG_ADAPTIVE_SKIP_DRAFT": "off",
        "SGLANG_ADAPTIVE_MIN_GAIN": "0.3",
    }
    with Server(target, *common, log_dir=log_dir) as server:
        plain = answers(server)
    with Server(target, *speculative(draft), *common, log_dir=log_dir, environment=environment) as server:
        ours = answers(server)
        state = server.adaptive_state()
    assert ours == plain
    assert set(json.loads(ours[-1])) == {"animal", "legs"}
    assert state["accept_length"] > 1.5


ENGINE = """
import sys
from sglang import Engine
if __name__ == "__main__":
    target, draft, algorithm = sys.argv[1:]
    options = {} if algorithm == "none" else dict(
        speculative_algorithm=algorithm, speculative_draft_model_path=draft)
    engine = Engine(model_path=target, **options)
    out = engine.generate(["<easy> " + "e1 e2"], {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True})
    state = engine.get_server_info()
    print("RESULT", out[0]["output_ids"], state["speculative_algorithm"],
          state["internal_states"][0].get("sglang_adaptive", {}).get("active"))
    engine.shutdown()
"""


def test_the_engine_api(tiny_pair, tmp_path, dear_costs):
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)

    def result(algorithm: str) -> str:
        command = [sys.executable, str(script), *map(str, tiny_pair), algorithm]
        environment = {**os.environ, **costs.environment(dear_costs)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
        assert lines, done.stdout[-2000:] + done.stderr[-2000:]
        return lines[0]

    plain, ours = result("none"), result("dspark_adaptive")
    assert ours.endswith(f"{ALGORITHM} True")
    assert plain.endswith("None None")
    assert ours.split("]")[0] == plain.split("]")[0]


def test_sglang_serve_and_a_broken_cost_table(tiny_pair, log_dir, tmp_path, dear_costs):
    """The other command for the same; half a table is profiled again."""
    target, draft = tiny_pair
    for table in dear_costs.glob("cost-*.json"):
        (tmp_path / table.name).write_text(table.read_text()[: table.stat().st_size // 2])
    broken = {path: path.read_text() for path in tmp_path.glob("cost-*.json")}
    server = Server(target, *speculative(draft), log_dir=log_dir, environment=costs.environment(tmp_path))
    at = server._command.index("sglang.launch_server")
    server._command[: at + 1] = [str(Path(sys.executable).with_name("sglang")), "serve"]
    with server:
        assert server.server_info()["speculative_algorithm"] == ALGORITHM
        assert server.adaptive_state()["active"]
        assert "profiling again" in server.log_text()
        assert server.greedy_ids(PROMPTS[:2], 8)
    (changed,) = [path for path, text in broken.items() if path.read_text() != text]
    assert changed.read_text().endswith("}")


def test_stock_algorithms_still_serve(tiny_pair, log_dir, expected_ids):
    target, draft = tiny_pair
    with Server(target, *speculative(draft, "DSPARK"), log_dir=log_dir) as server:
        assert server.server_info()["speculative_algorithm"] == "DSPARK"
        assert server.client.adaptive_states() == []
        assert server.greedy_ids(PROMPTS[:8], TOKENS) == expected_ids[:8]
