"""Benchmarks of targets with dummy weights: acceptance as a file states it (benchmarks/acceptance.py).

Applied by benchmarks/acceptance_server.py only, in the processes of a server that it starts; never by the plugin. It
holds for every DSpark arm alike, the host's own and ours.
"""

from __future__ import annotations

from typing import Any

from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.patches.registry import Patch

_DSPARK = "sglang.srt.speculative.dspark_components"


class _Mode:
    """What this process simulates: the file, the requests' fates once the pools exist, the running step's."""

    acceptance: Any = None
    fates: Any = None
    run: Any = None


_mode = _Mode()


def begin(acceptance: Any) -> None:
    """Simulate ``acceptance`` in this process from now on."""
    _mode.acceptance, _mode.fates, _mode.run = acceptance, None, None


def _admit(injector: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    from sglang_adaptive.benchmarks.acceptance import Fates, request_key

    runner = injector.model_runner
    if runner.server_args.load_format != "dummy":
        raise AdaptiveError(
            "Simulated acceptance needs --load-format dummy: real weights have an acceptance of their own."
        )
    if _mode.fates is None:
        slots, gamma = runner.req_to_token_pool.req_to_token.shape[0], injector.verify_num_draft_tokens - 1
        _mode.fates = Fates(_mode.acceptance, gamma, slots, injector.device)
    for request in batch.reqs:
        if not hasattr(request, "_acceptance_key"):
            request._acceptance_key = request_key(request.origin_input_ids)
    keys = [request._acceptance_key for request in batch.reqs]
    _mode.fates.admit(batch.req_pool_indices_cpu.tolist(), keys)


def _hear(proposal: Any, *args: Any, batch: Any, **kwargs: Any) -> Any:
    import msgspec

    if _mode.fates is None:
        return None
    _mode.run, confidence = _mode.fates.look(batch.req_pool_indices, batch.seq_lens)
    heard = {} if proposal.confidence is None else {"confidence": confidence, "confidence_raw": confidence}
    # Not folded: a greedy batch would be accepted inside the verify graph, where nothing can be replaced. Sampled
    # batches never are, so nothing changes for them.
    return msgspec.structs.replace(proposal, folded=False, **heard)


def _accept(result: Any, *args: Any, gamma: int, cutoff_layout: Any = None, **kwargs: Any) -> Any:
    """The acceptance has run, and cost what it costs; its lengths are replaced."""
    if _mode.run is None:
        return None
    # Of a shorter draft than the server was started with, no more than that.
    (correct, bonus, trimmed), run = result, _mode.run.clamp(max=gamma)
    kept = run if cutoff_layout is None else run.minimum(cutoff_layout.verify_lens.to(run.dtype) - 1)
    return kept.to(correct.dtype), bonus, (run - kept).to(trimmed.dtype)


def _state(result: None, controller: Any, state: dict[str, Any]) -> None:
    gamma = getattr(controller.scheduler.draft_worker, "gamma", None)
    if gamma is not None:
        state["bench_acceptance"] = _mode.acceptance.describe(gamma)


PATCHES = [
    Patch(
        target=f"{_DSPARK}.dspark_kv_inject.TargetHiddenKvInjector.place_prefill",
        hook=_admit,
        kind="before",
        why="A request's fates are drawn when it gets its slot: a step then only reads them.",
        remove_when="the host can simulate acceptance by request and position",
    ),
    Patch(
        target=f"{_DSPARK}.dspark_draft.DraftBlockProposer.propose",
        hook=_hear,
        kind="after",
        why="The confidences of the simulated drafts take the place of the head's, which has seen random numbers.",
        remove_when="the host can simulate acceptance by request and position",
        depends=(f"{_DSPARK}.dspark_draft.DraftProposal",),
    ),
    Patch(
        target=f"{_DSPARK}.dspark_verify.accept_draft_tokens",
        hook=_accept,
        kind="after",
        why="SGLANG_SIMULATE_ACC_LEN sets one length for the whole batch, and refuses trimmed verification.",
        remove_when="the host can simulate acceptance by request and position",
        depends=("sglang.kernels.ops.speculative.dspark.dspark_accept.cap_correct_len",),
    ),
    Patch(
        target="sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_env_vars",
        hook=_state,
        kind="after",
        why="/server_info must say that the acceptance is simulated.",
        remove_when="the host can simulate acceptance by request and position",
    ),
]
