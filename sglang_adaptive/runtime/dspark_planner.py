"""The planner in the place of the host's DSpark planner."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.dspark_components.dspark_planner import DSparkVerifyPlanner

from sglang_adaptive.runtime.planner import StepPlanner


class AdaptiveVerifyPlanner(StepPlanner, DSparkVerifyPlanner):
    """The host asks its planner three things per step, and this one answers them differently.

    They are ``prepare_verify_budget`` before the launch, ``resolve_verify_token_budget`` after the draft and
    ``schedule_layout`` before the verification. What the host builds from the layout is its own.
    """

    def __init__(self, *, tp_rank: int, **kwargs: Any) -> None:
        # The host logs on rank 0 that verification is not scheduled without an offline table; that is not so here.
        DSparkVerifyPlanner.__init__(self, tp_rank=-1, **kwargs)
        self._is_verify_all = False
        StepPlanner.__init__(
            self,
            gamma=self.gamma,
            model_runner=self.model_runner,
            device=self.device,
            group=self._tp_sync._tp_group,
            ragged=self.is_compact_mode,
        )

    def prepare_verify_budget(self, batch: Any, future_map: Any) -> None:
        """Called by the host's overlapping scheduler."""
        self.size(batch)

    def resolve_verify_token_budget(self, *, draft_input: Any, **_: Any) -> int | None:
        """The budget was decided before the launch, with and without overlap."""
        draft_input.verify_token_budget = None if self.decision is None else self.decision.budget
        return draft_input.verify_token_budget

    def schedule_layout(self, *, req_pool_indices: torch.Tensor, confidence: torch.Tensor | None, **_: Any) -> Any:
        """None where the attention verifies uniformly."""
        return self.layout(len(req_pool_indices), confidence) if self.ragged else None
