"""Draws by seed: verified windows say what the host's sampler says token by token, whatever was drafted and trimmed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers import sampler
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.speculative import eagle_utils
from sglang.srt.speculative.dspark_components.dspark_verify import TargetVerifyExecutor
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from sglang_adaptive.patches import cpu_eagle, eagle_sampling, sampling
from sglang_adaptive.patches import seeds as patches
from sglang_adaptive.platform_cpu import kernels
from sglang_adaptive.runtime import seeds

VOCAB, WIDTH, TOKENS = 23, 5, 40
HOST_FILTERED = sampler.top_k_top_p_min_p_sampling_from_probs_torch
# temperature, top-k, top-p, seed
FREE, GREEDY = (1.0, TOP_K_ALL, 1.0, 42), (1.0, 1, 1.0, 42)
SETTINGS = (
    FREE,
    (0.6, TOP_K_ALL, 1.0, -3),
    (1.4, 6, 1.0, 2**40),
    GREEDY,
    (1.0, TOP_K_ALL, 0.7, 42),
    (0.9, 9, 0.8, 5),
    FREE,
)


@dataclass
class Info:
    """What verification reads of the host's sampling information."""

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    sampling_seed: torch.Tensor | None
    is_all_greedy: bool
    is_any_greedy: bool
    need_top_k_sampling: bool
    need_top_p_sampling: bool
    acc_additive_penalties: None = None
    acc_scaling_penalties: None = None
    logit_bias: torch.Tensor | None = None
    has_watermark_candidates: bool = False

    @classmethod
    def of(cls, settings) -> Info:
        temperatures, top_ks, top_ps, numbers = map(list, zip(*settings, strict=True))
        return cls(
            torch.tensor(temperatures).unsqueeze(1),
            torch.tensor(top_ks, dtype=torch.int32),
            torch.tensor(top_ps),
            torch.tensor(numbers),
            is_all_greedy=all(k <= 1 for k in top_ks),
            is_any_greedy=any(k <= 1 for k in top_ks),
            need_top_k_sampling=any(k != TOP_K_ALL for k in top_ks),
            need_top_p_sampling=any(p != 1.0 for p in top_ps),
        )


@dataclass
class Output:
    next_token_logits: torch.Tensor


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """The host's sampler as it is patched on a CPU under the flag."""
    monkeypatch.setattr(sampler, "murmur_hash32", kernels.murmur_hash32)
    monkeypatch.setattr(sampler, "multinomial_with_seed", sampler.multinomial_with_seed._torchdynamo_orig_callable)
    monkeypatch.setattr(
        sampler,
        "top_k_top_p_min_p_sampling_from_probs_torch",
        lambda *args, **kwargs: patches._each_as_alone(HOST_FILTERED, *args, **kwargs),
    )
    monkeypatch.setattr(
        eagle_utils, "get_spec", lambda: SimpleNamespace(speculative_use_rejection_sampling=False), raising=True
    )
    monkeypatch.setattr(eagle_utils, "verify_tree_greedy_func", lambda **kwargs: cpu_eagle._verify(None, **kwargs))


def sampled(logits: torch.Tensor, settings, position: int) -> int:
    """One row of logits as the host's unpatched sampler draws from it in a batch of one request."""
    temperature, top_k, top_p, number = settings
    if top_k == 1:
        return int(logits.argmax())
    probs = torch.softmax(logits.unsqueeze(0) / temperature, dim=-1)
    by = torch.tensor([number]), torch.tensor([position])
    if (top_k, top_p) == (TOP_K_ALL, 1.0):
        return int(sampler.sampling_from_probs_torch(probs, *by))
    return int(HOST_FILTERED(probs, torch.tensor([top_k]), torch.tensor([top_p]), None, False, *by))


@pytest.fixture(scope="module")
def target() -> torch.Tensor:
    """Logits [VOCAB, VOCAB] by the token before."""
    return 2.0 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def expected(target) -> list[list[int]]:
    """What each request says token by token; their prompts end with token 3, and are of different lengths."""
    said = []
    for row, settings in enumerate(SETTINGS):
        tokens = [3]
        while len(tokens) <= TOKENS + WIDTH:
            tokens.append(sampled(target[tokens[-1]], settings, position=10 * row + len(tokens) - 1))
        said.append(tokens[1:])
    return said


def accept_dspark(info, logits, candidates, prefix_lens, lens):
    """Tokens said [B, WIDTH] and how many, by the host's own acceptance of DSpark drafts."""
    executor = SimpleNamespace(
        _simulated_correct_len=None,
        verify_num_draft_tokens=WIDTH,
        gamma=WIDTH - 1,
        _fused_argmax=False,
        _block_verification=False,
        _rejection_noise=None,
        _tp_sync=SimpleNamespace(sync=lambda site, values: values),
    )
    accept = sampling._accept(
        TargetVerifyExecutor.accept_and_finalize,
        executor,
        sampling_info=info,
        folded_accept=False,
        bs=len(lens),
        verify_ids_2d=candidates,
        target_logits=logits,
        draft_block=SimpleNamespace(greedy_mask=info.top_ks <= 1),
        draft_input=None,
        layout=RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=lens, device="cpu", grid=[len(lens) * WIDTH]),
        prefix_lens=prefix_lens,
        draft_tokens=candidates[:, 1:],
    )
    assert torch.equal(accept.new_seq_lens, prefix_lens + accept.commit_lens)
    return accept.out_tokens, accept.commit_lens


def accept_eagle(info, logits, candidates, prefix_lens, lens):
    """The same for a chain of EAGLE drafts, which ends where it was cut."""
    requests, place = len(lens), torch.arange(WIDTH)
    batch = SimpleNamespace(
        device="cpu",
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        seq_lens=prefix_lens,
        sampling_info=info,
        return_logprob=False,
    )
    index = torch.arange(requests * WIDTH).view(requests, WIDTH)
    verify_input = SimpleNamespace(
        draft_token_num=WIDTH,
        draft_token=candidates.flatten(),
        max_tree_depth=WIDTH,
        tree_topk=1,
        retrieve_index=index,
        retrieve_next_token=torch.where(place < torch.tensor(lens).unsqueeze(1) - 1, place + 1, -1),
        retrieve_next_sibling=torch.full_like(index, -1),
    )
    before = logits.clone()
    predict, accept_lens, _ = eagle_sampling._sample(
        eagle_utils.eagle_sample, verify_input, batch, Output(logits), None, watermark_state=None
    )
    assert batch.sampling_info is info
    assert torch.equal(logits, before if info.logit_bias is None else before + info.logit_bias.repeat_interleave(5, 0))
    return predict.view(requests, WIDTH).to(torch.int64), accept_lens


FAMILIES = pytest.mark.parametrize("accept", [accept_dspark, accept_eagle], ids=["dspark", "eagle"])


def serve(target, accept, generator, good: float, info: Info | None = None) -> tuple[list[list[int]], list[int]]:
    """What the requests say in verified steps, and the length of each commit; drafts are the likeliest with the chance
    ``good``, and each request verifies a random number of them."""
    requests = len(SETTINGS)
    said, commits = [[3] for _ in SETTINGS], []
    while min(map(len, said)) <= TOKENS:
        candidates = torch.randint(0, VOCAB, (requests, WIDTH), generator=generator)
        candidates[:, 0] = torch.tensor([tokens[-1] for tokens in said])
        for position in range(1, WIDTH):
            likeliest = target[candidates[:, position - 1]].argmax(dim=-1)
            hit = torch.rand(requests, generator=generator) < good
            candidates[:, position] = torch.where(hit, likeliest, candidates[:, position])
        lens = torch.randint(1, WIDTH + 1, (requests,), generator=generator)
        # Rows that were not verified are zeros, as the host fills them.
        verified = torch.arange(WIDTH) < lens.unsqueeze(1)
        logits = torch.where(verified.unsqueeze(2), target[candidates], 0.0).view(requests * WIDTH, VOCAB)
        prefix = torch.tensor([10 * row + len(tokens) - 1 for row, tokens in enumerate(said)])
        out, counts = accept(info or Info.of(SETTINGS), logits, candidates, prefix, lens.tolist())
        assert bool((counts <= lens).all())
        commits += counts.tolist()
        for row, count in enumerate(counts.tolist()):
            said[row] += out[row, :count].tolist()
    return [tokens[1 : TOKENS + 1] for tokens in said], commits


@FAMILIES
def test_the_output_is_that_token_by_token_whatever_is_drafted_and_verified(accept, target, expected):
    lengths = []
    for seed, good in ((0, 0.9), (1, 0.5), (2, 0.0), (3, 1.0)):
        said, commits = serve(target, accept, torch.Generator().manual_seed(seed), good)
        assert said == [tokens[:TOKENS] for tokens in expected]
        lengths.append(sum(commits) / len(commits))
    assert set(commits) == set(range(1, WIDTH + 1))
    assert lengths[2] < lengths[1] < lengths[0] < lengths[3], "better drafts should be accepted more often"
    assert expected[0] != expected[6], "where a request stands should make a difference"


@FAMILIES
def test_a_bias_is_drawn_with(accept, target, expected):
    info = Info.of(SETTINGS)
    bias = torch.zeros(len(SETTINGS), VOCAB)
    bias[:, 5] = 1e4
    logits = torch.zeros(len(SETTINGS) * WIDTH, VOCAB)
    if accept is accept_eagle:
        info.logit_bias = bias
    else:  # the host applies it before acceptance
        logits += bias.repeat_interleave(WIDTH, dim=0)
    candidates = torch.full((len(SETTINGS), WIDTH), 5)
    out, counts = accept(info, logits, candidates, torch.arange(len(SETTINGS)), [WIDTH] * len(SETTINGS))
    assert bool((out == 5).all()) and bool((counts == WIDTH).all())


@pytest.mark.parametrize("info", [None, Info.of([GREEDY] * 3)], ids=["none", "greedy"])
def test_greedy_steps_and_steps_without_seeds_are_the_hosts(info):
    assert not seeds.apply(info)
    unseeded = Info.of(SETTINGS)
    unseeded.sampling_seed = None
    assert not seeds.apply(unseeded) and seeds.apply(Info.of(SETTINGS))
    for each in (info, unseeded):
        executor = SimpleNamespace(_simulated_correct_len=None)
        heard = sampling._accept(lambda *args, **kwargs: (args, kwargs), executor, sampling_info=each, target_logits=1)
        assert heard == ((executor,), {"sampling_info": each, "target_logits": 1})
        batch = SimpleNamespace(sampling_info=each, forward_mode=SimpleNamespace(is_idle=lambda: False))
        verify_input = SimpleNamespace(draft_token_num=WIDTH)
        heard = eagle_sampling._sample(lambda *args, **kwargs: (args, kwargs), verify_input, batch, 2, 3, other=4)
        assert heard == ((verify_input, batch, 2, 3), {"other": 4})


def test_draws_have_the_distribution_of_the_target(target):
    requests, width = 1500, 4
    info = Info.of([(1.0, TOP_K_ALL, 1.0, number) for number in range(requests)])
    logits = target[2].expand(requests * width, -1).contiguous()
    tokens = seeds.drawn(logits, info, torch.arange(requests) % 7, width)
    share = torch.bincount(tokens, minlength=VOCAB) / len(tokens)
    probs = torch.softmax(target[2], dim=-1)
    assert bool(((share - probs).abs() < 4.5 * (probs * (1 - probs) / len(tokens)).sqrt() + 1e-9).all())
    together = tokens.view(requests, width)
    pairs = torch.bincount(together[:, 0] * VOCAB + together[:, 1], minlength=VOCAB**2) / requests
    joint = (probs.unsqueeze(1) * probs).flatten()
    assert bool(((pairs - joint).abs() < 5 * (joint * (1 - joint) / requests).sqrt() + 5 / requests).all())


def test_a_draw_does_not_depend_on_who_else_is_in_the_batch(target):
    """In the host it does: a greedy neighbour is enough."""
    positions = range(60)
    free = [int(seeds.drawn(target[:1], Info.of([FREE]), torch.tensor([place]), 1)) for place in positions]
    both = [seeds.drawn(target[:2], Info.of([FREE, GREEDY]), torch.tensor([place, 0]), 1)[0] for place in positions]
    assert free == [int(token) for token in both]
    info = Info.of([FREE, GREEDY])
    probs = torch.softmax(target[:2], dim=-1)
    hosts = [
        HOST_FILTERED(probs, info.top_ks, info.top_ps, None, False, info.sampling_seed, torch.tensor([place, 0]))[0]
        for place in positions
    ]
    assert free != [int(token) for token in hosts]


def test_the_weight_of_a_draw_is_said_where_supports_are_returned(target):
    info, probs = Info.of(SETTINGS), torch.softmax(target[: len(SETTINGS)], dim=-1)
    args = probs, info.top_ks, info.top_ps, None, False, info.sampling_seed, torch.arange(len(SETTINGS))
    tokens, kept, ids, weights = sampler.top_k_top_p_min_p_sampling_from_probs_torch(*args, return_filtered_probs=True)
    assert torch.equal(tokens, sampler.top_k_top_p_min_p_sampling_from_probs_torch(*args))
    place = (ids == tokens.unsqueeze(1)).long().argmax(dim=1, keepdim=True)
    assert torch.equal(kept.gather(1, place).squeeze(1), weights) and bool((weights > 0).all())


def test_many_rows_are_drawn_in_pieces(target, monkeypatch):
    info, prefix = Info.of(SETTINGS), torch.arange(len(SETTINGS))
    logits = target.repeat(2, 1)[: len(SETTINGS) * WIDTH]
    whole = seeds.drawn(logits, info, prefix, WIDTH)
    monkeypatch.setattr(seeds, "_ROWS", 4)
    assert torch.equal(seeds.drawn(logits, info, prefix, WIDTH), whole)


@pytest.mark.parametrize(("flag", "users", "inside"), [(True, None, "True"), (True, "0", "0"), (False, None, None)])
def test_drafts_are_the_likeliest_where_seeds_count_and_the_user_says_nothing(monkeypatch, flag, users, inside):
    name = "SGLANG_DSPARK_USE_GREEDY_DRAFT"
    monkeypatch.setattr(seeds, "enabled", lambda: flag)
    monkeypatch.delenv(name, raising=False)
    if users is not None:
        monkeypatch.setenv(name, users)
    with seeds.likeliest_drafts():
        assert os.environ.get(name) == inside
    assert os.environ.get(name) == users
