"""What a step costs on this machine: timed once at start-up, kept on disk.

Target verification is timed by token count, drafting by request count and acceptance by both, each through the very
calls that serving makes (with CUDA graphs where they were captured). On the CPU these are eager forwards. What a draft
is, the worker says; what a family runs in every step, with or without a draft, counts as verification.

On a GPU a call has two times: what the host needs to launch it, and what the device needs for it. While steps overlap
the longer one counts, so that is what the table holds: steps of a small model cost the same whatever they verify, as
long as the host is the slower one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dspark_components.dspark_planner import ragged_capture_num_tokens
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, round_up_grid

from sglang_adaptive.options import Options
from sglang_adaptive.policy.cost import CostModel, CostTableError, VerifySample
from sglang_adaptive.runtime.cost_key import cost_key
from sglang_adaptive.runtime.widths import LEAST_REQUESTS

logger = logging.getLogger(__name__)

REPLAYS = 5
# Of the device alone, whose times vary less.
DEVICE_REPLAYS = 3
# A long call is timed less often, since its time varies less: twice where both times agree.
LEAST_REPLAYS, ENOUGH_MS, AGREE = 2, 30.0, 0.05
DRAFT_KV = 128
# The device is kept busy for so much longer than a launch takes, so that the launch does not show in its time.
_HEAD_START = 1.5
_LONGEST_HEAD_START_MS = 100.0
# Of a clock of 2 GHz: with a slower one the head start is longer.
_CYCLES_PER_MS = 2_000_000
# Tokens in the KV cache of a step: each size is timed at the two that about these many per request come to.
KV_GRID = tuple(1024 * 4**power for power in range(8))
KV_PER_REQUEST = (64, 1024)


def profile(worker: Any, options: Options) -> CostModel:
    """The cost model of this server: from the cache, or timed now; equal on all tensor-parallel ranks.

    Without a profile the model knows nothing, and the policy verifies everything.
    """
    if options.profile == "off":
        logger.warning("sglang_adaptive: profiling is off, so every draft token is verified.")
        return CostModel.empty()
    key = cost_key(worker)
    path = options.cache_dir / f"cost-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.json"
    leader = get_parallel().tp_rank == 0
    cost = _load(path, key) if leader and options.profile == "on" else None
    if _broadcast(cost is None):
        timed = _Timer(worker, options.profile_seconds).run()
        if leader:
            cost = timed
            _save(cost, path, key)
    return _broadcast(cost)


def _broadcast(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    group = get_parallel().tp_group
    return group.broadcast_object(value, src=0) if group.world_size > 1 else value


def _load(path: Path, key: dict[str, str]) -> CostModel | None:
    """The table at ``path``; None, with one warning, for whatever lies there that cannot be read as one."""
    try:
        if not path.exists():
            return None
        if not path.is_file():
            raise CostTableError("it is no regular file")
        cost = CostModel.load(path, key)
    except (CostTableError, OSError) as error:
        logger.warning("sglang_adaptive: the cost table %s is not usable (%s): profiling again.", path, error)
        return None
    logger.info("sglang_adaptive: step costs read from %s", path)
    return cost


def _save(cost: CostModel, path: Path, key: dict[str, str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        cost.save(path, key)
    except OSError as error:
        logger.warning("sglang_adaptive: the cost table cannot be kept (%s): the next start profiles again.", error)


class _Timer:
    """Times the parts of a step on dummy requests, which all use the host's padding slot."""

    def __init__(self, worker: Any, seconds: float) -> None:
        self.worker, self.runner, self.device = worker, worker.model_runner, worker.device
        self.width = worker.verify_num_draft_tokens
        self.seconds = seconds
        self.tiers = ragged_capture_num_tokens(model_runner=self.runner)
        self.max_requests = self.runner.max_running_requests
        self._cuda = torch.device(self.device).type == "cuda"
        self._always = worker.profiled_always
        self._calls: dict[str, Callable[[int, int], Callable[[], Any]]] = {
            "verify": self._verify,
            "accept": self._accept,
            "draft": worker.profiled_draft,
        }
        if self._always is not None:
            self._calls["always"] = self._always
        self._narrow = {f"draft {width} tokens each": width for width in worker.narrow_widths}
        for kind, width in self._narrow.items():
            self._calls[kind] = partial(worker.profiled_draft, width=width)

    def run(self) -> CostModel:
        """Time everything within the seconds given, smallest sizes first; what is not reached is extrapolated."""
        started = time.monotonic()
        tokens = self._token_grid()
        requests = sorted({min(count, self.max_requests) for count in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)})
        jobs: list[tuple[str, int, int]] = [("draft", count, DRAFT_KV) for count in requests]
        jobs += [("accept", count, 0) for count in tokens]
        jobs += [("verify", count, length) for count in tokens for length in self._kv_lengths(self._rows(count))]
        jobs += [(kind, count, DRAFT_KV) for kind in self._narrow for count in requests if count >= LEAST_REQUESTS]
        jobs.sort(key=lambda job: (job[1], job[2]))
        results: dict[str, list[Any]] = {"draft": [], "accept": [], "verify": []}
        narrow: dict[str, list[Any]] = {kind: [] for kind in self._narrow}
        for number, (kind, count, kv_length) in enumerate(jobs):
            spent = time.monotonic() - started
            if _broadcast(spent > self.seconds) and all(len(found) >= 3 for found in results.values()):
                logger.warning(
                    "sglang_adaptive: profiled %d of %d sizes in %.1f s; larger ones are extrapolated.",
                    number,
                    len(jobs),
                    spent,
                )
                break
            times = self._time(kind, count, kv_length)
            if kind == "draft" and self._always is not None:
                # It is part of every verification's time already. Noise only makes times longer.
                besides = min(self._time("always", count, kv_length))
                times = [max(ms - besides, 1e-3) for ms in times]
            if kind == "verify":
                results[kind] += [VerifySample(count, kv_length * self._rows(count), ms) for ms in times]
            else:
                results.get(kind, narrow.get(kind)).extend((count, ms) for ms in times)
            if number % 8 == 0 or number == len(jobs) - 1:
                logger.info(
                    "sglang_adaptive: profiling step costs, %d/%d (%s of %d: %.2f ms), %.1f s",
                    number + 1,
                    len(jobs),
                    kind,
                    count,
                    statistics.median(times),
                    time.monotonic() - started,
                )
        return CostModel.from_samples(
            verify=results["verify"],
            draft=results["draft"],
            sampling=results["accept"],
            overhead_ms=0.0,
            capture_limit=self.tiers[-1] if self.tiers else None,
            narrow_draft={width: narrow[kind] for kind, width in self._narrow.items()},
        )

    def _token_grid(self) -> list[int]:
        limit = self.max_requests * self.width
        if self.tiers:
            return [count for count in self.tiers if count <= limit] or [self.tiers[0]]
        grid, count = [], 1
        while count < limit:
            grid.append(count)
            count = max(count + 1, int(count * 1.6))
        return [*grid, limit]

    def _kv_lengths(self, rows: int) -> list[int]:
        """KV lengths per request whose totals lie on the grid, as far as a context may go."""
        longest = int(self.runner.req_to_token_pool.req_to_token.shape[1]) - self.width - 1
        totals = {next(total for total in KV_GRID if total >= per_request * rows) for per_request in KV_PER_REQUEST}
        return sorted({total // rows for total in totals if total // rows <= longest}) or [longest]

    def _rows(self, tokens: int) -> int:
        """Requests of a step with so many tokens: about half of each block is verified."""
        return max(1, min(self.max_requests, -(-tokens // max(1, self.width // 2))))

    @torch.no_grad()
    def _time(self, kind: str, count: int, kv_length: int) -> list[float]:
        call = self._calls[kind](count, kv_length)
        call()
        times: list[float] = []
        launches = [self._launch_ms(call)] if self._cuda else []
        # Ranks must replay alike: rank 0 says how often, and how much of a head start a launch gets.
        head_start_ms = _HEAD_START * _broadcast(launches[0]) if self._cuda else 0.0
        while _broadcast(not _enough(times, DEVICE_REPLAYS if self._cuda else REPLAYS)):
            if self._cuda:
                times.append(self._device_ms(call, head_start_ms, launches))
            else:
                times.append(self._launch_ms(call))
        return [max(ms, min(launches)) for ms in times] if launches else times

    def _launch_ms(self, call: Callable[[], Any]) -> float:
        """What the host needs to launch it on a device with nothing to do; without a GPU, all that it takes."""
        self._synchronize()
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e3

    def _device_ms(self, call: Callable[[], Any], head_start_ms: float, launches: list[float]) -> float:
        """What the device needs for it when everything is launched before it begins; the launch's time is appended."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._synchronize()
        torch.cuda._sleep(int(min(head_start_ms, _LONGEST_HEAD_START_MS) * _CYCLES_PER_MS))
        begin.record()
        started = time.perf_counter()
        call()
        launches.append((time.perf_counter() - started) * 1e3)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def _verify(self, tokens: int, kv_length: int) -> Any:
        rows = self._rows(tokens)
        base, rest = divmod(tokens, rows)
        lens = [base + 1] * rest + [base] * (rows - rest)
        if self.tiers:
            # As serving makes them: what the host is told of lengths on the CPU, it does not lay out in the same way.
            layout = RaggedVerifyLayout.from_verify_lens_device(
                verify_lens=torch.tensor(lens, dtype=torch.int32, device=self.device),
                graph_num_tokens=round_up_grid(tokens, self.tiers),
            )
        else:
            layout = RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=lens, device=self.device, grid=[tokens])
        offsets = torch.cat([torch.arange(length) for length in lens])
        seq_lens_cpu = torch.full((rows,), kv_length, dtype=torch.int64)
        # Made once: copies from memory that is not pinned would wait for the device.
        seq_lens, slots = seq_lens_cpu.to(self.device), self._zeros(rows)
        packed = self._zeros(layout.graph_num_tokens)
        positions = self._padded(offsets + kv_length, layout.graph_num_tokens)
        extended_cpu = seq_lens_cpu + torch.tensor(lens)
        besides = None if self._always is None else self._always(rows, kv_length)

        def call() -> None:
            batch = ForwardBatch(
                forward_mode=ForwardMode.TARGET_VERIFY,
                batch_size=rows,
                input_ids=packed,
                req_pool_indices=slots,
                seq_lens=seq_lens,
                out_cache_loc=packed,
                seq_lens_sum=rows * kv_length + tokens,
                seq_lens_cpu=extended_cpu,
                positions=positions,
                spec_algorithm=self.runner.spec_algorithm,
                spec_info=DFlashVerifyInput(
                    draft_token=packed,
                    positions=positions,
                    draft_token_num=self.width,
                    custom_mask=None,
                    capture_hidden_mode=CaptureHiddenMode.FULL,
                    ragged_verify_layout=layout,
                    live_seq_lens_cpu=seq_lens_cpu,
                ),
                capture_hidden_mode=CaptureHiddenMode.FULL,
                lora_ids=[None] * rows,
            )
            if self.runner.lora_manager is not None:
                self.runner.lora_manager.prepare_lora_batch(batch)
            batch.global_num_token_non_padded_cpu = layout.graph_num_tokens
            batch.num_token_non_padded_cpu = layout.graph_num_tokens
            self.runner.kv_index_translator.bind_own_plan(batch)
            graphs = self.runner.decode_cuda_graph_runner
            if graphs is not None and graphs.can_run_graph(batch):
                graphs.load_batch(batch)
            else:
                self.runner.attn_backend.init_forward_metadata(batch)
            self.worker.target_worker.forward_batch_generation(
                batch=None, forward_batch=batch, is_verify=True, skip_attn_backend_init=True
            )
            if besides is not None:
                besides()

        return call

    def _accept(self, tokens: int, _kv_length: int) -> Any:
        vocab = self.runner.model_config.vocab_size
        logits = torch.zeros((tokens, vocab), dtype=torch.float32, device=self.device)

        def call() -> None:
            logits.argmax(dim=-1)

        return call

    def _zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self.device)

    def _padded(self, values: torch.Tensor, count: int) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, count - values.numel())).to(self.device)


def _enough(times: list[float], most: int = REPLAYS) -> bool:
    """Whether a call was timed often enough, ``times`` in ms."""
    if len(times) < LEAST_REPLAYS or len(times) >= most:
        return len(times) >= most
    agree = len(times) > LEAST_REPLAYS or max(times) <= min(times) * (1 + AGREE)
    return agree and sum(times) >= ENOUGH_MS
