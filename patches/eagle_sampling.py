"""EAGLE, EAGLE3 and MTP drafts: penalties exact at every verified position, and what verification drops refused."""

from __future__ import annotations

from typing import Any

import torch

from sglang_adaptive import ALGORITHM
from sglang_adaptive.patches.registry import Patch
from sglang_adaptive.patches.sampling import prefill
from sglang_adaptive.runtime.penalties import Penalties, StepPenalties


class _Penalised:
    """A target worker whose verified logits are penalised."""

    def __init__(self, target_worker: Any, step: StepPenalties, width: int) -> None:
        self._target_worker, self._step, self._width = target_worker, step, width

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target_worker, name)

    def forward_batch_generation(self, **kwargs: Any) -> Any:
        result = self._target_worker.forward_batch_generation(**kwargs)
        self._step.apply(result.logits_output.next_token_logits, self._width)
        return result


def _verify(original: Any, batch: Any, *, target_worker: Any, **kwargs: Any) -> Any:
    info, verify_input = batch.sampling_info, batch.spec_info
    if info is None or info.acc_additive_penalties is None:
        return original(batch, target_worker=target_worker, **kwargs)
    requests, width = verify_input.retrieve_index.shape
    tokens = verify_input.draft_token.view(requests, width).to(torch.int64)
    step = Penalties.of(batch).begin_decode(batch, tokens[:, 0], tokens[:, 1:])
    if step is None:
        return original(batch, target_worker=target_worker, **kwargs)
    result = original(batch, target_worker=_Penalised(target_worker, step, width), **kwargs)
    step.commit(result.next_token_ids.view(requests, width).to(torch.int64), result.accept_lens)
    return result


def _refuse(complaint: str | None, scheduler: Any, request: Any) -> str | None:
    if complaint is None and request.sampling_params.min_p > 0:
        return f"{ALGORITHM} does not apply min_p to a draft of this family: drop min_p from the request."
    return complaint


PATCHES = [
    Patch(
        target="sglang.srt.speculative.eagle_worker_common.run_eagle_verify",
        why="It applies the penalties of the tokens counted when the step was scheduled to all positions alike.",
        remove_when="the host counts output tokens on the device, and drafts for the positions behind them.",
        depends=(
            "sglang.srt.speculative.eagle_utils.eagle_prepare_for_decode",
            "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.copy_for_forward",
        ),
        hook=_verify,
        kind="around",
    ),
    Patch(
        target="sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2._forward_prefill_batch",
        why="A retracted request, or one that decodes in a mixed step, has output that the host's penalties forgot.",
        remove_when="the host rebuilds its counts after a retraction.",
        hook=prefill,
        kind="around",
    ),
    Patch(
        target="sglang.srt.dllm.mixin.scheduler.SchedulerDllmMixin.validate_dllm_request",
        why="Verification of EAGLE drafts ignores min_p, and no check of a request asks the algorithm about it.",
        remove_when="the host applies min_p to EAGLE's target probabilities, or refuses it.",
        hook=_refuse,
        kind="after",
    ),
]
