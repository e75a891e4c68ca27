"""Requests whose ``min_p`` would not be applied are refused."""

from __future__ import annotations

from typing import Any

from sglang_adaptive import ALGORITHM, activation, family
from sglang_adaptive.patches.registry import Patch


def _refuse(complaint: str | None, scheduler: Any, request: Any) -> str | None:
    if complaint is not None or request.sampling_params.min_p <= 0:
        return complaint
    if activation.active_family() is not family.DSPARK:
        return f"{ALGORITHM} does not apply min_p to a draft of this family: drop min_p from the request."
    if _seeded():
        return "SGLang draws no token by seed and min_p: drop min_p from the request."
    return None


def _seeded() -> bool:
    from sglang_adaptive.runtime import seeds

    return seeds.enabled()


PATCHES = [
    Patch(
        target="sglang.srt.dllm.mixin.scheduler.SchedulerDllmMixin.validate_dllm_request",
        why="Verification of EAGLE drafts ignores min_p, the host's sampler ends the server where it meets min_p and "
        "seeds, and no check of a request asks about either.",
        remove_when="the host applies min_p to EAGLE's target probabilities and to draws by seed, or refuses it.",
        depends=("sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",),
        hook=_refuse,
        kind="after",
    ),
]
