"""The torch twins against plain loops."""

import torch

from sglang_adaptive.platform_cpu import kernels


def test_cache_locs_are_gathered_request_by_request():
    table = torch.arange(60, dtype=torch.int32).view(3, 20)
    got = kernels.speculative_cache_locs(
        req_pool_indices=torch.tensor([2, 0]),
        req_to_token=table,
        start_offset=torch.tensor([3, 17]),
        end_offset=torch.tensor([6, 18]),
        batch_size=2,
        draft_token_num=8,
        device="cpu",
    )
    assert got.dtype == torch.int64
    assert got.tolist() == [43, 44, 45, 17]


def test_slots_are_written_where_a_request_grows_and_nowhere_else():
    table = torch.zeros(3, 6, dtype=torch.int32)
    kernels.assign_req_to_token_pool(
        torch.tensor([1, 2]), table, torch.tensor([2, 5]), torch.tensor([4, 5]), torch.tensor([7, 8, 9]), 2
    )
    assert table.tolist() == [[0] * 6, [0, 0, 7, 8, 0, 0], [0] * 6]


def murmur3(data: bytes) -> int:
    """MurmurHash3, x86, 32 bits, seed 0; whole words only."""
    h = 0
    for start in range(0, len(data), 4):
        k = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 % 2**32
        h ^= (k << 15 | k >> 17) % 2**32 * 0x1B873593 % 2**32
        h = ((h << 13 | h >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def test_noise_is_hashed_from_seed_position_and_column():
    assert murmur3(b"test") == 0xBA6BD213  # as published
    seeds, positions = [0, 42, -1, 2**63 - 1, -(2**63), 123456789012345], [0, 1, 77, 2**20, 5, 9]
    found = kernels.murmur_hash32(torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.arange(40))
    for row, seed, position in zip(found.tolist(), seeds, positions, strict=True):
        words = (seed % 2**64).to_bytes(8, "little") + position.to_bytes(4, "little")
        assert row == [murmur3(words + column.to_bytes(4, "little")) for column in range(40)]


def sample(target, draft, drafts, coins, final):
    rows, slots = target.shape[0], target.shape[1]
    index = torch.arange(rows * slots).view(rows, slots)
    predicts = torch.full((rows * slots,), -1, dtype=torch.int32)
    accept_index = torch.full((rows, slots), -1, dtype=torch.int32)
    count = torch.zeros(rows, dtype=torch.int32)
    candidates = torch.cat([torch.zeros(rows, 1, dtype=torch.int64), drafts], dim=1)
    kernels.chain_speculative_sampling(predicts, accept_index, count, candidates, index, coins, final, target, draft)
    return predicts.view(rows, slots), accept_index, count


def reference(target, draft, drafts, coins, final):
    """One row at a time, as the method is defined: accept while coin * q < p, then sample the residual."""
    out = []
    for row in range(target.shape[0]):
        tokens, step = [], 0
        while step < drafts.shape[1]:
            token = drafts[row, step]
            if not coins[row, step] * draft[row, step, token] < target[row, step, token]:
                break
            tokens.append(int(token))
            step += 1
        rest = target[row, step].double()
        if step < drafts.shape[1]:
            rest = (rest - draft[row, step].double()).clamp_min(0)
        place = final[row].double() * rest.sum()
        cumulated, token = 0.0, target.shape[-1] - 1
        for i, mass in enumerate(rest.tolist()):
            cumulated += mass
            if cumulated > place:
                token = i
                break
        out.append([*tokens, token])
    return out


def test_chain_sampling_follows_its_definition():
    torch.manual_seed(3)
    rows, steps, vocab = 64, 5, 11
    target = torch.softmax(torch.randn(rows, steps + 1, vocab) * 2, -1)
    draft = torch.softmax(torch.log(target[:, :-1]) + torch.randn(rows, steps, vocab), -1)
    drafts = torch.multinomial(draft.view(-1, vocab), 1).view(rows, steps)
    coins, final = torch.rand(rows, steps), torch.rand(rows)
    predicts, accept_index, count = sample(target, draft, drafts, coins, final)
    expected = reference(target, draft, drafts, coins, final)
    assert {0, steps} < set(count.tolist()), "the case must contain rows that reject at once and rows that never do"
    for row, tokens in enumerate(expected):
        accepted = len(tokens) - 1
        assert count[row] == accepted
        assert predicts[row, : accepted + 1].tolist() == tokens
        assert predicts[row, accepted + 1 :].eq(-1).all()
        assert accept_index[row, : accepted + 1].tolist() == [row * (steps + 1) + i for i in range(accepted + 1)]


def test_chain_sampling_keeps_the_target_distribution():
    torch.manual_seed(4)
    rows, vocab = 200_000, 3
    target = torch.tensor([0.7, 0.2, 0.1]).expand(rows, 2, vocab)
    draft = torch.tensor([0.2, 0.3, 0.5]).expand(rows, 1, vocab)
    drafts = torch.multinomial(draft[0, 0], rows, replacement=True).view(rows, 1)
    predicts, _, _ = sample(target, draft, drafts, torch.rand(rows, 1), torch.rand(rows))
    share = torch.bincount(predicts[:, 0].long(), minlength=vocab) / rows
    torch.testing.assert_close(share, target[0, 0], atol=0.006, rtol=0)


def test_a_draft_outside_its_own_distribution_is_rejected():
    target = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]])
    for bad in (0.0, float("nan"), float("inf")):
        draft = torch.tensor([[[1.0, bad]]])
        _, _, count = sample(target, draft, torch.tensor([[1]]), torch.zeros(1, 1), torch.zeros(1))
        assert count.tolist() == [0]
