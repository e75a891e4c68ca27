"""The decision of each step, in the order it happens: collect, size on the CPU, allocate on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.runtime_context import get_schedule
from sglang.srt.speculative.dspark_components.dspark_planner import DSparkVerifyPlanner, uniform_ragged_layout

from sglang_adaptive.options import Options
from sglang_adaptive.policy.allocation import allocate
from sglang_adaptive.policy.budget import Decision
from sglang_adaptive.policy.cost import CostModel
from sglang_adaptive.policy.engine import Engine, PolicyConfig
from sglang_adaptive.runtime.counters import Counters
from sglang_adaptive.runtime.relay import OVERLAP_LAG, SYNC_LAG, StepRelay


class AdaptiveVerifyPlanner(DSparkVerifyPlanner):
    """Verification lengths of a step from stale confidences (budget) and live ones (shares).

    The host asks its planner three things per step, and this one answers them differently: ``prepare_verify_budget``
    before the launch, ``resolve_verify_token_budget`` after the draft and ``schedule_layout`` before the verification.
    What the host builds from the lengths (packing, graph tier, KV locations) is its own.
    """

    def __init__(self, *, tp_rank: int, **kwargs: Any) -> None:
        # The host logs on rank 0 that verification is not scheduled without an offline table; that is not so here.
        super().__init__(tp_rank=-1, **kwargs)
        self._is_verify_all = False
        self.counters = Counters(self.gamma)
        self.decision: Decision | None = None
        self._group = self._tp_sync._tp_group
        self._engine: Engine | None = None
        self._relay: StepRelay | None = None
        self._allocate: Callable[..., torch.Tensor] = allocate
        self._iteration = 0
        self._layout: Any = None

    def begin_serving(self, *, cost: CostModel, options: Options, max_requests: int) -> None:
        """Take the profiled costs, and the memory pools that exist by now."""
        pool = self.model_runner.req_to_token_pool
        self._min_len = options.min_verify_len
        self._max_len = min(options.max_verify_len or self.gamma + 1, self.gamma + 1)
        config = PolicyConfig(min_gain=options.min_gain, min_len=self._min_len, max_len=self._max_len)
        self._engine = Engine(config, cost if options.policy else CostModel.empty(), self.gamma)
        self._relay = StepRelay(
            num_slots=pool.req_to_token.shape[0],
            gamma=self.gamma,
            max_requests=max_requests,
            device=self.device,
            lag=SYNC_LAG if get_schedule().disable_overlap_schedule else OVERLAP_LAG,
        )
        if torch.device(self.device).type == "cuda":
            self._allocate = torch.compile(allocate, dynamic=True)

    # -- before the launch, on the CPU, while the device runs the previous step --

    def prepare_verify_budget(self, batch: Any, future_map: Any) -> None:
        """Called by the host's overlapping scheduler."""
        self.size(batch)

    def size(self, batch: Any) -> None:
        """Decide this step's budget from steps that are old enough."""
        self._iteration = batch.forward_iter
        self.decision = None
        if not self.is_compact_mode:
            return
        for record in self._relay.collect(self._iteration):
            self.counters.observe(record)
            self._engine.observe(
                requests=len(record.slots),
                non_draft_tokens=len(record.slots),
                draft_tokens=int(record.verify_lens.sum()) - len(record.slots),
                kv_tokens=record.kv_tokens,
                committed_tokens=int(record.commit_lens.sum()),
                confidence=record.confidence,
                verified=record.verify_lens - 1,
                accepted=record.commit_lens - 1,
            )
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.batch_size() == 0:
            return
        slots = batch.req_pool_indices_cpu.numpy()
        generations = self.model_runner.req_to_token_pool.req_generation[batch.req_pool_indices_cpu].numpy()
        confidence, fresh = self._relay.read(slots, generations)
        self._slots, self._generations, self._kv_tokens = slots, generations, _kv_tokens(batch)
        self.decision = self._engine.size(
            confidence,
            requests=len(slots),
            non_draft_tokens=len(slots),
            kv_tokens=self._kv_tokens,
            fresh=fresh,
        )
        self.counters.decided(draft=self.decision.draft, uniform=self.decision.uniform)

    # -- after the draft --

    def resolve_verify_token_budget(self, *, draft_input: Any, **_: Any) -> int | None:
        """The budget was decided before the launch, with and without overlap."""
        draft_input.verify_token_budget = None if self.decision is None else self.decision.budget
        return draft_input.verify_token_budget

    def schedule_layout(self, *, req_pool_indices: torch.Tensor, confidence: torch.Tensor | None, **kwargs: Any) -> Any:
        """The step's packed layout, or the cached uniform one where everything is verified."""
        if not self.is_compact_mode:
            return None
        if confidence is not None and self._group.world_size > 1:
            # Ranks must allocate alike: they use rank 0's confidences, like its draft tokens.
            self._group.broadcast(confidence, src=0)
        if self.decision is None or self.decision.uniform:
            self._layout = self._uniform_layout(len(req_pool_indices), kwargs.get("global_num_reqs"))
        else:
            self._layout = super().schedule_layout(req_pool_indices=req_pool_indices, confidence=confidence, **kwargs)
        return self._layout

    def _uniform_layout(self, requests: int, global_requests: int | None) -> Any:
        key = (requests, global_requests)
        if key not in self._uniform_layout_cache:
            self._uniform_layout_cache[key] = uniform_ragged_layout(
                bs=requests,
                device=self.device,
                verify_num_draft_tokens=self.verify_num_draft_tokens,
                ragged_verify_mode=self._ragged_verify_mode,
                model_runner=self.model_runner,
                tier_num_reqs=global_requests,
            )
        return self._uniform_layout_cache[key]

    def _schedule_verify_lens(
        self, *, confidence: torch.Tensor | None, budget: int | None, **_: Any
    ) -> torch.Tensor | None:
        if confidence is None or budget is None:
            return None
        return self._allocate(confidence, budget, min_len=self._min_len, max_len=self._max_len)

    # -- when the step is launched --

    def publish(self, *, confidence: torch.Tensor, commit_lens: torch.Tensor) -> None:
        """Send the step's confidences [R, K] and committed tokens [R] on their way to the CPU."""
        layout = self._layout
        lens = torch.full_like(commit_lens, self.gamma + 1) if layout is None else layout.verify_lens
        self._relay.publish(
            iteration=self._iteration,
            slots=self._slots,
            generations=self._generations,
            kv_tokens=self._kv_tokens,
            confidence=confidence,
            verify_lens=lens,
            commit_lens=commit_lens,
        )


def _kv_tokens(batch: Any) -> float:
    """Tokens in the batch's KV cache; where the host keeps no lengths on the CPU, what it has reserved for them."""
    if batch.seq_lens_cpu is not None:
        return float(batch.seq_lens_cpu.sum())
    reserved = batch.spec_info.nxt_kv_lens_sum
    return float(reserved) if reserved is not None else float(np.sum([req.seqlen for req in batch.reqs]))
