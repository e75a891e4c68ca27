"""The relay hands out finished steps by slot and generation, and only those that are old enough."""

import numpy as np
import pytest
import torch

from sglang_adaptive.policy.budget import LOW_LOAD, Decision
from sglang_adaptive.runtime.relay import OVERLAP_LAG, SYNC_LAG, StepRelay

GAMMA = 3


def relay(lag=OVERLAP_LAG, requests=4):
    return StepRelay(num_slots=8, gamma=GAMMA, max_requests=requests, device="cpu", lag=lag)


def publish(target, iteration, slots, generations, value, verify=4, commit=2):
    rows = len(slots)
    target.publish(
        iteration=iteration,
        slots=np.array(slots),
        generations=np.array(generations),
        kv_tokens=10.0,
        confidence=torch.full((rows, GAMMA), value),
        verify_lens=torch.full((rows,), verify, dtype=torch.int32),
        commit_lens=torch.full((rows,), commit, dtype=torch.int64),
    )


@pytest.mark.parametrize("lag", [SYNC_LAG, OVERLAP_LAG])
def test_a_step_is_readable_after_the_lag_and_not_before(lag):
    steps = relay(lag)
    publish(steps, 5, [1, 2], [7, 7], 0.5)
    for iteration in range(5, 5 + lag):
        assert steps.collect(iteration) == []
        assert not steps.read(np.array([1, 2]), np.array([7, 7]))[1].any()
    (record,) = steps.collect(5 + lag)
    assert record.verify_lens.tolist() == [4, 4] and record.commit_lens.tolist() == [2, 2]
    confidence, fresh = steps.read(np.array([2, 1]), np.array([7, 7]))
    assert fresh.all() and (confidence == 0.5).all()


def test_a_slot_handed_to_another_request_has_no_history():
    steps = relay(SYNC_LAG)
    publish(steps, 1, [3], [1], 0.25)
    steps.collect(2)
    assert steps.read(np.array([3]), np.array([1]))[1].tolist() == [True]
    assert steps.read(np.array([3]), np.array([2]))[1].tolist() == [False]


def test_requests_that_change_rows_keep_their_confidences():
    steps = relay(SYNC_LAG)
    for slot in (1, 2, 5):
        publish(steps, slot, [slot], [1], slot / 10)
        steps.collect(slot + 1)
    confidence, fresh = steps.read(np.array([5, 1, 4, 2]), np.array([1, 1, 1, 1]))
    assert fresh.tolist() == [True, True, False, True]
    np.testing.assert_allclose(confidence[[0, 1, 3], 0], [0.5, 0.1, 0.2], rtol=1e-6)


def test_a_batch_that_grows_beyond_the_buffers_is_kept_whole():
    steps = relay(SYNC_LAG, requests=1)
    publish(steps, 1, [1, 2, 3], [1, 1, 1], 0.75)
    (record,) = steps.collect(2)
    assert len(record.slots) == 3
    publish(steps, 2, [1], [1], 0.5)
    assert len(steps.collect(3)[0].slots) == 1


def test_memory_is_reused_for_ever():
    steps = relay()
    for iteration in range(1, 200):
        steps.collect(iteration)
        publish(steps, iteration, [1 + iteration % 3], [iteration], iteration / 200)
    assert len(steps.collect(1000)) == OVERLAP_LAG
    assert len(steps._landings) == OVERLAP_LAG + 2


def test_publishing_without_collecting_is_an_error_not_an_overwrite():
    steps = relay()
    for iteration in range(OVERLAP_LAG + 2):
        publish(steps, iteration, [1], [1], 0.5)
    with pytest.raises(RuntimeError, match="collected"):
        publish(steps, 99, [1], [1], 0.5)


def test_a_step_after_another_forward_is_timed_from_its_own_start(monkeypatch):
    clock = iter([10.0, 10.004, 10.010, 20.000, 20.006])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    steps = relay(SYNC_LAG)
    steps.begin()
    publish(steps, 1, [1], [1], 0.5)
    publish(steps, 2, [1], [1], 0.5)  # 6 ms after the step before
    steps.begin()
    publish(steps, 4, [1], [1], 0.5)  # a prefill ran in between
    times = [record.step_ms for record in steps.collect(9)]
    assert times == pytest.approx([4.0, 6.0, 6.0])


def count(target, iteration, commit, *, draft, last=False, verified=None):
    decision = Decision(GAMMA * len(commit) if draft else 0, draft, draft, 1.0, 1.0, LOW_LOAD)
    target.count(
        iteration=iteration,
        requests=len(commit),
        commit_lens=torch.tensor(commit) if draft else None,
        verify_lens=None if verified is None else torch.tensor(verified, dtype=torch.int32),
        decision=decision,
        tier=0,
        last=last,
    )


def test_steps_that_are_only_counted_say_what_was_committed_and_nothing_else():
    steps = StepRelay(num_slots=8, gamma=GAMMA, max_requests=4, device="cpu", lag=SYNC_LAG, uncollected=4)
    publish(steps, 1, [1], [7], 0.5)
    count(steps, 2, [3], draft=True)
    count(steps, 3, [1, 1], draft=False)
    count(steps, 4, [2, 3], draft=True, last=True, verified=[2, 4])
    publish(steps, 5, [1], [7], 0.25)
    records = steps.collect(6)
    assert [record.observed for record in records] == [True, False, False, False, True]
    assert [record.drafted for record in records] == [True, True, False, True, True]
    assert [record.commit_lens.tolist() for record in records] == [[2], [3], [1, 1], [2, 3], [2]]
    assert [record.verify_lens.tolist() for record in records] == [[4], [4], [1, 1], [2, 4], [4]]
    assert [record.step_ms is not None for record in records[1:]] == [False, False, False, True]
    assert records[-1].follows, "the last counted step's end is the observed one's beginning"
    assert steps.read(np.array([1]), np.array([7]))[0][0, 0] == 0.25


def test_the_time_of_a_step_after_one_without_a_mark_counts_from_its_launch():
    steps = StepRelay(num_slots=8, gamma=GAMMA, max_requests=4, device="cpu", lag=SYNC_LAG, uncollected=4)
    publish(steps, 1, [1], [7], 0.5)
    count(steps, 2, [3], draft=True)
    steps.begin()
    publish(steps, 3, [1], [7], 0.25)
    record = steps.collect(4)[-1]
    assert record.step_ms is not None and not record.follows
