"""The host's EAGLE draft worker, listened to: what each draft's distribution looked like, at no change to the drafts.

The first draft of a step comes from the draft-extend of the step before (or from the prefill), the others from the
draft loop. Both go through the draft model's forward, eagerly or when a CUDA graph is captured, so the features are
taken there, and replays of the graph refresh them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.speculative import eagle_worker_v2 as host

from sglang_adaptive.runtime.device import compiled


def distribution(logits: torch.Tensor) -> torch.Tensor:
    """[R, 2] float32: the largest probability and the entropy (nats) of softmax(logits), ``logits`` [R, vocabulary]."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    return torch.stack([log_p.amax(dim=-1).exp(), torch.special.entr(log_p.exp()).sum(dim=-1)], dim=1)


class AdaptiveEagleDraftWorker(host.EagleDraftWorker):
    """Drafts as the host does; ``distributions`` tells with what confidence."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rows = self._topk1_parents_prealloc.shape[0]
        self._drafted = torch.zeros((rows, self.speculative_num_steps, 2), dtype=torch.float32, device=self.device)
        self._position: int | None = None
        self._heard: Any = None
        self._describe: Callable[[torch.Tensor], torch.Tensor] = distribution
        if torch.device(self.device).type == "cuda":
            vocabulary = self.draft_runner.model_config.vocab_size
            examples = [torch.zeros((count, vocabulary), device=self.device) for count in (1, 2)]
            self._describe = compiled(distribution, [((logits,), {}) for logits in examples], "draft features")
        self.draft_runner.forward = self._listening(self.draft_runner.forward, lambda output: output.logits_output)

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        super().alloc_memory_pool(*args, **kwargs)
        slots = self.req_to_token_pool.req_to_token.shape[0]
        self._first = torch.zeros((slots, 2), dtype=torch.float32, device=self.device)

    def _capture_cuda_graphs(self) -> None:
        super()._capture_cuda_graphs()
        graphs = self.cuda_graph_runner_for_draft_extend
        if graphs is not None:
            graphs.execute = self._listening(graphs.execute, lambda output: output)

    def distributions(self, req_pool_indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Largest probabilities and entropies [R, K] of the drafts that ``draft`` has just made for these slots [R].

        Views of a buffer: the next draft overwrites them.
        """
        rows = self._drafted[: len(req_pool_indices)]
        rows[:, 0] = self._first[req_pool_indices]
        return rows[..., 0], rows[..., 1]

    def draft_forward(self, forward_batch: Any) -> Any:
        if forward_batch.forward_mode.is_idle():
            return super().draft_forward(forward_batch)
        self._position = 1
        try:
            return super().draft_forward(forward_batch)
        finally:
            self._position = None

    def _draft_extend_for_prefill(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        draft_input = super()._draft_extend_for_prefill(batch, *args, **kwargs)
        self._keep_first(batch.req_pool_indices)
        return draft_input

    def _draft_extend_for_decode(self, batch: Any, batch_result: Any, **kwargs: Any) -> None:
        super()._draft_extend_for_decode(batch, batch_result, **kwargs)
        self._keep_first(batch.req_pool_indices)

    def _listening(self, run: Callable[..., Any], logits_of: Callable[[Any], Any]) -> Callable[..., Any]:
        def listened(*args: Any, **kwargs: Any) -> Any:
            output = run(*args, **kwargs)
            self._heard = logits_of(output)
            if self._position is not None:
                logits = self._heard.next_token_logits
                self._drafted[: len(logits), self._position] = self._describe(logits)
                self._position += 1
            return output

        return listened

    def _keep_first(self, req_pool_indices: torch.Tensor) -> None:
        """Of a draft-extend, whose logits the host has narrowed to the last row of each request by now."""
        heard, self._heard = self._heard, None
        if len(req_pool_indices):
            self._first[req_pool_indices] = self._describe(heard.next_token_logits[: len(req_pool_indices)])
