"""Golden step tables: what the engine does, step by step, on small scenarios that read like a story.

Each line is one decode step: the live requests with this step's confidences (K = 3; ``x`` is no number, ``A-H`` are
eight requests alike), the mixed prefill tokens, and then what must come out: the budget, the tier that the step is
padded to, each request's verify length (1 + drafts), and why. The budget is sized from the confidences of two steps
ago, as under overlap; a request that had none then is new, and trusted here. The lengths follow this step's
confidences. A request is known by its name: it may change its place in the batch.
"""

import numpy as np
import pytest
import torch

from sglang_adaptive.policy import budget, explore, saturation
from sglang_adaptive.policy.allocation import allocate
from sglang_adaptive.policy.cost import CostModel, VerifySample
from sglang_adaptive.policy.engine import Engine, PolicyConfig
from sglang_adaptive.policy.saturation import SkipRules

K = 3
LAG = 2

# Time in ms of the captured graphs by their tokens. Up to 8 all but free, then steep. The drafter takes 1 ms.
STAIRS = {4: 10.0, 8: 10.05, 12: 14.0, 16: 20.0, 24: 32.0, 32: 44.0}
DRAFT_MS = 1.0

WHY = {
    budget.NO_TABLE: "no table",
    budget.LOW_LOAD: "low load",
    budget.ALL_WORTH: "all worth it",
    budget.SMALL_GAIN: "small gain",
    budget.TRIMMED: "trimmed",
    explore.EXPLORE: "explore",
    saturation.SATURATED: "saturated",
    saturation.PROBE: "probe",
}

# Two requests fill 8 tokens, which cost as much as 4. C and D join and are trusted: 12 tokens. Then D's and B's weak
# drafts are known, and 8 tokens are the better bargain. The rows change places at step 7, nobody's history does. At
# step 8 the live confidences of A collapse: its slots go to B in the same step. A and B finish, C stays alone.
LOAD_RISES_AND_FALLS = """
 step | requests and confidences                       | prefill | budget | tier | lengths     | why
 1    | A .9 .8 .7                                     | 0       | 3      | 4    | A4          | low load
 2    | A .9 .8 .7, B .6 .3 .2                         | 0       | 6      | 8    | A4 B4       | low load
 3    | A .9 .8 .7, B .6 .3 .2                         | 0       | 6      | 8    | A4 B4       | low load
 4    | A .9 .8 .7, B .6 .3 .2, C .9 .9 .9, D .3 .2 .1 | 0       | 8      | 12   | A4 B2 C4 D2 | trimmed
 5    | A .9 .8 .7, B .6 .3 .2, C .9 .9 .9, D .3 .2 .1 | 0       | 8      | 12   | A4 B2 C4 D2 | trimmed
 6    | A .9 .8 .7, B .6 .3 .2, C .9 .9 .9, D .3 .2 .1 | 0       | 4      | 8    | A2 B1 C4 D1 | trimmed
 7    | D .3 .2 .1, C .9 .9 .9, B .6 .3 .2, A .9 .8 .7 | 0       | 4      | 8    | D1 C4 B1 A2 | trimmed
 8    | D .3 .2 .1, C .9 .9 .9, B .6 .3 .2, A .2 .2 .2 | 0       | 4      | 8    | D1 C4 B2 A1 | trimmed
 9    | D .3 .2 .1, C .9 .9 .9, B .6 .3 .2, A .2 .2 .2 | 0       | 4      | 8    | D1 C4 B2 A1 | trimmed
 10   | C .9 .9 .9, D .3 .2 .1                         | 0       | 6      | 8    | C4 D4       | low load
 11   | C .9 .9 .9                                     | 0       | 3      | 4    | C4          | low load
"""

# A's second confidence is no number from step 3 on: A keeps its first draft, the others theirs.
A_BROKEN_CONFIDENCE = """
 step | requests and confidences                       | prefill | budget | tier | lengths     | why
 1    | A .9 .8 .7, B .6 .3 .2, C .9 .9 .9, D .3 .2 .1 | 0       | 8      | 12   | A4 B2 C4 D2 | trimmed
 2    | A .9 .8 .7, B .6 .3 .2, C .9 .9 .9, D .3 .2 .1 | 0       | 8      | 12   | A4 B2 C4 D2 | trimmed
 3    | A .9 x .7, B .6 .3 .2, C .9 .9 .9, D .3 .2 .1  | 0       | 4      | 8    | A2 B1 C4 D1 | trimmed
 4    | A .9 x .7, B .6 .3 .2, C .9 .9 .9, D .3 .2 .1  | 0       | 4      | 8    | A2 B1 C4 D1 | trimmed
 5    | A .9 x .7, B .6 .3 .2, C .9 .9 .9, D .3 .2 .1  | 0       | 4      | 8    | A2 B1 C4 D1 | trimmed
"""

# Mixed prefill takes the cheap tier's room (step 4), pays for a larger one (step 5), leaves room for all in one that it
# needs anyway (step 6), and goes beyond the largest graph (step 7), where the padding ends and every token counts.
PREFILL_MIXED_IN = """
 step | requests and confidences | prefill | budget | tier | lengths | why
 1    | A .9 .8 .7, B .6 .3 .2   | 0       | 6      | 8    | A4 B4   | low load
 2    | A .9 .8 .7, B .6 .3 .2   | 0       | 6      | 8    | A4 B4   | low load
 3    | A .9 .8 .7, B .6 .3 .2   | 0       | 6      | 8    | A4 B4   | low load
 4    | A .9 .8 .7, B .6 .3 .2   | 3       | 3      | 8    | A3 B2   | trimmed
 5    | A .9 .8 .7, B .6 .3 .2   | 9       | 5      | 16   | A4 B3   | trimmed
 6    | A .9 .8 .7, B .6 .3 .2   | 22      | 6      | 32   | A4 B4   | all worth it
 7    | A .9 .8 .7, B .6 .3 .2   | 29      | 5      | 36   | A4 B3   | trimmed
"""

# D's tokens count eight times: its .3 goes before everybody's .9, its .06 does not.
PRIORITY = """
 step | requests and confidences                       | prefill | budget | tier | lengths     | why
 1    | A .9 .8 .7, B .6 .3 .2, C .9 .9 .9, D .3 .2 .1 | 0       | 4      | 8    | A2 B1 C3 D2 | trimmed
 2    | A .9 .8 .7, B .6 .3 .2, C .9 .9 .9, D .3 .2 .1 | 0       | 4      | 8    | A2 B1 C3 D2 | trimmed
 3    | A .9 .8 .7, B .6 .3 .2, C .9 .9 .9, D .3 .2 .1 | 0       | 4      | 8    | A2 B1 C3 D2 | trimmed
"""

# An expensive drafter and hopeless drafts. Eight requests are few: what their first, trusted steps promised fades over
# some steps. Then no drafts but for a probe of three steps after 4 skipped ones and after 8 more. The second probe
# finds good drafts.
SATURATION = """
 step | requests and confidences | prefill | budget | tier | lengths | why
 1    | A-H .05 .05 .05          | 0       | 24     | 32   | all 4   | all worth it
 2    | A-H .05 .05 .05          | 0       | 24     | 32   | all 4   | all worth it
 3    | A-H .05 .05 .05          | 0       | 0      | 8    | all 1   | trimmed
 4    | A-H .05 .05 .05          | 0       | 0      | 8    | all 1   | trimmed
 5    | A-H .05 .05 .05          | 0       | 0      | 8    | all 1   | trimmed
 6    | A-H .05 .05 .05          | 0       | 0      | 8    | all 1   | trimmed
 7    | A-H .05 .05 .05          | 0       | 0      | 8    | all 1   | trimmed
 8    | A-H .05 .05 .05          | 0       | 0      | 8    | all 1   | saturated
 9    | A-H .05 .05 .05          | 0       | 0      | 8    | all 1   | saturated
 10   | A-H .05 .05 .05          | 0       | 0      | 8    | all 1   | saturated
 11   | A-H .05 .05 .05          | 0       | 0      | 8    | all 1   | saturated
 12   | A-H .05 .05 .05          | 0       | 0      | 8    | all 1   | probe
 13   | A-H .05 .05 .05          | 0       | 0      | 8    | all 1   | probe
 14   | A-H .05 .05 .05          | 0       | 0      | 8    | all 1   | probe
 15   | A-H .05 .05 .05          | 0       | 0      | 8    | all 1   | saturated
 16   | A-H .05 .05 .05          | 0       | 0      | 8    | all 1   | saturated
 17   | A-H .05 .05 .05          | 0       | 0      | 8    | all 1   | saturated
 18   | A-H .05 .05 .05          | 0       | 0      | 8    | all 1   | saturated
 19   | A-H .05 .05 .05          | 0       | 0      | 8    | all 1   | saturated
 20   | A-H .9 .9 .9             | 0       | 0      | 8    | all 1   | saturated
 21   | A-H .9 .9 .9             | 0       | 0      | 8    | all 1   | saturated
 22   | A-H .9 .9 .9             | 0       | 0      | 8    | all 1   | saturated
 23   | A-H .9 .9 .9             | 0       | 0      | 8    | all 1   | probe
 24   | A-H .9 .9 .9             | 0       | 24     | 32   | all 4   | probe
 25   | A-H .9 .9 .9             | 0       | 24     | 32   | all 4   | probe
 26   | A-H .9 .9 .9             | 0       | 24     | 32   | all 4   | all worth it
 27   | A-H .9 .9 .9             | 0       | 24     | 32   | all 4   | all worth it
 28   | A-H .9 .9 .9             | 0       | 24     | 32   | all 4   | all worth it
"""

NO_TABLE = """
 step | requests and confidences | prefill | budget | tier | lengths | why
 1    | D .3 .2 .1, A .3 .2 .1   | 0       | 6      | 8    | D4 A4   | no table
 2    | D .3 .2 .1, A .3 .2 .1   | 0       | 6      | 8    | D4 A4   | no table
 3    | D .3 .2 .1, A .3 .2 .1   | 0       | 6      | 8    | D4 A4   | no table
"""

SCENARIOS = {
    "load rises and falls": (LOAD_RISES_AND_FALLS, {}),
    "a broken confidence": (A_BROKEN_CONFIDENCE, {}),
    "prefill mixed in": (PREFILL_MIXED_IN, {}),
    "priority": (PRIORITY, {"weights": {"A": 1.0, "B": 1.0, "C": 1.0, "D": 8.0}}),
    "saturation": (
        SATURATION,
        {
            "stairs": {8: 20.0, 16: 22.0, 24: 24.0, 32: 26.0},
            "draft_ms": 12.0,
            "skip_draft": True,
            "skip": SkipRules(patience=2, probe_steps=3, first_interval=4, last_interval=16),
        },
    ),
    "no table": (NO_TABLE, {"stairs": {}}),
}


def steps(table):
    for text in table.strip().splitlines()[1:]:
        step, requests, prefill, *wanted = (cell.strip() for cell in text.split("|"))
        live = {}
        for request in requests.split(","):
            names, *values = request.split()
            for code in range(ord(names[0]), ord(names[-1]) + 1):
                live[chr(code)] = [float("nan") if v == "x" else float(v) for v in values]
        yield step, live, int(prefill), wanted


def play(table, stairs=STAIRS, draft_ms=DRAFT_MS, weights=None, **settings):
    """Yields per step the cells that must come out, and those that do."""
    cost = CostModel.from_samples(
        [VerifySample(tokens, 0, ms) for tokens, ms in stairs.items()],
        [(1, draft_ms)],
        capture_limit=max(stairs, default=None),
    )
    plain = {"calibrate": False, "correct_costs": False, "skip_draft": False, "trust_new": True}
    config = PolicyConfig(**{**plain, **settings})
    policy, past = Engine(config, cost, K), []
    for step, live, prefill, wanted in steps(table):
        stale = past[-LAG] if len(past) >= LAG else {}
        seen = np.array([stale.get(name, [0.0] * K) for name in live])
        fresh = np.array([name in stale for name in live])
        shares = None if weights is None else np.array([weights[name] for name in live])
        anchors = len(live) + prefill
        decision = policy.size(
            seen, requests=len(live), non_draft_tokens=anchors, kv_tokens=0.0, fresh=fresh, weights=shares
        )
        now = np.array(list(live.values()))
        lengths = allocate(
            torch.tensor(now, dtype=torch.float32),
            decision.budget,
            weights=None if shares is None else torch.tensor(shares, dtype=torch.float32),
        )
        policy.observe(
            requests=len(live),
            non_draft_tokens=anchors,
            draft_tokens=decision.budget,
            kv_tokens=0.0,
            committed_tokens=len(live),
            drafted=decision.draft,
            confidence=now if decision.draft else None,
        )
        past.append(live if decision.draft else stale)
        got = [
            str(decision.budget),
            str(cost.tier(anchors + decision.budget)),
            shown(list(live), lengths.tolist()),
            WHY[decision.reason],
        ]
        yield step, wanted, got


def shown(names, lengths):
    if len(names) > 4 and len(set(lengths)) == 1:
        return f"all {lengths[0]}"
    return " ".join(f"{name}{length}" for name, length in zip(names, lengths, strict=True))


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name):
    table, settings = SCENARIOS[name]
    for step, wanted, got in play(table, **settings):
        assert got == wanted, f"{name}, step {step}"
