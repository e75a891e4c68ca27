"""A request that ends at the context length reserves no slot beyond its row."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt import runtime_context
from sglang.srt.mem_cache.allocation_sizing import page_aligned_decode_alloc_lens

from sglang_adaptive.patches import request_row

CONTEXT = 1024


@pytest.mark.parametrize("block", [2, 6, 8, 10, 16])
def test_two_blocks_fit_behind_the_last_token(block, monkeypatch):
    monkeypatch.setattr(runtime_context, "max_speculative_num_draft_tokens", lambda: block)
    hosts = 4 + block  # what the host leaves with pages of one token
    request = SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=0, kv_committed_len=CONTEXT))
    _, (reserved,), _ = page_aligned_decode_alloc_lens([request], reserve=2 * block, page_size=1)
    assert reserved <= CONTEXT + request_row._widen(hosts)
    assert request_row._widen(1000) == 1000


def test_without_speculation_nothing_changes(monkeypatch):
    monkeypatch.setattr(runtime_context, "max_speculative_num_draft_tokens", lambda: None)
    assert request_row._widen(4) == 4
