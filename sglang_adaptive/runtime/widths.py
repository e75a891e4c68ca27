"""Verification of equally many tokens of every request: attention and CUDA graphs that know one width only.

What a packed step needs besides the model (which rows are whose, staged into the graph's buffers and laid out for the
attention) costs the CPU two milliseconds a step, more than a small model takes for the step itself. Where every request
has the same number of tokens nothing of it is needed: a step that verifies everything then costs what the host's static
verification does, and a step without a draft runs as wide as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.environ import envs
from sglang.srt.model_executor.runner import decode_cuda_graph_runner
from sglang.srt.runtime_context import get_parallel, get_spec

logger = logging.getLogger(__name__)

# What must be left on the GPU besides the new attentions' tables; with less, packed graphs serve every step.
RESERVE_BYTES = 3 << 30
# Below so many requests a few rows more cost a drafter next to nothing.
LEAST_REQUESTS = 16
# Page tables of an attention: at most so many, four bytes for each request and page.
_TABLES = 7


class FixedWidths:
    """The target's attention and graphs for steps of ``widths`` tokens a request, besides the packed ones.

    ``own`` is K + 1, the width that the host's attention was made for. Only one set is in the model runner's place at a
    time; outside ``active`` it is the packed one. ``tails`` are for some widths what else their graphs do, called like
    the host's hooks at the end of a capture.
    """

    def __init__(
        self,
        model_runner: Any,
        widths: Sequence[int],
        own: int,
        tails: Mapping[int, Callable[..., None] | None] | None = None,
    ) -> None:
        self._runner = model_runner
        self._tails = {width: tail for width, tail in (tails or {}).items() if tail is not None}
        self._sets: dict[int, tuple[Any, Any]] = {}
        packed = model_runner.attn_backend, model_runner.decode_cuda_graph_runner
        self._beside = packed[1]
        self._aside: tuple[Any, Any] | None = None
        reason = _unable(model_runner)
        if reason is not None:
            logger.warning(
                "sglang_adaptive: %s, so all steps are packed, and with a DSpark draft drafting never stops.", reason
            )
            return
        if not self._has_room(len(widths)):
            logger.warning(
                "sglang_adaptive: too little GPU memory is left for graphs of fixed width, so all steps are packed, "
                "and with a DSpark draft drafting never stops. A lower --mem-fraction-static helps."
            )
            return
        for width in widths:
            self._sets[width] = packed if width == own and not self._in_graphs else self._made(width)

    def add(self, width: int) -> None:
        """Serve ``width``, too, in batches of ``LEAST_REQUESTS`` and more; smaller ones are padded to that."""
        if not self._sets:
            return
        if not self._has_room(1):
            logger.warning(
                "sglang_adaptive: too little GPU memory is left for graphs of %d tokens a request: such steps are "
                "packed.",
                width,
            )
            return
        with large_batches_only():
            self._sets[width] = self._made(width)

    def has_tail(self, width: int) -> bool:
        """Whether graphs of ``width`` tokens a request do what their tail is for; steps outside graphs do not."""
        return width in self._tails and width in self and self._in_graphs

    @property
    def _in_graphs(self) -> bool:
        return self._beside is not None and getattr(self._beside, "ragged_verify_mode", False)

    def _has_room(self, more: int) -> bool:
        """Whether there is memory for ``more`` sets."""
        if torch.device(self._runner.device).type != "cuda" or not self._in_graphs:
            return True
        return least_free_bytes() >= RESERVE_BYTES + more * _table_bytes(self._runner, self._beside)

    def _made(self, width: int) -> tuple[Any, Any]:
        runner, packed = self._runner, self._beside
        if torch.device(runner.device).type != "cuda":
            # The CPU platform's attention takes the width from the step.
            return runner.attn_backend, packed
        with get_spec().override(speculative_num_draft_tokens=width), _static():
            backend = runner._get_attention_backend(init_new_workspace=False)
            return backend, self._capture(packed, backend, width) if self._in_graphs else packed

    def _capture(self, packed_graphs: Any, backend: Any, width: int) -> Any:
        runner = self._runner
        logger.info("sglang_adaptive: capturing steps of %d token(s) a request", width)
        # What the host hangs on its packed graphs (accepting greedy drafts inside) knows their shapes only.
        tail = self._tails.get(width)
        hooks, runner.capture_tail_hooks = runner.capture_tail_hooks, [] if tail is None else [tail]
        try:
            return type(packed_graphs)(runner, attn_backend=backend, speculative_num_draft_tokens=width)
        finally:
            runner.capture_tail_hooks = hooks

    def __contains__(self, width: object) -> bool:
        # The host captures its graphs anew when it is told to after new weights: ours would compute with the old ones.
        packed = self._runner.decode_cuda_graph_runner if self._aside is None else self._aside[1]
        return width in self._sets and packed is self._beside

    @contextmanager
    def active(self, width: int) -> Iterator[None]:
        """Let the target verify ``width`` tokens of each request meanwhile."""
        runner = self._runner
        self._aside = packed = runner.attn_backend, runner.decode_cuda_graph_runner
        runner.attn_backend, runner.decode_cuda_graph_runner = self._sets[width]
        try:
            yield
        finally:
            runner.attn_backend, runner.decode_cuda_graph_runner = packed
            self._aside = None


def _unable(model_runner: Any) -> str | None:
    """Why a second attention or its graphs would not do what the first do; None where they would."""
    if mambaish_config(model_runner.model_config) is not None:
        return "The attention of a recurrent target keeps state of its own"
    if getattr(model_runner.server_args, "forward_hooks", None):
        return "--forward-hooks are in place already and must not be captured"
    return None


def _table_bytes(model_runner: Any, graphs: Any) -> int:
    """What the tables of one more attention may take."""
    context = int(model_runner.req_to_token_pool.req_to_token.shape[1])
    tables = _TABLES * 4 * int(graphs.max_bs) * -(-context // max(int(model_runner.page_size or 1), 1))
    # Of triton: the whole context of every row, not of every request.
    of_rows = getattr(model_runner.attn_backend, "cuda_graph_kv_indices", None)
    return tables + (of_rows.nbytes if isinstance(of_rows, torch.Tensor) else 0)


@contextmanager
def large_batches_only() -> Iterator[None]:
    """Graphs are captured from ``LEAST_REQUESTS`` on: smaller batches are padded to that."""
    hosts = decode_cuda_graph_runner.get_batch_sizes_to_capture

    def sizes(*args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        capture, compile = hosts(*args, **kwargs)
        large = [size for size in capture if size >= LEAST_REQUESTS] or capture[-1:]
        return large, [size for size in compile if size in large]

    decode_cuda_graph_runner.get_batch_sizes_to_capture = sizes
    try:
        yield
    finally:
        decode_cuda_graph_runner.get_batch_sizes_to_capture = hosts


@contextmanager
def _static() -> Iterator[None]:
    with envs.SGLANG_RAGGED_VERIFY_MODE.override("static"):
        yield


def least_free_bytes() -> int:
    """Of all ranks, which must decide alike."""
    free = torch.tensor(torch.cuda.mem_get_info()[0])
    group = get_parallel().tp_group
    if group.world_size > 1:
        torch.distributed.all_reduce(free, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return int(free)
