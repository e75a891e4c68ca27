"""Many flags at once: large pages, chunked prompts in mixed steps, priorities, and a shorter block."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import costs
import features
import pytest
import tiny_language as language
from conftest import PROMPTS
from features import answers, outputs, penalised
from features import request as asked
from server import Server, speculative

pytestmark = pytest.mark.e2e

BLOCK = 5
FLAGS = (
    *("--page-size", "64"),
    *("--chunked-prefill-size", "64", "--enable-mixed-chunk"),
    *("--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", "1000"),
    *("--speculative-dspark-block-size", str(BLOCK)),
)


@pytest.fixture(scope="module")
def odd_server(tiny_pair: tuple[Path, Path], dear_costs: Path, tmp_path_factory, log_dir: Path) -> Iterator[Server]:
    target, draft = tiny_pair
    folder = features.borrow_costs(dear_costs, tmp_path_factory.mktemp("odd"), gamma=BLOCK)
    environment = costs.environment(folder, priority_weight="2")
    with Server(target, *speculative(draft), *FLAGS, log_dir=log_dir, environment=environment) as server:
        yield server


def long_prompts(count: int) -> list[str]:
    return [" ".join(language.random_prompts(6, seed=100 + i, words=60)) for i in range(count)]


def test_chunked_prefill_in_mixed_steps(odd_server: Server, tiny_plain_server: Server):
    """Long prompts arrive while others decode."""
    bodies = [asked(prompt, 64) for prompt in PROMPTS[:8]] + [asked(prompt, 32) for prompt in long_prompts(5)]
    ours = answers(odd_server, bodies)
    assert [each["output_ids"] for each in ours] == [each["output_ids"] for each in answers(tiny_plain_server, bodies)]
    state = odd_server.adaptive_state()
    assert state["decisions"]["trimmed"] > 0 and len(state["verified_per_position"]) == 5


def test_penalties_in_mixed_steps(odd_server: Server, exact_plain_server: Server):
    bodies = penalised() + [asked(prompt, 40, frequency_penalty=1.0) for prompt in long_prompts(4)]
    assert outputs(odd_server, bodies) == outputs(exact_plain_server, bodies)


def test_priorities_change_no_output(odd_server: Server, tiny_plain_server: Server):
    prompts = language.random_prompts(12, seed=3, kinds=(language.MIXED,))
    bodies = [asked(prompt, 48, priority=3 * (i % 2)) for i, prompt in enumerate([p for p in prompts for _ in "01"])]
    ours = answers(odd_server, bodies)
    expected = outputs(tiny_plain_server, [asked(prompt, 48) for prompt in prompts])
    assert [each["output_ids"] for each in ours] == [ids for ids, _, _ in expected for _ in "01"]


def test_requests_that_end_exactly_at_the_context_length(odd_server: Server, tiny_plain_server: Server):
    bodies = features.up_to_the_context_length()
    ours = outputs(odd_server, bodies)
    assert ours == outputs(tiny_plain_server, bodies)
    left = features.left_of_the_context(ours)
    assert len(set(left)) == 1 and 0 <= left[0] <= 2, left
    odd_server.client.flush_cache()
    assert odd_server.free_kv_tokens() > 0
