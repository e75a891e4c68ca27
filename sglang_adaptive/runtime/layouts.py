"""Packed layouts of a verification: which rows are verified, and the captured graph that they are padded to."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.dspark_components.dspark_planner import (
    ragged_capture_max_slots,
    ragged_capture_num_tokens,
    uniform_ragged_layout,
)
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, RaggedVerifyMode, round_up_grid


class Layouts:
    """Builds the layouts of one worker. None where no captured graph holds the step: then all rows run eagerly.

    ``width`` is K + 1.
    """

    def __init__(self, model_runner: Any, device: Any, width: int) -> None:
        self._runner, self._device, self._width = model_runner, device, width
        self._uniform: dict[int, Any] = {}
        self._anchors: dict[int, Any] = {}

    def uniform(self, requests: int) -> Any:
        """Every draft of every request; cached."""
        if requests not in self._uniform:
            self._uniform[requests] = uniform_ragged_layout(
                bs=requests,
                device=self._device,
                verify_num_draft_tokens=self._width,
                ragged_verify_mode=RaggedVerifyMode.COMPACT,
                model_runner=self._runner,
            )
        return self._uniform[requests]

    def anchors(self, requests: int) -> Any:
        """One token of each request, for a step without a draft; cached."""
        if requests not in self._anchors:
            tiers = ragged_capture_num_tokens(model_runner=self._runner)
            grid = tiers if tiers and tiers[-1] >= requests else [requests]
            self._anchors[requests] = RaggedVerifyLayout.from_verify_lens(
                verify_lens_cpu=[1] * requests, device=self._device, grid=grid
            )
        return self._anchors[requests]

    def ragged(self, verify_lens: torch.Tensor, tokens: int) -> Any:
        """The lengths [R] int32 on the device, which sum to ``tokens``.

        With captured graphs nothing is read back; without them the lengths come to the CPU, which eager attention
        needs to lay out its work.
        """
        tiers = ragged_capture_num_tokens(model_runner=self._runner)
        if tiers is None:
            lens = verify_lens.tolist()
            return RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=lens, device=self._device, grid=[sum(lens)])
        if tokens > tiers[-1] or len(verify_lens) > ragged_capture_max_slots(model_runner=self._runner):
            return None
        return RaggedVerifyLayout.from_verify_lens_device(
            verify_lens=verify_lens, graph_num_tokens=round_up_grid(tokens, tiers)
        )
