"""What is refused before any weight loads, each in one sentence, and which targets verify every draft token."""

from __future__ import annotations

import json
import shutil

import pytest
import tiny_adapter
from test_activation import run

from sglang_adaptive import ALGORITHM

OPTIONS = {
    "two-batch overlap": {"enable_two_batch_overlap": True},
    "pipeline parallelism": {"pp_size": 2},
    "data-parallel attention": {"enable_dp_attention": True, "dp_size": 2, "tp_size": 2},
    "disaggregated decode": {"disaggregation_mode": "decode"},
    "disaggregated prefill": {"disaggregation_mode": "prefill"},
    "sampling on a trainer's policy": {"rl_on_policy_target": "fsdp"},
    "SGLang's own adaptive steps": {"speculative_adaptive": True},
    "an offline cost table": {"speculative_dspark_sps_table_path": "/nowhere"},
    "unpadded CUDA graphs": {"disable_cuda_graph_padding": True},
    "block verification": {"speculative_use_block_verification": True},
}
WORDS = {
    "disaggregated decode": "prefill/decode disaggregation",
    "disaggregated prefill": "prefill/decode disaggregation",
}


@pytest.fixture(scope="module")
def refusals(tiny_pair) -> dict[str, str]:
    said = run(
        f"""
        for name, options in {OPTIONS!r}.items():
            try:
                record(**options)
                print("SAY", name, "|", "accepted")
            except SystemExit as error:
                print("SAY", name, "|", str(error.code).replace(chr(10), " // "))
            except Exception as error:
                print("SAY", name, "|", type(error).__name__, str(error)[:200].replace(chr(10), " // "))
        """,
        tiny_pair,
    )
    return dict(line.split(" | ", 1) for line in said)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_feature_that_does_not_work_is_refused_in_one_sentence(refusals, name):
    sentence = refusals[name]
    assert sentence.startswith(f"sglang_adaptive: {ALGORITHM} does not work with {WORDS.get(name, name)}"), sentence
    assert " // " not in sentence and sentence.endswith(".") and ("drop --" in sentence or "or serve" in sentence)
    assert sentence.count(". ") == 0


def target_like(target, folder, **changes):
    """A copy of the tiny target whose configuration is that of another architecture; its weights do not matter."""
    shutil.copytree(target, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_targets_whose_positions_or_layers_know_one_length_only_verify_uniformly(tiny_pair, tmp_path):
    target, draft = tiny_pair
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    mrope = target_like(target, tmp_path / "mrope", rope_parameters=rope, rope_scaling=rope)
    hybrid = target_like(
        target,
        tmp_path / "hybrid",
        architectures=["Lfm2ForCausalLM"],
        model_type="lfm2",
        layer_types=["conv", "full_attention", "conv"],
        conv_L_cache=3,
    )
    said = run(
        f"""
        for path in ({str(target)!r}, {str(mrope)!r}, {str(hybrid)!r}):
            args = ServerArgs(model_path=path, speculative_algorithm="DSPARK_ADAPTIVE",
                              speculative_draft_model_path=sys.argv[2])
            args.resolve_once()
            print("SAY", args._sglang_adaptive.mode, os.environ["SGLANG_RAGGED_VERIFY_MODE"])
        """,
        (target, draft),
    )
    assert said == ["compact compact", "static static", "static static"]


def test_adapters_of_experts_are_refused_on_a_cpu(tiny_pair, tmp_path):
    target, draft = tiny_pair
    mixture = target_like(
        target,
        tmp_path / "mixture",
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        mlp_only_layers=[],
    )
    every = tiny_adapter.make_adapter(tmp_path / "every", 4, seed=0)
    attention = shutil.copytree(every, tmp_path / "attention")
    config = json.loads((attention / "adapter_config.json").read_text())
    names = [name for name in config["target_modules"] if name in ("q_proj", "o_proj")]
    (attention / "adapter_config.json").write_text(json.dumps(config | {"target_modules": names}))
    head = shutil.copytree(every, tmp_path / "head")
    (head / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["model.q_proj", "lm_head"]}))
    flags = {"enable_lora": True, "max_lora_rank": 8}
    no_draft = {"algorithm": None}
    cases = {
        "adapter": (mixture, {"lora_paths": [f"a={every}"]}),
        "record": (mixture, {"lora_paths": [str(attention), {"lora_name": "a", "lora_path": str(every)}]}),
        "flag": (mixture, {**flags, "lora_target_modules": ["all"]}),
        "attention": (mixture, {"lora_paths": {"a": str(attention)}}),
        "attention's flag": (mixture, {**flags, "lora_target_modules": ["q_proj", "down_proj"]}),
        "off": (mixture, {"enable_lora": False, "lora_paths": [f"a={every}"]}),
        "dense": (target, {"lora_paths": [f"a={every}"]}),
        "head": (target, {"lora_paths": [f"a={head}"]}),
        "without a draft": (mixture, {"lora_paths": [f"a={every}"], **no_draft}),
        "attention without a draft": (mixture, {"lora_paths": [f"a={attention}"], **no_draft}),
    }
    options = {name: (str(path), fields) for name, (path, fields) in cases.items()}
    said = run(
        f"""
        for name, (path, fields) in {options!r}.items():
            sys.argv[1] = path
            try:
                record(**fields)
                print("SAY", name, "| accepted")
            except SystemExit as error:
                print("SAY", name, "|", error.code)
        """,
        (target, draft),
    )
    found = dict(line.split(" | ", 1) for line in said)
    assert {name for name, sentence in found.items() if sentence == "accepted"} == set(cases) - {
        "adapter",
        "record",
        "flag",
        "head",
        "without a draft",
    }, found
    refusal = "sglang_adaptive: The CPU platform does not apply LoRA adapters to the "
    experts = f"{refusal}experts of a mixture, which {every} names: leave gate_proj, up_proj and down_proj out."
    assert found["adapter"] == found["record"] == found["without a draft"] == experts
    assert found["flag"] == experts.replace(str(every), "--lora-target-modules")
    assert found["head"] == f"{refusal}output head, which {head} names: leave lm_head out."
