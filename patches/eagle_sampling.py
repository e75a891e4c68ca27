"""EAGLE, EAGLE3 and MTP drafts: penalties exact at every verified position, and draws by the seeds of requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sglang_adaptive.patches.registry import Patch
from sglang_adaptive.patches.sampling import prefill
from sglang_adaptive.runtime import seeds
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


def _sample(original: Any, verify_input: Any, batch: Any, logits_output: Any, grammar_mask: Any = None, **kwargs: Any):
    info, width = batch.sampling_info, verify_input.draft_token_num
    if batch.forward_mode.is_idle() or not seeds.apply(info):
        return original(verify_input, batch, logits_output, grammar_mask, **kwargs)
    logits = logits_output.next_token_logits
    if info.logit_bias is not None:
        logits.add_(info.logit_bias.repeat_interleave(width, dim=0))
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    said = seeds.certain(logits, seeds.drawn(logits, info, batch.seq_lens, width))
    batch.sampling_info = replace(info, is_all_greedy=True, logit_bias=None)
    try:
        return original(verify_input, batch, replace(logits_output, next_token_logits=said), **kwargs)
    finally:
        batch.sampling_info = info


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
        target="sglang.srt.speculative.eagle_utils.eagle_sample",
        why="Its seeds throw the coins of acceptance, so that what is said depends on what was drafted and verified; "
        "with ours, greedy verification compares drafts with what the target draws by its seeds.",
        remove_when="the host accepts drafts where they are the target's own seeded draw.",
        depends=("sglang.srt.speculative.eagle_utils._verify_uses_greedy",),
        hook=_sample,
        kind="around",
    ),
]
