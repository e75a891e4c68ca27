"""The live view: one frame from a server's answers, and one line for every server that has nothing to show."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console
from test_observe_counters import observed, some_records

from sglang_adaptive import __main__ as command
from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.launch.process import free_port
from sglang_adaptive.observe import fetch, top, view
from sglang_adaptive.observe.fetch import Snapshot, base_url, snapshot
from sglang_adaptive.observe.frame import frame
from sglang_adaptive.observe.view import Sums

Answer = tuple[int, str]


@contextmanager
def serving(answers: Callable[[str, Any], Answer]) -> Iterator[str]:
    """A server on this machine that answers GET with ``answers(path, headers)``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answers(self.path, self.headers)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def info(*counts: int, **more: Any) -> str:
    """What a server with one data-parallel rank for each of ``counts`` answers after so many steps."""
    states = [
        {"sglang_adaptive": {**observed(some_records(count)).as_dict(), "version": "0.1.0", "ranks": [{}]}}
        for count in counts
    ]
    return json.dumps({"model_path": "/models/tiny", "internal_states": states, **more})


def shown(renderable: Any, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()


def run(*arguments: str) -> int:
    return top.main([*arguments, "--interval", "0.1"])


def test_one_frame_has_the_numbers_of_server_info(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    looks = iter([80, 200, 200])
    asked = []

    def answers(path: str, headers: Any) -> Answer:
        asked.append(path)
        return 200, info(next(looks))

    with serving(answers) as url:
        assert run(url, "--once") == 0
    text = capsys.readouterr().out
    assert set(asked) == {"/server_info"}
    state = observed(some_records(200)).as_dict()
    assert "tiny" in text and "K = 4" in text
    rows = {row.strip("│ ").split("  ")[0]: row for row in text.splitlines()}
    assert f"{state['verify_length']:.2f}" in rows["verified"]
    assert f"{state['accept_length']:.2f}" in rows["accepted"]
    wasted = 100 * state["wasted_tokens"] / sum(state["verified_per_position"])
    assert f"{wasted:.0f} %" in rows["wasted"]
    # The first column is of the steps between the two looks.
    before = observed(some_records(80)).as_dict()
    recent = (state["verify_tokens"] - before["verify_tokens"]) / (state["requests"] - before["requests"])
    assert re.search(rf"verified +{recent:.2f} ", rows["verified"])
    trimmed = state["decisions"]["trimmed"] / sum(state["decisions"].values())
    assert f"{trimmed:.0%}" in rows["trimmed"]
    assert "32-63" in text and "fallbacks" not in text


def test_data_parallel_ranks_are_added_up():
    both = Sums.of(Snapshot(0.0, "m", [observed(some_records(n)).as_dict() for n in (30, 50)]))
    alone = [observed(some_records(n)).as_dict() for n in (30, 50)]
    assert both["steps"] == 80
    assert both.verified.tolist() == [
        a + b for a, b in zip(*(each["verified_per_position"] for each in alone), strict=True)
    ]
    weights = [each["calibration"]["drafts"] for each in alone]
    errors = [each["calibration"]["error"] for each in alone]
    expected = sum(w * e for w, e in zip(weights, errors, strict=True)) / sum(weights)
    assert view.calibration(alone, "error") == pytest.approx(expected)


def test_a_server_that_started_again_counts_from_nothing():
    old, new = (Sums.of(Snapshot(at, "m", [observed(some_records(n)).as_dict()])) for at, n in ((0.0, 90), (2.0, 20)))
    assert new.since(old)["steps"] == 20


@pytest.mark.parametrize("steps", [0, 1])
def test_a_server_that_has_hardly_done_anything_has_a_frame(steps):
    now = Snapshot(1.0, "m", [observed(some_records(steps)).as_dict()])
    text = shown(frame("http://x", now, Sums.of(now).since(Sums.of(now))))
    assert ("No decode step yet" in text) == (steps == 0)


def test_nothing_is_cut_in_a_terminal_of_80_columns():
    """With 7 drafts, the widest that the usual checkpoints have."""
    states = [observed(some_records(n)).as_dict() for n in (80, 200)]
    for state in states:
        state["verified_per_position"] = state["accepted_per_position"] = [state["drafted_tokens"]] * 7
        state["calibration"]["bias_per_position"] = [-0.13] * 7
    old, new = (Snapshot(at, "m", [state]) for at, state in zip((0.0, 2.0), states, strict=True))
    text = shown(frame("http://127.0.0.1:30000", new, Sums.of(new).since(Sums.of(old))), width=80)
    assert "…" not in text and text.count("-13%") == 7, text


def test_what_is_not_as_it_should_be_is_said():
    state = observed(some_records(10)).as_dict()
    state["fallbacks"]["no_cost_table"], state["ragged_verify"] = 7, False
    now = Snapshot(1.0, "[bold]m[/bold]", [state])
    text = shown(frame("http://x", now, None, "Nobody answers."))
    assert "7 x no cost table" in text and "nothing is trimmed" in text and "Nobody answers." in text
    assert "[bold]m[/bold]" in text, "a model's name is text, not markup"


def refusal(*arguments: str) -> str:
    with pytest.raises(AdaptiveError) as caught:
        run(*arguments)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 250
    return line


def test_nobody_answers():
    assert "Nobody answers at http://127.0.0.1:" in refusal(f"127.0.0.1:{free_port()}", "--once")


@pytest.mark.parametrize(
    "url", ["", "ftp://host", "http://", "http://[::1", "http://host:99999", "http://host:x", ":80"]
)
def test_what_is_no_url(url):
    assert "is not the URL of a server" in refusal(url)


def test_urls_may_be_short():
    assert base_url("localhost:30000") == "http://localhost:30000"
    assert base_url("https://host/path/") == "https://host/path"


@pytest.mark.parametrize(
    "status, text, says",
    [
        (200, json.dumps({"internal_states": [{}], "speculative_algorithm": "EAGLE"}), "runs EAGLE: start it with"),
        (200, json.dumps({"internal_states": [{}], "speculative_algorithm": None}), "does not speculate"),
        (200, json.dumps({"internal_states": [{"sglang_adaptive": {"steps": 1}}]}), "another release"),
        (200, "<html>a web page</html>", "not as an SGLang server does"),
        (200, "[1, 2]", "not as an SGLang server does"),
        (200, json.dumps({"internal_states": "x"}), "not as an SGLang server does"),
        (404, "no", "answers 404"),
        (500, "no", "answers 500"),
        (401, "no", "--api-key"),
    ],
)
def test_servers_that_have_nothing_to_show(status, text, says):
    with serving(lambda path, headers: (status, text)) as url:
        assert says in refusal(url, "--once")


def test_a_server_that_hangs(monkeypatch):
    monkeypatch.setattr(fetch, "TIMEOUT_SECONDS", 0.2)
    go_on = threading.Event()

    def hang(path: str, headers: Any) -> Answer:
        go_on.wait(10)
        return 200, ""

    with serving(hang) as url:
        assert "did not answer within" in refusal(url)
        go_on.set()


def test_the_key_is_sent():
    def answers(path: str, headers: Any) -> Answer:
        return (200, info(5)) if headers["Authorization"] == "Bearer secret" else (401, "")

    with serving(answers) as url:
        assert snapshot(url, "secret").model == "tiny"


@pytest.mark.parametrize("interval", ["0", "nan", "-1", "1e9"])
def test_an_interval_that_is_none(interval):
    with pytest.raises(AdaptiveError, match="--interval is"):
        top.main(["host", "--interval", interval])


def test_without_rich_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert refusal("host:1") == f"sglang_adaptive: {top.MISSING}"


def test_it_waits_for_a_server_that_is_away_and_ends_with_ctrl_c(monkeypatch):
    drawn: list[str] = []

    def ask() -> Snapshot:
        step = len(drawn)
        if step == 2:
            raise AdaptiveError("Nobody answers at http://x.")
        if step == 4:
            raise KeyboardInterrupt
        return Snapshot(float(step), "m", [observed(some_records(10 + step)).as_dict()])

    def draw(*arguments: Any) -> str:
        drawn.append(shown(frame(*arguments)))
        return drawn[-1]

    with pytest.raises(KeyboardInterrupt):
        top._watch(Console(file=io.StringIO()), "http://x", ask, 0.01, draw)
    assert "Waiting since" in drawn[2] and "Waiting since" not in drawn[3]


def test_the_command_and_its_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sglang_adaptive", "--help"])
    command.main()
    text = capsys.readouterr().out
    assert all(f"  {name}" in text for name in ("doctor", "top", "report"))
    monkeypatch.setattr(sys, "argv", ["sglang_adaptive", "tpo"])
    with pytest.raises(SystemExit, match="usage: python -m sglang_adaptive"):
        command.main()


def test_the_commands_start_without_torch_and_the_host():
    script = (
        "import sys, sglang_adaptive.observe.top, sglang_adaptive.observe.frame, sglang_adaptive.observe.report;"
        "print(sorted({'torch', 'sglang', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stderr
