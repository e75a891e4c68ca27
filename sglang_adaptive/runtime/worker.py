"""The DSpark worker of the host, with the adaptive planner in the place of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel, get_schedule
from sglang.srt.speculative.dspark_components import dspark_worker_v2 as host

from sglang_adaptive import ALGORITHM, __version__
from sglang_adaptive.options import Options
from sglang_adaptive.patches.registry import refuse_foreign_hooks
from sglang_adaptive.policy.cost import CostModel
from sglang_adaptive.runtime import plain
from sglang_adaptive.runtime.counters import Counters
from sglang_adaptive.runtime.planner import AdaptiveVerifyPlanner
from sglang_adaptive.runtime.profiler import profile
from sglang_adaptive.runtime.trace_features import watch_drafts

logger = logging.getLogger(__name__)


@contextmanager
def _planner_in_place():
    """The host's constructor builds its planner by name, and hands it to its observers."""
    original, host.DSparkVerifyPlanner = host.DSparkVerifyPlanner, AdaptiveVerifyPlanner
    try:
        yield
    finally:
        host.DSparkVerifyPlanner = original


class AdaptiveDSparkWorker(host.DSparkWorkerV2):
    """Drafts, verifies and accepts as the host does; how much it verifies is the planner's decision."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_foreign_hooks()
        self._options = Options.from_env(os.environ)
        with _planner_in_place():
            super().__init__(*args, **kwargs)
        self._ranks = _gather_ranks()
        if get_parallel().tp_rank == 0:
            logger.info(
                "%s is active on %d rank(s): sglang_adaptive %s, K=%d, overlap %s, options %s",
                ALGORITHM,
                len(self._ranks),
                __version__,
                self.gamma,
                "off" if get_schedule().disable_overlap_schedule else "on",
                self._options.as_dict(),
            )

    def init_cuda_graphs(self) -> None:
        """Capture as the host does, then profile what was captured."""
        super().init_cuda_graphs()
        ragged = self._verify_planner.is_compact_mode
        self._cost = profile(self, self._options) if ragged else CostModel.empty()
        self._verify_planner.begin_serving(
            cost=self._cost, options=self._options, max_requests=self.model_runner.max_running_requests
        )
        if ragged and self._verify_planner.traces(self._options):
            watch_drafts(self._proposer, self._verify_planner.see_draft)

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[..., None] | None = None,
        grammar_barrier: Any = None,
        **kwargs: Any,
    ) -> Any:
        if get_schedule().disable_overlap_schedule:
            # The overlapping scheduler sizes before it launches; without it there is no earlier place than this.
            self._verify_planner.size(batch)
        planner, prefix_lens = self._verify_planner, batch.seq_lens

        def publish(new_seq_lens: torch.Tensor, confidence: torch.Tensor | None = None) -> None:
            if planner.decision is not None:
                if confidence is not None:
                    planner.publish(confidence=confidence, commit_lens=new_seq_lens - prefix_lens)
                elif not planner.decision.draft:
                    planner.publish(confidence=None, commit_lens=None)
            if on_publish is not None:
                on_publish(new_seq_lens)

        if planner.decision is not None and not planner.decision.draft:
            if plain.can_run(self, batch):
                self._observers.note_idle_decode_step()
                return plain.forward(self, batch, publish)
            planner.draft_after_all()
        return super().forward_batch_generation(batch, publish, grammar_barrier, **kwargs)

    @property
    def adaptive_counters(self) -> Counters:
        """What the metrics are written from."""
        return self._verify_planner.counters

    def adaptive_state(self) -> dict[str, Any]:
        """What /server_info shows of this rank."""
        return {
            "active": True,
            "algorithm": ALGORITHM,
            "version": __version__,
            "rank": get_parallel().tp_rank,
            "ranks": self._ranks,
            "options": self._options.as_dict(),
            "cost": {
                "verify_tokens": self._cost.tiers.tolist(),
                "kv_tokens": self._cost.kv_points.tolist(),
                "verify_ms": self._cost.verify_ms.tolist(),
                "draft_requests": self._cost.draft_points.tolist(),
                "draft_ms": self._cost.draft_ms.tolist(),
            },
            **self._verify_planner.counters.as_dict(),
        }

    def block_accept_estimate_log_suffix(self) -> str | None:
        """Appended by the host to its line of decode metrics."""
        if self._options.log_decisions == "off":
            return super().block_accept_estimate_log_suffix()
        counters = self._verify_planner.counters.as_dict()
        own = f"verify len: {counters['verify_length']:.2f}, budget: {counters['budget_per_step']:.1f}"
        hosts = super().block_accept_estimate_log_suffix()
        return f"{hosts}, {own}" if hosts else own


def _gather_ranks() -> list[dict[str, Any]]:
    """What every rank of the tensor-parallel group says of itself, equal on all of them."""
    group = get_parallel().tp_group
    mine = {"rank": get_parallel().tp_rank, "pid": os.getpid(), "active": True, "version": __version__}
    if group.world_size == 1:
        return [mine]
    ranks: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(ranks, mine, group=group.cpu_group)
    return ranks
