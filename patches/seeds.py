"""Seeds of requests: the host's own draws, made independent of the rest of the batch. Applied under the flag only."""

from __future__ import annotations

from typing import Any

from sglang_adaptive.patches.registry import Patch
from sglang_adaptive.runtime import seeds

_SAMPLER = "sglang.srt.layers.sampler"


def _each_as_alone(
    original: Any,
    probs: Any,
    top_ks: Any,
    top_ps: Any,
    min_ps: Any,
    need_min_p_sampling: bool,
    sampling_seed: Any,
    positions: Any,
    **kwargs: Any,
) -> Any:
    result = original(probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions, **kwargs)
    if sampling_seed is None:
        return result
    if not kwargs.get("return_filtered_probs"):
        return seeds.by_row(result, probs, top_ks, top_ps, sampling_seed, positions)
    tokens, kept, ids, _ = result
    tokens = seeds.by_row(tokens, probs, top_ks, top_ps, sampling_seed, positions)
    return tokens, kept, ids, probs.gather(1, tokens.long().unsqueeze(1)).squeeze(1)


PATCHES = [
    Patch(
        target=f"{_SAMPLER}.top_k_top_p_min_p_sampling_from_probs_torch",
        why="As soon as one request of a batch is greedy or has a top-k or top-p, it hashes the noise of all rows by "
        "ranks instead of token ids, so that the draws of a request would change with its neighbours.",
        remove_when="the host draws each row in the way that it would alone.",
        depends=(
            f"{_SAMPLER}.Sampler._sample_from_probs",
            f"{_SAMPLER}.sampling_from_probs_torch",
            f"{_SAMPLER}.multinomial_with_seed",
            "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
            "sglang.srt.model_executor.model_runner.ModelRunner.sample",
        ),
        hook=_each_as_alone,
        kind="around",
    ),
]
