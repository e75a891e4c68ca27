"""The decision of each step, in the order it happens: collect, size on the CPU, allocate on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sglang.srt.runtime_context import get_parallel, get_schedule
from sglang.srt.speculative.dspark_components.dspark_planner import (
    DSparkVerifyPlanner,
    ragged_capture_num_tokens,
    uniform_ragged_layout,
)
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from sglang_adaptive.options import Options
from sglang_adaptive.policy.allocation import allocate
from sglang_adaptive.policy.budget import Decision
from sglang_adaptive.policy.cost import CostModel
from sglang_adaptive.policy.engine import Engine, PolicyConfig
from sglang_adaptive.runtime import trace_features
from sglang_adaptive.runtime.counters import Counters
from sglang_adaptive.runtime.relay import OVERLAP_LAG, SYNC_LAG, StepRecord, StepRelay
from sglang_adaptive.runtime.trace import TraceRecorder, describe

logger = logging.getLogger(__name__)

# How often a changed calibration is sent to the device, in steps.
CALIBRATE_STEPS = 16


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
        self._anchor_layouts: dict[int, Any] = {}
        self._calibration: torch.Tensor | None = None
        self._calibration_version = -1
        self._trace: TraceRecorder | None = None
        self._draft_columns: torch.Tensor | None = None
        self._priorities: Priorities | None = None
        self._weights: np.ndarray | None = None
        self._log_every = False

    def begin_serving(self, *, cost: CostModel, options: Options, max_requests: int) -> None:
        """Take the profiled costs, and the memory pools that exist by now."""
        pool = self.model_runner.req_to_token_pool
        config = PolicyConfig(
            min_gain=options.min_gain,
            min_len=options.min_verify_len,
            max_len=min(options.max_verify_len or self.gamma + 1, self.gamma + 1),
            calibrate=options.calibration,
            correct_costs=options.cost_correction,
            skip_draft=options.skip_draft,
            auto_refresh=self._group.world_size == 1,
        )
        self._engine = Engine(config, cost if options.policy else CostModel.empty(), self.gamma)
        self.counters.begin_serving(self._engine.calibration if config.calibrate else None, self.is_compact_mode)
        self._relay = StepRelay(
            num_slots=pool.req_to_token.shape[0],
            gamma=self.gamma,
            max_requests=max_requests,
            device=self.device,
            lag=SYNC_LAG if get_schedule().disable_overlap_schedule else OVERLAP_LAG,
            extra=trace_features.width(self.gamma) if self.traces(options) else 0,
        )
        if self.traces(options):
            self._trace = TraceRecorder(options.trace, self.gamma, meta=describe(self.model_runner.server_args))
        self._ones = torch.ones(max_requests, dtype=torch.int32, device=self.device)
        self._log_every = options.log_decisions == "every"
        if options.priority_weight > 0:
            self._priorities = Priorities(options.priority_weight, get_schedule().schedule_low_priority_values_first)
        if torch.device(self.device).type == "cuda":
            identity = torch.tensor([[0.0], [1.0]], device=self.device).repeat(1, self.gamma)
            self._calibration = identity
            self._allocate = compiled_allocation(max_requests, config, identity)

    def traces(self, options: Options) -> bool:
        """Whether this rank records a trace."""
        return options.trace is not None and get_parallel().tp_rank == 0

    def see_draft(self, columns: torch.Tensor) -> None:
        """Keep the ``trace_features.draft_columns`` of the step that is being launched, for its trace."""
        self._draft_columns = columns

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
            self._learn(record)
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.batch_size() == 0:
            return
        slots = batch.req_pool_indices_cpu.numpy()
        generations = self.model_runner.req_to_token_pool.req_generation[batch.req_pool_indices_cpu].numpy()
        confidence, fresh = self._relay.read(slots, generations)
        self._slots, self._generations, self._kv_tokens = slots, generations, _kv_tokens(batch)
        self._weights = None if self._priorities is None else self._priorities.weights(batch.reqs)
        self.decision = self._engine.size(
            confidence,
            requests=len(slots),
            non_draft_tokens=len(slots),
            kv_tokens=self._kv_tokens,
            fresh=fresh,
            weights=self._weights,
        )
        if self._log_every and get_parallel().tp_rank == 0:
            logger.info("Step %d of %d requests: %s", self._iteration, len(slots), self.decision)

    def _learn(self, record: StepRecord) -> None:
        """Feed a finished step to the engine; what comes of this rank's clock takes effect as rank 0 measured it."""
        self.counters.observe(record)
        if self._trace is not None:
            self._trace.record(record, record.decision)
        requests = len(record.slots)
        self._engine.observe(
            requests=requests,
            non_draft_tokens=requests,
            draft_tokens=int(record.verify_lens.sum()) - requests,
            kv_tokens=record.kv_tokens,
            committed_tokens=int(record.commit_lens.sum()),
            step_ms=record.step_ms,
            drafted=record.confidence is not None,
            confidence=record.confidence,
            verified=record.verify_lens - 1,
            accepted=record.commit_lens - 1,
        )
        if self._group.world_size > 1 and self._engine.refresh_due:
            state = torch.from_numpy(self._engine.measured_state())
            torch.distributed.broadcast(state, src=self._group.ranks[0], group=self._group.cpu_group)
            self._engine.apply_measured(state.numpy())
        if self._engine.calibration.version != self._calibration_version and self._engine.steps % CALIBRATE_STEPS == 0:
            self._calibration_version = self._engine.calibration.version
            if not self._engine.calibration.is_identity:
                coefficients = torch.from_numpy(self._engine.calibration.coefficients.astype(np.float32))
                self._calibration = async_h2d(coefficients, self.device)

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
        config = self._engine.config
        weights = self._weights
        return self._allocate(
            confidence,
            budget,
            min_len=config.min_len,
            max_len=config.max_len,
            calibration=self._calibration,
            weights=None if weights is None else async_h2d(torch.from_numpy(weights).float(), self.device),
        )

    # -- a step without a draft --

    def draft_after_all(self) -> None:
        """The batch needs the host's full step: draft, and verify everything."""
        self.decision = replace(self.decision, draft=True, uniform=True, budget=len(self._slots) * self.gamma)

    def anchor_layout(self, requests: int) -> Any:
        """The packed layout that verifies one token of each request; cached."""
        if requests not in self._anchor_layouts:
            tiers = ragged_capture_num_tokens(model_runner=self.model_runner)
            grid = tiers if tiers and tiers[-1] >= requests else [requests]
            self._anchor_layouts[requests] = RaggedVerifyLayout.from_verify_lens(
                verify_lens_cpu=[1] * requests, device=self.device, grid=grid
            )
        self._layout = self._anchor_layouts[requests]
        return self._layout

    def ones(self, requests: int) -> torch.Tensor:
        """[R] int32 ones, to be read only."""
        return self._ones[:requests]

    # -- when the step is launched --

    def publish(self, *, confidence: torch.Tensor | None, commit_lens: torch.Tensor | None) -> None:
        """Send the step's confidences [R, K] and committed tokens [R] on their way to the CPU; None without a draft."""
        lens = None
        if confidence is not None:
            full = self._layout is None
            lens = torch.full_like(commit_lens, self.gamma + 1) if full else self._layout.verify_lens
        self._relay.publish(
            iteration=self._iteration,
            slots=self._slots,
            generations=self._generations,
            kv_tokens=self._kv_tokens,
            confidence=confidence,
            verify_lens=lens,
            commit_lens=commit_lens,
            decision=self.decision,
            tier=0 if self._layout is None else self._layout.graph_num_tokens,
            extra=None if confidence is None else self._draft_columns,
        )
        self._draft_columns = None


class Priorities:
    """Weights of requests from the host's request priority.

    A request's tokens weigh ``1 + weight`` times as much for each step of priority above none, at most eight steps.
    """

    def __init__(self, weight: float, low_values_first: bool) -> None:
        self._base, self._sign = 1.0 + weight, -1 if low_values_first else 1

    def weights(self, requests: list[Any]) -> np.ndarray | None:
        """[R] float64 > 0; None where no request has a priority."""
        values = np.fromiter((request.priority or 0 for request in requests), np.float64, len(requests))
        return self._base ** np.clip(self._sign * values, -8, 8) if values.any() else None


def compiled_allocation(
    max_requests: int, config: PolicyConfig, calibration: torch.Tensor
) -> Callable[..., torch.Tensor]:
    """``allocate`` under torch.compile, compiled now for all shapes that serving meets; as it is where that fails."""
    compiled = torch.compile(allocate, dynamic=True)
    gamma, device = calibration.shape[1], calibration.device
    try:
        for requests in sorted({1, 2, max_requests}):
            confidence = torch.full((requests, gamma), 0.5, device=device)
            for budget in (0, 1, 2, 3):
                compiled(confidence, budget, min_len=config.min_len, max_len=config.max_len, calibration=calibration)
    except Exception as error:
        logger.warning("sglang_adaptive: torch.compile failed (%s): the allocation runs uncompiled.", error)
        return allocate
    return compiled


def async_h2d(values: torch.Tensor, device: Any) -> torch.Tensor:
    """The values on the device, without waiting for the copy."""
    if torch.device(device).type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def _kv_tokens(batch: Any) -> float:
    """Tokens in the batch's KV cache; where the host keeps no lengths on the CPU, what it has reserved for them."""
    if batch.seq_lens_cpu is not None:
        return float(batch.seq_lens_cpu.sum())
    reserved = getattr(batch.spec_info, "nxt_kv_lens_sum", None)
    return float(sum(request.seqlen for request in batch.reqs) if reserved is None else reserved)
