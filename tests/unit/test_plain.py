"""The draft's KV of a step without a draft: in the step's graph where the draft's pool is written like the target's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.kv_loc_plan import IdSpace, IdSpaceKind

from sglang_adaptive.runtime.plain import draft_kv_in_graph

FULL = (IdSpaceKind.FULL, None)


def worker(target=FULL, draft=FULL, pool=None) -> SimpleNamespace:
    """A worker whose pools name their slots by these keys; its model keeps what it is told to write."""

    def runner(key, pool=None):
        spaces = {} if key is None else {IdSpaceKind.FULL: IdSpace(key=key)}
        return SimpleNamespace(kv_index_translator=SimpleNamespace(space=spaces.get), token_to_kv_pool=pool)

    written = []
    return SimpleNamespace(
        model_runner=runner(target),
        draft_model_runner=runner(draft, pool or SimpleNamespace()),
        draft_model=SimpleNamespace(write_target_hidden_kv=lambda **given: written.append(given)),
        written=written,
    )


def test_every_token_of_the_graph_is_written_to_its_slot():
    made = worker()
    write = draft_kv_in_graph(made)
    # A graph's buffers may be larger than what it was captured for.
    hidden = torch.arange(12.0).reshape(6, 2)
    step = SimpleNamespace(
        positions=torch.tensor([4, 9, 0, 0]), out_cache_loc=torch.tensor([17, 5, 0, 0], dtype=torch.int32)
    )
    write(None, SimpleNamespace(hidden_states=hidden), step, 4)
    (given,) = made.written
    assert given["pool"] is made.draft_model_runner.token_to_kv_pool
    assert torch.equal(given["target_hidden"], hidden[:4])
    assert given["positions"].tolist() == [4, 9, 0, 0] and given["cache_loc"].tolist() == [17, 5, 0, 0]
    assert given["positions"].dtype == given["cache_loc"].dtype == torch.int64


@pytest.mark.parametrize(
    "other",
    [
        worker(target=(IdSpaceKind.FULL, 1)),
        worker(draft=None),
        worker(pool=SimpleNamespace(set_swa_key_buffer_radix_fused_norm_rope=print)),
    ],
    ids=["virtual slots", "no such pool", "a ring"],
)
def test_a_pool_that_is_written_otherwise_is_left_to_the_host(other):
    assert draft_kv_in_graph(other) is None
