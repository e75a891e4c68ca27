"""How much the load generator can take: a server in another process answers at once, with chunks made beforehand."""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
from collections.abc import Sequence
from typing import Any

from sglang_adaptive.benchmarks.load import Load, Runner, processes_for
from sglang_adaptive.benchmarks.prompts import SyntheticPrompts

TOKENS, INTERVAL = 128, 32


def _chunks() -> list[bytes]:
    """The answer to one request, by chunk: the first token, one every ``INTERVAL`` tokens, the end."""
    pieces = [b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"]
    for tokens in (1, *range(INTERVAL + 1, TOKENS, INTERVAL), TOKENS):
        reason = {"type": "length", "length": TOKENS} if tokens == TOKENS else None
        meta = {"id": "0" * 32, "finish_reason": reason, "prompt_tokens": 64, "completion_tokens": tokens}
        meta |= {"spec_verify_ct": 60} if reason else {}
        event = b"data: " + json.dumps({"text": "word " * tokens, "meta_info": meta}).encode() + b"\n\n"
        pieces.append(b"%x\r\n%s\r\n" % (len(event), event))
    end = b"data: [DONE]\n\n"
    return [*pieces, b"%x\r\n%s\r\n0\r\n\r\n" % (len(end), end)]


class _Answer(asyncio.Protocol):
    """Reads requests with a Content-Length and answers each, one chunk per turn of the loop."""

    chunks = _chunks()

    def connection_made(self, transport: Any) -> None:
        self._transport, self._data = transport, b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        if not found:
            return
        fields = dict(line.split(b": ", 1) for line in head.lower().splitlines()[1:])
        if len(body) < int(fields.get(b"content-length", 0)):
            return
        self._data = b""
        if b"/generate" in head.split(b"\r\n", 1)[0]:
            self._send(0)
        else:
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    def _send(self, place: int) -> None:
        if place < len(self.chunks) and not self._transport.is_closing():
            self._transport.write(self.chunks[place])
            asyncio.get_running_loop().call_soon(self._send, place + 1)


def _serve(listening: socket.socket) -> None:
    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(_Answer, sock=listening)
        await server.serve_forever()

    asyncio.run(run())


async def _take(url: str, concurrency: int, seconds: float, processes: int | None) -> dict[str, Any]:
    prompts, tokens = SyntheticPrompts((0, 1000), (64, 64)), (TOKENS, TOKENS)
    load = Load(concurrency, prompts, seconds=seconds, output_tokens=tokens)
    runner = Runner(url, load, processes)
    await runner.run()
    assert runner.window is not None
    begin, end = runner.window
    tokens = sum(TOKENS for r in runner.requests if r.done and begin <= r.stamps[-1][0] <= end)
    return {
        "concurrency": concurrency,
        "tok_s": tokens / (end - begin),
        "cpu_us_per_token": 1e6 * runner.generator["cpu"] * (end - begin) / max(tokens, 1),
        **runner.generator,
    }


def main(argv: Sequence[str]) -> int:
    """Tokens per second that the load generator takes from a server that never waits, in chunks of 32."""
    parser = argparse.ArgumentParser(prog="python -m sglang_adaptive.benchmarks absorb", description=main.__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--processes", type=int, help="default: by concurrency and cores")
    parser.add_argument("--servers", type=int, default=1, help="processes that answer")
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args(argv)
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        servers = [context.Process(target=_serve, args=(listening,), daemon=True) for _ in range(arguments.servers)]
        for server in servers:
            server.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        print("| streams | processes | tokens/s taken | CPU, us per token | busiest process | woke up late, p99 |")
        print("| ---: | ---: | ---: | ---: | ---: | ---: |")
        for concurrency in arguments.concurrency:
            count = arguments.processes or processes_for(concurrency)
            row = asyncio.run(_take(url, concurrency, arguments.seconds, count))
            print(
                f"| {concurrency} | {row['processes']} | {row['tok_s']:,.0f} | {row['cpu_us_per_token']:.2f} "
                f"| {row['busy']:.0%} | {row['lag_ms']['p99']:.1f} ms |"
            )
        for server in servers:
            server.terminate()
    return 0
