"""How the shipped cost tables come about: ``python -m sglang_adaptive.benchmarks.simulator.derive`` writes them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from sglang_adaptive.benchmarks.simulator.tables import FOLDER
from sglang_adaptive.policy.cost import CostModel

# vLLM 0.33, DeepSeek-V4-Pro on 8 B300, aggregate tokens/s at these concurrencies.
CONCURRENCY = (1, 16, 32, 64, 128, 256)
PUBLISHED = {
    "adaptive": (269, 2037, 3361, 5197, 7417, 9719),
    "best fixed K": (258, 1939, 3112, 4931, 7402, 9728),
    "fixed 7": (251, 1878, 2939, 4611, 6250, 7609),
    "none": (101, 1124, 1664, 2774, 4406, 6323),
}
# Tokens per request and step with 7 drafts. Not published; it is the value at which the two published series agree on
# what a step of 128 and of 256 tokens costs.
ACCEPTED_WITH_7 = 3.6
V4_DRAFT_MS = 1.5

# Qwen3-8B in bf16 on one H200.
WEIGHT_BYTES = 16.4e9
BYTES_PER_MS = 4.3e9
FLOP_PER_MS = 790e9
KV_BYTES_PER_TOKEN = 2 * 8 * 128 * 36 * 2
DRAFTER_WEIGHT_BYTES = 2.2e9
STEP_OVERHEAD_MS = 0.3

_NO_INTS, _NO_FLOATS = np.zeros(0, np.int64), np.zeros(0)


def tiers(largest: int = 8192, smallest: int = 8) -> np.ndarray:
    """Graph sizes like a server's: 1, 2, 4, then steps of 8 that double with every power of two from 256 on."""
    sizes = [size for size in (1, 2, 4) if size < smallest]
    size = smallest
    while size <= largest:
        sizes.append(size)
        size += max(8, 1 << max(0, int(size).bit_length() - 5))
    return np.array(sizes, np.int64)


def v4_pro() -> tuple[CostModel, dict[str, str]]:
    """Step times that reproduce the published throughputs.

    Without speculation a step at concurrency c verifies c tokens and yields c: C(c) = c / none. With 7 drafts it
    verifies 8 c tokens and yields c * ACCEPTED_WITH_7: C(8 c) = c * ACCEPTED_WITH_7 / fixed7 - V4_DRAFT_MS. Where both
    say something, their mean; then the cumulative maximum, and lines between the points.
    """
    points: dict[int, list[float]] = {}
    for c, none, fixed in zip(CONCURRENCY, PUBLISHED["none"], PUBLISHED["fixed 7"], strict=True):
        points.setdefault(c, []).append(1e3 * c / none)
        points.setdefault(8 * c, []).append(1e3 * c * ACCEPTED_WITH_7 / fixed - V4_DRAFT_MS)
    known = sorted(points)
    ms = np.maximum.accumulate([float(np.mean(points[tokens])) for tokens in known])
    at = tiers(smallest=8)
    beyond = (ms[-1] - ms[-2]) / (known[-1] - known[-2]) * np.maximum(at - known[-1], 0)
    return _model(at, np.zeros(1), (np.interp(at, known, ms) + beyond)[:, None], [(1, V4_DRAFT_MS)]), {
        "table": "DeepSeek-V4-Pro on 8 B300, DSpark with 7 drafts",
        "origin": "derived from throughputs that vLLM published for its release 0.33; nothing here was measured by us",
        "assumptions": f"{ACCEPTED_WITH_7} tokens per request and step with 7 drafts (not published; at this value the "
        f"two series agree on steps of 128 and 256 tokens); drafting takes {V4_DRAFT_MS} ms at any load; cost depends "
        "on tokens only, the context is in it as it was; straight lines between the points, and on beyond 2,048 tokens",
    }


def qwen3_8b_roofline() -> tuple[CostModel, dict[str, str]]:
    """max(weights / bandwidth, 2 * parameters * tokens / compute) + KV / bandwidth, and a fixed overhead."""
    parameters, at = WEIGHT_BYTES / 2, tiers()
    kv = np.array([0.0, 1 << 16, 1 << 18, 1 << 20])
    compute = 2 * parameters * at / FLOP_PER_MS
    verify = np.maximum(WEIGHT_BYTES / BYTES_PER_MS, compute)[:, None] + kv * KV_BYTES_PER_TOKEN / BYTES_PER_MS
    drafter = DRAFTER_WEIGHT_BYTES / 2
    draft = [
        (r, max(DRAFTER_WEIGHT_BYTES / BYTES_PER_MS, 2 * drafter * 8 * r / FLOP_PER_MS) + 0.1)
        for r in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    ]
    return _model(at, kv, verify, draft, STEP_OVERHEAD_MS), {
        "table": "Qwen3-8B in bf16 on one H200, DSpark with 7 drafts",
        "origin": "computed from a roofline, not measured",
        "assumptions": "16.4 GB of weights at 4.3 TB/s, 790 TFLOP/s, 147,456 bytes of KV per token read at 4.3 TB/s; a "
        "drafter of 1.1 billion parameters run once over 8 positions; 0.3 ms of overhead per step; perfect overlap of "
        "memory and compute",
    }


def _model(
    at: np.ndarray, kv: np.ndarray, ms: np.ndarray, draft: list[tuple[int, float]], overhead: float = 0.0
) -> CostModel:
    requests, times = np.array([r for r, _ in draft], np.int64), np.array([time for _, time in draft])
    digits = 4
    return CostModel(
        at, kv, np.round(ms, digits), requests, np.round(times, digits), _NO_INTS, _NO_FLOATS, overhead, int(at[-1])
    )


DERIVED = {"v4-pro-8xb300": v4_pro, "qwen3-8b-h200-roofline": qwen3_8b_roofline}


def write(folder: Path = FOLDER) -> None:
    """Write the derived tables; the measured one is data and stays."""
    for name, derive in DERIVED.items():
        model, key = derive()
        model.save(folder / f"{name}.json", key)


if __name__ == "__main__":
    sys.exit(write())
