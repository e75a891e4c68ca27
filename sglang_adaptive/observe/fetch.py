"""What a running server says of itself, or one sentence why it does not."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests

from sglang_adaptive import ALGORITHM
from sglang_adaptive.errors import AdaptiveError

TIMEOUT_SECONDS = 10.0
NEEDED = ("steps", "requests", "verify_tokens", "committed_tokens", "decisions", "by_load", "step_time", "calibration")


@dataclass(frozen=True)
class Snapshot:
    """The server at one moment.

    Attributes:
        at: ``time.monotonic`` seconds.
        model: what it serves.
        states: what our worker reports, one for each data-parallel rank.
    """

    at: float
    model: str
    states: list[dict[str, Any]]


def base_url(text: str) -> str:
    """``text`` as the URL of a server; ``http://`` may be left out. Raises AdaptiveError for what is none."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good:
        raise AdaptiveError(f"{text!r} is not the URL of a server; give one like http://127.0.0.1:30000.")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def snapshot(url: str, api_key: str | None = None) -> Snapshot:
    """Ask the server at ``url`` (from ``base_url``).

    Raises AdaptiveError when nobody answers, when the answer is not SGLang's, and when our plugin is not in it.
    """
    info = _server_info(url, api_key)
    internal = info.get("internal_states")
    if not isinstance(internal, list):
        raise AdaptiveError(f"{url} answers, but not as an SGLang server does; give the address of the server itself.")
    states = [state.get("sglang_adaptive") for state in internal if isinstance(state, dict)]
    states = [state for state in states if isinstance(state, dict)]
    if not states:
        runs = info.get("speculative_algorithm")
        runs = f"runs {runs}" if runs else "does not speculate"
        raise AdaptiveError(
            f"The server at {url} {runs}: start it with --speculative-algorithm {ALGORITHM} to have something to see."
        )
    if any(name not in state for state in states for name in NEEDED):
        raise AdaptiveError(f"The server at {url} runs another release of sglang_adaptive; use that one's command.")
    model = str(info.get("served_model_name") or info.get("model_path") or "?")
    return Snapshot(time.monotonic(), model.rstrip("/").rsplit("/", 1)[-1], states)


def _server_info(url: str, api_key: str | None) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with requests.Session() as session:
            session.trust_env = False  # a proxy that the environment names cannot reach this machine's own ports
            answer = session.get(f"{url}/server_info", headers=headers, timeout=TIMEOUT_SECONDS)
    except requests.Timeout:
        raise AdaptiveError(f"{url} did not answer within {TIMEOUT_SECONDS:.0f} s; is the server hung?") from None
    except (requests.RequestException, UnicodeError):
        raise AdaptiveError(f"Nobody answers at {url}; start the server there, or give its address.") from None
    if answer.status_code in (401, 403):
        raise AdaptiveError(f"The server at {url} wants a key; give it with --api-key.")
    if not answer.ok:
        raise AdaptiveError(f"{url}/server_info answers {answer.status_code}; give the address of an SGLang server.")
    try:
        info = answer.json()
    except ValueError:
        info = None
    return info if isinstance(info, dict) else {}
