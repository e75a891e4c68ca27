"""Penalties and ``min_new_tokens`` as each position of a verified window has to see them.

Frequency, presence and repetition penalties depend on every token that was output before. A draft token at position j
is therefore judged by logits that are penalised for the request's output and for the drafts before j: then a verified
step outputs what steps of one token would. The counts live on the device and follow what was committed, because the
scheduler learns of it a step late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.utils.common import async_h2d


def has_penalty(params: Any) -> bool:
    """Whether a request's sampling parameters ask for anything that depends on its output so far."""
    return (
        params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.repetition_penalty != 1.0
        or params.min_new_tokens > 0
    )


def stop_ids(request: Any) -> set[int]:
    """The tokens that must not end the request before ``min_new_tokens``."""
    ids = set(request.sampling_params.stop_token_ids or ()) | set(request.eos_token_ids or ())
    tokenizer = request.tokenizer
    if tokenizer is not None:
        ids |= set(tokenizer.additional_stop_token_ids or ()) | {tokenizer.eos_token_id}
    return {token for token in ids if token is not None}


@dataclass
class Table:
    """What is kept of P requests; row p of every tensor belongs to ``keys[p]``.

    Attributes:
        keys: slot and generation of each request in the host's request pool; they change when it is retracted.
        counts: float32 [P, V], how often each token was output.
        outputs: int64 [P], tokens output and counted.
        frequency, presence, repetition: float32 [P, 1].
        minimum: int64 [P], ``min_new_tokens``.
        stops: bool [P, V], what must not be output before ``minimum``; None where no request has one.
    """

    keys: list[tuple[int, int]]
    counts: torch.Tensor
    outputs: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor
    minimum: torch.Tensor
    stops: torch.Tensor | None


def _scatter(rows: list[int], tokens: list[int], target: torch.Tensor) -> None:
    index = async_h2d([rows, tokens], dtype=torch.int64, device=target.device)
    target.index_put_((index[0], index[1]), torch.ones((), dtype=target.dtype, device=target.device), accumulate=True)


def make_table(requests: list[Any], keys: list[tuple[int, int]], vocab: int, device: Any) -> Table:
    """The requests' settings, and the counts of the output that the scheduler knows of."""
    params = [request.sampling_params for request in requests]

    def column(name: str) -> torch.Tensor:
        return async_h2d([getattr(each, name) for each in params], dtype=torch.float32, device=device).unsqueeze(1)

    counts = torch.zeros((len(requests), vocab), dtype=torch.float32, device=device)
    known = [(row, token) for row, request in enumerate(requests) for token in request.output_ids]
    if known:
        _scatter([row for row, _ in known], [token for _, token in known], counts)
    stops = None
    if any(each.min_new_tokens > 0 for each in params):
        marks = torch.zeros_like(counts)
        pairs = [(row, token) for row, request in enumerate(requests) for token in stop_ids(request) if token < vocab]
        if pairs:
            _scatter([row for row, _ in pairs], [token for _, token in pairs], marks)
        stops = marks > 0
    return Table(
        keys=keys,
        counts=counts,
        outputs=async_h2d([len(request.output_ids) for request in requests], dtype=torch.int64, device=device),
        frequency=column("frequency_penalty"),
        presence=column("presence_penalty"),
        repetition=column("repetition_penalty"),
        minimum=async_h2d([each.min_new_tokens for each in params], dtype=torch.int64, device=device),
        stops=stops,
    )


class StepPenalties:
    """The penalties of one step, for the P of its B requests that have any.

    ``rows`` int64 [P] are their rows in the batch, ``window`` int64 [P, K] the drafts behind the anchor (None in a step
    without a draft).
    """

    def __init__(self, table: Table, rows: torch.Tensor, window: torch.Tensor | None) -> None:
        self._table, self._rows, self._window = table, rows, window

    def apply(self, logits: torch.Tensor, width: int) -> None:
        """Penalise ``logits`` [B * width, V] in place; row ``width * b + j`` is position j of request b."""
        table, view = self._table, logits.view(-1, width, logits.shape[-1])
        counts = table.counts if width == 1 else table.counts.clone()
        for position in range(width):
            place = view[self._rows, position].float()
            place += self.additive(counts, position)
            scaling = self.scaling(counts)
            place = torch.where(place < 0, place * scaling, place / scaling)
            view[self._rows, position] = place.to(logits.dtype)
            if position + 1 < width:
                drafted = self._window[:, position : position + 1]
                counts.scatter_add_(1, drafted, torch.ones_like(drafted, dtype=counts.dtype))

    @property
    def rows(self) -> torch.Tensor:
        return self._rows

    def additive(self, counts: torch.Tensor | None = None, position: int = 0) -> torch.Tensor:
        """What is added to the logits, float32 [P, V]."""
        table = self._table
        counts = table.counts if counts is None else counts
        added = -(table.frequency * counts) - table.presence * (counts > 0)
        if table.stops is not None:
            early = (table.outputs + position < table.minimum).unsqueeze(1)
            added = added.masked_fill(early & table.stops, float("-inf"))
        return added

    def scaling(self, counts: torch.Tensor | None = None) -> torch.Tensor:
        """By what negative logits are multiplied and the others divided, float32 [P, V]."""
        counts = self._table.counts if counts is None else counts
        return torch.where(counts > 0, self._table.repetition, 1.0)

    def commit(self, tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        """Count the step's output: the first ``lengths`` [B] of ``tokens`` [B, width]."""
        table, tokens, lengths = self._table, tokens[self._rows], lengths[self._rows].unsqueeze(1)
        real = torch.arange(tokens.shape[1], device=tokens.device) < lengths
        table.counts.scatter_add_(1, torch.where(real, tokens, 0), real.to(table.counts.dtype))
        table.outputs += lengths.squeeze(1)


class Penalties:
    """The output counts of the running requests that have penalties."""

    def __init__(self) -> None:
        self._table: Table | None = None

    @classmethod
    def of(cls, batch: Any) -> Penalties:
        """The counts that go with the batch's request pool, and so with its worker."""
        pool = batch.req_to_token_pool
        if not hasattr(pool, "adaptive_penalties"):
            pool.adaptive_penalties = cls()
        return pool.adaptive_penalties

    def begin_decode(
        self, batch: Any, anchors: torch.Tensor, window: torch.Tensor | None = None
    ) -> StepPenalties | None:
        """Penalties of a decode step over ``batch`` of B requests; None where none has any.

        ``anchors`` int64 [B] are the tokens output last, which the step's forward reads first, ``window`` int64 [B, K]
        the drafts behind them. The host's own penalties, which know nothing of a window, are taken off the batch.
        """
        info = batch.sampling_info
        if info is None or info.acc_additive_penalties is None:
            return None
        info.acc_additive_penalties = info.acc_scaling_penalties = None
        rows = [row for row, request in enumerate(batch.reqs) if has_penalty(request.sampling_params)]
        # The cache holds the prompt and the output but for the anchor.
        return self._begin(batch, rows, batch.seq_lens + 1, anchors, window, forget=True)

    def begin_prefill(self, batch: Any) -> StepPenalties | None:
        """Penalties of requests that have output already: retracted ones, and those that decode in a mixed step.

        The host keeps no counts for them; theirs replace the host's in ``batch``. Returns what ``commit`` is due for.
        """
        info = batch.sampling_info
        if info is None or info.acc_additive_penalties is None:
            return None
        mixed = len(batch.decoding_reqs or ())
        first = len(batch.reqs) - mixed
        rows = [
            row
            for row, request in enumerate(batch.reqs)
            if has_penalty(request.sampling_params) and (request.output_ids or row >= first)
        ]
        if not rows:
            return None
        anchors = torch.zeros_like(batch.seq_lens)
        if mixed:
            anchors[first:] = batch.input_ids[-mixed:]
        step = self._begin(batch, rows, batch.seq_lens, anchors, None, forget=mixed > 0)
        info.acc_additive_penalties[step.rows] = step.additive()
        if info.acc_scaling_penalties is not None:
            info.acc_scaling_penalties[step.rows] = step.scaling()
        return step if mixed else None

    def _begin(
        self,
        batch: Any,
        rows: list[int],
        lengths: torch.Tensor,
        anchors: torch.Tensor,
        window: torch.Tensor | None,
        *,
        forget: bool,
    ) -> StepPenalties | None:
        """``lengths`` int64 [B] count prompt and output, the anchor included. Requests that are not among ``rows`` are
        forgotten, unless the step is none of theirs."""
        if not rows:
            self._table = None if forget else self._table
            return None
        requests, device = [batch.reqs[row] for row in rows], lengths.device
        table = self._follow(batch, rows, requests, device)
        if forget:
            self._table = table
        index = async_h2d(rows, dtype=torch.int64, device=device)
        prompts = async_h2d([len(request.origin_input_ids) for request in requests], dtype=torch.int64, device=device)
        # What a prefill sampled is not counted yet, and under overlap the scheduler does not know it either.
        missing = (lengths[index] - prompts - table.outputs).clamp(0, 1)
        table.counts.scatter_add_(1, anchors[index].unsqueeze(1), missing.unsqueeze(1).to(table.counts.dtype))
        table.outputs += missing
        return StepPenalties(table, index, None if window is None else window[index])

    def _follow(self, batch: Any, rows: list[int], requests: list[Any], device: Any) -> Table:
        """The table of these requests: rows that are known move, the others start from what the scheduler knows."""
        slots = batch.req_pool_indices_cpu[rows]
        keys = list(zip(slots.tolist(), batch.req_to_token_pool.req_generation[slots].tolist(), strict=True))
        known = self._table
        if known is not None and known.keys == keys:
            return known
        table = make_table(requests, keys, batch.sampling_info.vocab_size, device)
        if known is not None:
            places = {key: place for place, key in enumerate(known.keys)}
            moved = [(new, places[key]) for new, key in enumerate(keys) if key in places]
            if moved:
                new, old = async_h2d(list(zip(*moved, strict=True)), dtype=torch.int64, device=device)
                table.counts[new] = known.counts[old]
                table.outputs[new] = known.outputs[old]
        return table
