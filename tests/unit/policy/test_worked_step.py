"""The worked step of sglang_adaptive/policy/README.md is what the code computes."""

from pathlib import Path

import numpy as np
import torch

from sglang_adaptive import policy
from sglang_adaptive.policy.allocation import allocate
from sglang_adaptive.policy.budget import TRIMMED, size_budget
from sglang_adaptive.policy.cost import CostModel, VerifySample
from sglang_adaptive.policy.survival import survival

PAGE = (Path(policy.__path__[0]) / "README.md").read_text()
CONFIDENCES = {"A": [0.9, 0.8, 0.7], "B": [0.6, 0.3, 0.2], "C": [0.9, 0.9, 0.9], "D": [0.3, 0.2, 0.1]}
STAIRS = {4: 10.0, 8: 10.05, 12: 14.0, 16: 20.0}


def test_the_page_shows_what_the_code_decides():
    confidence = np.array(list(CONFIDENCES.values()))
    alive = survival(confidence)
    for name, given, product in zip(CONFIDENCES, confidence, alive, strict=True):
        row = f"| {name} | {', '.join(f'{c:g}' for c in given)} | {', '.join(f'{s:.3f}' for s in product)} |"
        assert row in PAGE

    samples = [VerifySample(tokens, 0.0, ms) for tokens, ms in STAIRS.items()]
    cost = CostModel.from_samples(samples, [(requests, 1.0) for requests in (1, 4)], capture_limit=16)
    falling = np.sort(alive, axis=None)[::-1]
    for budget in (0, 4, 8, 12):
        output, ms = 4 + falling[:budget].sum(), cost.point_ms(4, 4 + budget, 4 + budget, 0.0)
        assert f"| {budget} | {4 + budget} | {output:.3f} | {ms:.2f} | {output / ms:.3f} |" in PAGE

    decision = size_budget(alive, cost, 4, 0.0, min_gain=0.01)
    assert (decision.budget, decision.reason) == (4, TRIMMED) and "B = 4 wins" in PAGE
    lengths = allocate(torch.tensor(confidence, dtype=torch.float32), decision.budget)
    shown = [f"{name} {length}" for name, length in zip(CONFIDENCES, lengths.tolist(), strict=True)]
    assert ", ".join(shown) in PAGE.replace("\n", " ")
