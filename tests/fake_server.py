"""A server that speaks as much of the host's HTTP as the benchmarks use, and decodes by sleeping.

Every step takes ``--step-ms`` plus ``--request-ms`` for each request that is running, and gives each request
``--accept`` tokens; with ``--adaptive`` it counts steps as our worker does. ``--fail N`` ends the process at the N-th
request. A request that neither streams nor has a rid is answered at once.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import sys
from pathlib import Path

from aiohttp import web


class FakeServer:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.running: dict[int | str, asyncio.Event] = {}
        self.served = 0
        self.bodies: list[dict] = []
        self.counters = {"steps": 0, "requests": 0, "verify_tokens": 0, "committed_tokens": 0}
        self.counters["decisions"] = {"trimmed": 0}

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_post("/flush_cache", self.health)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/start_profile", self.start_profile)
        app.router.add_get("/v1/loads", self.loads)
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def server_info(self, request: web.Request) -> web.Response:
        state = {"avg_spec_accept_length": self.options.accept}
        if self.options.adaptive:
            state["sglang_adaptive"] = {"active": True, "rank": 0, "accept_length": 1.5, **self.counters}
        if self.options.bench_acceptance:
            state["bench_acceptance"] = {"simulated": True}
        return web.json_response({"internal_states": [state]})

    async def abort(self, request: web.Request) -> web.Response:
        asked = await request.json()
        for rid, aborted in self.running.items():
            if asked.get("abort_all") or asked["rid"] == rid:
                aborted.set()
        return web.Response()

    async def loads(self, request: web.Request) -> web.Response:
        used = self.served if self.options.leak else 0
        load = {"num_running_reqs": len(self.running), "num_waiting_reqs": 0, "num_used_tokens": used}
        return web.json_response({"loads": [load]})

    async def start_profile(self, request: web.Request) -> web.Response:
        asked = await request.json()
        await asyncio.sleep(0.1)
        with gzip.open(Path(asked["output_dir"]) / "1-TP-0.trace.json.gz", "wt") as file:
            json.dump({"traceEvents": trace_events(asked["num_steps"])}, file)
        return web.Response()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.served += 1
        if self.options.fail and self.served >= self.options.fail:
            print("fake server: failing as told", flush=True)
            os._exit(7)
        if "text" not in body and "input_ids" not in body:
            return web.json_response({"error": {"message": "no prompt"}}, status=400)
        if not body.get("stream"):
            return web.json_response({"output_ids": self.greedy(body), "meta_info": await self._whole(body)})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        number = self.served
        aborted = self.running[number] = asyncio.Event()
        try:
            await self._decode(body["sampling_params"], response, aborted)
        finally:
            del self.running[number]
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _whole(self, body: dict) -> dict:
        """The meta_info of an answer that does not stream; with a rid it takes a step per token, and can be aborted."""
        wanted, tokens = body["sampling_params"]["max_new_tokens"], 0
        if rid := body.get("rid"):
            aborted = self.running[rid] = asyncio.Event()
            while tokens < wanted and not aborted.is_set():
                await asyncio.sleep(self.options.step_ms / 1e3)
                tokens += 1
            del self.running[rid]
        if rid and tokens < wanted:
            return {"completion_tokens": tokens, "finish_reason": {"type": "abort", "message": "Aborted"}}
        return {"completion_tokens": wanted, "finish_reason": {"type": "length", "length": wanted}}

    def greedy(self, body: dict) -> list[int]:
        """The ids that follow a prompt; with ``--odd N``, every N-th prompt's last one is another."""
        ids = [(7 * place + sum(body["input_ids"])) % 97 for place in range(body["sampling_params"]["max_new_tokens"])]
        if self.options.odd and sum(body["input_ids"]) % self.options.odd == 0:
            ids[-1] += 1
        return ids

    async def _decode(self, sampling: dict, response: web.StreamResponse, aborted: asyncio.Event) -> None:
        wanted, interval = sampling["max_new_tokens"], sampling.get("stream_interval", 1)
        tokens, sent, steps, finish = 1, 0, 0, None
        while finish is None:
            if tokens >= wanted:
                finish = {"type": "length", "length": wanted}
            elif aborted.is_set():
                finish = {"type": "abort", "message": "Aborted"}
            if finish or sent == 0 or tokens - sent >= interval:
                meta = {"completion_tokens": tokens, "prompt_tokens": 5, "finish_reason": finish}
                if finish and steps and self.options.accept > 1:
                    meta |= {
                        "spec_verify_ct": steps,
                        "spec_num_proposed_drafts": steps * 7,
                        "spec_correct_drafts_histogram": [0, steps],
                    }
                await response.write(b"data: " + json.dumps({"text": "x", "meta_info": meta}).encode() + b"\n\n")
                sent = tokens
            if finish is None:
                await asyncio.sleep((self.options.step_ms + self.options.request_ms * len(self.running)) / 1e3)
                steps += 1
                tokens = min(tokens + self.options.accept, wanted)
                self.counters["steps"] += 1
                self.counters["requests"] += 1
                self.counters["verify_tokens"] += 3
                self.counters["decisions"]["trimmed"] += 1


def trace_events(steps: int) -> list[dict]:
    """A profile of ``steps`` steps of 1000 us: two kernels that overlap for 100 us, one wait, one blocking copy."""
    events: list[dict] = [{"ph": "M", "name": "process_name"}]

    def add(cat: str, name: str, ts: float, dur: float) -> None:
        events.append({"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur})

    add("cuda_runtime", "cudaDeviceSynchronize", -500, 400)  # before the first step: not counted
    for step in range(steps):
        at = step * 1000.0
        add("user_annotation", "step[VERIFY bs=1]", at, 900)
        add("gpu_user_annotation", "step[VERIFY bs=1]", at + 50, 900)
        add("user_annotation", "step[DRAFT bs=1]", at + 500, 100)
        add("cuda_runtime", "cudaGraphLaunch", at + 10, 20)
        add("cuda_runtime", "cudaEventSynchronize", at + 100, 300)
        add("cuda_runtime", "cudaEventQuery", at + 450, 1)
        add("cpu_op", "aten::item", at + 460, 5)
        add("kernel", "gemm", at + 40, 400)
        add("kernel", "attention", at + 340, 300)
        add("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", at + 700, 10)
    return events


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=4.0)
    parser.add_argument("--request-ms", type=float, default=0.0)
    parser.add_argument("--accept", type=int, default=1)
    parser.add_argument("--adaptive", action="store_true")
    parser.add_argument("--fail", type=int, default=0)
    parser.add_argument("--leak", action="store_true", help="report a KV slot more for each request")
    parser.add_argument("--odd", type=int, default=0)
    parser.add_argument("--bench-acceptance", action="store_true")
    parser.add_argument("--refuse", help="end at once with this line")
    options = parser.parse_args()
    if options.refuse:
        sys.exit(options.refuse)
    web.run_app(FakeServer(options).app(), host="127.0.0.1", port=options.port, print=None)


if __name__ == "__main__":
    main()
