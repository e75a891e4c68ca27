"""The host's triton attention, patched, on packed batches against attention by hand: prints one JSON object.

Run by itself: on a CPU with TRITON_INTERPRET=1, which must be set before the host is imported, on a GPU without it,
where the graphs are real. Every slot of the KV pool that no request owns holds NaN, so that a row which reads beyond
its own request shows.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from types import SimpleNamespace

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, build_capture_verify_lens
from transformers import LlamaConfig

from sglang_adaptive import activation
from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.options import variable
from sglang_adaptive.patches import registry, triton_ragged

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
WIDTH, SLOTS, CONTEXT, POOL = 4, 4, 32, 200
HEADS, KV_HEADS, DIM = 4, 2, 16
# Prefix lengths and verify lengths of each request.
BATCHES = {
    "all one": ([5, 20, 1], [1, 1, 1]),
    "all of them": ([0, 7, 20], [4, 4, 4]),
    "mixed": ([20, 0, 3], [1, 4, 2]),
    "mixed, two": ([9, 17], [3, 1]),
    "one request": ([16], [2]),
    "as many requests as slots": ([1, 2, 0, 19], [2, 1, 3, 1]),
}


class Pool:
    """Keys and values of one layer, as the attention writes and reads them."""

    start_layer = 0

    def __init__(self) -> None:
        self.k = torch.full((POOL, KV_HEADS, DIM), float("nan"), device=DEVICE)
        self.v = self.k.clone()

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.k

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.v

    def set_kv_buffer(self, layer: RadixAttention, loc: object, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k[loc.loc], self.v[loc.loc] = k, v


def model_runner(**others: object) -> SimpleNamespace:
    # A slot of the request table for each slot of a graph, and the first, which padding uses.
    requests = SimpleNamespace(
        size=SLOTS, req_to_token=torch.full((SLOTS + 1, CONTEXT), POOL - 1, dtype=torch.int32, device=DEVICE)
    )
    requests.req_to_token[0] = 0
    pool = Pool()
    translator = KVIndexTranslator(
        req_to_token=requests.req_to_token,
        token_to_kv_pool_allocator=None,
        token_to_kv_pool=pool,
        page_size=1,
        device=DEVICE,
    )
    config = SimpleNamespace(
        attention_arch=AttentionArch.MHA,
        get_max_num_attention_heads=lambda: HEADS,
        get_num_kv_heads=lambda *sizes: KV_HEADS,
        hf_config=LlamaConfig(architectures=["LlamaForCausalLM"]),
        is_draft_model=False,
        linear_attn_registry_result=None,
        v_head_dim=DIM,
        swa_v_head_dim=DIM,
        head_dim=DIM,
        context_len=CONTEXT,
        is_encoder_decoder=False,
    )
    runner = SimpleNamespace(
        req_to_token_pool=requests,
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=None,
        kv_index_translator=translator,
        sliding_window_size=None,
        model_config=config,
        page_size=1,
        device=DEVICE,
        gpu_id=0,
        is_draft_worker=False,
        kv_cache_dtype=torch.float32,
        decode_num_tokens_per_req=lambda: WIDTH,
        spec_algorithm=None,
    )
    return SimpleNamespace(**{**vars(runner), **others})


class Step:
    """A verification of a batch: its requests' prefixes are in the pool, its rows are padded to ``tokens``."""

    def __init__(self, runner: SimpleNamespace, prefixes: list[int], lens: list[int], tokens: int) -> None:
        self.prefixes, self.lens, self.tokens = prefixes, lens, tokens
        pool, table = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
        for buffer in (pool.k, pool.v):
            buffer.fill_(float("nan"))
            buffer[0] = torch.randn(KV_HEADS, DIM)
        table[1:] = POOL - 1
        free = list(range(1, POOL - 1))
        random.shuffle(free)
        self.written = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)
        row = 0
        for request, (prefix, length) in enumerate(zip(prefixes, lens, strict=True), start=1):
            slots = torch.tensor([free.pop() for _ in range(prefix + length)], device=DEVICE)
            table[request, : prefix + length] = slots.int()
            pool.k[slots[:prefix]] = torch.randn(prefix, KV_HEADS, DIM, device=DEVICE)
            pool.v[slots[:prefix]] = torch.randn(prefix, KV_HEADS, DIM, device=DEVICE)
            self.written[row : row + length] = slots[prefix:]
            row += length
        self.q = torch.randn(tokens, HEADS * DIM, device=DEVICE)
        self.k, self.v = torch.randn(2, tokens, KV_HEADS, DIM, device=DEVICE)
        self.expected = self._by_hand(pool, table)

    def _by_hand(self, pool: Pool, table: torch.Tensor) -> torch.Tensor:
        """[verified rows, heads * dim]"""
        outputs, row = [], 0
        for request, (prefix, length) in enumerate(zip(self.prefixes, self.lens, strict=True), start=1):
            rows, slots = slice(row, row + length), table[request, :prefix].long()
            keys = torch.cat([pool.k[slots], self.k[rows]])
            values = torch.cat([pool.v[slots], self.v[rows]])
            keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", self.q[rows].view(length, HEADS, DIM), keys) * DIM**-0.5
            place = torch.arange(prefix + length, device=DEVICE)
            future = place > prefix + torch.arange(length, device=DEVICE).unsqueeze(1)
            weights = scores.masked_fill(future, float("-inf")).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, values).reshape(length, HEADS * DIM))
            row += length
        return torch.cat(outputs)

    def batch(self, layout: RaggedVerifyLayout | None, padded: int, **others: object) -> SimpleNamespace:
        """What the attention reads of the host's batch, with ``padded`` slots as a graph has them."""
        spare = padded - len(self.lens)
        requests = torch.tensor([*range(1, len(self.lens) + 1), *[0] * spare], device=DEVICE)
        fields = {
            "forward_mode": ForwardMode.TARGET_VERIFY,
            "batch_size": padded,
            "req_pool_indices": requests,
            "seq_lens": torch.tensor([*self.prefixes, *[1] * spare], device=DEVICE),
            "seq_lens_sum": None,
            "spec_info": DFlashVerifyInput(None, None, WIDTH, ragged_verify_layout=layout),
            "out_cache_loc": self.written,
            "out_cache_loc_is_physical": False,
            "positions": None,
            "encoder_lens": None,
            "kv_loc_plan": None,
            "extend_seq_lens": None,
            "extend_seq_lens_cpu": None,
            "mha_one_shot": False,
        }
        return SimpleNamespace(**{**fields, **others})

    def report(self, output: torch.Tensor) -> dict[str, object]:
        rows = sum(self.lens)
        return {
            "error": float((output[:rows] - self.expected).abs().nan_to_num(nan=9e9).max()),
            "padding_is_finite": bool(output[rows:].isfinite().all()),
        }


LAYER = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, layer_id=0)


def packed(lens: list[int], tokens: int) -> RaggedVerifyLayout:
    return RaggedVerifyLayout.from_verify_lens_device(
        verify_lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE), graph_num_tokens=tokens
    )


def eager(prefixes: list[int], lens: list[int], layout: RaggedVerifyLayout | None) -> dict[str, object]:
    runner = model_runner()
    backend, step = TritonAttnBackend(runner), Step(runner, prefixes, lens, sum(lens))
    batch = step.batch(layout, len(lens))
    backend.init_forward_metadata(batch)
    return step.report(backend.forward_extend(step.q, step.k, step.v, LAYER, batch))


def recorded(function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """How to run it again on the same memory, and where its output is."""
    if DEVICE == "cuda":
        function()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = function()
        return graph.replay, output
    output = function()
    return lambda: output.copy_(function()), output


class Graph:
    """One captured tier of ``tokens``, and its replays, as the host's decode runner makes them."""

    def __init__(self, tokens: int) -> None:
        self.runner, self.tokens = model_runner(), tokens
        self.backend = TritonAttnBackend(self.runner)
        self.backend.init_cuda_graph_state(SLOTS, SLOTS * WIDTH)
        self.backend.cuda_graph_kv_indices.fill_(POOL - 1)
        lens = build_capture_verify_lens(num_tokens=tokens, num_slots=min(tokens, SLOTS), num_draft_tokens=WIDTH)
        self.slots = len(lens)
        self.static = Step(self.runner, [1] * self.slots, lens, tokens)
        batch = self.static.batch(packed(lens, tokens), self.slots)
        self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        self.metadata, self.pointers = self.backend.forward_metadata, self._pointers()
        static = self.static
        self.replay, self.output = recorded(
            lambda: self.backend.forward_extend(static.q, static.k, static.v, LAYER, batch)
        )
        self.captured = self.static.report(self.output)

    def _pointers(self) -> list[int]:
        metadata = self.backend.forward_metadata
        return [t.data_ptr() for t in (metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices)]

    def run(self, prefixes: list[int], lens: list[int]) -> dict[str, object]:
        step = Step(self.runner, prefixes, lens, self.tokens)
        self.backend.init_forward_metadata_out_graph(step.batch(packed(lens, self.tokens), self.slots))
        same = self.backend.forward_metadata is self.metadata and self._pointers() == self.pointers
        for mine, theirs in (
            (self.static.q, step.q),
            (self.static.k, step.k),
            (self.static.v, step.v),
            (self.static.written, step.written),
        ):
            mine.copy_(theirs)
        self.replay()
        return {**step.report(self.output), "same_memory": same, "begins": self.metadata.qo_indptr.tolist()}


def refusal(**others: object) -> str:
    try:
        backend = TritonAttnBackend(model_runner(**others))
    except AdaptiveError as error:
        return str(error)
    return f"supports graphs: {backend.supports_ragged_verify_graph}"


def patched(server_args: object, option: str, mode: str) -> bool:
    """Whether the patches are in place once the worker's class is asked for."""
    os.environ.update({variable("triton_ragged"): option, activation.RAGGED_MODE: mode})
    activation.worker_class(server_args)
    return {patch.target for patch in triton_ragged.PATCHES} <= set(registry.applied())


def main() -> None:
    torch.manual_seed(0)
    random.seed(0)
    found: dict[str, object] = {"device": DEVICE}
    context = get_context().override_server_args(speculative_num_draft_tokens=WIDTH)
    with context as server_args, get_parallel().override(attn_tp_size=1, attn_dcp_size=1, attn_dcp_rank=0):
        settings = (("off", "compact"), ("on", "static"), ("on", "compact"))
        found["patched"] = [patched(server_args, option, mode) for option, mode in settings]
        for name, (prefixes, lens) in BATCHES.items():
            found[f"eager, {name}"] = eager(prefixes, lens, packed(lens, sum(lens)))
        found["eager, uniform"] = eager([3, 0, 11], [WIDTH] * 3, None)
        for tokens in (4, 8, 16):
            graph = Graph(tokens)
            found[f"graph of {tokens}, captured"] = graph.captured
            for name, (prefixes, lens) in BATCHES.items():
                if sum(lens) <= tokens:
                    found[f"graph of {tokens}, {name}"] = graph.run(prefixes, lens)
        found["refusals"] = {
            "none": refusal(),
            "window": refusal(sliding_window_size=8),
            "draft": refusal(is_draft_worker=True, spec_algorithm=SimpleNamespace(is_dspark=lambda: True)),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
