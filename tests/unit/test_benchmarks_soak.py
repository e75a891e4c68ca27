"""The soak against a server that decodes by sleeping: it ends well, and it notices what is lost."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from sglang_adaptive.benchmarks import soak
from sglang_adaptive.benchmarks.prompts import SyntheticPrompts
from sglang_adaptive.benchmarks.soak import Soak
from sglang_adaptive.benchmarks.soak_requests import REGEX, Drawer, wrong
from sglang_adaptive.benchmarks.soak_state import SoakState, merged
from sglang_adaptive.errors import AdaptiveError
from tests.fake_server import FakeServer
from tests.unit.test_benchmarks_load import against, fake
from tests.unit.test_benchmarks_sweep import no_server_is_left, written

PROMPTS = SyntheticPrompts((10, 90), (1, 9))


def soaked(server: FakeServer, seconds: float, patience: float = 60.0, rounds: tuple[str, ...] = ()) -> Soak:
    async def act(url: str) -> Soak:
        load = Soak(url, PROMPTS, crowd=8, tokens=16, seed=1, patience=patience)
        await load.run(seconds, lambda text: None)
        for name in rounds:
            await one_round(load, name)
        return load

    return against(server, act)


async def one_round(load: Soak, name: str) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=load.patience)) as load._http:
        await getattr(load, f"_{name}")()
        await load._settled(name)


ROUNDS = ("shrinking", "mixed", "aborted", "hung_up", "alone")


def test_every_request_gets_an_end_in_every_kind_of_round():
    server = fake(step_ms=10.0)
    found = soaked(server, 0.0, rounds=ROUNDS)
    assert found.troubles == []
    # 8 shrinking, 8 mixed, 4 beside the aborted, 1 beside the hung up, 3 alone
    assert found.counts["finished"] == 24 + (4 - found.counts["aborted"])
    assert found.counts["aborted"] >= 1 and found.counts["hung up"] == 2
    assert len(server.bodies) == 30 and not server.running


def test_it_goes_on_until_the_time_is_over():
    found = soaked(fake(step_ms=1.0), 3.0)
    assert found.troubles == [] and found.counts["finished"] >= 8


@pytest.mark.parametrize(
    ("change", "trouble"),
    [({"leak": True}, "KV slots are missing"), ({"step_ms": 2000.0}, "got no end: TimeoutError")],
    ids=["leak", "hang"],
)
def test_a_lost_slot_and_a_request_without_an_end_are_noticed(change: dict[str, Any], trouble: str):
    found = soaked(fake(**({"step_ms": 1.0} | change)), 0.0, patience=1.0, rounds=("alone", "alone"))
    assert any(trouble in line for line in found.troubles), found.troubles


def test_a_wrong_answer_is_noticed(monkeypatch):
    async def refuse(self: FakeServer, request: web.Request) -> web.Response:
        return web.json_response({"error": "out of memory"}, status=500)

    monkeypatch.setattr(FakeServer, "generate", refuse)
    found = soaked(fake(), 0.0, rounds=("alone",))
    assert len(found.troubles) == 3 and "answered 500" in found.troubles[0] and "out of memory" in found.troubles[0]


def test_the_command_starts_a_server_and_ends_it(tmp_path, capsys):
    path = written(tmp_path, [{"name": "adaptive", "role": "ours", "args": ["--step-ms", "1"]}])
    more = ["--config", str(path), "--log", str(tmp_path / "soak.log"), "--crowd", "4", "--tokens", "8"]
    assert soak.main([*more, "--minutes", "0.2"]) == 0
    assert "'finished': " in capsys.readouterr().out
    assert no_server_is_left()
    broken = written(tmp_path, [{"name": "adaptive", "role": "ours", "args": ["--leak"]}])
    assert soak.main(["--config", str(broken), *more[2:], "--minutes", "0.5"]) == 1
    assert "KV slots are missing" in capsys.readouterr().out


class Counting(FakeServer):
    """Counts the steps of whole answers, too, and says that it has a tokenizer."""

    async def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        meta = await super()._whole(body)
        self.counters["steps"] += meta["completion_tokens"]
        return meta

    async def server_info(self, request: web.Request) -> web.Response:
        state = {"sglang_adaptive": dict(self.counters)}
        return web.json_response({"internal_states": [state], "skip_tokenizer_init": False})


def soaked_in_chunks(path: Path, seconds: float, **aims: int) -> Soak:
    async def act(url: str) -> Soak:
        state = SoakState(path, {"command": ["soak"]})
        load = Soak(url, PROMPTS, crowd=8, tokens=16, seed=1, patience=20.0, state=state, **aims)
        await load.run(seconds, lambda text: None)
        return load

    return against(Counting(fake(step_ms=1.0).options), act)


def test_chunks_add_up_until_their_aims_are_reached(tmp_path):
    path = tmp_path / "state.json"
    soaked_in_chunks(path, 0.0, steps=1)
    first = json.loads(path.read_text())
    assert first["steps"] == first["requests"] == 0 and len(first["chunks"]) == 1
    soaked_in_chunks(path, 60.0, requests=5)
    found = soaked_in_chunks(path, 60.0, steps=200, requests=9)
    state = json.loads(path.read_text())
    assert found.troubles == [] and len(state["chunks"]) == 3
    assert state["steps"] >= 200 and state["short_requests"] >= 9
    assert state["requests"] == sum(state["outcomes"].values()) == sum(each["requests"] for each in state["chunks"])
    assert [each["short_requests"] >= 4 for each in state["chunks"]] == [False, True, True]
    assert state["chunks"][2]["kv_tokens"] == {"before": 0, "after": 0}
    assert state["errors"] == state["hangs"] == state["leaks"] == 0
    assert merged([path, path])["steps"] == 2 * state["steps"]
    again = soaked_in_chunks(path, 60.0, steps=200, requests=9)
    assert again.chunk["requests"] == 0, "the aims were reached before"


def test_random_requests_ask_for_everything():
    drawer = Drawer(PROMPTS, random.Random(0), texts=True)
    sampling = [drawer.any(8)["sampling_params"] for _ in range(400)]
    names = {name for each in sampling for name in each}
    assert names >= {"stop", "regex", "frequency_penalty", "min_new_tokens", "top_p", "min_p"}
    assert {each["temperature"] for each in sampling} == {0.0, 1.0}
    plain = Drawer(PROMPTS, random.Random(0), texts=False)
    assert not any(plain.any(8)["sampling_params"].keys() & {"stop", "regex"} for _ in range(400))


@pytest.mark.parametrize(
    ("sampling", "end", "tokens", "text", "fault"),
    [
        ({}, "length", 8, "", None),
        ({}, "length", 7, "", "7 tokens instead of 8"),
        ({}, "stop", 5, "", "ended by stop"),
        ({}, "abort", 5, "", "aborted unasked"),
        ({"ignore_eos": False}, "stop", 5, "", None),
        ({"stop": ["the"]}, "stop", 5, "and ", None),
        ({"stop": ["the"]}, "length", 8, "and the" + 40 * "x", "went on after a stop string"),
        ({"regex": REGEX, "ignore_eos": False}, "stop", 5, "h3 e4", None),
        ({"regex": REGEX, "ignore_eos": False}, "stop", 5, "<mask>", "does not match"),
    ],
)
def test_an_answer_is_judged_by_what_was_asked(sampling, end, tokens, text, fault):
    body = {"sampling_params": {"max_new_tokens": 8, "ignore_eos": True, **sampling}}
    answer = {"text": text, "meta_info": {"completion_tokens": tokens, "finish_reason": {"type": end}}}
    found = wrong(body, 200, answer)
    assert (found is None) if fault is None else (fault in found)
    assert wrong(body, 500, answer) == "status 500"


def test_a_state_that_is_none_is_refused(tmp_path):
    path = tmp_path / "state.json"
    path.write_text('{"chunks": [{}]}')
    with pytest.raises(AdaptiveError, match="name another file"):
        SoakState(path, {})


def test_a_server_that_counts_no_steps_is_refused():
    async def act(url: str) -> None:
        await Soak(url, PROMPTS, crowd=2, tokens=4, seed=1, steps=1).run(1.0)

    with pytest.raises(AdaptiveError, match="needs one of DSPARK_ADAPTIVE"):
        against(fake(), act)


def test_a_server_that_is_not_there_is_trouble(tmp_path, capsys):
    path = tmp_path / "state.json"
    assert soak.main(["--url", "http://127.0.0.1:1", "--state", str(path), "--steps", "9", "--minutes", "1"]) == 1
    assert "after the start the server did not answer" in capsys.readouterr().out
    assert json.loads(path.read_text())["errors"] == 1
