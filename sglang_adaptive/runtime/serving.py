"""What the adaptive workers of all families share: start-up, and what they tell about themselves."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel, get_schedule

from sglang_adaptive import ALGORITHM, __version__
from sglang_adaptive.options import Options
from sglang_adaptive.patches.registry import refuse_foreign_hooks
from sglang_adaptive.policy.cost import CostModel
from sglang_adaptive.runtime import packed_rows
from sglang_adaptive.runtime.counters import Counters
from sglang_adaptive.runtime.estimate import Estimate
from sglang_adaptive.runtime.planner import StepPlanner
from sglang_adaptive.runtime.profiler import profile

logger = logging.getLogger(__name__)


class AdaptiveServing:
    """Mixed into a worker of the host.

    The worker has ``planner``, ``model_runner`` (the target's), ``draft_model_runner``, ``gamma`` and
    ``verify_num_draft_tokens`` (K and K + 1), and what the profiler times: ``profiled_draft`` and ``profiled_always``.
    """

    planner: StepPlanner
    options: Options
    family: str
    # What else the costs of this server's steps depend on.
    profiled_facts: dict[str, Any] = {}  # noqa: RUF012
    # Numbers of drafts below K that ``profiled_draft`` can time, too.
    narrow_widths: tuple[int, ...] = ()

    def begin_process(self) -> None:
        """First of all: refuse what would change the meaning of our patches, and read the options."""
        refuse_foreign_hooks()
        self.options = Options.from_env(os.environ)

    def announce(self, family: str) -> None:
        """Once the host's worker is built."""
        self.family = family
        self._ranks = _gather_ranks()
        if get_parallel().tp_rank == 0:
            logger.info(
                "%s is active on %d rank(s): sglang_adaptive %s, %s draft, K=%d, overlap %s, options %s",
                ALGORITHM,
                len(self._ranks),
                __version__,
                family,
                self.gamma,
                "off" if get_schedule().disable_overlap_schedule else "on",
                self.options.as_dict(),
            )

    def begin_serving(self, estimate: Estimate | None = None) -> None:
        """Profile what the host has captured, and hand it to the planner."""
        if self.options.draft_features and not (estimate is not None and estimate.head):
            logger.warning(
                "sglang_adaptive: draft_features changes nothing here: drafts without a confidence head are always "
                "asked, and there is nothing to ask where all drafts are greedy (as under "
                "--enable-deterministic-inference) or every draft is verified."
            )
        if self.planner.ragged and torch.device(self.model_runner.device).type == "cuda":
            packed_rows.compile_ahead(self.model_runner.device)
        self._cost = profile(self, self.options) if self.planner.ragged else CostModel.empty()
        self.planner.begin_serving(
            cost=self._cost,
            options=self.options,
            max_requests=self.model_runner.max_running_requests,
            estimate=estimate,
        )

    @property
    def adaptive_counters(self) -> Counters:
        """What the metrics are written from."""
        return self.planner.counters

    def adaptive_state(self) -> dict[str, Any]:
        """What /server_info shows of this rank."""
        return {
            "active": True,
            "algorithm": ALGORITHM,
            "family": self.family,
            "version": __version__,
            "rank": get_parallel().tp_rank,
            "ranks": self._ranks,
            "options": self.options.as_dict(),
            "cost": {
                "verify_tokens": self._cost.tiers.tolist(),
                "kv_tokens": self._cost.kv_points.tolist(),
                "verify_ms": self._cost.verify_ms.tolist(),
                "draft_requests": self._cost.draft_points.tolist(),
                "draft_ms": self._cost.draft_ms.tolist(),
                "narrow_draft_ms": {width: ms.tolist() for width, ms in self._cost.narrow_draft_ms.items()},
            },
            **self.planner.counters.as_dict(),
        }

    def block_accept_estimate_log_suffix(self) -> str | None:
        """Appended by the host to its line of decode metrics."""
        suffix = getattr(super(), "block_accept_estimate_log_suffix", None)
        hosts = None if suffix is None else suffix()
        if self.options.log_decisions == "off":
            return hosts
        counters = self.planner.counters.as_dict()
        own = f"verify len: {counters['verify_length']:.2f}, budget: {counters['budget_per_step']:.1f}"
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


def catch_up(batch: Any, grammar_barrier: Callable[[], None] | None) -> None:
    """Before a mixed step: its decoding requests' grammars take in what the last step brought.

    A decode step calls the host's barrier where it verifies. A mixed step samples as a prefill does and never calls it.
    """
    if grammar_barrier is not None and batch.forward_mode.is_mixed() and batch.has_grammar:
        grammar_barrier()
