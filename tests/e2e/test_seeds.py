"""Seeds of requests under --enable-deterministic-inference: the tokens without speculation, whatever else is served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import costs
import features
import pytest
import tiny_language as language
from conftest import PROMPTS, TOKENS
from features import PENALTIES, answers
from features import request as asked
from server import Server, speculative

from sglang_adaptive import ALGORITHM
from sglang_adaptive.launch.client import RequestFailed

pytestmark = pytest.mark.e2e

FLAG = "--enable-deterministic-inference"
MIXED = ("--chunked-prefill-size", "64", "--enable-mixed-chunk")
# From this many requests on, the server below does not draft.
CROWD = 12
KINDS = (
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 9},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "logit_bias": {str(language.FIRST_EASY): 2.0}, **PENALTIES["both"]},
    {"temperature": 1.0, "regex": "(h[0-9]{1,2}|e1[0-9]{0,2}){30}", "ignore_eos": False},
)
BODIES = [
    asked(prompt, 48, sampling_seed=7 + i, **KINDS[i % len(KINDS)])
    for i, prompt in enumerate(language.random_prompts(12, seed=43))
]
OTHERS = [asked(prompt, 20 + i) for i, prompt in enumerate(PROMPTS[:6])]
OTHERS += [asked(prompt, 30 + i, temperature=1.0, sampling_seed=100 + i) for i, prompt in enumerate(PROMPTS[6:12])]


@pytest.fixture(scope="module")
def plain(tiny_pair: tuple[Path, Path], log_dir: Path) -> Iterator[Server]:
    """Without speculation. It does not overlap, for the sake of penalties."""
    with Server(tiny_pair[0], FLAG, "--disable-overlap-schedule", "--sleep-on-idle", log_dir=log_dir) as server:
        yield server


@pytest.fixture(scope="module")
def expected(plain: Server) -> list[list[int]]:
    """What each of BODIES says alone."""
    return alone(plain, BODIES)


@pytest.fixture(scope="module")
def server(tiny_pair: tuple[Path, Path], dear_costs: Path, tmp_path_factory, log_dir: Path) -> Iterator[Server]:
    """It trims, does not draft for a crowd, mixes prompts with decoding requests and retracts some."""
    target, draft = tiny_pair
    folder = features.borrow_costs(dear_costs, tmp_path_factory.mktemp("seeds"), deterministic=True)
    for path in folder.iterdir():
        table = json.loads(path.read_text())
        drafting = table["draft"]
        drafting["ms"] = [
            ms + (1e4 if requests >= CROWD else 0.0)
            for requests, ms in zip(drafting["requests"], drafting["ms"], strict=True)
        ]
        path.write_text(json.dumps(table))
    environment = costs.environment(folder, skip_draft="on")
    environment |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"}
    with Server(target, *speculative(draft), FLAG, *MIXED, log_dir=log_dir, environment=environment) as server:
        assert "step costs read from" in server.log_text()
        yield server


def ids(server: Server, bodies: list[dict]) -> list[list[int]]:
    """All at the same time."""
    return [answer["output_ids"] for answer in answers(server, bodies)]


def alone(server: Server, bodies: list[dict]) -> list[list[int]]:
    return [ids(server, [body])[0] for body in bodies]


def seeded(body: dict, seed: int | None) -> dict:
    return {**body, "sampling_params": {**body["sampling_params"], "sampling_seed": seed}}


def test_seeded_output_is_that_without_speculation_at_every_load(server: Server, expected, tiny_plain_server: Server):
    before = server.adaptive_state()
    assert alone(server, BODIES) == expected
    few = server.adaptive_state()
    assert few["decisions"]["trimmed"] > before["decisions"]["trimmed"]
    assert few["accept_length"] > 1.1
    assert ids(server, BODIES[:6]) == expected[:6]
    crowd = answers(server, BODIES + OTHERS)
    assert [answer["output_ids"] for answer in crowd[: len(BODIES)]] == expected
    assert sum(answer["meta_info"]["num_retractions"] for answer in crowd) > 0, "no request was retracted"
    many = server.adaptive_state()
    assert many["decisions"]["not_drafted"] > few["decisions"]["not_drafted"]
    assert many["decisions"]["trimmed"] > few["decisions"]["trimmed"]
    greedy = [{**body, "sampling_params": {**body["sampling_params"], "temperature": 0.0}} for body in BODIES]
    differs = [a != b for a, b in zip(expected, ids(tiny_plain_server, greedy), strict=True)]
    assert sum(differs) > 5, "too little was left to chance"


def test_other_seeds_say_something_else_and_none_is_the_hosts_default(server: Server, plain: Server):
    body = asked(language.random_prompts(1, seed=5, kinds=(language.HARD,))[0], 32, temperature=1.0)
    several = [seeded(body, seed) for seed in (1, 2, 3, -5, 2**40)]
    said = ids(server, several)
    assert len({tuple(each) for each in said}) == len(several)
    assert said == alone(plain, several)
    unseeded = ids(server, [body, seeded(body, 42), body])
    assert unseeded == [unseeded[0]] * 3 == ids(plain, [body]) * 3


def test_a_request_with_min_p_is_refused(server: Server):
    with pytest.raises(RequestFailed, match=r"400: .*drop min_p from the request"):
        server.generate(PROMPTS[:1], 8, temperature=1.0, min_p=0.1)
    assert server.generate(PROMPTS[:1], 8, temperature=1.0)[0]["output_ids"]


def test_a_target_with_an_mtp_layer_of_its_own_without_overlap(
    tiny_mtp_target, tmp_path, log_dir, expected_ids, expected
):
    arguments = ("--speculative-algorithm", ALGORITHM, "--disable-overlap-schedule", FLAG)
    with Server(tiny_mtp_target, *arguments, log_dir=log_dir, environment=costs.environment(tmp_path)) as server:
        assert server.greedy_ids(PROMPTS, TOKENS) == expected_ids
        state, info = server.adaptive_state(), server.server_info()
        assert state["decisions"]["trimmed"] > 0
        assert state["accept_length"] > 1.2
        assert alone(server, BODIES) == expected
        assert ids(server, BODIES + OTHERS)[: len(BODIES)] == expected
        after = server.adaptive_state()
    assert state["family"] == "NEXTN" and info["speculative_num_steps"] == 3
    assert after["decisions"]["trimmed"] > state["decisions"]["trimmed"]
