"""Calls to a running server over HTTP: its own API, the OpenAI-compatible one, and what it tells of itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import requests

Prompt = str | list[int]
Item = TypeVar("Item")
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*(?:\{.*\})?) (\S+)", re.MULTILINE)


class RequestFailed(Exception):
    """The server answered with an error; the message holds the status and the answer."""


class Client:
    """Talks to the server at ``url``. Requests that are given together are sent at the same time."""

    def __init__(self, url: str, timeout_seconds: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self.timeout_seconds = timeout_seconds

    def healthy(self) -> bool:
        """Whether it serves: it is up and has answered its own first request."""
        try:
            return self._send("GET", "/health", timeout=10).ok
        except requests.RequestException:
            return False

    def get(self, path: str) -> requests.Response:
        """The answer. Raises RequestFailed for any other status than success."""
        return _checked(self._send("GET", path))

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON answer. Raises RequestFailed for any other status than success."""
        return _checked(self._send("POST", path, json=body)).json()

    def generate(
        self, prompts: Sequence[Prompt], max_new_tokens: int = 64, temperature: float = 0.0, **options: Any
    ) -> list[dict[str, Any]]:
        """Complete every prompt, a text or token ids; answers in order, with ``text``, ``output_ids``, ``meta_info``.

        ``options`` named like a sampling parameter of the host's native API go there (``ignore_eos``, ``top_p``, ...);
        those that the request itself knows (``return_logprob``, ``priority``, ...) go to its top level.
        """
        top = {name: options.pop(name) for name in list(options) if name in REQUEST_OPTIONS}
        sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, **options}

        def one(prompt: Prompt) -> dict[str, Any]:
            key = "text" if isinstance(prompt, str) else "input_ids"
            return self.post("/generate", {key: prompt, "sampling_params": sampling, **top})

        return together(one, prompts)

    def chat(self, questions: Sequence[str], max_tokens: int = 64, temperature: float = 0.0, **options: Any) -> list:
        """The answers of ``/v1/chat/completions`` to one-turn conversations, in order; ``options`` go into the body."""
        body = {"model": "default", "max_tokens": max_tokens, "temperature": temperature, **options}

        def one(question: str) -> dict[str, Any]:
            return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": question}], **body})

        return together(one, questions)

    def server_info(self) -> dict[str, Any]:
        return self.get("/server_info").json()

    def adaptive_states(self) -> list[dict[str, Any]]:
        """What our worker reports, one entry for each data-parallel rank that has one."""
        states = self.server_info().get("internal_states") or []
        return [state["sglang_adaptive"] for state in states if state.get("sglang_adaptive")]

    def loads(self) -> list[dict[str, Any]]:
        """The host's load report, one entry for each data-parallel rank."""
        return self.get("/v1/loads?include=all").json()["loads"]

    def flush_cache(self) -> bool:
        """Forget the cached prefixes; False while requests run."""
        return self._send("POST", "/flush_cache").ok

    def metrics(self) -> dict[str, float]:
        """Prometheus samples by name with labels, as written. The server needs ``--enable-metrics``."""
        return {match[1]: float(match[2]) for match in _SAMPLE.finditer(self.get("/metrics").text)}

    def _send(self, method: str, path: str, **options: Any) -> requests.Response:
        with requests.Session() as session:
            session.trust_env = False  # a proxy that the environment names cannot reach this machine's own ports
            return session.request(method, self.url + path, **{"timeout": self.timeout_seconds, **options})


REQUEST_OPTIONS = frozenset(
    {
        "custom_logit_processor",
        "data_parallel_rank",
        "logprob_start_len",
        "lora_path",
        "priority",
        "return_logprob",
        "rid",
        "token_ids_logprob",
        "top_logprobs_num",
    }
)


def together(call: Callable[[Item], Any], items: Sequence[Item]) -> list[Any]:
    """``call`` for every item, each in a thread of its own; results in order. The first exception is raised."""
    if not items:
        return []
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(call, items))


def _checked(response: requests.Response) -> requests.Response:
    if not response.ok:
        raise RequestFailed(f"{response.url} answered {response.status_code}: {response.text[:500]}")
    return response
