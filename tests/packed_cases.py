"""The kernels of packed rows, patched into the host's functions, against the host's own torch versions.

Prints one JSON object. Run by itself: on a CPU with TRITON_INTERPRET=1, which must be set before the host is imported,
on a GPU without it, where launches are counted and timed, too.
"""

from __future__ import annotations

import inspect
import json
import os
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from launch_costs import launches, microseconds
from sglang.kernels.ops.speculative import ragged_verify_kernels as lengths
from sglang.kernels.ops.speculative.dspark import dspark_verify_window as host_window
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_context
from sglang.srt.speculative import ragged_verify
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from sglang_adaptive import activation
from sglang_adaptive.patches import packed_rows as patches
from sglang_adaptive.patches import registry
from sglang_adaptive.runtime import packed_rows

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
USUAL = {"seq_lens": torch.int64, "pool": torch.int64, "table": torch.int32, "tokens": torch.int64}
UNUSUAL = {"seq_lens": torch.int32, "pool": torch.int32, "table": torch.int64, "tokens": torch.int32}
CONTEXT = 1000
KINDS = "random", "all one", "all of them"
# Name: requests, K + 1. A block of the kernel has 128 rows.
SIZES = {
    "one request": (1, 8),
    "two": (2, 2),
    "some": (13, 8),
    "many": (300, 4),
    "long ones": (3, 300),
    "one long": (1, 129),
}


def lens_of(kind: str, requests: int, width: int) -> list[int]:
    if kind == "random":
        return [random.randint(1, width) for _ in range(requests)]
    return [1 if kind == "all one" else width] * requests


def by_hand(
    *, req_pool_indices: Any, req_to_token: Any, start_offset: Any, end_offset: Any, batch_size: int, **_: Any
) -> Any:
    """What the host's kernel does, which is compiled for GPUs only."""
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    return torch.cat([req_to_token[row, start:end] for row, start, end in list(spans)[:batch_size]]).long()


def layout_of(lens: list[int], rows: int) -> RaggedVerifyLayout:
    return RaggedVerifyLayout.from_verify_lens_device(
        verify_lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE), graph_num_tokens=rows
    )


def window_arguments(lens: list[int], rows: int, width: int, dtypes: dict[str, torch.dtype], strided: bool) -> dict:
    requests, pool = len(lens), len(lens) + 5

    def integers(low: int, high: int, size: tuple[int, ...], kind: str) -> torch.Tensor:
        return torch.randint(low, high, size, dtype=dtypes[kind], device=DEVICE)

    drafts = max(width - 1, 1)
    block = integers(0, 50000, (requests, drafts + 1), "tokens")
    rows_of_pool = torch.randperm(pool, device=DEVICE).to(dtypes["pool"])
    return {
        "batch": SimpleNamespace(
            seq_lens=integers(0, CONTEXT - width, (requests,), "seq_lens"),
            # Begins inside of a vector of 16 bytes where it is strided.
            req_pool_indices=rows_of_pool[1 if strided else 0 :][:requests],
        ),
        "layout": layout_of(lens, rows),
        "draft_block_ids": block[:, :drafts] if strided else block[:, :drafts].contiguous(),
        "draft_tokens": block[:, 1:] if strided else block[:, 1:].contiguous(),
        "bs": requests,
        "device": DEVICE,
        "verify_num_draft_tokens": width,
        "model_runner": SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=integers(1, 2**31 - 1, (pool, CONTEXT), "table"))
        ),
    }


def same(ours: Any, theirs: Any, *names: str) -> bool:
    pairs = [(getattr(ours, name), getattr(theirs, name)) for name in names]
    return all(
        mine.dtype == other.dtype and torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other
        for mine, other in pairs
    )


def windows(dtypes: dict[str, torch.dtype], strided: bool, kinds: tuple[str, ...] = KINDS) -> dict[str, bool]:
    found = {}
    names = "positions", "verify_cache_loc", "verify_ids", "window_index"
    for size, (requests, width) in SIZES.items():
        for kind in kinds:
            lens = lens_of(kind, requests, width)
            paddings = {"none": sum(lens), "some": sum(lens) + 3, "most": requests * width + 150}
            for padding, rows in paddings.items():
                if size == "many" and padding == "some":
                    continue
                arguments = window_arguments(lens, rows, width, dtypes, strided)
                ours = host_window.BuildRaggedVerifyWindow.triton(**arguments)
                theirs = host_window.BuildRaggedVerifyWindow.torch(**arguments)
                found[f"{size}, {kind}, padding: {padding}"] = same(ours, theirs, *names)
    return found


def paddings() -> dict[str, bool]:
    found = {}
    names = "verify_lens", "qo_indptr_device", "extend_start_loc", "graph_num_tokens", "cap", "total_verify_tokens"
    more = {"more than a block": (1300, 3), "a block": (1024, 2), "a slot more": (1025, 2)}
    for size, (requests, width) in {**SIZES, **more}.items():
        for kind in KINDS:
            lens = lens_of(kind, requests, width)
            for spare in (0, 1, 7, 900):
                for left in (0, 1, 10, 2000):
                    layout, slots = layout_of(lens, sum(lens) + left), requests + spare
                    for cap in (width, None, 1):
                        ours = layout.padded_to_bucket(padded_bs=slots, cap=cap)
                        found[f"{size}, {kind}, {spare} slots and {left} rows more, cap {cap}"] = same(
                            ours, padded(layout, slots, cap), *names
                        )
    return found


def padded(layout: RaggedVerifyLayout, slots: int, cap: int | None) -> SimpleNamespace:
    """By the host's torch versions."""
    lens = lengths.pad_verify_lens_to_bucket(
        verify_lens=layout.verify_lens, graph_num_tokens=layout.graph_num_tokens, bs=layout.bs, padded_bs=slots
    )
    lens = lens if cap is None else lens.clamp(max=cap)
    begins = lengths.build_qo_indptr(verify_lens=lens)
    return SimpleNamespace(
        verify_lens=lens,
        qo_indptr_device=begins.qo_indptr,
        extend_start_loc=begins.extend_start_loc,
        graph_num_tokens=layout.graph_num_tokens,
        cap=cap,
        total_verify_tokens=None if cap is not None else layout.graph_num_tokens,
    )


def geometries() -> dict[str, bool]:
    found = {}
    build = ragged_verify.build_ragged_target_verify_geometry
    names = "cache_seqlens_int32", "cu_seqlens_q", "cu_seqlens_k", "max_seq_len_q"
    for requests in (1, 2, 300, 1024, 1300):
        for dtype in (torch.int64, torch.int32):
            for known in (False, True):
                lens = lens_of("random", requests, 8)
                layout = (
                    RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=lens, device=DEVICE, grid=[sum(lens)])
                    if known
                    else layout_of(lens, sum(lens))
                )
                seq_lens = torch.randint(0, 100000, (requests,), dtype=dtype, device=DEVICE)
                ours, theirs = (f(seq_lens=seq_lens, layout=layout) for f in (build, inspect.unwrap(build)))
                found[f"{requests}, {dtype}, lengths {'on the CPU, too' if known else 'on the device'}"] = same(
                    ours, theirs, *names
                )
    return found


def counted(call: Callable[[], Any]) -> int:
    """How many times a layout is padded by our kernel."""
    made, build = [], packed_rows.Padding

    def padding(*arguments: Any) -> Any:
        made.append(arguments)
        return build(*arguments)

    packed_rows.Padding = padding
    try:
        call()
    finally:
        packed_rows.Padding = build
    return len(made)


class Runner:
    """What the host's staging asks of its runner, and what a graph then reads."""

    captured_req_width = 4

    def __init__(self, slots: int, rows: int) -> None:
        lens = ragged_verify.build_capture_verify_lens(num_tokens=rows, num_slots=slots, num_draft_tokens=4)
        captured = RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=lens, device=DEVICE, grid=[rows])
        self.captured, self._captured_ragged_layouts, self.rows = captured, {rows: captured}, rows

    def stage(self, layout: RaggedVerifyLayout) -> None:
        DecodeCudaGraphRunner._stage_ragged_verify_layout(self, layout, self.rows)

    def reads(self, layout: RaggedVerifyLayout) -> bool:
        theirs = padded(layout, self.captured.bs, self.captured_req_width)
        return same(self.captured, theirs, "verify_lens", "qo_indptr_device")


def remembered() -> dict[str, Any]:
    """How often a step pads, and that no layout gets what was made of another, or of what it was before."""
    runner, other, found = Runner(5, 16), Runner(5, 16), {}

    def step(layout: RaggedVerifyLayout, *runners: Runner) -> None:
        for each in runners:
            each.stage(layout)
            attention = layout.padded_to_bucket(padded_bs=5)
            each.stage(layout)
            correct.append(each.reads(layout) and same(attention, padded(layout, 5, None), "verify_lens", "cap"))

    correct: list[bool] = []
    layouts = [layout_of(lens, 16) for lens in ([4, 1, 2], [1, 1, 1, 1, 1], [2, 2])]
    found["launches of a step"] = [counted(lambda layout=layout: step(layout, runner)) for layout in layouts]
    found["launches of a step in two graphs"] = counted(lambda: step(layouts[0], runner, other))
    step(layouts[1], runner)
    step(layouts[0], runner)
    found["correct"] = correct
    captured = runner.captured
    expected, before = padded(captured, 5, None), captured.padded_to_bucket(padded_bs=5)
    captured.verify_lens.copy_(torch.tensor([3, 3, 3, 3, 3], dtype=torch.int32))
    after = captured.padded_to_bucket(padded_bs=5)
    found["lengths written in place"] = [
        same(before, expected, "verify_lens"),
        same(after, padded(captured, 5, None), "verify_lens"),
    ]
    for caps in ((4, 2), (None, 4), (4, None), (2, None)):
        layout = layout_of([4, 1, 2], 16)
        correct.extend(
            same(layout.padded_to_bucket(padded_bs=5, cap=cap), padded(layout, 5, cap), "verify_lens", "cap")
            for cap in caps
        )
    return found


def handed_over() -> dict[str, Any]:
    """What the kernels do not take, they leave to the host."""
    arguments = window_arguments([2, 3], 8, 4, USUAL, strided=False)
    widened = {**arguments, "draft_tokens": arguments["draft_tokens"].t().contiguous().t()}
    short = {**arguments, "draft_tokens": arguments["draft_tokens"][:, :2]}
    cases = {"columns first": widened, "too few drafts": short, "fewer requests": {**arguments, "bs": 1}}
    found: dict[str, Any] = {}
    for name, case in {"as usual": arguments, **cases}.items():
        found[name] = patches._window(lambda **_: "the host", **case) == "the host"
    try:
        layout_of([1, 1, 1], 8).padded_to_bucket(padded_bs=2)
    except AssertionError as error:
        found["more requests than slots"] = str(error)
    return found


def costs() -> dict[str, dict[str, list[float]]]:
    """[the host's, ours]: launches, and microseconds on the CPU."""
    arguments = window_arguments(lens_of("random", 32, 8), 256, 8, USUAL, strided=False)
    lens = lens_of("random", 32, 8)
    seq_lens = torch.randint(0, 1000, (32,), device=DEVICE)
    functions = {
        "window": (host_window.build_ragged_verify_window_triton, lambda f: f(**arguments)),
        "padded": (RaggedVerifyLayout.padded_to_bucket, lambda f: f(fresh(), padded_bs=48, cap=8)),
        "geometry": (
            ragged_verify.build_ragged_target_verify_geometry,
            lambda f: f(seq_lens=seq_lens, layout=arguments["layout"]),
        ),
    }
    template = layout_of(lens, 256)

    def fresh() -> RaggedVerifyLayout:
        """The same lengths in a layout that was not padded yet."""
        return RaggedVerifyLayout(
            verify_lens=template.verify_lens,
            graph_num_tokens=256,
            extend_start_loc=template.extend_start_loc,
            qo_indptr_device=template.qo_indptr_device,
        )

    found: dict[str, dict[str, list[float]]] = {"launches": {}, "microseconds": {}}
    launches(fresh)  # what the first use of the profiler sees is not complete
    for name, (ours, call) in functions.items():
        calls = [partial(call, function) for function in (inspect.unwrap(ours), ours)]
        for each in calls:
            each()
        found["launches"][name] = [launches(each) for each in calls]
        found["microseconds"][name] = [microseconds(each) for each in calls]
    return found


def compiled() -> int:
    """How many variants of the kernels there are."""
    kernels = packed_rows._window, packed_rows._padding, packed_rows._kv_lengths
    return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())


def patched(device: str, mode: str) -> bool:
    """Whether the patches are in place once the worker's class is asked for."""
    os.environ[activation.RAGGED_MODE] = mode
    with get_context().override_server_args(device=device) as server_args:
        activation.worker_class(server_args)
    return {patch.target for patch in patches.PATCHES} <= set(registry.applied())


def main() -> None:
    torch.manual_seed(0)
    random.seed(0)
    found: dict[str, Any] = {"device": DEVICE}
    settings = ("cpu", "compact"), ("cuda", "static"), ("cuda", "compact")
    found["patched"] = [patched(device, mode) for device, mode in settings]
    packed_rows.compile_ahead(DEVICE)
    if DEVICE == "cpu":
        host_window.assign_extend_cache_locs_func = by_hand
    else:
        ahead = compiled()
        found["windows, usual"] = windows(USUAL, False)
        found["paddings"] = paddings()
        found["compiled ahead"] = [ahead, compiled()]
        found["costs"] = costs()
    found["windows, usual"] = windows(USUAL, False)
    found["windows, unusual"] = windows(UNUSUAL, True, ("random",))
    found["paddings"] = paddings()
    found["geometries"] = geometries()
    found["remembered"] = remembered()
    found["handed over"] = handed_over()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
