"""Which family a draft belongs to, and the shape of its chain."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_adaptive import family
from sglang_adaptive.errors import AdaptiveError


@pytest.mark.parametrize(
    ("architecture", "found"),
    [
        ("LlamaForCausalLMEagle3", family.EAGLE3),
        ("Eagle3DeepseekV2ForCausalLM", family.EAGLE3),
        ("LlamaForCausalLMEagle", family.EAGLE),
        ("DeepseekV3ForCausalLMNextN", family.NEXTN),
        ("Qwen3NextForCausalLMMTP", family.NEXTN),
        ("MiMoMTP", family.NEXTN),
        ("Qwen3DSparkModel", family.DSPARK),
        ("Gemma4AssistantForCausalLM", family.DSPARK),
    ],
)
def test_drafts_by_their_architecture(architecture, found):
    assert family.of_draft(SimpleNamespace(architectures=[architecture])) is found


def test_a_draft_that_says_nothing():
    assert family.of_draft(None) is family.DSPARK
    assert family.of_draft(SimpleNamespace(architectures=None)) is family.DSPARK


def test_targets_that_carry_mtp_layers():
    assert family.carries_mtp(SimpleNamespace(num_nextn_predict_layers=1))
    assert family.carries_mtp(SimpleNamespace(text_config=SimpleNamespace(mtp_num_hidden_layers=1)))
    assert family.carries_mtp(SimpleNamespace(architectures=["Qwen3NextForCausalLM"]))
    assert not family.carries_mtp(SimpleNamespace(num_nextn_predict_layers=0, architectures=["Qwen3ForCausalLM"]))
    assert not family.carries_mtp(SimpleNamespace(num_nextn_predict_layers=None))


def arguments(topk=None, steps=None, tokens=None, **others):
    return SimpleNamespace(
        speculative_eagle_topk=topk, speculative_num_steps=steps, speculative_num_draft_tokens=tokens, **others
    )


@pytest.mark.parametrize(
    ("given", "steps"),
    [({}, 5), ({"steps": 3}, 3), ({"tokens": 8}, 7), ({"steps": 2, "tokens": 3, "topk": 1}, 2)],
)
def test_the_chain_is_what_was_given_or_the_familys(given, steps):
    assert family.chain(arguments(**given), family.EAGLE3) == {
        "speculative_eagle_topk": 1,
        "speculative_num_steps": steps,
        "speculative_num_draft_tokens": steps + 1,
    }


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"topk": 4}, "--speculative-eagle-topk 4"),
        ({"steps": 3, "tokens": 8}, "--speculative-num-draft-tokens 8"),
        ({"steps": 0}, "at least one draft"),
        ({"tokens": 1}, "at least one draft"),
    ],
)
def test_trees_and_uneven_chains_are_refused(given, word):
    with pytest.raises(AdaptiveError, match=word):
        family.chain(arguments(**given), family.NEXTN)


def test_a_draft_path_that_is_the_target_is_none():
    assert family.separate_draft(SimpleNamespace(model_path="a", speculative_draft_model_path="a")) is None
    assert family.separate_draft(SimpleNamespace(model_path="a", speculative_draft_model_path="b")) == "b"


def test_a_server_that_names_nothing_readable_is_left_to_the_later_checks(tmp_path):
    raw = arguments(
        model_path=str(tmp_path),
        speculative_draft_model_path=None,
        speculative_draft_model_revision=None,
        revision=None,
        trust_remote_code=False,
    )
    pytest.importorskip("sglang")
    assert family.find(raw) is family.DSPARK
