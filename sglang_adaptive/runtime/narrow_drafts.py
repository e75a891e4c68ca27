"""Drafts of fewer than K tokens, for steps at many requests: the same draft model, over a shorter block of masks.

The host drafts any block up to the trained one, but always the one that it was started with. Here it gets a second
proposer, with attention and CUDA graphs of a shorter block.

A step that trims such a draft is the host's for K: the results lie in the first proposer's buffers, and what comes
after the draft finds K columns. Acceptance looks at the first column that a request's length leaves out: where it would
accept that draft, it outputs it, and otherwise draws from what the target has beyond the draft's distribution. So the
column behind the drafts holds a draft of its own, token 0 with certainty, for which that is exact like for any other.

A step that verifies all of it is what the host would do if it had been started with a shorter block: nothing is packed,
and acceptance has as many rows as were verified.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from sglang.srt.model_executor.runner import decode_cuda_graph_runner
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.draft_worker_common import make_draft_block_spec_info, make_draft_sampler_capture_hook
from sglang.srt.speculative.dspark_components.dspark_draft import DraftBlockProposer, DraftProposal
from sglang.srt.speculative.dspark_components.dspark_draft_sampler import DsparkDraftSampler

from sglang_adaptive.runtime.widths import RESERVE_BYTES, large_batches_only, least_free_bytes

logger = logging.getLogger(__name__)

# A shorter block is at most half of the trained one; a block of fewer has none.
_LEAST_TRAINED = 4


def widths(gamma: int) -> tuple[int, ...]:
    """The shorter blocks of a draft of K = ``gamma`` tokens."""
    return (gamma // 2,) if gamma >= _LEAST_TRAINED else ()


class NarrowDrafts:
    """From now on the worker's proposer drafts as many tokens as ``width()`` says, K or one of ``widths``.

    To be made after the host captured its draft graphs. ``widths`` is empty where there is no room for more.
    """

    def __init__(self, worker: Any, wanted: Sequence[int], width: Callable[[], int]) -> None:
        self._worker, self._wide, self._width = worker, worker._proposer, width
        self._propose = self._wide.propose
        self._narrow: dict[int, tuple[Any, Any, Any]] = {}
        self._whole = False
        runner = worker.draft_model_runner
        self._beside = graphs = runner.decode_cuda_graph_runner
        if _is_captured(graphs) and least_free_bytes() < RESERVE_BYTES:
            logger.warning("sglang_adaptive: too little GPU memory is left for graphs of shorter drafts: none is made.")
            return
        for each in wanted:
            self._narrow[each] = self._made(each)
        self._wide.propose = self._proposed

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of tokens, besides K, that can be drafted."""
        return tuple(self._narrow)

    def drafts(self, width: int) -> bool:
        """Whether ``width`` tokens can be drafted just now."""
        # The host captures its graphs anew when it is told to after new weights: ours would compute with the old ones.
        return width in self._narrow and self._worker.draft_model_runner.decode_cuda_graph_runner is self._beside

    @contextmanager
    def whole(self, width: int) -> Iterator[None]:
        """Let the worker take a step as if it had been started with a block of ``width``, which must be drafted."""
        worker, executor = self._worker, self._worker._verify_executor
        places = (
            (worker, "gamma", width),
            (worker, "verify_num_draft_tokens", width + 1),
            (worker, "_block_pos_offsets", worker._block_pos_offsets[: width + 1]),
            (worker, "_observers", _Unobserved(worker._observers)),
            (executor, "gamma", width),
            (executor, "verify_num_draft_tokens", width + 1),
        )
        hosts = [getattr(owner, name) for owner, name, _ in places]
        for owner, name, value in places:
            setattr(owner, name, value)
        self._whole = True
        try:
            yield
        finally:
            self._whole = False
            for (owner, name, _), value in zip(places, hosts, strict=True):
                setattr(owner, name, value)

    def _made(self, width: int) -> tuple[Any, Any, Any]:
        """Proposer, attention and graphs of drafts of ``width`` tokens."""
        worker, wide, runner = self._worker, self._wide, self._worker.draft_model_runner
        proposer = DraftBlockProposer(
            draft_model=wide.draft_model,
            draft_model_runner=runner,
            gamma=width,
            mask_token_id=wide._mask_token_id,
            draft_block_spec_info=make_draft_block_spec_info(
                draft_token_num=width + (not wide.sample_from_anchor), device=worker.device
            ),
            tp_sync=wide._tp_sync,
            random_seed=worker.target_worker.random_seed,
            greedy_draft=wide._greedy_draft,
        )
        # One sequence of draws for all widths.
        proposer._noise = wide._noise
        if torch.device(worker.device).type != "cuda":
            # The CPU platform's attention takes the width from the step.
            return proposer, runner.attn_backend, runner.decode_cuda_graph_runner
        with worker._draft_context(), get_spec().override(speculative_num_draft_tokens=width + 1):
            backend = runner._get_attention_backend(init_new_workspace=False)
            graphs = runner.decode_cuda_graph_runner
            if _is_captured(graphs):
                graphs = self._captured(type(graphs), backend, width, proposer)
        return proposer, backend, graphs

    def _captured(self, kind: Any, backend: Any, width: int, proposer: Any) -> Any:
        runner, wide = self._worker.draft_model_runner, self._wide._draft_sampler
        logger.info("sglang_adaptive: capturing drafts of %d tokens", width)
        hooks = []
        if wide is not None:
            proposer.attach_draft_sampler(_Sampler(wide, width))
            hooks = [make_draft_sampler_capture_hook(proposer._draft_sampler)]
        hosts, runner.capture_tail_hooks = runner.capture_tail_hooks, hooks
        try:
            with large_batches_only():
                return kind(runner, attn_backend=backend, speculative_num_draft_tokens=width + 1)
        finally:
            runner.capture_tail_hooks = hosts

    def _proposed(self, **kwargs: Any) -> DraftProposal:
        width = self._width()
        runner = self._worker.draft_model_runner
        if not self.drafts(width):
            return self._propose(**kwargs)
        proposer, backend, graphs = self._narrow[width]
        hosts = runner.attn_backend, runner.decode_cuda_graph_runner
        runner.attn_backend, runner.decode_cuda_graph_runner = backend, graphs
        try:
            # What the host may have prepared is the wide block.
            proposal = proposer.propose(**{**kwargs, "anchor_prepared": False})
        finally:
            runner.attn_backend, runner.decode_cuda_graph_runner = hosts
        if not self._whole:
            return self._widened(proposal, width)
        if proposal.confidence is None:
            return proposal
        # Columns of the wide buffer: as they are, ranks could not be sent them.
        return msgspec.structs.replace(proposal, confidence=proposal.confidence.contiguous())

    def _widened(self, proposal: DraftProposal, width: int) -> DraftProposal:
        """With K columns: that behind the drafts holds token 0 with certainty, further ones hold anything."""
        block, gamma = proposal.draft_block, self._wide.gamma
        requests, sampler = len(block.draft_tokens), self._wide._draft_sampler
        confidence, raw = proposal.confidence, proposal.confidence_raw
        if (
            sampler is not None
            and isinstance(self._narrow[width][0]._draft_sampler, _Sampler)
            and _in_buffers(block.draft_tokens, self._narrow[width][0]._draft_sampler.out)
        ):
            tokens = sampler.out[: requests * gamma].view(requests, gamma)
            logits = None if block.greedy_draft else sampler.step_logits[:requests]
            if sampler.confidence_out is not None and confidence is not None and confidence.shape[1] == width:
                confidence, raw = sampler.confidence_out[:requests], sampler.confidence_raw_out[:requests]
        else:
            missing = gamma - width
            tokens = torch.nn.functional.pad(block.draft_tokens, (0, missing))
            logits = block.corrected_logits
            if logits is not None:
                logits = torch.nn.functional.pad(logits, (0, 0, 0, missing), value=-torch.inf)
                logits[:, width:, 0] = 0.0
            if confidence is not None and confidence.shape[1] == width:
                confidence, raw = (torch.nn.functional.pad(each, (0, missing)) for each in (confidence, raw))
        return msgspec.structs.replace(
            proposal,
            draft_block=msgspec.structs.replace(block, draft_tokens=tokens, corrected_logits=logits),
            confidence=confidence,
            confidence_raw=raw,
            # Of K columns, too; the worker puts them together itself.
            verify_ids=None,
        )


class _Unobserved:
    """The host's observers for a step that they are not told of: what they keep is of K columns."""

    def __init__(self, hosts: Any) -> None:
        self._hosts = hosts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hosts, name)

    def begin_step(self) -> None:
        """The step counts as one of no interest."""
        self._hosts.note_idle_decode_step()

    def observe_verify_step(self, **_: Any) -> None:
        """Nothing is kept."""


class _Sampler(DsparkDraftSampler):
    """Samples ``width`` tokens into the first columns of the ``wide`` sampler's buffers."""

    def __init__(self, wide: DsparkDraftSampler, width: int) -> None:
        super().__init__(
            model=wide.model,
            gamma=width,
            max_bs=wide.max_bs,
            device=wide.out.device,
            noise=wide._noise,
            tp_sync=wide._tp_sync,
            greedy_draft=wide.greedy_draft,
        )
        self._tokens = wide.out.view(wide.max_bs, wide.gamma)[:, :width]
        self.verify_ids = None
        if wide.confidence_out is not None:
            self.confidence_out = wide.confidence_out[:, :width]
            self.confidence_raw_out = wide.confidence_raw_out[:, :width]
        self._token_behind = self._logits_behind = None
        if wide.step_logits is not None:
            self.step_logits = wide.step_logits[:, :width]
            self._token_behind = wide.out.view(wide.max_bs, wide.gamma)[:, width]
            self._logits_behind = wide.step_logits[:, width]

    def __call__(self, hidden_states: torch.Tensor, input_ids: torch.Tensor) -> None:
        super().__call__(hidden_states, input_ids)
        requests = hidden_states.shape[0] // self.query_token_num
        self._tokens[:requests].copy_(self.out[: requests * self.gamma].view(requests, self.gamma))
        if self._logits_behind is not None:
            self._token_behind[:requests].zero_()
            self._logits_behind[:requests].fill_(-torch.inf)
            self._logits_behind[:requests, 0] = 0.0


def _is_captured(graphs: Any) -> bool:
    return isinstance(graphs, decode_cuda_graph_runner.DecodeCudaGraphRunner)


def _in_buffers(tokens: torch.Tensor, out: torch.Tensor) -> bool:
    return tokens.data_ptr() == out.data_ptr()
