"""A draft's confidence head and its distributions, put together.

The head alone ranks greedy drafts with an AUC of 0.79 on traces of SmolLM2-135M, with the maximum and the entropy of
the distributions 0.85, which in simulations is worth 1 to 5 % from 64 greedy requests on
(benchmarks/results/head-and-distribution-2026-11-30.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch

from sglang_adaptive.policy.estimator import estimate_on_device
from sglang_adaptive.runtime.device import compiled
from sglang_adaptive.runtime.estimate import Estimate


def hear(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    greedy: torch.Tensor,
    head: torch.Tensor,
    recent: torch.Tensor,
    coefficients: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Confidences [R, K] and what they were made from, the columns [R, 4 * K + 1] that ``Estimate`` learns from.

    ``logits`` [R, K, vocabulary] are those that the drafts were drawn from, at ``temperatures`` [R], which are 1 for
    ``greedy`` [R] requests; the ``head``'s confidences are [R, K], ``recent`` and ``coefficients`` those of
    ``Estimate.live``. The probabilities are never written out: of x = logits / temperature with the maximum m, the
    largest one is 1 / s and the entropy log s - t / s with s = sum exp(x - m) and t = sum (x - m) exp(x - m).
    """
    below = logits.float() / temperatures[:, None, None]
    below = below - below.amax(dim=-1, keepdim=True)
    share = below.exp()
    total = share.sum(dim=-1)
    # A masked token has no share, and is infinitely far below.
    weighted = torch.where(share > 0, below * share, 0.0).sum(dim=-1)
    largest, entropy = 1.0 / total, total.log() - weighted / total
    asked, head = torch.where(greedy, 0.0, temperatures), head.float()
    confidence = estimate_on_device(largest, entropy, recent, coefficients, asked, head)
    # The margins, which nothing but a trace would read, are not computed.
    columns = [largest, entropy, torch.full_like(entropy, float("nan")), asked.unsqueeze(1), head]
    return confidence, torch.cat(columns, dim=1)


class HeardDrafts:
    """From now on the host's ``proposer`` gives the confidences of ``estimate`` in the place of its head's.

    Only in steps for which ``wanted`` is true; ``see`` is given the columns of those. The proposer must keep its
    logits, as one does that does not draft greedily for all requests.
    """

    def __init__(
        self, proposer: Any, estimate: Estimate, wanted: Callable[[], bool], see: Callable[[torch.Tensor], None]
    ) -> None:
        self._propose, self._estimate, self._wanted, self._see = proposer.propose, estimate, wanted, see
        self._hear: Callable[..., Any] = hear
        proposer.propose = self._heard

    def compile(self, drafts: Iterable[Callable[[], Any]]) -> None:
        """Compile for what the proposer gives in these ``drafts``, which must be of every kind that serving meets."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def note(*arguments: Any) -> Any:
            calls.append((arguments, {}))
            return hear(*arguments)

        self._hear = note
        for draft in drafts:
            draft()
        self._hear = compiled(hear, calls, "confidence of drafts")

    def _heard(self, **kwargs: Any) -> Any:
        proposal = self._propose(**kwargs)
        if proposal.confidence is None or not self._wanted():
            return proposal
        block, head = proposal.draft_block, proposal.confidence
        live = self._estimate.live(len(head))
        confidence, columns = self._hear(block.corrected_logits, block.temperatures, block.greedy_mask, head, *live)
        self._see(columns)
        return msgspec.structs.replace(proposal, confidence=confidence)
