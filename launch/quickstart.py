"""Serve a model without and with DSPARK_ADAPTIVE, ask both the same questions at once, and compare.

Usage: ``bash launch/quickstart.sh`` installs what is needed first. With an environment of your own:
``python -m sglang_adaptive.launch.quickstart [--target DIR --draft DIR]``.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang_adaptive import ALGORITHM
from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.launch import comparison, models
from sglang_adaptive.launch.client import Client, RequestFailed
from sglang_adaptive.launch.process import ServerFailed, ServerProcess
from sglang_adaptive.launch.progress import BEAT_SECONDS, busy, say

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "List three primary colors.",
    "Explain why the sky is blue in one sentence.",
    "Count from one to ten.",
    "Translate 'good morning' into Spanish.",
    "Write a haiku about the sea.",
    "Give me a recipe for pancakes.",
)
ACTIVE_SECONDS = 60.0
# What a server's log says, in the order of a start, and what it does from then on.
STAGES = (
    ("", "importing SGLang"),
    ("server_args=", "reading the model's files"),
    ("Using default HuggingFace chat template", "starting the process that runs the model"),
    ("Load weight begin", "loading weights"),
    ("Memory pool end", "preparing the first step"),
    ("CUDA graph begin", "capturing CUDA graphs"),
    ("sglang_adaptive: profiling step costs", "measuring what steps cost on this machine"),
    ("Uvicorn running", "answering a first request of its own"),
)


class Failed(Exception):
    """The quickstart did not show what it should; the message says what."""


def stage(log: str) -> str:
    """What a server that is starting does now, by what its log said last."""
    return max(STAGES, key=lambda each: log.rfind(each[0]) if each[0] else -0.5)[1]


def log_file(name: str, options: argparse.Namespace) -> Path:
    return options.cache_dir / "logs" / f"quickstart-{name.replace(' ', '-')}.log"


@contextmanager
def serving(name: str, arguments: list[str], options: argparse.Namespace) -> Iterator[ServerProcess]:
    """A ready server; its output goes to a file in the cache folder."""
    log = log_file(name, options)
    say(f"Starting the server {name}; its log: {log}")
    beats = [BEAT_SECONDS]

    def beat(elapsed: float) -> None:
        if elapsed >= beats[-1]:
            beats.append(beats[-1] + BEAT_SECONDS)
            say(f"  {elapsed:.0f} s: {stage(server.log_text())}")

    with ServerProcess(["--model-path", str(options.target), *arguments], log, python=options.python) as server:
        seconds = server.wait_ready(options.start_seconds, beat)
        say(f"  ready after {seconds:.0f} s")
        try:
            yield server
        finally:
            say(f"Stopping the server {name}")


def ask(client: Client, options: argparse.Namespace, what: str, **extra: Any) -> tuple[list, comparison.Answers]:
    """Ask all questions at once: the replies and what they come to."""
    with busy(f"  {what}"):
        begin = time.monotonic()
        replies = client.chat(options.questions, options.max_tokens, temperature=0.0, **extra)
        return replies, comparison.answers_of(replies, time.monotonic() - begin)


def wait_active(client: Client) -> None:
    """Wait until every rank has recorded that the plugin is active. Raises Failed after a minute."""
    deadline = time.monotonic() + ACTIVE_SECONDS
    while True:
        info = client.server_info()
        states = [state.get("sglang_adaptive") or {} for state in info["internal_states"]]
        ranks = [rank for state in states for rank in state.get("ranks", ())]
        wanted = info["tp_size"] * len(states)
        if states and len(ranks) >= wanted and all(rank["active"] for rank in ranks):
            where = ", ".join(f"rank {rank['rank']} in process {rank['pid']}" for rank in ranks)
            say(f"  {ALGORITHM} is active on every tensor-parallel rank: {where}")
            return
        if time.monotonic() > deadline:
            raise Failed(f"only {len(ranks)} of {wanted} ranks have recorded that {ALGORITHM} is active: {states}")
        time.sleep(0.5)


def run(options: argparse.Namespace) -> None:
    """Everything, in order. Raises Failed when a check does not hold."""
    plain_name, adaptive_name = "without speculation", f"with {ALGORITHM}"
    speculative = ["--speculative-algorithm", ALGORITHM, "--speculative-draft-model-path", str(options.draft)]
    say(f"Serving {options.target} twice: {plain_name}, then {adaptive_name} and the draft {options.draft}.")
    say(f"Both get the same {len(options.questions)} questions, all at once and in two rounds; answers are greedy.")
    with serving(plain_name, [], options) as server:
        reference, _ = ask(
            server.client, options, "round 1, warms up and gives the reference", logprobs=True, top_logprobs=5
        )
        _, plain = ask(server.client, options, "round 2, timed")
        info = server.client.server_info()

    with serving(adaptive_name, speculative, options) as server:
        wait_active(server.client)
        _, warm = ask(server.client, options, "round 1, warms up")
        before = server.client.adaptive_states()
        _, adaptive = ask(server.client, options, "round 2, timed")
        after = server.client.adaptive_states()

    counters = comparison.since(before[0], after[0])
    print(f"\nQuestions, and the answers {adaptive_name} (cut after {options.max_tokens} tokens):")
    print(f"{comparison.dialogue(options.questions, adaptive.texts)}\n\nRound 2, timed:")
    print(f"{comparison.table(plain, adaptive, counters)}\n\n{comparison.explanation(info)}\n")
    if not counters["steps"]:
        raise Failed(f"the worker of {ALGORITHM} has counted no decode step")
    if not all(text.strip() for text in adaptive.texts):
        raise Failed("an answer is empty")
    dtype = info["dtype"]
    _compare_texts(reference, (warm, adaptive), comparison.TIE_NATS.get(dtype, comparison.HALF_PRECISION_TIE_NATS))
    command = [options.python, "-m", "sglang.launch_server", "--model-path", str(options.target), *speculative]
    print(f"\nThe servers' logs: {log_file(plain_name, options)}\n{'':19}{log_file(adaptive_name, options)}")
    print(f"To serve it yourself:\n  {shlex.join(command)}")


def _compare_texts(reference: list, runs: tuple[comparison.Answers, ...], tie_nats: float) -> None:
    """Print whether the greedy texts are those without speculation. Raises Failed when one is not."""
    verdicts = []
    for answers in runs:
        for number, (text, reply) in enumerate(zip(answers.texts, reference, strict=True), 1):
            choice = reply["choices"][0]
            verdict = comparison.judge(text, choice["message"]["content"], choice["logprobs"]["content"], tie_nats)
            verdicts.append(verdict)
            if not verdict.same:
                print(f"  answer {number}: {verdict.why}")
    same, ties = sum(verdict.same for verdict in verdicts), sum(verdict.tie for verdict in verdicts)
    suffix = f"; {ties} more part from them at a rounding tie" if ties else ""
    print(
        f"Answers with {ALGORITHM} that equal those without speculation, letter for letter: {same} of {len(verdicts)} "
        f"({len(reference)} questions, {len(runs)} rounds){suffix}"
    )
    if same + ties < len(verdicts):
        raise Failed("speculation changed a greedy text")


def _lines(file: str) -> list[str]:
    try:
        lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{file} cannot be read: {error}") from error
    if not lines:
        raise argparse.ArgumentTypeError(f"{file} holds no question")
    return lines


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, help="folder of the target (default: SmolLM2-135M-Instruct, prepared)")
    parser.add_argument("--draft", type=Path, help="folder of its DSpark draft (default: the bundled one)")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the servers (default: this one)")
    parser.add_argument("--questions", type=_lines, default=QUESTIONS, help="file with one a line (default: our own)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each answer (default: %(default)s)")
    parser.add_argument("--start-seconds", type=float, default=900, help="limit for a server's start")
    parser.add_argument("--cache-dir", type=Path, default=models.default_cache_dir(), help="default: %(default)s")
    options = parser.parse_args()
    if (options.target is None) != (options.draft is None):
        parser.error("--target and --draft belong together: a draft is trained for one target")
    return options


def main() -> None:
    # Turn a request to end into an exception, so that the servers are stopped on the way out.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit("error: terminated"))
    options = _options()
    try:
        if options.target is None:
            options.target = models.smollm2(options.cache_dir)
            options.draft = models.smollm2_dspark(options.cache_dir)
        run(options)
    except (AdaptiveError, Failed, RequestFailed, ServerFailed, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("error: interrupted")
    say("The quickstart has passed.")


if __name__ == "__main__":
    main()
