"""What works with DSPARK_ADAPTIVE and what is refused: each row with the tests that show it.

Usage: ``python tests/feature_table.py`` prints the rows as they stand in the README.
"""

from __future__ import annotations

from dataclasses import dataclass

_FEATURES = "tests/e2e/test_features.py::"
_ODD = "tests/e2e/test_odd_flags.py::"
_SERVING = "tests/e2e/test_serving.py::"
_SEEDS = "tests/e2e/test_seeds.py::"
_REFUSED = "tests/unit/test_refusals.py::test_a_feature_that_does_not_work_is_refused_in_one_sentence"
_UNIFORM = "tests/unit/test_refusals.py::test_targets_whose_positions_or_layers_know_one_length_only_verify_uniformly"
_GPU = "tests/unit/test_activation.py::test_what_a_gpu_verifies_without_graphs_and_with_adapters"

EQUAL = "as without speculation"
REFUSED = "refused before weights load"


@dataclass(frozen=True)
class Row:
    """A feature, its state in a few words, and the tests that show it."""

    feature: str
    state: str
    tests: tuple[str, ...]


ROWS = (
    Row(
        "Output logprobs and top logprobs",
        f"{EQUAL}, in `/generate` and chats",
        (f"{_FEATURES}test_logprobs_are_those_without_speculation", f"{_FEATURES}test_logprobs_of_chats"),
    ),
    Row(
        "Streaming, `n` > 1",
        EQUAL,
        (f"{_FEATURES}test_streams_hold_every_token_once", f"{_FEATURES}test_parallel_samples"),
    ),
    Row("Stop strings, stop tokens, `ignore_eos`", EQUAL, (f"{_FEATURES}test_stop_strings_and_stop_tokens",)),
    Row(
        "Frequency, presence and repetition penalties, `min_new_tokens`",
        "exact: every verified position sees all tokens before it (SGLang without speculation is a token late unless "
        "`--disable-overlap-schedule` is given)",
        (
            f"{_FEATURES}test_penalties_are_exact_at_every_position",
            f"{_ODD}test_penalties_in_mixed_steps",
            f"{_FEATURES}test_end_of_text_and_its_postponement",
            "tests/unit/test_penalties.py::test_every_position_sees_the_tokens_before_it",
        ),
    ),
    Row(
        "`min_p`",
        "exact for DSpark drafts; for EAGLE, EAGLE3 and MTP drafts, and where seeds are honoured, the request is "
        "refused",
        (
            f"{_FEATURES}test_min_p_bounds_every_token",
            "tests/unit/test_penalties.py::test_min_p_keeps_what_the_hosts_sampler_keeps",
            "tests/unit/test_penalties.py::test_a_request_whose_min_p_would_not_be_applied_is_refused",
            f"{_SEEDS}test_a_request_with_min_p_is_refused",
        ),
    ),
    Row("`logit_bias`", EQUAL, (f"{_FEATURES}test_logit_bias",)),
    Row(
        "Structured output: regex, JSON schema",
        f"{EQUAL}, also in steps that verify no draft",
        (
            f"{_FEATURES}test_structured_output",
            f"{_FEATURES}test_structured_output_in_steps_whose_budget_is_0",
            f"{_ODD}test_structured_output_in_mixed_steps",
            f"{_SERVING}test_the_real_pair",
        ),
    ),
    Row(
        "Sampling",
        "has the distribution without speculation",
        (f"{_SERVING}test_sampled_output_has_the_distribution_of_the_target",),
    ),
    Row(
        "Seeds of requests",
        "with `--enable-deterministic-inference`: the tokens that the request gets alone without speculation, whatever "
        "is verified and whoever else is served; not run on a GPU. Without it SGLang ignores them, speculating or not",
        (
            f"{_SEEDS}test_seeded_output_is_that_without_speculation_at_every_load",
            f"{_SEEDS}test_other_seeds_say_something_else_and_none_is_the_hosts_default",
            f"{_SEEDS}test_a_target_with_an_mtp_layer_of_its_own_without_overlap",
            "tests/unit/test_seed_draws.py::test_the_output_is_that_token_by_token_whatever_is_drafted_and_verified",
            "tests/unit/test_seed_draws.py::test_a_draw_does_not_depend_on_who_else_is_in_the_batch",
        ),
    ),
    Row("Radix cache", EQUAL, (f"{_FEATURES}test_cached_prefixes",)),
    Row(
        "Chunked prefill, `--enable-mixed-chunk`",
        EQUAL,
        (
            f"{_ODD}test_chunked_prefill_in_mixed_steps_with_retractions",
            f"{_ODD}test_structured_output_in_mixed_steps",
        ),
    ),
    Row(
        "Retraction",
        EQUAL,
        (
            f"{_SERVING}test_retracted_requests_finish_with_the_right_output",
            f"{_ODD}test_chunked_prefill_in_mixed_steps_with_retractions",
        ),
    ),
    Row(
        "`--page-size` 1 and 64, up to the context length",
        EQUAL,
        (
            f"{_FEATURES}test_a_request_that_ends_exactly_at_the_context_length",
            f"{_ODD}test_requests_that_end_exactly_at_the_context_length",
        ),
    ),
    Row(
        "`--disable-overlap-schedule`",
        EQUAL,
        (f"{_SERVING}test_greedy_output_is_equal_without_overlap",),
    ),
    Row(
        "`--disable-cuda-graph`",
        EQUAL,
        (f"{_ODD}test_chunked_prefill_in_mixed_steps_with_retractions", _GPU),
    ),
    Row(
        "LoRA adapters of the target",
        f"{EQUAL}, on a CPU, where adapters of experts or of the output head are refused; on GPUs every draft token is "
        "verified, and the log says so: not run here",
        (
            f"{_ODD}test_adapters_side_by_side",
            "tests/e2e/test_eagle.py::test_an_eagle_draft_and_an_adapter",
            "tests/unit/platform_cpu/test_lora.py::test_each_row_gets_the_adapter_of_its_request",
            "tests/unit/test_refusals.py::test_adapters_of_experts_are_refused_on_a_cpu",
            "tests/unit/platform_cpu/test_lora.py::test_adapters_of_experts_are_refused",
            "tests/unit/platform_cpu/test_lora.py::test_adapters_of_the_output_head_are_refused",
            _GPU,
        ),
    ),
    Row(
        "`--speculative-dspark-block-size`, request priorities",
        "with `SGLANG_ADAPTIVE_PRIORITY_WEIGHT` a higher priority takes fewer steps; the output stays",
        (
            "tests/e2e/test_priorities.py::test_a_higher_priority_takes_fewer_steps_and_changes_no_output",
            f"{_ODD}test_priorities_change_no_output",
            "tests/unit/test_planner.py::test_a_higher_priority_weighs_more_and_none_weighs_one",
            "tests/unit/policy/test_policy_allocation.py::test_weights_serve_priority_first_and_bad_weights_count_as_one",
        ),
    ),
    Row(
        "Aborts, disconnects",
        "nothing is left behind",
        ("tests/e2e/test_faults.py::test_a_storm_of_clients_that_leave",),
    ),
    Row(
        "`--dp-size`, SGLang's router",
        "unchanged; each engine decides by its own load",
        (
            "tests/e2e/test_fleet.py::test_data_parallel_engines_decide_each_for_itself",
            "tests/e2e/test_fleet.py::test_two_engines_behind_the_router",
        ),
    ),
    Row(
        "Multimodal rotary (mRoPE) targets, recurrent (mamba, GDN, short convolution) targets",
        "every draft token is verified, and the log says so; not run here",
        (_UNIFORM,),
    ),
    Row("Data-parallel attention", REFUSED, (f"{_REFUSED}[data-parallel attention]",)),
    Row(
        "Prefill/decode disaggregation",
        REFUSED,
        (f"{_REFUSED}[disaggregated decode]", f"{_REFUSED}[disaggregated prefill]"),
    ),
    Row("Pipeline parallelism", REFUSED, (f"{_REFUSED}[pipeline parallelism]",)),
    Row("Two-batch overlap", REFUSED, (f"{_REFUSED}[two-batch overlap]",)),
    Row("`--disable-cuda-graph-padding`", REFUSED, (f"{_REFUSED}[unpadded CUDA graphs]",)),
    Row("`--speculative-use-block-verification`", REFUSED, (f"{_REFUSED}[block verification]",)),
    Row("An offline cost table", REFUSED, (f"{_REFUSED}[an offline cost table]",)),
)


def markdown(row: Row) -> str:
    """The row as a line of the README's table."""
    return f"| {row.feature} | {row.state} |"


if __name__ == "__main__":
    print(*map(markdown, ROWS), sep="\n")
