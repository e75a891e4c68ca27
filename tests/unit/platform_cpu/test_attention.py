"""The attention backend against a dense reference, for every forward that serving needs."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.platform_cpu.attention import AdaptiveCpuAttention, split_requests
from sglang_adaptive.platform_cpu.draft_attention import DraftSteps

DIM = 16
SLOTS = 1024


class Pool:
    """A KV pool of one layer."""

    def __init__(self, kv_heads: int):
        self.k = torch.randn(SLOTS, kv_heads, DIM)
        self.v = torch.randn(SLOTS, kv_heads, DIM)

    def set_kv_buffer(self, layer, loc, k, v):
        self.k[loc.loc] = k
        self.v[loc.loc] = v

    def get_key_buffer(self, layer_id):
        return self.k

    def get_value_buffer(self, layer_id):
        return self.v


def make_layer(heads: int, kv_heads: int, **changes):
    layer = {
        "layer_id": 0,
        "tp_q_head_num": heads,
        "tp_k_head_num": kv_heads,
        "qk_head_dim": DIM,
        "v_head_dim": DIM,
        "scaling": DIM**-0.5,
        "sliding_window_size": -1,
        "logit_cap": 0.0,
        "attn_type": AttentionType.DECODER,
        "is_cross_attention": False,
    }
    return SimpleNamespace(**(layer | changes))


def slot_table(kv_lens: list[int], page_size: int) -> torch.Tensor:
    """Slots of each request: shuffled pages, contiguous inside a page; page 0 belongs to nobody."""
    pages = (torch.randperm(SLOTS // page_size - 1) + 1).tolist()
    table = torch.zeros(len(kv_lens) + 1, max(kv_lens) + page_size, dtype=torch.int32)
    for row, kv_len in enumerate(kv_lens, start=1):
        for start in range(0, kv_len, page_size):
            page = pages.pop()
            table[row, start : start + page_size] = torch.arange(page_size) + page * page_size
    return table


def dense(q, k, v, layer, q_len: int, kv_len: int) -> torch.Tensor:
    """Plain attention of one request in float64; q [q_len, heads, DIM], k and v [kv_len, kv_heads, DIM]."""
    fold = layer.tp_q_head_num // layer.tp_k_head_num
    k, v = k.double().repeat_interleave(fold, 1), v.double().repeat_interleave(fold, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * layer.scaling
    if layer.logit_cap > 0:
        scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
    for i in range(q_len):
        own = kv_len - q_len + i
        for j in range(kv_len):
            hidden = layer.attn_type == AttentionType.DECODER and j > own
            outside = layer.sliding_window_size >= 0 and j < own - layer.sliding_window_size
            if hidden or outside:
                scores[:, i, j] = float("-inf")
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).float()


def run(mode: ForwardMode, q_lens, kv_lens, layer, page_size=1, layout=None, uniform=None, extra_rows=0):
    """Run one forward through the backend; returns (its output rows, the reference's)."""
    table = slot_table(kv_lens, page_size)
    pool = Pool(layer.tp_k_head_num)
    backend = AdaptiveCpuAttention(
        SimpleNamespace(
            use_mla_backend=False, req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool=pool
        )
    )
    verify = mode == ForwardMode.TARGET_VERIFY
    rows = sum(q_lens)
    written = torch.cat(
        [table[r, kv - q : kv] for r, (q, kv) in enumerate(zip(q_lens, kv_lens, strict=True), start=1)]
    ).long()
    batch = SimpleNamespace(
        forward_mode=mode,
        seq_lens=torch.tensor([kv - q if verify else kv for q, kv in zip(q_lens, kv_lens, strict=True)]),
        extend_seq_lens=torch.tensor(q_lens),
        req_pool_indices=torch.arange(1, len(q_lens) + 1),
        out_cache_loc=torch.cat([written, torch.zeros(extra_rows, dtype=torch.int64)]),
        spec_info=SimpleNamespace(ragged_verify_layout=layout, draft_token_num=uniform) if verify else None,
    )
    q = torch.randn(rows + extra_rows, layer.tp_q_head_num * DIM)
    k = torch.randn(rows + extra_rows, layer.tp_k_head_num, DIM)
    v = torch.randn_like(k)
    backend.init_forward_metadata(batch)
    got = backend.forward(q, k, v, layer, batch).view(-1, layer.tp_q_head_num, DIM)

    expected, start = [], 0
    for row, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True), start=1):
        slots = table[row, :kv_len].long()
        own = q[start : start + q_len].view(q_len, layer.tp_q_head_num, DIM)
        expected.append(dense(own, pool.k[slots], pool.v[slots], layer, q_len, kv_len))
        assert torch.equal(pool.k[slots[-q_len:]], k[start : start + q_len])
        start += q_len
    return got, torch.cat(expected)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (8, 1)])
class TestForwards:
    def test_extend_with_and_without_a_cached_prefix(self, heads, kv_heads, page_size):
        got, expected = run(ForwardMode.EXTEND, [5, 33, 1], [5, 70, 9], make_layer(heads, kv_heads), page_size)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)

    def test_decode(self, heads, kv_heads, page_size):
        got, expected = run(ForwardMode.DECODE, [1] * 4, [1, 64, 65, 200], make_layer(heads, kv_heads), page_size)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)

    def test_uniform_verify(self, heads, kv_heads, page_size):
        layer = make_layer(heads, kv_heads)
        got, expected = run(ForwardMode.TARGET_VERIFY, [8] * 3, [8, 64, 131], layer, page_size, uniform=8)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)

    @pytest.mark.parametrize("host_lens_known", [True, False])
    def test_ragged_verify(self, heads, kv_heads, page_size, host_lens_known):
        lens = [1, 8, 3, 1, 5]
        layout = RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=lens, device="cpu", grid=[sum(lens)])
        if not host_lens_known:
            layout = RaggedVerifyLayout.from_verify_lens_device(
                verify_lens=torch.tensor(lens, dtype=torch.int32), graph_num_tokens=sum(lens)
            )
        layer = make_layer(heads, kv_heads)
        got, expected = run(ForwardMode.TARGET_VERIFY, lens, [64, 72, 40, 1, 130], layer, page_size, layout)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)

    def test_draft_block_sees_itself_whole(self, heads, kv_heads, page_size):
        layer = make_layer(heads, kv_heads, attn_type=AttentionType.ENCODER_ONLY)
        got, expected = run(ForwardMode.TARGET_VERIFY, [7] * 3, [7, 50, 64], layer, page_size, uniform=7)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


def test_each_step_of_a_draft_sees_what_the_steps_before_have_written():
    seq_lens, steps, layer = [1, 64, 130], 4, make_layer(4, 2)
    table, pool = slot_table([seq_len + steps for seq_len in seq_lens], 1), Pool(2)
    runner = SimpleNamespace(
        use_mla_backend=False, req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool=pool
    )
    backends = DraftSteps(runner, 1, steps)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE, seq_lens=torch.tensor(seq_lens), req_pool_indices=torch.arange(1, 4)
    )
    backends.init_forward_metadata(batch)
    assert len(backends.attn_backends) == steps - 1
    for step, backend in enumerate(backends.attn_backends):
        batch.out_cache_loc = torch.stack([table[row + 1, n + step] for row, n in enumerate(seq_lens)]).long()
        q, k, v = torch.randn(3, 4 * DIM), torch.randn(3, 2, DIM), torch.randn(3, 2, DIM)
        got = backend.forward(q, k, v, layer, batch).view(3, 4, DIM)
        for row, seq_len in enumerate(seq_lens):
            slots = table[row + 1, : seq_len + step + 1].long()
            assert torch.equal(pool.k[slots[-1]], k[row])
            expected = dense(q[row].view(1, 4, DIM), pool.k[slots], pool.v[slots], layer, 1, seq_len + step + 1)
            torch.testing.assert_close(got[row : row + 1], expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("page_size", [1, 64])
def test_draft_extend(page_size):
    got, expected = run(ForwardMode.DRAFT_EXTEND_V2, [5] * 3, [5, 69, 131], make_layer(4, 2), page_size)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


def test_rows_beyond_the_packed_ones_come_out_zero():
    lens = [2, 3]
    layout = RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=lens, device="cpu", grid=[8])
    got, expected = run(ForwardMode.TARGET_VERIFY, lens, [9, 20], make_layer(4, 2), 1, layout, extra_rows=3)
    torch.testing.assert_close(got[:5], expected, atol=2e-5, rtol=0)
    assert not got[5:].any()


@pytest.mark.parametrize("window", [0, 4, 500])
def test_sliding_window(window):
    layer = make_layer(4, 2, sliding_window_size=window)
    got, expected = run(ForwardMode.TARGET_VERIFY, [6, 6], [6, 40], layer, uniform=6)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


def test_logit_cap():
    got, expected = run(ForwardMode.EXTEND, [6, 2], [6, 40], make_layer(4, 2, logit_cap=0.5, scaling=3.0))
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


def test_a_verified_row_equals_the_decoded_one():
    """The same token, decoded alone or verified among others, attends to the same keys with the same result."""
    layer = make_layer(9, 3)
    got, _ = run(ForwardMode.DECODE, [1], [77], layer)
    torch.manual_seed(0)
    expected, _ = run(ForwardMode.TARGET_VERIFY, [1], [77], layer, uniform=1)
    assert torch.equal(got, expected)


def test_grouping_never_more_than_doubles_the_work_and_keeps_every_request():
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        q_lens = torch.randint(0, 9, (12,), generator=generator).tolist()
        kv_lens = torch.randint(9, 3000, (12,), generator=generator).tolist()
        groups = split_requests(q_lens, kv_lens)
        assert sorted(i for group in groups for i in group) == [i for i, q in enumerate(q_lens) if q]
        for group in groups:
            padded = len(group) * max(q_lens[i] for i in group) * max(kv_lens[i] for i in group)
            assert padded <= 2 * sum(q_lens[i] * kv_lens[i] for i in group)


def test_models_it_cannot_serve_are_refused():
    with pytest.raises(AdaptiveError, match="MLA"):
        AdaptiveCpuAttention(SimpleNamespace(use_mla_backend=True))
    with pytest.raises(AdaptiveError, match="cross-attention"):
        run(ForwardMode.DECODE, [1], [4], make_layer(2, 2, is_cross_attention=True))
