"""Put on PYTHONPATH, this changes what a server's ranks see.

With ``ADAPTIVE_TEST_COSTS`` the profile times everything as always, but what it keeps is made up: tokens are dear. If
it is "narrow", drafts of K tokens are very dear, and shorter ones are not; if "narrow and whole", verified tokens cost
next to nothing, too.

With ``RANK_DRIFT_DIR`` (test_ranks.py) one tensor-parallel rank sees something else than the other: rank 1 hears other
confidences of its draft, profiles other step costs and measures other step times than rank 0. On rank 0 every token is
dear, on rank 1 tokens are free. Every rank writes down what it decided, step by step, into that folder.

Without these variables nothing is changed.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from typing import Any

FOLDER = os.environ.get("RANK_DRIFT_DIR")


def rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_rank


def milliseconds(tokens: int) -> float:
    """What a step of so many tokens costs, if one asks this rank."""
    return 20.0 + tokens if rank() == 0 else 20.0


def note(what: str, **values: Any) -> None:
    if not FOLDER:
        return
    with open(os.path.join(FOLDER, f"{what}-{rank()}.jsonl"), "a") as file:
        file.write(json.dumps(values) + "\n")


def drift_confidences(module: Any) -> None:
    original = module.DraftBlockProposer.propose

    def propose(self: Any, **kwargs: Any) -> Any:
        proposal = original(self, **kwargs)
        if proposal.confidence is not None and rank() == 1:
            note("fault", in_="confidence", heard=proposal.confidence.tolist())
            proposal.confidence.copy_(1 - proposal.confidence)
        return proposal

    module.DraftBlockProposer.propose = propose


def made_up(kind: str, count: int) -> float:
    return milliseconds(count) if kind == "verify" else 1.0 + count / 1000


def drift_profile(module: Any) -> None:
    def _time(self: Any, kind: str, count: int, kv_length: int) -> list[float]:
        note("fault", in_="profile", kind=kind, count=count)
        return [made_up(kind, count)] * module.REPLAYS

    assert hasattr(module._Timer, "_time"), "the profiler times its jobs elsewhere: move this fault there"
    module._Timer._time = _time


def dear_profile(module: Any) -> None:
    original = module._Timer._time
    print("tests: step costs are made up", file=sys.stderr, flush=True)

    def _time(self: Any, kind: str, count: int, kv_length: int) -> list[float]:
        times = original(self, kind, count, kv_length)
        assert times and min(times) > 0
        if kind == "always":  # the profile takes it off the draft's time
            return [0.0] * len(times)
        if kind == "draft" and os.environ["ADAPTIVE_TEST_COSTS"].startswith("narrow"):
            return [1.0 + count] * len(times)
        if kind == "verify" and os.environ["ADAPTIVE_TEST_COSTS"] == "narrow and whole":
            return [20.0 + count / 1000] * len(times)
        return [made_up(kind, count)] * len(times)

    module._Timer._time = _time


def drift_clock_and_record(module: Any) -> None:
    publish, count, collect = module.StepRelay.publish, module.StepRelay.count, module.StepRelay.collect

    def noted(**values: Any) -> None:
        lens, confidence, decision = values.get("verify_lens"), values.get("confidence"), values["decision"]
        slots = values.get("slots")
        note(
            "steps",
            iteration=values["iteration"],
            slots=None if slots is None else slots.tolist(),
            draft=decision.draft,
            uniform=decision.uniform,
            budget=decision.budget,
            verify_lens=None if lens is None else lens.tolist(),
            confidence=None if confidence is None else confidence.tolist(),
        )

    def published(self: Any, **values: Any) -> None:
        noted(**values)
        publish(self, **values)

    def counted(self: Any, **values: Any) -> None:
        noted(**values)
        count(self, **values)

    def collected(self: Any, iteration: int) -> list[Any]:
        records = []
        for record in collect(self, iteration):
            ms = None if record.step_ms is None else milliseconds(int(record.verify_lens.sum()))
            note("fault", in_="clock", measured=record.step_ms, said=ms)
            records.append(dataclasses.replace(record, step_ms=ms))
        return records

    module.StepRelay.publish, module.StepRelay.count, module.StepRelay.collect = published, counted, collected


FAULTS: dict[str, Callable[[Any], None]] = {
    "sglang.srt.speculative.dspark_components.dspark_draft": drift_confidences,
    "sglang_adaptive.runtime.profiler": drift_profile,
    "sglang_adaptive.runtime.relay": drift_clock_and_record,
}


if not FOLDER:
    FAULTS = {"sglang_adaptive.runtime.profiler": dear_profile}


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the usual finders find a module, and applies its fault once it has been executed."""

    of_adaptive_tests = True

    def __init__(self) -> None:
        self._busy = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in FAULTS or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy = False
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            FAULTS[name](module)

        spec.loader.exec_module = exec_module
        return spec


# A child that is a fork of a warm interpreter runs this file a second time.
_there = any(getattr(finder, "of_adaptive_tests", False) for finder in sys.meta_path)
if not _there and (FOLDER or os.environ.get("ADAPTIVE_TEST_COSTS")):
    sys.meta_path.insert(0, _Finder())
