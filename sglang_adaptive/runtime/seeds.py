"""Seeds of requests: what is said at a position follows from the request's seed, the position and the target alone.

Under ``--enable-deterministic-inference`` the host's sampler draws a token by noise that it hashes from the seed and
the position of the token read last. Here every verified position gets that draw from the target's distribution, and a
draft is accepted where it is what was drawn. The output is then a function of the target and the seed: neither what was
drafted nor how much was verified can change it, and it is distributed as the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers import sampler
from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.sampling_params import TOP_K_ALL

# Drawn at once: the noise of a row takes 8 bytes for each token of the vocabulary.
_ROWS = 512


def enabled() -> bool:
    """Whether this server was asked to honour seeds."""
    return bool(get_exec().deterministic.enable_deterministic_inference)


def apply(info: Any) -> bool:
    """Whether a step with this sampling information (None: greedy) draws by seeds."""
    return info is not None and not info.is_all_greedy and info.sampling_seed is not None


def drawn(logits: torch.Tensor, info: Any, prefix_lens: torch.Tensor, width: int) -> torch.Tensor:
    """What the target says at each verified position, int64 [B * width].

    Args:
        logits: [B * width, V], with penalties, biases and grammars; row ``width * b + j`` follows token j of request b.
        info: the host's sampling information of the B requests; greedy ones get the likeliest token.
        prefix_lens: int64 [B], tokens before the first of the ``width``, whose position that is.
    """
    positions = (prefix_lens.unsqueeze(1) + torch.arange(width, device=prefix_lens.device)).view(-1)
    temperatures, top_ks, top_ps, seeds = (
        value.view(-1).repeat_interleave(width)
        for value in (info.temperatures, info.top_ks, info.top_ps, info.sampling_seed)
    )
    filtered = info.need_top_k_sampling or info.need_top_p_sampling
    pieces = zip(*(each.split(_ROWS) for each in (logits, temperatures, top_ks, top_ps, seeds, positions)), strict=True)
    tokens = torch.cat([_draw(*piece, filtered=filtered) for piece in pieces]).to(torch.int64)
    return torch.where(top_ks <= 1, logits.argmax(dim=-1), tokens) if info.is_any_greedy else tokens


def certain(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Logits by which greedy verification accepts what was drawn: 1 at ``tokens`` [rows], 0 elsewhere."""
    return torch.zeros_like(logits).scatter_(1, tokens.unsqueeze(1), 1.0)


def by_row(drawn_in_order: torch.Tensor, probs: torch.Tensor, top_ks: Any, top_ps: Any, seeds: Any, positions: Any):
    """The draws of a batch in which some row has a top-k or top-p, each as the row gets it alone; int32 [rows].

    The host then hashes the noise of every row by ranks, ``drawn_in_order``, and otherwise by token ids: what a request
    without either says would depend on the others.
    """
    alone = sampler.sampling_from_probs_torch(probs, seeds, positions)
    return torch.where((top_ks == TOP_K_ALL) & (top_ps == 1.0), alone, drawn_in_order)


def _draw(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    filtered: bool,
) -> torch.Tensor:
    probs = torch.softmax((logits / temperatures.unsqueeze(1)).to(logits.dtype), dim=-1)
    if filtered:
        # Patched to draw by row.
        return sampler.top_k_top_p_min_p_sampling_from_probs_torch(probs, top_ks, top_ps, None, False, seeds, positions)
    return sampler.sampling_from_probs_torch(probs, seeds, positions)


@contextmanager
def likeliest_drafts() -> Iterator[None]:
    """DSpark drafts the likeliest token where seeds are honoured, unless the user says otherwise.

    A draft that is drawn from its own distribution q meets the target's draw with the chance sum(p q), the likeliest
    one with p(argmax q), which is rarely less.
    """
    option = envs.SGLANG_DSPARK_USE_GREEDY_DRAFT
    if not enabled() or option.is_set():
        yield
        return
    with option.override(True):
        yield
