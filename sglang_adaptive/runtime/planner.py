"""The decision of each step, in the order it happens: collect, size on the CPU, allocate on the device.

It is the same for every family of drafts. A family adds how it drafts, how its confidences come about, and where in the
host's step these methods are called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sglang.srt.runtime_context import get_parallel, get_schedule
from sglang.srt.speculative.dspark_components.dspark_planner import ragged_capture_num_tokens

from sglang_adaptive.options import Options
from sglang_adaptive.policy.allocation import allocate
from sglang_adaptive.policy.budget import Decision
from sglang_adaptive.policy.cost import CostModel
from sglang_adaptive.policy.engine import Engine, PolicyConfig
from sglang_adaptive.policy.steady import EVERY, Steady
from sglang_adaptive.runtime import trace_features
from sglang_adaptive.runtime.compiled_allocation import serving_allocation
from sglang_adaptive.runtime.counters import Counters
from sglang_adaptive.runtime.device import async_h2d
from sglang_adaptive.runtime.estimate import Estimate
from sglang_adaptive.runtime.layouts import Layouts
from sglang_adaptive.runtime.priorities import Priorities
from sglang_adaptive.runtime.relay import OVERLAP_LAG, SYNC_LAG, StepRecord, StepRelay
from sglang_adaptive.runtime.trace import TraceRecorder, describe
from sglang_adaptive.runtime.widths import FixedWidths

logger = logging.getLogger(__name__)

# How often a changed calibration is sent to the device, in steps.
CALIBRATE_STEPS = 16


class StepPlanner:
    """Verification lengths of a step from stale confidences (budget) and live ones (shares).

    A worker calls ``size`` before the launch, ``layout`` between draft and verification, and ``publish`` when the
    outcome is known on the device. ``gamma`` is K; ``group`` are the ranks that must decide alike; ``ragged`` is False
    where the attention verifies uniformly, so that nothing is ever decided.
    """

    def __init__(self, *, gamma: int, model_runner: Any, device: Any, group: Any, ragged: bool) -> None:
        self.gamma, self.model_runner, self.device = gamma, model_runner, device
        self.ragged = ragged
        self.counters = Counters(gamma)
        self.decision: Decision | None = None
        self._sized: Decision | None = None
        self.estimate: Estimate | None = None
        self._group = group
        self._layouts = Layouts(model_runner, device, gamma + 1)
        self.widths: FixedWidths | None = None
        # Whether drafts of so many tokens can be made just now; all K always can.
        self.drafts_narrow: Callable[[int], bool] = lambda width: False
        self._skips_drafts = True
        self._engine: Engine | None = None
        self._relay: StepRelay | None = None
        self._allocate: Callable[..., torch.Tensor] = allocate
        self._iteration = 0
        self._layout: Any = None
        self._tier = 0
        self._calibration: torch.Tensor | None = None
        self._calibration_version = -1
        self._trace: TraceRecorder | None = None
        self._draft_columns: torch.Tensor | None = None
        self._priorities: Priorities | None = None
        self._weights: np.ndarray | None = None
        self._log_every = False
        self._steady = Steady()
        self._may_repeat = self._repeating = False
        self._edges: list[int] = []
        self._bounds = 0, gamma
        self._requests = 0

    def capture_widths(self, *widths: int, tails: Mapping[int, Callable[..., None] | None] | None = None) -> None:
        """Make the graphs of steps in which every request has so many tokens; the host's must be there. ``tails`` are
        what else those of a width do."""
        if self.ragged:
            self.widths = FixedWidths(self.model_runner, widths, self.gamma + 1, tails)
            # A family that asks for no width of one packs its steps without a draft.
            self._skips_drafts = all(self.serves(width) for width in widths if width == 1)

    def add_width(self, width: int) -> None:
        """Make graphs of ``width`` tokens for each of many requests, too."""
        if self.widths is not None:
            self.widths.add(width)

    def begin_serving(
        self, *, cost: CostModel, options: Options, max_requests: int, estimate: Estimate | None = None
    ) -> None:
        """Take the profiled costs, and the memory pools that exist by now.

        ``estimate`` makes the confidences of drafts without a head, or with more than a head, and learns by itself what
        the engine's calibration learns of a head.
        """
        self.estimate = estimate
        pool = self.model_runner.req_to_token_pool
        config = PolicyConfig(
            min_gain=options.min_gain,
            min_len=options.min_verify_len,
            max_len=min(options.max_verify_len or self.gamma + 1, self.gamma + 1),
            calibrate=options.calibration and estimate is None,
            learns_first=estimate is not None and estimate.head and estimate.learning,
            correct_costs=options.cost_correction,
            skip_draft=options.skip_draft and self._skips_drafts,
            narrow_whole=all(self.serves(width + 1) for width in cost.narrow_draft_ms),
            auto_refresh=self._group.world_size == 1,
        )
        self._engine = Engine(config, cost if options.policy else CostModel.empty(), self.gamma)
        self.counters.begin_serving(self._engine.calibration if config.calibrate else None, self.ragged)
        self._relay = StepRelay(
            num_slots=pool.req_to_token.shape[0],
            gamma=self.gamma,
            max_requests=max_requests,
            device=self.device,
            lag=SYNC_LAG if get_schedule().disable_overlap_schedule else OVERLAP_LAG,
            extra=trace_features.width(self.gamma) * self.traces(options) if estimate is None else estimate.columns,
            uncollected=EVERY,
        )
        if self.traces(options):
            self._trace = TraceRecorder(options.trace, self.gamma, meta=describe(self.model_runner))
        self._ones = torch.ones(max_requests, dtype=torch.int32, device=self.device)
        self._ones_on_cpu = torch.ones(max_requests, dtype=torch.int32)
        self._log_every = options.log_decisions == "every"
        self._may_repeat = not self._log_every
        # A trace wants the confidences of every step.
        heads = estimate is not None and estimate.head
        trims = self._may_repeat and not heads and options.trace is None and not options.priority_weight
        if self._group.world_size > 1:
            # Ranks on other machines may have been given other options.
            self._may_repeat, trims = self._group.broadcast_object((self._may_repeat, trims), src=0)
        if not trims:
            self._steady.every_trim = 0
        self._edges = ragged_capture_num_tokens(model_runner=self.model_runner) or []
        self._bounds = config.min_len - 1, min(self.gamma, config.max_len - 1)
        if options.priority_weight > 0:
            self._priorities = Priorities(options.priority_weight, get_schedule().schedule_low_priority_values_first)
        if torch.device(self.device).type == "cuda":
            identity = torch.tensor([[0.0], [1.0]], device=self.device).repeat(1, self.gamma)
            self._calibration = identity
            lengths = {min(config.max_len, width + 1) for width in (self.gamma, *self._engine.draft_widths.widths)}
            self._allocate = serving_allocation(max_requests, config, identity, sorted(lengths), self._group)

    def traces(self, options: Options) -> bool:
        """Whether this rank records a trace."""
        return options.trace is not None and get_parallel().tp_rank == 0

    def serves(self, width: int) -> bool:
        """Whether there are attention and graphs for ``width`` tokens of every request."""
        return self.widths is not None and width in self.widths

    def hears_draft(self) -> bool:
        """Whether the running step's confidences matter; while steps are profiled they cost what they do in those."""
        if self._engine is None or self.decision is None:
            return self._engine is None
        # Of a repeated decision only a trim hands out shares.
        return not self._repeating or (self.decision.draft and not self.decision.uniform)

    def see_draft(self, columns: torch.Tensor) -> None:
        """Keep what the estimate and the trace want to know of the draft of the step that is being launched."""
        self._draft_columns = columns if self._engine is not None else None

    # -- before the launch, on the CPU, while the device runs the previous step --

    def size(self, batch: Any) -> None:
        """Decide this step's budget from steps that are old enough."""
        self._iteration = batch.forward_iter
        last, self.decision, self._repeating = self._sized, None, False
        if not self.ragged:
            return
        requests = batch.batch_size()
        decodes = not (batch.forward_mode.is_extend() or batch.is_extend_in_batch or requests == 0)
        if decodes and self._may_repeat and self._steady.repeats(requests):
            self._repeating, self._requests = True, requests
            least, most = self._bounds
            most = min(most, last.width or most)
            self.decision = self._steady.again(last, requests, self.gamma, self._edges, least, most)
            if self._trace is not None:
                self._see_rows(batch)
            return
        for record in self._relay.collect(self._iteration):
            self._learn(record)
        if not decodes:
            return
        slots, generations = self._see_rows(batch)
        if self.estimate is not None:
            self.estimate.begin(self._iteration, slots, generations)
        confidence, fresh = self._relay.read(slots, generations)
        self._requests = requests
        self._weights = None if self._priorities is None else self._priorities.weights(batch.reqs)
        self.decision = self._engine.size(
            confidence,
            requests=requests,
            non_draft_tokens=requests,
            kv_tokens=self._kv_tokens,
            fresh=fresh,
            weights=self._weights,
            repeated=self._steady.repeated,
        )
        self._sized = self.decision
        self._steady.sized(self.decision, requests)
        if self._log_every and get_parallel().tp_rank == 0:
            logger.info("Step %d of %d requests: %s", self._iteration, len(slots), self.decision)

    def _see_rows(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        """Keep, and return, the slot and its generation of each request [R]; and keep the tokens in the KV cache."""
        self._slots = batch.req_pool_indices_cpu.numpy()
        self._generations = self.model_runner.req_to_token_pool.req_generation[batch.req_pool_indices_cpu].numpy()
        self._kv_tokens = _kv_tokens(batch)
        return self._slots, self._generations

    def _learn(self, record: StepRecord) -> None:
        """Feed a finished step to the engine; what comes of this rank's clock takes effect as rank 0 measured it."""
        self.counters.observe(record)
        if self._trace is not None:
            self._trace.record(record, record.decision)
        if not record.observed:
            return
        requests = len(record.slots)
        self._engine.observe(
            requests=requests,
            non_draft_tokens=requests,
            draft_tokens=int(record.verify_lens.sum()) - requests,
            kv_tokens=record.kv_tokens,
            committed_tokens=int(record.commit_lens.sum()),
            step_ms=record.step_ms,
            follows=record.follows,
            drafted=record.drafted,
            width=record.width,
            confidence=record.confidence,
            verified=record.verify_lens - 1,
            accepted=record.commit_lens - 1,
        )
        if self.estimate is not None:
            self.estimate.learn(record)
        if self._group.world_size > 1 and self._engine.refresh_due:
            state = torch.from_numpy(self._engine.measured_state())
            torch.distributed.broadcast(state, src=self._group.ranks[0], group=self._group.cpu_group)
            self._engine.apply_measured(state.numpy())
        due = self._engine.steps % CALIBRATE_STEPS == 0 or self._engine.steps < CALIBRATE_STEPS
        if due and self._engine.calibration.version != self._calibration_version:
            self._calibration_version = self._engine.calibration.version
            if not self._engine.calibration.is_identity:
                coefficients = torch.from_numpy(self._engine.calibration.coefficients.astype(np.float32))
                self._calibration = async_h2d(coefficients, self.device)

    def begin_step(self) -> None:
        """The step that was sized is about to be launched."""
        if self.decision is not None and not self._repeating:
            self._relay.begin()

    @property
    def draft_width(self) -> int:
        """How many tokens the running step drafts for each request."""
        return (0 if self.decision is None else self.decision.width) or self.gamma

    # -- after the draft --

    @property
    def in_fixed_width(self) -> bool:
        """Whether this step verifies all that is drafted of every request, with the graphs and the attention for
        that."""
        decision = self.decision
        if decision is None or not decision.uniform or not self.serves(self.draft_width + 1):
            return False
        return not decision.width or self.drafts_narrow(decision.width)

    def fixed_width(self) -> AbstractContextManager[None]:
        """What the step's verification must run in."""
        return self.widths.active(self.draft_width + 1) if self.in_fixed_width else nullcontext()

    def layout(self, requests: int, confidence: torch.Tensor | None) -> Any:
        """The step's packed layout from its live confidences [R, K]; None in a step of fixed width."""
        if confidence is not None and self._group.world_size > 1:
            # Ranks must allocate alike: they use rank 0's confidences, like its draft tokens.
            self._group.broadcast(confidence, src=0)
        if self.in_fixed_width:
            self._layout, self._tier = None, requests * (self.draft_width + 1)
            return None
        if confidence is None or self.decision is None or (self.decision.uniform and not self.decision.width):
            return self._take(self._layouts.uniform(requests))
        config, weights = self._engine.config, self._weights
        max_len = min(config.max_len, self.draft_width + 1)
        verify_lens = self._allocate(
            confidence.float(),
            self.decision.budget,
            min_len=config.min_len,
            max_len=max_len,
            calibration=self._calibration,
            weights=None if weights is None else async_h2d(torch.from_numpy(weights).float(), self.device),
        )
        return self._take(self._layouts.ragged(verify_lens, requests + self.decision.budget))

    def _take(self, layout: Any) -> Any:
        self._layout, self._tier = layout, 0 if layout is None else layout.graph_num_tokens
        return layout

    # -- a step without a draft --

    def draft_after_all(self) -> None:
        """The batch needs the host's full step: draft, and verify everything."""
        self.decision = replace(self.decision, draft=True, uniform=True, budget=self._requests * self.gamma, width=0)

    def anchor_layout(self, requests: int) -> Any:
        """The packed layout that verifies one token of each request."""
        return self._take(self._layouts.anchors(requests))

    def verify_anchors(self, requests: int) -> AbstractContextManager[None]:
        """What a step must run in that verifies one token of each request."""
        self._layout, self._tier = None, requests
        return self.widths.active(1)

    def ones(self, requests: int) -> torch.Tensor:
        """[R] int32 ones, to be read only."""
        return self._ones[:requests]

    def ones_on_cpu(self, requests: int) -> torch.Tensor:
        """The same where the host reads them."""
        return self._ones_on_cpu[:requests]

    # -- when the step is launched --

    def publish(self, *, confidence: torch.Tensor | None, commit_lens: torch.Tensor | None) -> None:
        """Send the step's confidences [R, K] and committed tokens [R] on their way to the CPU; None without a draft.

        A shorter draft may have fewer columns. Of a step that repeats a decision only the committed tokens go.
        """
        if self._repeating:
            rows = (
                {}
                if self._trace is None
                else {"slots": self._slots, "generations": self._generations, "kv_tokens": self._kv_tokens}
            )
            self._relay.count(
                iteration=self._iteration,
                requests=self._requests,
                commit_lens=commit_lens,
                verify_lens=None if self._layout is None or commit_lens is None else self._layout.verify_lens,
                decision=self.decision,
                tier=self._tier,
                last=not self._steady.left,
                **rows,
            )
            return
        self._relay.publish(
            iteration=self._iteration,
            slots=self._slots,
            generations=self._generations,
            kv_tokens=self._kv_tokens,
            confidence=confidence,
            verify_lens=None if confidence is None or self._layout is None else self._layout.verify_lens,
            commit_lens=commit_lens,
            decision=self.decision,
            tier=self._tier,
            extra=None if confidence is None else self._draft_columns,
        )
        self._draft_columns = None


def _kv_tokens(batch: Any) -> float:
    """Tokens in the batch's KV cache; where the host keeps no lengths on the CPU, what it has reserved for them."""
    if batch.seq_lens_cpu is not None:
        return float(batch.seq_lens_cpu.sum())
    reserved = getattr(batch.spec_info, "nxt_kv_lens_sum", None)
    return float(sum(request.seqlen for request in batch.reqs) if reserved is None else reserved)
