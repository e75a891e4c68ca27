"""The width of a request's row of KV slots, which a speculative step fills ahead of what is committed."""

from __future__ import annotations

from sglang_adaptive.patches.registry import Patch


def _widen(extra: int) -> int:
    from sglang.srt.runtime_context import max_speculative_num_draft_tokens

    # A step reserves two blocks behind the last committed token, at any page size.
    return max(extra, 2 * (max_speculative_num_draft_tokens() or 0))


PATCHES = [
    Patch(
        target="sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
        why="With pages of one token it leaves room for one block, but two are reserved: a request within a few tokens "
        "of the context length then writes into the row of another.",
        remove_when="the host sizes the row by what its speculative steps reserve at every page size.",
        depends=(
            "sglang.srt.mem_cache.allocation_sizing.page_aligned_decode_alloc_lens",
            "sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode",
            "sglang.srt.speculative.dflash_info_v2.DFlashDraftInputV2.prepare_for_decode",
        ),
        hook=_widen,
        kind="after",
    ),
]
