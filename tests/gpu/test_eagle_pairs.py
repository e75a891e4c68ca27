"""On a CUDA GPU: with EAGLE3 drafts and MTP layers, greedy tokens of ours are those of the host's own chains.

The pairs are the tiny ones of the CPU tests, in bfloat16.
"""

from __future__ import annotations

import pytest
import tiny_language as language
from greedy_answers import ask, assert_no_worse, drafting
from server import Server, speculative

from sglang_adaptive import ALGORITHM
from sglang_adaptive.benchmarks.equality import agreement

pytestmark = pytest.mark.gpu

# FA3 knows no float32, in which the pairs are kept.
COMMON = ("--dtype", "bfloat16", "--max-running-requests", "64", "--max-total-tokens", "40000")
CHAIN = ("--speculative-eagle-topk", "1", "--speculative-num-steps", "4", "--speculative-num-draft-tokens", "5")
MODES = {"graphs": (), "eager": ("--disable-cuda-graph",)}
PROMPTS = language.random_prompts(48, seed=11)
TOKENS = 128


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["eagle3", "mtp"])
def test_greedy_tokens_are_those_of_the_host_s_chain(family, mode, request, log_dir, tmp_path):
    if family == "eagle3":
        target, draft = request.getfixturevalue("tiny_eagle3_pair")
        stock, ours = speculative(draft, "EAGLE3"), speculative(draft)
    else:
        target = request.getfixturevalue("tiny_mtp_target")
        stock, ours = ["--speculative-algorithm", "NEXTN"], ["--speculative-algorithm", ALGORITHM]
    arguments = [*COMMON, *CHAIN, *MODES[mode], "--attention-backend", "fa3"]
    with Server(target, *stock, *arguments, log_dir=log_dir) as server:
        expected = ask(server, PROMPTS, TOKENS, len(PROMPTS))
        control = agreement(expected, ask(server, PROMPTS, TOKENS, 4))
    environment = drafting(tmp_path, SGLANG_ADAPTIVE_COST_CORRECTION="off", ADAPTIVE_TEST_COSTS="dear")
    with Server(target, *ours, *arguments, log_dir=log_dir, environment=environment) as server:
        found = agreement(expected, ask(server, PROMPTS, TOKENS, len(PROMPTS)))
        few = agreement(expected, ask(server, PROMPTS, TOKENS, 4))
        decisions, log = server.adaptive_state()["decisions"], server.log_text()
    assert "step costs are made up" in log
    print(f"\n{family} {mode}: ours {found}, four at a time {few}; stock against itself {control}; {decisions}")
    assert decisions["trimmed"] > 20, decisions
    assert_no_worse(found, control, TOKENS)
