"""The torch twins of EAGLE's kernels against plain loops."""

import pytest
import torch

from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.platform_cpu import chains


def layout(seq_lens: list[int], slots: int):
    """What the host hands to the builder, and what it makes of it."""
    rows = len(seq_lens)
    mask = torch.ones(rows * slots * slots, dtype=torch.bool)
    positions = torch.empty(rows * slots, dtype=torch.int64)
    index, following = torch.full((2, rows, slots), -1)
    chains.build_chain(torch.tensor(seq_lens), mask, positions, index, following, 1, slots, full_mask=False)
    return mask.view(rows, slots, slots), positions.view(rows, slots), index, following


def test_a_chain_is_laid_out_token_after_token():
    mask, positions, index, following = layout([7, 30], 4)
    assert positions.tolist() == [[7, 8, 9, 10], [30, 31, 32, 33]]
    assert index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert following.tolist() == [[1, 2, 3, -1]] * 2
    for row in mask.tolist():
        assert row == [[True] * (i + 1) + [False] * (3 - i) for i in range(4)]


def test_trees_and_foreign_masks_are_refused():
    with pytest.raises(AdaptiveError, match="--speculative-eagle-topk 1"):
        chains.refuse_tree(4)
    empty = torch.empty(0)
    with pytest.raises(AdaptiveError, match="--attention-backend"):
        chains.build_chain(empty, empty, empty, empty, empty, 1, 4, full_mask=True)


@pytest.mark.parametrize("with_positions", [True, False])
def test_draft_cache_locs_follow_the_committed_tokens(with_positions):
    table = torch.arange(60, dtype=torch.int32).view(3, 20)
    out = torch.empty(6, dtype=torch.int64)
    positions = torch.empty(2, dtype=torch.int64) if with_positions else None
    mrope = torch.empty(3, 2, dtype=torch.int64) if with_positions else None
    seq_lens = torch.tensor([3, 10])
    chains.assign_draft_cache_locs(torch.tensor([2, 0]), table, seq_lens, out, 1, 3, positions=positions, mrope=mrope)
    assert out.tolist() == [43, 44, 45, 10, 11, 12]
    if with_positions:
        assert positions.tolist() == [3, 10] and mrope.tolist() == [[3, 10]] * 3


def buffers(rows: int, slots: int):
    predicts = torch.zeros(rows * slots, dtype=torch.int32)
    accept_index = torch.full((rows, slots), -1, dtype=torch.int32)
    return predicts, accept_index, torch.empty(rows, dtype=torch.int32), torch.arange(rows * slots).view(rows, slots)


def following(lens: torch.Tensor, slots: int) -> torch.Tensor:
    """The successor of each token of chains of ``lens`` tokens, the root included: -1 from the last one on."""
    steps = torch.arange(1, slots + 1)
    return torch.where(steps < lens.unsqueeze(1), steps, -1)


@pytest.mark.parametrize("ragged", [False, True])
def test_greedy_acceptance_stops_at_the_first_disagreement_or_the_end_of_the_chain(ragged):
    torch.manual_seed(1)
    rows, slots = 200, 5
    candidates, target = torch.randint(0, 2, (2, rows, slots))
    lens = torch.randint(1, slots + 1, (rows,)) if ragged else torch.full((rows,), slots)
    predicts, accept_index, count, index = buffers(rows, slots)
    next_token = following(lens, slots)
    chains.verify_chain_greedy(predicts, accept_index, count, candidates, index, next_token, target, topk=1)
    assert set(count.tolist()) == set(range(slots))
    for row in range(rows):
        agreed = 0
        while agreed < lens[row] - 1 and candidates[row, agreed + 1] == target[row, agreed]:
            agreed += 1
        assert count[row] == agreed
        committed = target[row, : agreed + 1].tolist()
        assert predicts.view(rows, slots)[row].tolist() == committed + [0] * (slots - 1 - agreed)
        assert accept_index[row].tolist() == [row * slots + i for i in range(agreed + 1)] + [-1] * (slots - 1 - agreed)


def sampled(target: torch.Tensor, drafts: torch.Tensor, lens: torch.Tensor | None = None, **thresholds: float):
    rows, slots = target.shape[:2]
    lens = torch.full((rows,), slots) if lens is None else lens
    predicts, accept_index, count, index = buffers(rows, slots)
    chains.sample_chain_target_only(
        predicts,
        accept_index,
        count,
        torch.cat([torch.zeros(rows, 1, dtype=torch.int64), drafts], dim=1),
        index,
        following(lens, slots),
        torch.rand(rows, slots),
        torch.rand(rows),
        target,
        **thresholds,
        deterministic=True,
    )
    return predicts.view(rows, slots), count


@pytest.mark.parametrize("ragged", [False, True])
def test_sampled_output_has_the_distribution_of_the_target_whatever_is_drafted(ragged):
    """Two tokens of three words, the second hanging on the first: all nine pairs as often as the target says them."""
    torch.manual_seed(2)
    rows = 200_000
    first, second = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([[0.1, 0.8, 0.1], [0.3, 0.3, 0.4], [0.9, 0.1, 0.0]])
    drafts = torch.multinomial(torch.tensor([0.2, 0.3, 0.5]), rows * 2, replacement=True).view(rows, 2)
    after = second[drafts[:, 0]]
    target = torch.stack([first.expand(rows, -1), after, torch.full((rows, 3), 1 / 3)], dim=1)
    lens = torch.randint(1, 4, (rows,)) if ragged else torch.full((rows,), 3)
    predicts, count = sampled(target, drafts, lens)
    # Where the first draft fell or was not verified, the second token comes in the next step, as the target says then.
    one = predicts[:, 0].long()
    two = torch.where(count > 0, predicts[:, 1].long(), torch.multinomial(second[one], 1).squeeze(1))
    share = torch.bincount(one * 3 + two, minlength=9) / rows
    torch.testing.assert_close(share, (first.unsqueeze(1) * second).flatten(), atol=0.005, rtol=0)
    assert {0, 1, 2} == set(count.tolist()) and bool((count < lens).all())


def test_a_rejected_draft_is_never_what_is_drawn_instead():
    target = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]]).expand(2000, -1, -1)
    drafts = torch.ones(2000, 1, dtype=torch.int64)
    predicts, count = sampled(target, drafts)
    assert predicts[count == 0, 0].eq(0).all() and predicts[count == 1, 0].eq(1).all()
    assert 800 < int(count.sum()) < 1200


def test_thresholds_accept_more():
    target = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]]).expand(2000, -1, -1)
    drafts = torch.ones(2000, 1, dtype=torch.int64)
    assert sampled(target, drafts, threshold_single=0.4)[1].sum() == 2000
    assert 1300 < int(sampled(target, drafts, threshold_acc=0.7)[1].sum()) < 1550


def test_the_last_committed_token_is_the_next_root():
    tokens = torch.tensor([5, 6, 7, 1, 2, 3], dtype=torch.int32)
    bonus = torch.empty(2, dtype=torch.int32)
    chains.fill_bonus_tokens(tokens, torch.tensor([3, 1], dtype=torch.int32), bonus, 3)
    assert bonus.tolist() == [7, 1]


@pytest.mark.parametrize("with_hidden", [True, False])
def test_relayed_rows_are_gathered(with_hidden):
    p, index, tokens = torch.rand(4, 1), torch.arange(4).view(4, 1), torch.arange(4) * 10
    hidden = torch.rand(4, 3) if with_hidden else None
    rows = torch.tensor([3, 1])
    got = chains.gather_relayed(rows, p, index, tokens, hidden)
    assert torch.equal(got[0], p[[3, 1]]) and got[1].tolist() == [[3], [1]] and got[2].tolist() == [30, 10]
    assert torch.equal(got[3], hidden[[3, 1]]) if with_hidden else got[3] is None


def test_renormalised_probabilities():
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.5, 0.125, 0.125]])
    got = chains.top_k_renorm(probs, torch.tensor([2, 1 << 30], dtype=torch.int32))
    torch.testing.assert_close(got, torch.tensor([[0, 4 / 7, 0, 3 / 7], [0.25, 0.5, 0.125, 0.125]]))
    got = chains.top_p_renorm(probs, torch.tensor([0.65, 0.5]))
    torch.testing.assert_close(got, torch.tensor([[0, 4 / 7, 0, 3 / 7], [0, 1.0, 0, 0]]))
