"""The CUDA graphs of the target's verification."""

from __future__ import annotations

from typing import Any

from sglang_adaptive.patches.registry import Patch
from sglang_adaptive.policy.tiers import token_tiers


def _tiers(host_tiers: list[int], runner: Any) -> list[int]:
    return token_tiers(max(host_tiers), host_tiers)


PATCHES = [
    Patch(
        target="sglang.srt.model_executor.runner.decode_cuda_graph_runner"
        ".DecodeCudaGraphRunner._build_ragged_verify_token_buckets",
        hook=_tiers,
        kind="after",
        why="The host captures whole blocks only, multiples of K+1 tokens: a trim of a few tokens saves nothing there, "
        "and a step of one token is padded to K+1.",
        remove_when="the graph sizes of a ragged verification can be configured",
        depends=(
            "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner._ragged_capture_slots",
            "sglang.srt.speculative.ragged_verify.build_capture_verify_lens",
        ),
    ),
]
