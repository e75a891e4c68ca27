"""The load generator against a server that decodes by sleeping, and its arithmetic on requests made by hand."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest
from aiohttp.test_utils import TestServer

from sglang_adaptive.benchmarks import shares
from sglang_adaptive.benchmarks.load import Load, Runner, measure, processes_for
from sglang_adaptive.benchmarks.prompts import Prompts, SyntheticPrompts
from sglang_adaptive.benchmarks.result import difference, summarize, tokens_until
from sglang_adaptive.benchmarks.stats import geomean, percentile, ratio, spread
from sglang_adaptive.benchmarks.streams import Request, Streams
from tests.fake_server import FakeServer

PROMPTS = SyntheticPrompts((10, 20), (3, 5))


def fake(**changes: Any) -> FakeServer:
    options = {"step_ms": 4.0, "request_ms": 0.0, "accept": 1, "adaptive": False, "fail": 0}
    options |= {"odd": 0, "bench_acceptance": False, "leak": False}
    return FakeServer(argparse.Namespace(**(options | changes)))


def against(server: FakeServer, act: Any) -> Any:
    async def run() -> Any:
        async with TestServer(server.app()) as running:
            work: Coroutine[Any, Any, Any] = act(str(running.make_url("")).rstrip("/"))
            return await work

    return asyncio.run(run())


def seen(*stamps: tuple[float, int], sent: float = 0.0, cut: bool = False, **meta: Any) -> Request:
    return Request(sent, list(stamps), meta, done=True, cut=cut)


def test_a_window_is_measured_and_what_runs_is_cut_off():
    server = fake(accept=2, adaptive=True)
    load = Load(4, PROMPTS, seconds=0.6, output_tokens=(40, 60), settle_seconds=0.1)
    cell = against(server, lambda url: measure(url, load))
    assert cell["errors"] == 0
    assert cell["completed"] > 4
    assert 1 <= cell["cut"] <= 4
    assert cell["requests"] == cell["completed"] + cell["cut"]
    assert 0.6 <= cell["seconds"] < 1.2
    # 4 requests, 2 tokens in at least 4 ms each
    assert 200 < cell["tok_s"] <= 2000
    assert 100 < cell["tok_s_user"] <= 500
    assert cell["tpot_ms"]["p50"] >= 2
    assert cell["accept_length"] == pytest.approx(2, abs=0.1)
    # the counters' word goes before what the host's fields say (8)
    assert cell["verify_length"] == 3
    assert cell["budget"] == 2
    assert cell["adaptive"]["decisions"]["trimmed"] == cell["adaptive"]["steps"]
    assert cell["accepted_histogram"][0] == 0
    assert not server.running


def test_the_first_requests_end_apart():
    load = Load(4, PROMPTS, seconds=1.0, output_tokens=(100, 100))
    assert [load.body(index)["sampling_params"]["max_new_tokens"] for index in range(6)] == [25, 50, 75, 100, 100, 100]


def test_256_streams_are_spread_over_processes_and_measured_alike():
    """4 processes against a server of 50 ms a step: what each user sees, and what sending took, are known."""
    server = fake(step_ms=50, accept=4)
    load = Load(256, PROMPTS, seconds=2.0, output_tokens=(60, 100), settle_seconds=0.2, stream_interval=16, seed="x")
    cell = against(server, lambda url: measure(url, load, processes=4))
    assert cell["errors"] == 0 and cell["cut"] >= 200
    assert cell["requests"] == cell["completed"] + cell["cut"] == len(server.bodies)
    sent = sorted(json.dumps(body, sort_keys=True) for body in server.bodies)
    first = sorted(json.dumps(load.body(index), sort_keys=True) for index in range(256))
    assert set(first) <= set(sent), "the first request of each stream is the one of its number"
    # 4 tokens in at least 50 ms for each of 256 users
    assert 20 < cell["tok_s_user"] <= 80 and 256 * 15 < cell["tok_s"] <= 256 * 80
    assert cell["tpot_ms"]["n"] > 200 and cell["tpot_ms"]["p50"] >= 12.4
    assert cell["ttft_ms"]["n"] > 20
    assert cell["generator"]["processes"] == 4
    assert 0 < cell["generator"]["busy"] < 0.9 and cell["generator"]["lag_ms"]["n"] > 8
    assert not server.running


def test_processes_finish_a_number_of_requests():
    server = fake()
    load = Load(5, PROMPTS, requests=13, output_tokens=(20, 20))
    cell = against(server, lambda url: measure(url, load, processes=2))
    assert (cell["requests"], cell["completed"], cell["errors"]) == (13, 13, 0)
    assert len({json.dumps(body) for body in server.bodies}) == 13
    assert cell["output_tokens"] == 13 * 20 and cell["seconds"] > 0


def test_a_process_that_dies_is_an_error_and_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(shares.sys, "executable", "false")
    with pytest.raises(RuntimeError, match="a process of the load generator ended with status 1"):
        against(fake(), lambda url: measure(url, Load(2, PROMPTS, seconds=0.2), processes=2))


def test_errors_in_other_processes_are_told():
    load = Load(4, Prompts([{"image": "none"}]), seconds=0.2, ramp_timeout=20)
    with pytest.raises(RuntimeError, match=r"0 of 4 requests got a first token.*HTTP 400.*no prompt"):
        against(fake(), lambda url: measure(url, load, processes=2))


def test_the_number_of_processes_follows_concurrency_and_cores():
    assert [processes_for(c, cores=16) for c in (1, 32, 33, 64, 256, 1024)] == [1, 1, 2, 2, 5, 5]
    assert [processes_for(c, cores=2) for c in (1, 256)] == [1, 1]


def test_a_chunk_that_goes_on_is_read_without_decoding_it():
    """Only a server's own fields count, whatever the text says."""
    text = '\\"completion_tokens\\": 99, \\"finish_reason\\": null'
    streams = Streams("", Load(1, PROMPTS), 0, 1, lambda: None)
    request = Request(0.0)
    for tokens, reason in ((3, "null"), (5, '{"type": "length"}')):
        chunk = f'{{"text": "{text}", "meta_info": {{"completion_tokens": {tokens}, "finish_reason": {reason}}}}}'
        streams._chunk(request, chunk.encode(), 0)
    assert (
        [tokens for _, tokens in request.stamps] == [3, 5] and request.done and request.meta["completion_tokens"] == 5
    )


def test_a_number_of_requests_is_sent_and_awaited():
    server = fake()
    load = Load(3, PROMPTS, requests=7, output_tokens=(20, 20), temperature=0.7)
    cell = against(server, lambda url: measure(url, load))
    assert (cell["requests"], cell["completed"], cell["cut"], cell["errors"]) == (7, 7, 0, 0)
    assert cell["output_tokens"] == 7 * 20
    assert cell["e2e_ms"]["n"] > 0
    assert cell["accept_length"] is None
    sampling = server.bodies[0]["sampling_params"]
    assert sampling["ignore_eos"] is True and sampling["temperature"] == 0.7 and sampling["max_new_tokens"] == 20


def test_refused_requests_are_reported_not_counted():
    load = Load(2, Prompts([{"image": "none"}]), seconds=0.2, ramp_timeout=3)
    with pytest.raises(RuntimeError, match=r"0 of 2 requests got a first token.*HTTP 400.*no prompt"):
        against(fake(), lambda url: measure(url, load))


def test_a_request_that_the_server_aborts_is_an_error():
    server = fake(step_ms=20)

    async def act(url: str) -> Runner:
        runner = Runner(url, Load(1, PROMPTS, requests=1, output_tokens=(50, 50)))
        running = asyncio.create_task(runner.run())
        while not server.running:
            await asyncio.sleep(0.01)
        server.running[1].set()
        await running
        return runner

    (request,) = against(server, act).requests
    assert request.error == "aborted by the server: Aborted"


def test_every_arm_gets_the_same_requests():
    first, second = (Load(2, PROMPTS, seconds=1, seed="0/8/1") for _ in range(2))
    other = Load(2, PROMPTS, seconds=1, seed="0/8/2")
    assert [first.body(index) for index in range(9)] == [second.body(index) for index in range(9)]
    assert first.body(5) != other.body(5)


def test_tokens_are_linear_between_chunks():
    stamps = [(1.0, 1), (3.0, 9), (4.0, 10)]
    assert [tokens_until(stamps, moment) for moment in (0.9, 1.0, 2.0, 3.5, 9.0)] == [0, 1, 5, 9.5, 10]


def test_the_window_leaves_ramp_and_tail_out():
    requests = [
        seen((1.0, 1), (11.0, 101), completion_tokens=101, spec_verify_ct=50, spec_cap_length=4.0),
        seen((4.0, 1), (6.0, 21), sent=3.5, completion_tokens=21, spec_verify_ct=10, spec_cap_length=2.0),
        seen((0.5, 1), (1.5, 11), completion_tokens=11),
        Request(5.0, error="HTTP 500: no"),
    ]
    cell = summarize(requests, (2.0, 6.0), {}, {})
    assert cell["tok_s"] == pytest.approx((40 + 21) / 4)
    assert cell["tok_s_whole"] == pytest.approx((101 + 21 + 11) / 11)
    assert cell["tok_s_user"] == pytest.approx(120 / 12)
    assert cell["ttft_ms"] == {"n": 1, "p50": 500, "p90": 500, "p99": 500}
    assert cell["tpot_ms"]["n"] == 2
    assert cell["e2e_ms"]["p50"] == pytest.approx(2500)
    assert cell["accept_length"] == pytest.approx((100 + 20) / 60)
    assert cell["verify_length"] == pytest.approx((4 * 50 + 2 * 10) / 60)
    assert cell["ms_per_step"] == pytest.approx(12e3 / 60)
    assert (cell["errors"], cell["error_examples"]) == (1, ["HTTP 500: no"])


def test_without_steps_a_token_is_a_step():
    assert summarize([seen((0.0, 1), (1.0, 11))], (0.0, 1.0), {}, {})["ms_per_step"] == pytest.approx(100)


def test_counters_are_subtracted_and_averages_are_not():
    before = {"steps": 2, "rank": 0, "accepted": [1, 2], "decisions": {"a": 1}, "accept_length": 1.1, "active": True}
    after = {"steps": 5, "rank": 0, "accepted": [4, 2], "decisions": {"a": 1, "b": 2}, "accept_length": 1.2, "new": 3}
    assert difference(before, after) == {"steps": 3, "accepted": [3, 0], "decisions": {"a": 0, "b": 2}, "new": 3}
    assert difference({"measured_ms": 1.5, "mean": 1.0}, {"measured_ms": 4.0, "mean": 2.0}) == {"measured_ms": 2.5}


def test_small_statistics():
    assert percentile([1, 2, 3, 4], 50) == 2.5 and percentile([], 50) is None and percentile([7], 99) == 7
    assert spread([9, 10, 12]) == pytest.approx(0.15) and spread([1]) is None and spread([0, 0]) is None
    assert geomean([1, 4]) == pytest.approx(2) and geomean([]) is None
    assert ratio(1, 2) == 0.5 and ratio(1, 0) is None and ratio(None, 1) is None
