"""What EAGLE, EAGLE3 and MTP drafts need in the host; applied in the scheduler process before their worker is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_adaptive.patches.registry import Edit, Patch

_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"


def _admit(original: Callable[..., bool], algorithm: Any) -> bool:
    return original(algorithm) or algorithm.is_eagle()


def _packed_input(spec_info: Any, runner: Any, num_tokens: int) -> Any:
    """What a graph for packed rows is captured with: the same input that replays bring, as for DSpark."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    if not runner.ragged_verify_mode:
        return None
    return DFlashVerifyInput(
        draft_token=None,
        positions=None,
        draft_token_num=runner.captured_req_width,
        custom_mask=None,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        ragged_verify_layout=runner._capture_ragged_verify_layout(num_tokens),
    )


def _prepare(original: Callable[..., Any], *args: Any) -> Any:
    from sglang_adaptive.runtime import eagle_verify

    return eagle_verify.prepare(original, *args)


PATCHES = [
    Patch(
        target="sglang.srt.speculative.spec_info.SpeculativeAlgorithm.supports_ragged_verify",
        hook=_admit,
        kind="around",
        why="The decode runner captures graphs by tokens, which packed rows need, for DSpark only.",
        depends=("sglang.srt.model_executor.runner.decode_cuda_graph_runner.ragged_verify_compact_graphs_enabled",),
        remove_when="the host verifies EAGLE chains of different lengths",
    ),
    Patch(
        target=f"{_RUNNER}.get_spec_info",
        hook=_packed_input,
        kind="after",
        why="A graph of an EAGLE target is captured with a tree mask and one length for all requests.",
        depends=(f"{_RUNNER}._capture_ragged_verify_layout",),
        remove_when="the host captures EAGLE targets with a ragged layout",
    ),
    Patch(
        target="sglang.srt.speculative.eagle_utils.eagle_prepare_for_verify",
        hook=_prepare,
        kind="around",
        why="It lays out K + 1 rows for every request; a step with a packed layout brings the chosen rows only.",
        depends=(
            "sglang.srt.speculative.eagle_worker_common.run_eagle_verify",
            "sglang.srt.speculative.eagle_utils.eagle_sample",
            "sglang.kernels.ops.speculative.reject_sampling.speculative_sampling_classic_kernel",
        ),
        remove_when="the host packs EAGLE's verification",
    ),
    Patch(
        target="sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.report_decode_stats",
        why="Only DSpark workers may add to the line of decode metrics.",
        remove_when="the host asks every draft worker",
        kind="edit",
        edits=(
            Edit(
                old="if self.scheduler.spec_algorithm.is_dspark():",
                new='if hasattr(self.scheduler.draft_worker, "block_accept_estimate_log_suffix"):',
            ),
        ),
    ),
]
