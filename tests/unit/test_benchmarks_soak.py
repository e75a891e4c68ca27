"""The soak against a server that decodes by sleeping: it ends well, and it notices what is lost."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from aiohttp import web

from sglang_adaptive.benchmarks import soak
from sglang_adaptive.benchmarks.prompts import SyntheticPrompts
from sglang_adaptive.benchmarks.soak import Soak
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
    found = soaked(fake(**({"step_ms": 1.0} | change)), 0.0, patience=3.0, rounds=("alone", "alone"))
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
