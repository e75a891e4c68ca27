"""The host's EAGLE worker, for EAGLE, EAGLE3 and MTP drafts, with adaptive verification."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative import eagle_worker_v2 as host
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.eagle_utils import (
    get_draft_input_from_target_hidden_dim,
    get_draft_recurrent_hidden_state_spec,
)
from sglang.srt.speculative.ragged_verify import ragged_verify_compact_enabled
from sglang.srt.speculative.spec_utils import draft_tp_context

from sglang_adaptive import activation
from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.runtime import eagle_verify
from sglang_adaptive.runtime.eagle_draft import AdaptiveEagleDraftWorker
from sglang_adaptive.runtime.estimate import Estimate
from sglang_adaptive.runtime.planner import StepPlanner
from sglang_adaptive.runtime.serving import AdaptiveServing, catch_up


@contextmanager
def _draft_worker_in_place() -> Iterator[None]:
    """The host's constructor builds its draft worker by name."""
    original, host.EagleDraftWorker = host.EagleDraftWorker, AdaptiveEagleDraftWorker
    try:
        yield
    finally:
        host.EagleDraftWorker = original


class AdaptiveEagleWorker(AdaptiveServing, host.EAGLEWorkerV2):
    """Drafts, verifies, accepts and extends the draft as the host does; how much it verifies is the planner's decision.

    A step without a draft verifies one token a request and still extends the draft with it, which keeps the draft's
    hidden states and KV current.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.begin_process()
        if float(os.environ.get("SGLANG_SIMULATE_ACC_LEN", "-1")) > 0:
            raise AdaptiveError("SGLANG_SIMULATE_ACC_LEN accepts drafts that were never verified: unset it.")
        with _draft_worker_in_place():
            super().__init__(*args, **kwargs)
        self.model_runner = self.target_worker.model_runner
        self.gamma, self.verify_num_draft_tokens = self.speculative_num_steps, self.speculative_num_draft_tokens
        self.planner = StepPlanner(
            gamma=self.gamma,
            model_runner=self.model_runner,
            device=self.device,
            group=get_parallel().tp_group,
            ragged=ragged_verify_compact_enabled(),
        )
        self._confidence: torch.Tensor | None = None
        self._accepted: torch.Tensor | None = None
        self.announce(activation.active_family().name)

    @property
    def draft_model_runner(self) -> Any:
        return self._draft_worker.draft_runner

    def init_cuda_graphs(self) -> None:
        """Capture as the host does, then profile what was captured."""
        estimate = Estimate(
            gamma=self.gamma,
            num_slots=self.model_runner.req_to_token_pool.req_to_token.shape[0],
            device=self.device,
            learn=self.options.calibration,
        )
        if self.planner.ragged:
            self._draft_worker.listen_for(estimate, self.planner.hears_draft)
        super().init_cuda_graphs()
        requests = self.model_runner.max_running_requests
        self._roots = torch.arange(requests, dtype=torch.int64, device=self.device).unsqueeze(1)
        self._no_successor = torch.full_like(self._roots, -1)
        self.planner.capture_widths(self.gamma + 1)
        self.begin_serving(estimate)

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[..., None] | None = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        catch_up(batch, grammar_barrier)
        # With overlap the device still runs the step before; the scheduler has no earlier place for EAGLE.
        planner = self.planner
        planner.size(batch)
        planner.begin_step()

        def publish(new_seq_lens: torch.Tensor) -> None:
            if planner.decision is not None:
                if planner.decision.draft:
                    planner.publish(confidence=self._confidence, commit_lens=self._accepted)
                else:
                    planner.publish(confidence=None, commit_lens=None)
            if on_publish is not None:
                on_publish(new_seq_lens)

        if planner.decision is not None and not planner.decision.draft:
            return self._step_without_draft(batch, publish, grammar_barrier)
        if planner.decision is not None and planner.hears_draft():
            self._draft_worker.ask(batch)
        return super().forward_batch_generation(batch, publish, grammar_barrier, pp_proxy_tensors)

    def verify(self, batch: Any, pp_proxy_tensors: Any = None, grammar_barrier: Any = None) -> Any:
        """Called by the host after the draft, ``batch.spec_info`` is the verification's input."""
        layout = None if self.planner.decision is None else self._allocate(len(batch.seq_lens))
        if layout is None:
            with self.planner.fixed_width():
                result = super().verify(batch, pp_proxy_tensors, grammar_barrier)
        else:
            if not self.planner.decision.uniform:
                eagle_verify.cut(batch.spec_info, layout.verify_lens)
            result = eagle_verify.run(self, batch, layout, grammar_barrier)
        # Tokens that are committed, with the one that the target adds: [R] int32.
        self._accepted = result.accept_lens
        return result

    def _allocate(self, requests: int) -> Any:
        self._confidence = None
        if self.planner.hears_draft():
            self._confidence, columns = self._draft_worker.told(requests)
            self.planner.see_draft(columns)
        return self.planner.layout(requests, self._confidence)

    # -- a step without a draft --

    def _step_without_draft(self, batch: Any, on_publish: Callable[..., None], grammar_barrier: Any) -> Any:
        requests = len(batch.seq_lens)
        batch.spec_info = EagleVerifyInput(
            draft_token=batch.spec_info.bonus_tokens.to(torch.int64),
            custom_mask=None,
            positions=batch.seq_lens,
            retrieve_index=self._roots[:requests],
            retrieve_next_token=self._no_successor[:requests],
            retrieve_next_sibling=self._no_successor[:requests],
            retrieve_cum_len=None,
            spec_steps=0,
            topk=1,
            draft_token_num=1,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=None,
            seq_lens_cpu=None,
        )
        result = eagle_verify.run(self, batch, self.planner.anchor_layout(requests), grammar_barrier)
        on_publish(result.new_seq_lens)
        with self._draft_context():
            self._extend_anchors(batch, result)
        return result

    def _extend_anchors(self, batch: Any, result: Any) -> None:
        """The draft's extension by the one token of each request that a step without a draft commits.

        Attention backends of GPUs, and the graphs captured over them, know the width K + 1 only: there the rows beyond
        are padding, which the next step overwrites, as those of rejected drafts are.
        """
        draft, width = self._draft_worker, self.speculative_num_draft_tokens
        if torch.device(self.device).type == "cpu":
            draft.speculative_num_draft_tokens = 1
            try:
                draft._draft_extend_for_decode(batch, result)
            finally:
                draft.speculative_num_draft_tokens = width
            return
        requests, hidden = len(batch.seq_lens), result.logits_output.hidden_states
        tokens = result.next_token_ids.new_zeros((requests, width))
        tokens[:, 0] = result.next_token_ids
        states = hidden.new_zeros((requests, width, hidden.shape[-1]))
        states[:, 0] = hidden
        batch.out_cache_loc = eagle_verify.kv_window(batch, self.req_to_token_pool, width)
        padded = replace(
            result,
            next_token_ids=tokens.view(-1),
            logits_output=SimpleNamespace(hidden_states=states.view(requests * width, -1)),
            prepared_draft_extend_inputs=None,
        )
        draft._draft_extend_for_decode(batch, padded)

    @contextmanager
    def _draft_context(self) -> Iterator[None]:
        with (
            draft_tp_context(self._draft_worker.parallel_layout),
            speculative_moe_backend_context(),
            speculative_moe_a2a_backend_context(),
        ):
            yield

    # -- what the profiler times --

    def profiled_draft(self, requests: int, kv_length: int) -> Callable[[], Any]:
        """The draft loop, and the draft's extension by K + 1 tokens of each of R requests."""
        width = self.speculative_num_draft_tokens

        def call() -> None:
            batch = self._dummy_batch(requests, kv_length)
            with self._draft_context():
                self._draft_worker.draft(batch)
                batch.out_cache_loc = eagle_verify.kv_window(batch, self.req_to_token_pool, width)
                self._draft_worker._draft_extend_for_decode(batch, self._dummy_result(requests, width))

        return call

    def profiled_always(self, requests: int, kv_length: int) -> Callable[[], Any]:
        """What a step runs besides the target even if it does not draft."""

        def call() -> None:
            batch = self._dummy_batch(requests, kv_length)
            batch.out_cache_loc = eagle_verify.kv_window(batch, self.req_to_token_pool, 1)
            with self._draft_context():
                self._extend_anchors(batch, self._dummy_result(requests, 1))

        return call

    def _dummy_batch(self, requests: int, kv_length: int) -> Any:
        """A decode batch of the host's padding slot, R times."""
        runner, draft = self.model_runner, self._draft_worker
        batch = ScheduleBatch.init_new(
            [],
            runner.req_to_token_pool,
            self.token_to_kv_pool_allocator,
            None,
            runner.model_config,
            False,
            runner.spec_algorithm,
        )
        zeros = torch.zeros(requests, dtype=torch.int64, device=self.device)
        batch.forward_mode, batch.req_pool_indices = ForwardMode.DECODE, zeros
        batch.seq_lens_cpu = torch.full((requests,), kv_length, dtype=torch.int64)
        # Filled on the device: a copy would wait for it, in the middle of what is timed.
        batch.seq_lens = torch.full((requests,), kv_length, dtype=torch.int64, device=self.device)
        batch.seq_lens_sum = requests * kv_length
        batch.multimodal_inputs = [None] * requests
        hidden_size, dtype = get_draft_recurrent_hidden_state_spec(draft.draft_runner)
        batch.spec_info = EagleDraftInput(
            topk_p=torch.ones((requests, 1), dtype=torch.float32, device=self.device),
            topk_index=zeros.unsqueeze(1),
            hidden_states=torch.zeros((requests, hidden_size), dtype=dtype, device=self.device),
            bonus_tokens=zeros,
            capture_hidden_mode=CaptureHiddenMode.LAST,
        )
        return batch

    def _dummy_result(self, requests: int, width: int) -> Any:
        runner = self._draft_worker.draft_runner
        rows = requests * width
        states = torch.zeros(
            (rows, get_draft_input_from_target_hidden_dim(runner)), dtype=runner.dtype, device=self.device
        )
        return host.GenerationBatchResult(
            logits_output=SimpleNamespace(hidden_states=states),
            next_token_ids=torch.zeros(rows, dtype=torch.int32, device=self.device),
            accept_lens=torch.ones(requests, dtype=torch.int32, device=self.device),
            next_draft_input=EagleDraftInput(),
        )
