"""Train an EAGLE3 draft for a Llama-type target in minutes on one GPU, from nothing but the target itself.

``python -m sglang_adaptive.benchmarks train_eagle3 --target DIR --out DIR --minutes 2.5 --prompts prompts.jsonl``
writes a checkpoint that SGLang serves with ``--speculative-algorithm EAGLE3``, the same in 8 bits (draft.gguf, which
launch/models.py can unpack), and METRICS.json. ``--minutes`` bounds everything: the start, the conversations that the
target writes, the training on them, and the measurement of acceptance on held-out ones and on the answers to the given
prompts. A SIGTERM or SIGINT ends the stage that runs; a checkpoint is written all the same.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOY = {
    "device": "cpu", "minutes": 2.0, "sequences": 40, "held_out": 8, "gen_batch": 40, "length": 96, "user_room": 10,
    "batch": 4, "max_steps": 40, "warmup": 4, "draft_vocab": 2048,
}  # fmt: skip


class Budget:
    """A clock that started at ``begin`` (``time.monotonic()``) and ends after ``minutes`` or when a signal comes."""

    def __init__(self, minutes: float, begin: float) -> None:
        self.begin, self.end, self.stopped = begin, begin + 60 * minutes, False

    def listen(self) -> None:
        """Take SIGTERM and SIGINT as the wish to finish early."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def _stop(self, number: int, _: Any) -> None:
        self.stopped = True
        self.say(f"signal {number}: finishing")

    def share(self, part: float) -> float:
        """The time at which ``part`` of what is left now will have passed."""
        now = time.monotonic()
        return now + part * max(0.0, self.end - now)

    def over(self, at: float | None = None) -> bool:
        """Whether the time ``at`` (the end) has passed, or a signal came."""
        return self.stopped or time.monotonic() >= (self.end if at is None else at)

    def say(self, text: str) -> None:
        """A line of progress with the seconds since the start."""
        print(f"[{time.monotonic() - self.begin:6.1f} s] {text}", flush=True)


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The options; those of the toy run are replaced only where they are not given."""
    parser = argparse.ArgumentParser(prog="python -m sglang_adaptive.benchmarks train_eagle3", description=__doc__)
    add = parser.add_argument
    add(
        "--target",
        type=Path,
        required=True,
        help="folder of the target: a Llama checkpoint with tokenizer and chat template",
    )
    add("--out", type=Path, required=True, help="folder of the checkpoint")
    add("--minutes", type=float, default=2.5, help="for everything, from the start of the process")
    add(
        "--prompts",
        type=Path,
        help="lines of {source, text}: acceptance is measured on their answers too, never trained on",
    )
    add("--toy", action="store_true", help="small sizes: the whole way on a CPU in two minutes")
    add("--device", help="cuda where there is one, else cpu")
    add(
        "--layer-ids",
        type=int,
        nargs="+",
        help="layers whose outputs the draft reads; default 1, the middle, the last but one",
    )
    add("--draft-vocab", type=int, default=8192, help="the most frequent tokens that the draft can say")
    add("--steps", type=int, default=5, help="draft steps of the training-time test, and those measured")
    add("--fade", type=float, default=0.85, help="weight of a draft step against the one before")
    add("--sequences", type=int, default=16384, help="conversations to train on at most")
    add("--held-out", type=int, default=128, help="conversations of the target's own to measure on")
    add("--data-share", type=float, default=0.33, help="of the time left after the start, for the conversations")
    add("--gen-batch", type=int, default=2048, help="conversations written at a time")
    add("--length", type=int, default=512, help="tokens of a conversation at most")
    add("--user-room", type=int, default=96, help="tokens of the user's turn at most")
    add("--batch", type=int, default=32, help="conversations of a training step")
    add(
        "--rate",
        type=float,
        default=1e-3,
        help="highest learning rate; it rises over --warmup steps, then falls as a cosine",
    )
    add("--warmup", type=int, default=40)
    add("--max-steps", type=int, default=10**6)
    add("--every", type=float, default=4.0, help="seconds between lines of progress")
    add("--seed", type=int, default=0)
    if "--toy" in argv:
        parser.set_defaults(**TOY)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = arguments(argv)
    budget = Budget(args.minutes, time.monotonic())
    budget.listen()
    budget.say("importing torch")
    from sglang_adaptive.benchmarks import eagle3_training  # after the clock has started: it takes seconds

    eagle3_training.run(args, budget)
    return 0
