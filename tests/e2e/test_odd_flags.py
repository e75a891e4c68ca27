"""Many flags at once: large pages, chunked prompts in mixed steps, retractions, priorities, a shorter block, and
confidences made of more than the head."""

from __future__ import annotations

import re
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

BLOCK, PAGE = 5, 64
FLAGS = (
    *("--page-size", str(PAGE)),
    # The requests that decode in a mixed step are taken off the chunk, and the host admits whole pages only: a chunk of
    # one page would let no request in while another one decodes.
    *("--chunked-prefill-size", str(2 * PAGE), "--enable-mixed-chunk"),
    "--disable-cuda-graph",
    *("--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", "1000"),
    *("--speculative-dspark-block-size", str(BLOCK)),
)


@pytest.fixture(scope="module")
def odd_server(
    tiny_pair: tuple[Path, Path], dear_costs: Path, adapters: dict[str, Path], tmp_path_factory, log_dir: Path
) -> Iterator[Server]:
    target, draft = tiny_pair
    folder = features.borrow_costs(dear_costs, tmp_path_factory.mktemp("odd"), gamma=BLOCK, draft_features=True)
    environment = costs.environment(folder, priority_weight="2", draft_features="on")
    environment |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"}
    arguments = (*speculative(draft), *FLAGS, *adapter_flags(adapters))
    with Server(target, *arguments, log_dir=log_dir, environment=environment) as server:
        yield server


def adapter_flags(adapters: dict[str, Path]) -> list[str]:
    return ["--lora-paths", *(f"{name}={folder}" for name, folder in adapters.items())]


def long_prompts(count: int) -> list[str]:
    return [" ".join(language.random_prompts(6, seed=100 + i, words=60)) for i in range(count)]


def running_with_prompts(server: Server) -> list[int]:
    """How many requests decode while each chunk of prompts comes in. With mixed steps on, it is mixed with them."""
    return [int(running) for running in re.findall(r"Prefill batch.*?#running-req: (\d+)", server.log_text())]


def test_chunked_prefill_in_mixed_steps_with_retractions(odd_server: Server, tiny_plain_server: Server):
    """Long prompts arrive while others decode."""
    bodies = [asked(prompt, 64) for prompt in PROMPTS[:8]] + [asked(prompt, 32) for prompt in long_prompts(5)]
    ours = answers(odd_server, bodies)
    assert [each["output_ids"] for each in ours] == [each["output_ids"] for each in answers(tiny_plain_server, bodies)]
    assert sum(each["meta_info"]["num_retractions"] for each in ours) > 0, "no request was retracted"
    state, info = odd_server.adaptive_state(), odd_server.server_info()
    assert state["options"]["draft_features"] is True
    assert state["decisions"]["trimmed"] > 0 and len(state["verified_per_position"]) == BLOCK
    assert "8" in state["by_load"], "the requests did not run together"
    assert info["enable_mixed_chunk"] and info["cuda_graph_config"]["decode"]["backend"] == "disabled"
    assert max(running_with_prompts(odd_server)) >= 4, "no prompt was mixed with decoding requests"


def test_penalties_in_mixed_steps(odd_server: Server, tiny_plain_server: Server):
    bodies = penalised() + [asked(prompt, 40, frequency_penalty=1.0) for prompt in long_prompts(4)]
    assert outputs(odd_server, bodies) == outputs(tiny_plain_server, bodies)


def test_structured_output_in_mixed_steps(odd_server: Server, tiny_plain_server: Server):
    """Grammars in which every token depends on the one before, and which end while long prompts come in.

    Some of the long prompts have one, too: it begins in the step of their last chunk.
    """
    kinds = [{"regex": f"(h[0-9]{{1,2}}e[0-9]{{1,3}}){{{pairs}}}", "ignore_eos": False} for pairs in range(3, 11)]
    bodies = [asked(prompt, 40, **kind) for prompt, kind in zip(PROMPTS, kinds, strict=False)]
    bodies += [asked(prompt, 8, **({}, kinds[0])[i % 2]) for i, prompt in enumerate(long_prompts(6))]
    odd_server.client.flush_cache()
    before = len(running_with_prompts(odd_server))
    ours = outputs(odd_server, bodies)
    assert ours == outputs(tiny_plain_server, bodies)
    assert [(len(ids), reason["type"]) for ids, _, reason in ours[:8]] == [(2 * n + 1, "stop") for n in range(3, 11)]
    assert sum(running > 0 for running in running_with_prompts(odd_server)[before:]) > 10


def test_priorities_change_no_output(odd_server: Server, tiny_plain_server: Server):
    prompts = language.random_prompts(12, seed=3, kinds=(language.MIXED,))
    bodies = [asked(prompt, 48, priority=3 * (i % 2)) for i, prompt in enumerate([p for p in prompts for _ in "01"])]
    ours = answers(odd_server, bodies)
    expected = outputs(tiny_plain_server, [asked(prompt, 48) for prompt in prompts])
    assert [each["output_ids"] for each in ours] == [ids for ids, _, _ in expected for _ in "01"]


def test_adapters_side_by_side(odd_server: Server, adapted_ids, expected_ids):
    """Two LoRA adapters and no adapter, mixed in every batch, while steps are trimmed."""
    before = odd_server.adaptive_state()
    prompts, names = PROMPTS[:6], [*adapted_ids, None]
    bodies = [asked(prompt, 40, **({"lora_path": name} if name else {})) for prompt in prompts for name in names]
    found = [each["output_ids"] for each in answers(odd_server, bodies)]
    for place, name in enumerate(names):
        plain = [ids[:40] for ids in expected_ids[:6]]
        assert found[place :: len(names)] == (adapted_ids[name] if name else plain), name
        assert name is None or adapted_ids[name] != plain, "the adapter changes nothing"
    after = odd_server.adaptive_state()
    assert after["decisions"]["trimmed"] > before["decisions"]["trimmed"]
    assert after["verify_tokens"] - before["verify_tokens"] < (BLOCK + 1) * (after["requests"] - before["requests"])


def test_requests_that_end_exactly_at_the_context_length(odd_server: Server, tiny_plain_server: Server):
    bodies = features.up_to_the_context_length()
    ours = outputs(odd_server, bodies)
    assert ours == outputs(tiny_plain_server, bodies)
    left = features.left_of_the_context(ours)
    assert len(set(left)) == 1 and 0 <= left[0] <= 2, left
    odd_server.client.flush_cache()
    assert odd_server.free_kv_tokens() > 0
