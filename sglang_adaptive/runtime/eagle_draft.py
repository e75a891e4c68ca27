"""The host's EAGLE draft worker, listened to: what each draft's distribution looked like, at no change to the drafts.

The first draft of a step comes from the draft-extend of the step before (or from the prefill), the others from the
draft loop. What is made of them depends on tables that lie by request slot on the device. So all of it belongs to the
host's CUDA graphs of both, where they are captured: a replay refreshes it, and the CPU launches nothing more for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.speculative import eagle_worker_v2 as host

from sglang_adaptive.policy.estimator import estimate_on_device
from sglang_adaptive.runtime.device import compiled
from sglang_adaptive.runtime.estimate import Estimate


def distribution(logits: torch.Tensor) -> torch.Tensor:
    """[R, 2] float32: the largest probability and the entropy (nats) of softmax(logits), ``logits`` [R, vocabulary].

    The probabilities are never written out: of x, the logits below their maximum, they are 1 / s and log s - t / s with
    s = sum exp x and t = sum x exp x.
    """
    below = logits.float()
    below = below - below.amax(dim=-1, keepdim=True)
    share = below.exp()
    total = share.sum(dim=-1)
    # A masked token has no share, and is infinitely far below.
    weighted = (below * share).masked_fill(share == 0, 0.0).sum(dim=-1)
    return torch.stack([1.0 / total, total.log() - weighted / total], dim=1)


def tell(
    first: torch.Tensor,
    later: torch.Tensor,
    temperature: torch.Tensor,
    recent: torch.Tensor,
    coefficients: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Confidences [R, K] of drafts, and the columns [R, 3 * K + 1] that ``Estimate`` learns from.

    Of the requests in ``slots`` [R] this is known by slot: the ``distribution`` of their ``first`` drafts, their
    ``temperature`` (0 for greedy ones) and ``recent`` acceptance. ``later`` [R, K - 1, 2] are the other drafts'.
    """
    drafted = torch.cat([first[slots].unsqueeze(1), later], dim=1)
    largest, entropy = drafted[..., 0], drafted[..., 1]
    asked = temperature[slots]
    confidence = estimate_on_device(largest, entropy, recent[slots], coefficients, asked)
    # The margins, which nothing but the trace would read, are not computed.
    unseen = torch.full_like(entropy, float("nan"))
    return confidence, torch.cat([largest, entropy, unseen, asked.unsqueeze(1)], dim=1)


class AdaptiveEagleDraftWorker(host.EagleDraftWorker):
    """Drafts as the host does; ``told`` says with what confidence, once there is an estimate to ``listen_for``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._estimate: Estimate | None = None
        self._wanted: Callable[[], bool] = lambda: True
        self._later: list[torch.Tensor] | None = None
        self._heard: Any = None
        self._sampling: tuple[Any, Any] = (None, None)
        self._describe: Callable[..., torch.Tensor] = distribution
        self._tell: Callable[..., Any] = tell

    def listen_for(self, estimate: Estimate, wanted: Callable[[], bool]) -> None:
        """Before graphs are captured. Drafts for which ``wanted`` is false are not described where that costs time."""
        rows, slots = self._topk1_parents_prealloc.shape[0], self.req_to_token_pool.req_to_token.shape[0]
        gamma = self.speculative_num_steps
        self._estimate, self._wanted = estimate, wanted
        self._first = torch.zeros((slots, 2), dtype=torch.float32, device=self.device)
        self._temperature = torch.zeros(slots, dtype=torch.float32, device=self.device)
        self._none_later = torch.zeros((rows, 0, 2), dtype=torch.float32, device=self.device)
        self._confidence = torch.zeros((rows, gamma), dtype=torch.float32, device=self.device)
        self._columns = torch.zeros((rows, estimate.columns), dtype=torch.float32, device=self.device)
        if torch.device(self.device).type == "cuda":
            vocabulary = self.draft_runner.model_config.vocab_size
            examples = [torch.zeros((count, vocabulary), device=self.device) for count in (1, 2)]
            self._describe = compiled(distribution, [((logits,), {}) for logits in examples], "draft features")
            self._tell = compiled(tell, [(self._known(*self._example(count)), {}) for count in (1, 2)], "estimate")
        self.draft_runner.forward = self._listening(self.draft_runner.forward)

    def told(self, requests: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Confidences [R, K] and columns [R, 3 * K + 1], as ``tell`` has them, of the R requests just drafted for.

        Views of buffers: the next draft overwrites them.
        """
        return self._confidence[:requests], self._columns[:requests]

    def ask(self, batch: Any) -> None:
        """Before a draft: keep the temperatures of the batch's requests, if they are others than the last time."""
        info = batch.sampling_info
        sampling = info.temperatures, info.top_ks
        # The host makes new tensors whenever the requests of a batch change.
        if sampling[0] is self._sampling[0] and sampling[1] is self._sampling[1]:
            return
        self._sampling = sampling
        # The host gives greedy requests a temperature of 1 and the likeliest token only.
        asked = torch.where(info.top_ks > 1, info.temperatures.view(-1).float(), 0.0)
        self._temperature[batch.req_pool_indices] = asked

    def draft_forward(self, forward_batch: Any) -> Any:
        if self._estimate is None or forward_batch.forward_mode.is_idle() or not self._wanted():
            return super().draft_forward(forward_batch)
        self._later = []
        try:
            result = super().draft_forward(forward_batch)
            slots = forward_batch.req_pool_indices
            later = torch.stack(self._later, dim=1) if self._later else self._none_later[: len(slots)]
        finally:
            self._later = None
        confidence, columns = self._tell(*self._known(later, slots))
        self._confidence[: len(slots)] = confidence
        self._columns[: len(slots)] = columns
        return result

    def _known(self, later: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        estimate = self._estimate
        return self._first, later, self._temperature, estimate.by_slot, estimate.coefficients, slots

    def _example(self, requests: int) -> tuple[torch.Tensor, torch.Tensor]:
        later = torch.zeros((requests, self.speculative_num_steps - 1, 2), device=self.device)
        return later, torch.zeros(requests, dtype=torch.int64, device=self.device)

    def _draft_extend_for_prefill(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._heard = None
        draft_input = super()._draft_extend_for_prefill(batch, *args, **kwargs)
        self._keep_first(batch.req_pool_indices)
        if self._estimate is not None and len(batch.req_pool_indices):
            # Nothing is known of these requests: what their slots hold is of the ones before them.
            self._estimate.by_slot.index_fill_(0, batch.req_pool_indices.long(), 0.0)
        return draft_input

    def _draft_extend_for_decode(self, batch: Any, batch_result: Any, **kwargs: Any) -> None:
        self._heard = None
        super()._draft_extend_for_decode(batch, batch_result, **kwargs)
        self._keep_first(batch.req_pool_indices)

    def _listening(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def listened(*args: Any, **kwargs: Any) -> Any:
            output = run(*args, **kwargs)
            if self._later is not None:
                self._later.append(self._describe(output.logits_output.next_token_logits))
            else:
                self._heard = output.logits_output
            return output

        return listened

    def _keep_first(self, req_pool_indices: torch.Tensor) -> None:
        """Of an eager draft-extend, whose logits the host has narrowed to the last row of each request by now."""
        heard, self._heard = self._heard, None
        if heard is not None and len(req_pool_indices):
            self._first[req_pool_indices] = self._describe(heard.next_token_logits[: len(req_pool_indices)])

    def _capture_cuda_graphs(self) -> None:
        """As the host; the graphs of draft-extends, which call the model themselves, keep their first drafts inside.

        Rows that a replay pads a batch with belong to slot 0, which no request has.
        """
        if self._estimate is None:
            super()._capture_cuda_graphs()
            return
        model = self.draft_runner.model
        forward, hooked = model.forward, vars(model).get("forward")

        def heard(input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            output = forward(input_ids, positions, forward_batch, *args, **kwargs)
            if forward_batch.forward_mode.is_draft_extend_v2():
                self._first[forward_batch.req_pool_indices] = self._describe(output.next_token_logits)
            return output

        model.forward = heard
        try:
            super()._capture_cuda_graphs()
        finally:
            del model.forward
            if hooked is not None:
                model.forward = hooked
