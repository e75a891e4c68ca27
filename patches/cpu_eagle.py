"""CPU platform, EAGLE, EAGLE3 and MTP drafts: applied in the scheduler process before the worker is built.

Where the host launches a kernel that a plain CPU lacks, the torch twin takes over.
"""

from typing import Any

from sglang_adaptive.patches.registry import Edit, Patch
from sglang_adaptive.platform_cpu import ATTENTION_BACKEND, chains

_SPEC = "sglang.srt.speculative"
_OPS = "sglang.kernels.ops.speculative"
_SEAM = "the host asks the platform for this kernel, as it does for speculative cache locations."


def _admit_backend(factory: Any, name: str, backend_map: dict[str, Any], error: str, stamps_children: bool = False):
    def steps() -> tuple[str, Any]:
        from sglang_adaptive.platform_cpu.draft_attention import DraftSteps

        return ATTENTION_BACKEND, DraftSteps(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)

    def extend() -> tuple[str, Any]:
        from sglang_adaptive.platform_cpu.attention import AdaptiveCpuAttention

        return ATTENTION_BACKEND, AdaptiveCpuAttention(factory.draft_model_runner)

    # Only the backend of the draft's decode steps is one that has children.
    backend_map[ATTENTION_BACKEND] = steps if stamps_children else extend


def _cache_locs(original: Any, *args: Any, **kwargs: Any) -> None:
    chains.assign_draft_cache_locs(*args, **kwargs)


def _build(
    original: Any,
    parent_list: Any,
    top_scores_index: Any,
    seq_lens: Any,
    tree_mask: Any,
    positions: Any,
    retrieve_index: Any,
    retrieve_next_token: Any,
    retrieve_next_sibling: Any,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: Any,
) -> None:
    chains.build_chain(
        seq_lens,
        tree_mask,
        positions,
        retrieve_index,
        retrieve_next_token,
        topk,
        num_verify_tokens,
        full_mask=tree_mask_mode != type(tree_mask_mode).QLEN_ONLY,
    )


def _verify(original: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
    del kwargs["retrieve_next_sibling"]
    chains.verify_chain_greedy(**kwargs)
    return kwargs["predicts"], kwargs["accept_index"], kwargs["accept_token_num"]


def _bonus(original: Any, accept_tokens: Any, accept_lens: Any, bonus: Any, stride: int, batch_size: int) -> None:
    chains.fill_bonus_tokens(accept_tokens, accept_lens, bonus, stride)


def _gather(original: Any, *args: Any) -> tuple[Any, ...]:
    return chains.gather_relayed(*args)


def _eager(compiled: Any, *args: Any) -> Any:
    return compiled._torchdynamo_orig_callable(*args)


PATCHES = [
    Patch(
        target=f"{_SPEC}.draft_utils.DraftBackendFactory._create_backend",
        why="The attention backends of a draft are a fixed list; ours is not on it.",
        remove_when="the host lets a platform add a draft attention backend.",
        depends=(
            f"{_SPEC}.draft_utils.DraftBackendFactory.create_decode_backend",
            f"{_SPEC}.draft_utils.DraftBackendFactory.create_draft_extend_backend",
        ),
        hook=_admit_backend,
        kind="before",
    ),
    Patch(
        target=f"{_OPS}.cache_locs.assign_draft_cache_locs_contiguous_func",
        why="It launches Triton on every device but the host's own CPU engine.",
        remove_when=_SEAM,
        hook=_cache_locs,
        kind="around",
    ),
    Patch(
        target=f"{_OPS}.spec_tree.build_tree_kernel_efficient_func",
        why="It refuses every out-of-tree platform.",
        remove_when=_SEAM,
        hook=_build,
        kind="around",
    ),
    Patch(
        target=f"{_OPS}.spec_tree.verify_tree_greedy_func",
        why="It refuses every out-of-tree platform.",
        remove_when=_SEAM,
        hook=_verify,
        kind="around",
    ),
    Patch(
        target=f"{_OPS}.eagle.fill_bonus_tokens_func",
        why="It launches Triton on every device but the host's own CPU engine.",
        remove_when=_SEAM,
        hook=_bonus,
        kind="around",
    ),
    Patch(
        target=f"{_OPS}.gather_spec_extras.gather_spec_extras",
        why="The relay of overlapped scheduling launches Triton whatever the device.",
        remove_when=_SEAM,
        hook=_gather,
        kind="around",
    ),
    Patch(
        target=f"{_SPEC}.spec_utils._select_top_k_tokens_later",
        why="torch.compile would build C++ code in the middle of the first requests, and again for other shapes.",
        remove_when="the host compiles it on GPUs only.",
        hook=_eager,
        kind="around",
    ),
    Patch(
        target=f"{_SPEC}.eagle_utils.eagle_sample",
        why="Sampled acceptance and the renormalisation of probabilities are None where there is no kernel for them.",
        remove_when=_SEAM,
        depends=("sglang.kernels.ops.speculative.verify_sampling", "sglang.kernels.ops.sampling.renorm"),
        kind="edit",
        edits=(
            Edit(
                old="sampling_fn = tree_speculative_sampling_target_only",
                new="sampling_fn = sample_chain_target_only",
            ),
            Edit(old="target_probs = top_k_renorm_prob(", new="target_probs = top_k_renorm("),
            Edit(old="target_probs = top_p_renorm_prob(", new="target_probs = top_p_renorm("),
        ),
        names={
            "sample_chain_target_only": chains.sample_chain_target_only,
            "top_k_renorm": chains.top_k_renorm,
            "top_p_renorm": chains.top_p_renorm,
        },
    ),
]
