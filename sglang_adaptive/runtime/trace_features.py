"""What the trace keeps of a step's draft distributions: the features of an estimator for drafters without a head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

PER_DRAFT = 3


def width(gamma: int) -> int:
    """Columns of ``draft_columns`` for K = ``gamma``."""
    return PER_DRAFT * gamma + 1


@dataclass(frozen=True)
class DraftFeatures:
    """Of the draft distributions of R requests, all float32.

    Attributes:
        max_probability: [R, K] of the likeliest token.
        entropy: [R, K] nats.
        margin: [R, K] log of the likeliest token's probability over the second's.
        temperature: [R], 0 for greedy requests.
    """

    max_probability: np.ndarray
    entropy: np.ndarray
    margin: np.ndarray
    temperature: np.ndarray

    @staticmethod
    def of(columns: np.ndarray, gamma: int) -> DraftFeatures:
        """From ``draft_columns`` [R, 3 * K + 1] on the CPU, K = ``gamma``; further columns are others'."""
        drafts = PER_DRAFT * gamma
        parts = columns[:, :drafts].reshape(len(columns), PER_DRAFT, gamma)
        return DraftFeatures(parts[:, 0], parts[:, 1], parts[:, 2], columns[:, drafts])


def draft_columns(logits: torch.Tensor, temperatures: torch.Tensor, greedy: torch.Tensor) -> torch.Tensor:
    """[R, 3 * K + 1] float32: maxima [K], entropies [K], margins [K] and temperature of each request.

    The distributions are softmax(logits / temperature), which sampled drafts are drawn from; ``temperatures`` [R] are 1
    for ``greedy`` [R] requests. ``logits`` [R, K, vocabulary]. One position at a time, which bounds the memory.
    """
    maxima, entropies, margins = [], [], []
    for j in range(logits.shape[1]):
        log_p = torch.log_softmax(logits[:, j].float() / temperatures[:, None], dim=-1)
        best = log_p.topk(2, dim=-1).values
        p = log_p.exp()
        maxima.append(best[:, 0].exp())
        # Masked tokens have p = 0 and log p = -inf.
        entropies.append(-(p * log_p.clamp_min(torch.finfo(log_p.dtype).min)).sum(dim=-1))
        margins.append(best[:, 0] - best[:, 1])
    asked = torch.where(greedy, torch.zeros_like(temperatures), temperatures)
    return torch.stack([*maxima, *entropies, *margins, asked], dim=1)


def watch_drafts(proposer: Any, see: Callable[[torch.Tensor], None]) -> None:
    """Give ``see`` the ``draft_columns`` of every block that the host's ``proposer`` drafts from now on.

    A server that drafts greedily for all requests keeps no logits: it gives none.
    """
    propose = proposer.propose

    def watched(**kwargs: Any) -> Any:
        proposal = propose(**kwargs)
        block = proposal.draft_block
        if block.corrected_logits is not None:
            see(draft_columns(block.corrected_logits, block.temperatures, block.greedy_mask))
        return proposal

    proposer.propose = watched
