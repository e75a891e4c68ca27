"""The kernel of the allocation against the policy's: prints one JSON object, the complaint of each claim or none.

Run by itself: on a CPU with TRITON_INTERPRET=1, on a GPU without it, where more is tried and the costs are measured.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from launch_costs import launches, microseconds

from sglang_adaptive.policy.allocation import allocate as policys
from sglang_adaptive.policy.allocation import allocate_reference
from sglang_adaptive.policy.config import PolicyConfig
from sglang_adaptive.policy.logistic import LOGIT_LIMIT
from sglang_adaptive.runtime import allocation_kernel
from sglang_adaptive.runtime.allocation_kernel import MOST_DRAFTS, MOST_REQUESTS
from sglang_adaptive.runtime.compiled_allocation import compiled_allocation, serving_allocation

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# Interpreted, a call takes 50 ms: few are made, and none to make a failing example smaller.
EXAMPLES = 40 if DEVICE == "cpu" else 2000
TRIED = settings(max_examples=EXAMPLES, deadline=None, database=None, phases=[Phase.generate])
# Few distinct values make ties the rule, and products of up to fifteen of them are exact.
VALUES = st.sampled_from([0.0, -0.0, 0.25, 0.5, 0.5, 0.75, 1.0, 1.0, float("nan"), float("inf"), -0.5, 1.5])
WEIGHTS = st.sampled_from([0.5, 1.0, 1.0, 2.0, 0.0, -1.0, float("nan"), float("inf")])
SEEDS = st.integers(0, 2**32 - 1)
# What calibrated survivals may differ by, relative to the largest weight.
TOLERANCE = 1e-6


def kernels(confidence: np.ndarray, budget: int, **options: Any) -> np.ndarray:
    """What the kernel says, of arrays as of tensors."""
    tensors = {
        name: torch.from_numpy(value).to(DEVICE) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    lengths = allocation_kernel.allocate(torch.from_numpy(confidence).to(DEVICE), budget, **tensors)
    assert lengths.dtype == torch.int32 and lengths.shape == confidence.shape[:1]
    return lengths.cpu().numpy()


@st.composite
def instances(draw, most_requests=9, most_drafts=10):
    """Confidences [R, K] of few distinct values, a budget from none to more than all, and any options."""
    requests, width = draw(st.integers(1, most_requests)), draw(st.integers(1, most_drafts))
    values = draw(st.lists(VALUES, min_size=requests * width, max_size=requests * width))
    options: dict[str, Any] = {"min_len": draw(st.integers(1, width + 1))}
    options["max_len"] = draw(st.one_of(st.none(), st.integers(options["min_len"], width + 1)))
    weights = st.lists(WEIGHTS, min_size=requests, max_size=requests)
    options["weights"] = draw(st.one_of(st.none(), weights.map(lambda each: np.array(each, np.float32))))
    budget = draw(st.integers(0, requests * width + 2))
    return np.array(values, np.float32).reshape(requests, width), budget, options


def continuous(random: np.random.Generator, requests: int, width: int) -> np.ndarray:
    """Of one kind: any values, such as are next to 1 or to 0, or some of them invalid."""
    values = random.random((requests, width), dtype=np.float32)
    kind = random.integers(4)
    if kind == 1:
        values = (1 - values * 2.0**-22).astype(np.float32)
    elif kind == 2:
        # Their products are too small for a normal float32.
        values = (values * 1e-9).astype(np.float32)
    elif kind == 3:
        odd = np.array([0.0, -0.0, 1.0, np.nan, np.inf, -0.5, 1.5], np.float32)
        values = np.where(random.random((requests, width)) < 0.2, random.choice(odd, (requests, width)), values)
    return values


def coefficients(random: np.random.Generator, width: int) -> np.ndarray:
    """[2, K] as the policy's calibration has them, or as it has them before it has learned."""
    if random.integers(3) == 0:
        return np.stack([np.zeros(width), np.ones(width)]).astype(np.float32)
    return np.stack([random.uniform(-6, 6, width), random.uniform(0.05, 4, width)]).astype(np.float32)


def survivals(confidence: np.ndarray, calibration: np.ndarray | None, weights: np.ndarray | None) -> np.ndarray:
    """[R, K] in float64."""
    raw = confidence.astype(np.float64)
    inside = (raw >= 0) & (raw <= 1)
    if calibration is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            odds = np.clip(np.log(raw / (1 - raw)), -LOGIT_LIMIT, LOGIT_LIMIT)
        raw = 1 / (1 + np.exp(-(calibration[0].astype(np.float64) + calibration[1] * odds)))
    alive = np.cumprod(np.where(inside, raw, 0), axis=1)
    return alive if weights is None else alive * weights[:, None]


# -- claims about any input --


@TRIED
@given(instances())
def equals_the_policy_where_products_are_exact(instance):
    confidence, budget, options = instance
    weights = options["weights"]
    tensors = {**options, "weights": None if weights is None else torch.from_numpy(weights)}
    wanted = policys(torch.from_numpy(confidence), budget, **tensors)
    assert kernels(confidence, budget, **options).tolist() == wanted.tolist()


@TRIED
@given(SEEDS, st.integers(1, 40), st.integers(1, MOST_DRAFTS))
def equals_the_one_by_one_reference_to_the_last_bit(seed, requests, width):
    random = np.random.default_rng(seed)
    confidence = continuous(random, requests, width)
    budget = int(random.integers(0, requests * width + 1))
    min_len = int(random.integers(1, 4))
    options = {"min_len": min_len, "max_len": random.choice([None, max(min_len, width)])}
    if random.integers(2):
        options["weights"] = random.uniform(0.1, 3.0, requests).astype(np.float32)
    wanted = allocate_reference(confidence, budget, **options)
    assert kernels(confidence, budget, **options).tolist() == wanted.tolist()


@TRIED
@given(SEEDS, st.integers(1, 40), st.integers(1, MOST_DRAFTS))
def takes_the_largest_calibrated_survivals(seed, requests, width):
    random = np.random.default_rng(seed)
    confidence, calibration = continuous(random, requests, width), coefficients(random, width)
    weights = random.uniform(0.1, 3.0, requests).astype(np.float32) if random.integers(2) else None
    budget = int(random.integers(0, requests * width + 1))
    lengths = kernels(confidence, budget, calibration=calibration, weights=weights)
    assert lengths.sum() == requests + budget
    alive = survivals(confidence, calibration, weights)
    taken = np.arange(width) < (lengths - 1)[:, None]
    tolerance = TOLERANCE * (1.0 if weights is None else weights.max())
    if taken.any() and not taken.all():
        assert alive[taken].min() >= alive[~taken].max() - tolerance
    tensors = {"calibration": torch.from_numpy(calibration)}
    tensors["weights"] = None if weights is None else torch.from_numpy(weights)
    theirs = policys(torch.from_numpy(confidence), budget, **tensors).numpy()
    moved = taken != (np.arange(width) < (theirs - 1)[:, None])
    if moved.any():
        assert alive[moved].max() - alive[moved].min() <= tolerance


@TRIED
@given(SEEDS, st.integers(1, 20), st.integers(1, MOST_DRAFTS))
def no_later_value_decides(seed, requests, width):
    """Whether a position is verified does not depend on later values of its request; values behind the first trimmed
    token change nobody."""
    random = np.random.default_rng(seed)
    confidence = continuous(random, requests, width)
    calibration = coefficients(random, width) if random.integers(3) else None
    budget = int(random.integers(0, requests * width + 1))
    row, position = int(random.integers(requests)), int(random.integers(width))
    changed = confidence.copy()
    changed[row, position + 1 :] = random.choice([0.0, 1.0, np.nan, 0.999], width - position - 1)
    before, after = (kernels(each, budget, calibration=calibration) for each in (confidence, changed))
    assert min(before[row] - 1, position + 1) == min(after[row] - 1, position + 1)
    behind = np.arange(width) >= before[:, None]
    changed = np.where(behind, random.choice(np.array([0.0, 1.0, np.nan], np.float32), behind.shape), confidence)
    assert kernels(changed, budget, calibration=calibration).tolist() == before.tolist()


@TRIED
@given(SEEDS, st.integers(1, 200), st.integers(1, MOST_DRAFTS))
def equal_requests_share_by_position_then_by_row(seed, requests, width):
    """Their survivals are equal to the last bit, calibrated or not."""
    random = np.random.default_rng(seed)
    confidence = np.repeat(continuous(random, 1, width), requests, axis=0)
    calibration = coefficients(random, width) if random.integers(3) else None
    budget = int(random.integers(0, requests * width + 1))
    lengths = kernels(confidence, budget, calibration=calibration)
    full, more = divmod(budget, requests)
    assert lengths.tolist() == [full + 2] * more + [full + 1] * (requests - more)


@TRIED
@given(SEEDS, st.integers(1, 20), st.integers(1, MOST_DRAFTS))
def the_sum_is_kept_whatever_the_coefficients_are(seed, requests, width):
    random = np.random.default_rng(seed)
    odd = np.array([0.0, 1e30, -1e30, np.nan, np.inf, -np.inf], np.float32)
    budget = int(random.integers(0, requests * width + 3))
    lengths = kernels(continuous(random, requests, width), budget, calibration=random.choice(odd, (2, width)))
    assert lengths.sum() == requests + min(budget, requests * width)
    assert lengths.min() >= 1 and lengths.max() <= width + 1


# -- claims about certain inputs --


def every_size_of_a_program_serves():
    random = np.random.default_rng(1)
    for requests in (1, 2, 31, 32, 33, 128, 129, 300, 512, 513, 1000, MOST_REQUESTS):
        for width in (1, 7, 8, 9, MOST_DRAFTS):
            confidence = random.random((requests, width), dtype=np.float32)
            for budget in (1, requests * width // 3):
                wanted = allocate_reference(confidence, budget)
                assert kernels(confidence, budget).tolist() == wanted.tolist(), (requests, width, budget)
    ones = np.ones((MOST_REQUESTS, MOST_DRAFTS), np.float32)
    for budget in (0, 1, ones.size // 2 + 1, ones.size - 1, ones.size, ones.size + 5, 2**40):
        wanted = policys(torch.from_numpy(ones), budget)
        assert kernels(ones, budget).tolist() == wanted.tolist(), budget


def columns_of_other_tensors_are_read_as_they_lie():
    block = torch.rand((5, 12), device=DEVICE)
    wide = torch.rand((2, 12), device=DEVICE)
    for confidence in (block[:, 2:9], block[1:, 2:9], torch.rand((7, 5), device=DEVICE).t(), block[:, :1].expand(5, 7)):
        for calibration in (None, wide[:, :7], torch.rand((7, 2), device=DEVICE).t()):
            for weights in (None, block[:, 3][: len(confidence)]):
                options = {"calibration": calibration, "weights": weights}
                apart = {name: None if each is None else each.clone() for name, each in options.items()}
                ours = allocation_kernel.allocate(confidence, 11, **options)
                assert ours.tolist() == allocation_kernel.allocate(confidence.clone(), 11, **apart).tolist()


def lengths_have_memory_of_their_own():
    confidence = torch.rand((4, 3), device=DEVICE)
    first = allocation_kernel.allocate(confidence, 5)
    before = first.tolist()
    second = allocation_kernel.allocate(1 - confidence, 7)
    assert first.data_ptr() != second.data_ptr() and first.tolist() == before


def what_it_does_not_take_is_the_policy_s():
    class Refused:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            raise AssertionError("launched")

    def random(*shape: int, **options: Any) -> torch.Tensor:
        return torch.rand(shape, device=DEVICE, **options)

    cases: dict[str, tuple[torch.Tensor, Any, dict[str, Any]]] = {
        "no requests": (random(0, 7), 3, {}),
        "no drafts": (random(3, 7), 3, {"max_len": 1}),
        "too many requests": (random(MOST_REQUESTS + 1, 2), 1000, {}),
        "too many drafts": (random(3, MOST_DRAFTS + 1), 9, {}),
        "a budget on the device": (random(3, 7), torch.tensor(9, device=DEVICE), {}),
        "float64": (random(3, 7, dtype=torch.float64), 9, {}),
        "weights in float64": (random(3, 7), 9, {"weights": random(3, dtype=torch.float64)}),
        "a weight for all": (random(3, 7), 9, {"weights": random(1)}),
        "coefficients in float64": (random(3, 7), 9, {"calibration": random(2, 7, dtype=torch.float64)}),
        "coefficients for all": (random(3, 7), 9, {"calibration": random(2, 1)}),
    }
    kernel, allocation_kernel._allocate = allocation_kernel._allocate, Refused()
    try:
        for name, (confidence, budget, options) in cases.items():
            ours = allocation_kernel.allocate(confidence, budget, **options)
            assert ours.tolist() == policys(confidence, budget, **options).tolist(), name
    finally:
        allocation_kernel._allocate = kernel
    many, few = torch.ones((MOST_REQUESTS + 1, MOST_DRAFTS + 3), device=DEVICE), {"max_len": MOST_DRAFTS + 1}
    assert allocation_kernel.allocate(many[:3], 9, **few).tolist() == policys(many[:3], 9, **few).tolist()


def a_server_uses_it_where_it_takes_all_batches():
    config = PolicyConfig()
    identity = torch.tensor([[0.0], [1.0]], device=DEVICE)
    assert serving_allocation(40, config, identity.repeat(1, 7)) is allocation_kernel.allocate
    for requests, width in ((MOST_REQUESTS + 1, 7), (8, MOST_DRAFTS + 1)):
        assert not allocation_kernel.takes(requests, width, identity.repeat(1, width))
    ahead, allocation_kernel.compile_ahead = allocation_kernel.compile_ahead, lambda *_: 1 / 0
    try:
        instead = serving_allocation(4, config, identity.repeat(1, 3))
    finally:
        allocation_kernel.compile_ahead = ahead
    assert instead is not allocation_kernel.allocate
    confidence = torch.tensor([[0.9, 0.9, 0.9], [0.5, 0.5, 0.5]], device=DEVICE)
    assert instead(confidence, 4, calibration=identity.repeat(1, 3)).tolist() == [4, 2]


CLAIMS: list[Callable[[], None]] = [
    equals_the_policy_where_products_are_exact,
    equals_the_one_by_one_reference_to_the_last_bit,
    takes_the_largest_calibrated_survivals,
    no_later_value_decides,
    equal_requests_share_by_position_then_by_row,
    the_sum_is_kept_whatever_the_coefficients_are,
    every_size_of_a_program_serves,
    columns_of_other_tensors_are_read_as_they_lie,
    lengths_have_memory_of_their_own,
    what_it_does_not_take_is_the_policy_s,
    a_server_uses_it_where_it_takes_all_batches,
]


def complaint(claim: Callable[[], None]) -> str | None:
    try:
        claim()
    except Exception as error:
        return "\n".join([traceback.format_exc(), *getattr(error, "__notes__", ())])[-3000:]
    return None


# -- on a GPU --


def compiled() -> int:
    """How many variants of the kernel there are."""
    return sum(len(caches[0]) for caches in allocation_kernel._allocate.device_caches.values())


def on_the_device(call: Callable[[], Any], times: int = 200) -> float:
    """Microseconds of the GPU for one call."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # so that the CPU's launches are not what is timed
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return round(start.elapsed_time(end) / times * 1e3, 1)


def costs() -> dict[str, dict[str, list[float]]]:
    """[torch.compile's, ours] by requests x drafts: launches, and microseconds on the CPU and on the GPU."""
    found: dict[str, dict[str, list[float]]] = {"launches": {}, "microseconds": {}, "microseconds on the GPU": {}}
    config = PolicyConfig()
    for requests, width in ((1, 7), (32, 7), (128, 7), (512, 7), (512, 15)):
        # As in a server, which has compiled for one size only: each one more takes longer to find, and few are kept.
        torch.compiler.reset()
        identity = torch.tensor([[0.0], [1.0]], device=DEVICE).repeat(1, width)
        confidence = torch.rand((requests, width), device=DEVICE)
        named = {"min_len": 1, "max_len": width + 1, "calibration": identity, "weights": None}
        functions = compiled_allocation(requests, config, identity, [width + 1]), allocation_kernel.allocate
        calls = [partial(each, confidence, requests * width // 2, **named) for each in functions]
        with torch.no_grad():
            for call in calls:
                call()
            launches(calls[1])  # what the first use of the profiler sees is not complete
            name = f"{requests} x {width}"
            found["launches"][name] = [launches(call) for call in calls]
            found["microseconds"][name] = [microseconds(call) for call in calls]
            found["microseconds on the GPU"][name] = [on_the_device(call) for call in calls]
    return found


def main() -> None:
    torch.manual_seed(0)
    found: dict[str, Any] = {"device": DEVICE}
    if DEVICE == "cuda":
        begin = time.perf_counter()
        allocation_kernel.compile_ahead(MOST_REQUESTS, MOST_DRAFTS, DEVICE)
        found["seconds ahead"] = round(time.perf_counter() - begin, 1)
        ahead = compiled()
    found["claims"] = {claim.__name__: complaint(claim) for claim in CLAIMS}
    if DEVICE == "cuda":
        found["compiled ahead"] = [ahead, compiled()]
        found["costs"] = costs()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
