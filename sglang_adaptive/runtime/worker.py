"""The DSpark worker of the host, with the adaptive planner in the place of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel, get_schedule
from sglang.srt.speculative.dspark_components import dspark_worker_v2 as host
from sglang.srt.speculative.dspark_components.dspark_planner import alloc_verify_window

from sglang_adaptive.runtime import plain, seeds
from sglang_adaptive.runtime.dspark_planner import AdaptiveVerifyPlanner
from sglang_adaptive.runtime.estimate import Estimate
from sglang_adaptive.runtime.heard_drafts import HeardDrafts
from sglang_adaptive.runtime.narrow_drafts import NarrowDrafts
from sglang_adaptive.runtime.narrow_drafts import widths as narrow_widths
from sglang_adaptive.runtime.serving import AdaptiveServing, catch_up
from sglang_adaptive.runtime.trace_features import watch_drafts


@contextmanager
def _planner_in_place():
    """The host's constructor builds its planner by name, and hands it to its observers."""
    original, host.DSparkVerifyPlanner = host.DSparkVerifyPlanner, AdaptiveVerifyPlanner
    try:
        yield
    finally:
        host.DSparkVerifyPlanner = original


class AdaptiveDSparkWorker(AdaptiveServing, host.DSparkWorkerV2):
    """Drafts, verifies and accepts as the host does; how much it verifies is the planner's decision."""

    profiled_always = None
    # The numbers of tokens, besides K, that a step may draft; and that of the draft that is being profiled.
    narrow_widths: tuple[int, ...] = ()
    _profiled_width = 0
    _narrow: NarrowDrafts | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.begin_process()
        with _planner_in_place(), seeds.likeliest_drafts():
            super().__init__(*args, **kwargs)
        self.announce("DSPARK")

    @property
    def planner(self) -> AdaptiveVerifyPlanner:
        return self._verify_planner

    def init_cuda_graphs(self) -> None:
        """Capture as the host does, then profile what was captured."""
        super().init_cuda_graphs()
        self.planner.capture_widths(self.gamma + 1, 1, tails={1: plain.draft_kv_in_graph(self)})
        estimate = self._estimate()
        if estimate is None and self._drafts_narrow():
            self._narrow = narrow = NarrowDrafts(
                self, narrow_widths(self.gamma), lambda: self._profiled_width or self.planner.draft_width
            )
            self.narrow_widths, self.planner.drafts_narrow = narrow.widths, narrow.drafts
            for width in narrow.widths:
                self.planner.add_width(width + 1)
        self.begin_serving(estimate)
        if self.planner.ragged and self.planner.traces(self.options) and not self.options.policy:
            # For studies of confidences, in which nothing is trimmed: dozens of kernels a step.
            watch_drafts(self._proposer, self.planner.see_draft)

    def _drafts_narrow(self) -> bool:
        """Whether a step may draft fewer than K tokens. A trace wants the confidences of all K."""
        plain = not self._draft_is_moe and self._deferred_commit() is None
        wanted = self.options.policy and self.options.narrow_drafts and self.options.trace is None
        return plain and wanted and self.planner.ragged and not get_parallel().attn_dp_enabled

    def _estimate(self) -> Estimate | None:
        """Where the draft's distributions are to be asked, too: what makes confidences of them and the head's."""
        wanted = self.options.draft_features and self.options.policy and self.planner.ragged
        if not wanted or self._proposer._greedy_draft:
            return None
        estimate = Estimate(
            gamma=self.gamma,
            num_slots=self.model_runner.req_to_token_pool.req_to_token.shape[0],
            device=self.device,
            learn=self.options.calibration,
            head=True,
        )
        self.profiled_facts = {"draft_features": True}
        heard = HeardDrafts(self._proposer, estimate, self.planner.hears_draft, self.planner.see_draft)
        if torch.device(self.device).type == "cuda":
            heard.compile(self.profiled_draft(requests, 1) for requests in (1, 2, 3))
        return estimate

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[..., None] | None = None,
        grammar_barrier: Any = None,
        **kwargs: Any,
    ) -> Any:
        catch_up(batch, grammar_barrier)
        planner, prefix_lens = self.planner, batch.seq_lens
        if get_schedule().disable_overlap_schedule:
            # The overlapping scheduler sizes before it launches; without it there is no earlier place than this.
            planner.size(batch)
        planner.begin_step()

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
        with planner.fixed_width(), self._whole_draft():
            return super().forward_batch_generation(batch, publish, grammar_barrier, **kwargs)

    def _whole_draft(self) -> AbstractContextManager[None]:
        """What a step must run in that verifies all of a draft of fewer than K tokens."""
        planner = self.planner
        if self._narrow is None or planner.draft_width == self.gamma or not planner.in_fixed_width:
            return nullcontext()
        return self._narrow.whole(planner.draft_width)

    def _sampling_graph_eligible(self, *, sampling_info: Any, **kwargs: Any) -> bool:
        """The host's graph of sampled acceptance knows temperatures only."""
        return not seeds.apply(sampling_info) and super()._sampling_graph_eligible(
            sampling_info=sampling_info, **kwargs
        )

    def profiled_draft(self, requests: int, kv_length: int, width: int = 0) -> Callable[[], Any]:
        """One draft of ``width`` tokens (0: K) for R requests, which all use the host's padding slot."""
        seq_lens_cpu = torch.full((requests,), kv_length, dtype=torch.int64)
        zeros = torch.zeros(requests, dtype=torch.int64, device=self.device)
        batch = SimpleNamespace(
            req_pool_indices=zeros,
            seq_lens=seq_lens_cpu.to(self.device),
            seq_lens_cpu=seq_lens_cpu,
            global_num_tokens=None,
            global_num_tokens_for_logprob=None,
            can_run_decode_cuda_graph=False,
            is_extend_in_batch=False,
            dp_spec_prefill_coordination_applied=False,
        )
        draft_input = SimpleNamespace(bonus_tokens=zeros, nxt_kv_lens_cpu=None)

        def call() -> None:
            window = alloc_verify_window(
                batch=batch,
                bs=requests,
                device=self.device,
                verify_num_draft_tokens=self.verify_num_draft_tokens,
                block_pos_offsets=self._block_pos_offsets,
                model_runner=self.model_runner,
                seq_lens_cpu=seq_lens_cpu,
            )
            self._profiled_width = width
            try:
                with self._draft_context():
                    self._proposer.propose(
                        batch=batch,
                        draft_input=draft_input,
                        verify_window=window,
                        bs=requests,
                        device=self.device,
                        target_model=self.model_runner.model,
                        sampling_info=None,
                    )
            finally:
                self._profiled_width = 0

        return call
