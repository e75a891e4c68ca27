"""Many engines: two servers behind the host's router, and the host's own data parallelism, all of it unchanged."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import costs
import psutil
import pytest
from conftest import PROMPTS, TOKENS
from server import Server, speculative

from sglang_adaptive.launch.client import Client
from sglang_adaptive.launch.process import free_port

pytestmark = pytest.mark.e2e


@contextmanager
def router(workers: list[str], log: Path) -> Iterator[Client]:
    """The host's router in front of ``workers``, ready to be asked."""
    port, metrics_port = free_port(), free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics_port), "--policy", "round_robin", "--worker-urls", *workers]
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            client = Client(f"http://127.0.0.1:{port}", timeout_seconds=120)
            deadline = time.monotonic() + 120
            # It answers as soon as it knows one worker.
            while not (client.healthy() and _healthy_workers(client) == len(workers)):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
                time.sleep(0.5)
            yield client
        finally:
            process.terminate()
            process.wait(30)


def _healthy_workers(client: Client) -> int:
    return sum(worker["is_healthy"] for worker in client.get("/workers").json()["workers"])


def ids(client: Client, prompts: list[str]) -> list[list[int]]:
    answers = client.generate(prompts, TOKENS, temperature=0.0, ignore_eos=True)
    return [answer["output_ids"] for answer in answers]


def test_two_engines_behind_the_router(adaptive_server, tiny_pair, dear_costs, log_dir, expected_ids, tmp_path):
    target, draft = tiny_pair
    environment = costs.environment(dear_costs)
    with ExitStack() as stack:
        second = stack.enter_context(
            Server(target, *speculative(draft), "--sleep-on-idle", log_dir=log_dir, environment=environment)
        )
        engines = [adaptive_server, second]
        urls = [engine.client.url for engine in engines]
        front = stack.enter_context(router(urls, tmp_path / "router.log"))
        before = [engine.adaptive_state()["requests"] for engine in engines]
        assert ids(front, PROMPTS) == expected_ids
        after = [engine.adaptive_state()["requests"] for engine in engines]
        assert all(new > old for new, old in zip(after, before, strict=True)), "the router used one engine only"
        assert all(engine.adaptive_state()["decisions"]["trimmed"] > 0 for engine in engines)

        # One engine dies: requests that come later are served by the other, with the same output.
        for process in second.processes():
            process.kill()
        psutil.wait_procs(second.processes(), timeout=15)
        deadline = time.monotonic() + 60
        answered = None
        while answered is None and time.monotonic() < deadline:
            try:
                answered = ids(front, PROMPTS[:6])
            except Exception:
                time.sleep(1.0)
        assert answered == expected_ids[:6]


def test_data_parallel_engines_decide_each_for_itself(tiny_pair, dear_costs, log_dir, expected_ids):
    target, draft = tiny_pair
    environment = costs.environment(dear_costs)
    arguments = [*speculative(draft), "--dp-size", "2", "--load-balance-method", "round_robin"]
    with Server(target, *arguments, log_dir=log_dir, environment=environment) as server:
        assert server.greedy_ids(PROMPTS, TOKENS) == expected_ids
        states = server.client.adaptive_states()
    assert len(states) == 2
    assert all(state["active"] and state["requests"] > 0 and state["decisions"]["trimmed"] > 0 for state in states)
