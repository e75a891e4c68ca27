"""CPU platform, host functions that launch a Triton kernel whatever the device: replaced by their torch twins.

Applied in the scheduler process before the speculative worker is built.
"""

from typing import Any

from sglang_adaptive.patches.registry import Patch
from sglang_adaptive.platform_cpu import kernels


def _assign(original: Any, *args: Any, **kwargs: Any) -> None:
    kernels.assign_req_to_token_pool(*args, **kwargs)


def _last_loc(original: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(*args, **kwargs)


def _sample(original: Any, *args: Any, **kwargs: Any) -> None:
    for name in (
        "retrive_next_token",
        "retrive_next_sibling",
        "threshold_single",
        "threshold_acc",
        "deterministic",
        "block_verification",
    ):
        kwargs.pop(name, None)
    kernels.chain_speculative_sampling(*args, **kwargs)


def _say_whether_any_row_samples(cls: type, **kwargs: Any) -> tuple[tuple[type], dict[str, Any]]:
    if kwargs.get("has_sampled_rows") is None:
        kwargs["has_sampled_rows"] = bool((kwargs["temperatures"] > 0).any())
    return (cls,), kwargs


PATCHES = [
    Patch(
        target="sglang.srt.mem_cache.allocation.get_last_loc",
        why="It takes the torch twin for attention backends of a few fixed names only; pages larger than one need it.",
        remove_when="the host asks the platform's supports_triton here, as its allocators do.",
        depends=("sglang.srt.mem_cache.allocation.get_last_loc_torch",),
        hook=_last_loc,
        kind="around",
    ),
    Patch(
        target="sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        why="It launches Triton on every device but the host's own CPU engine, whose kernels need an AMX build.",
        remove_when="the host asks the platform's supports_triton here, as its allocators do.",
        hook=_assign,
        kind="around",
    ),
    Patch(
        target="sglang.kernels.ops.speculative.reject_sampling.chain_speculative_sampling_triton",
        why="Sampled acceptance has a Triton kernel only; block verification, which the host refuses on a CPU, is not "
        "covered.",
        remove_when="the host gives the kernel a torch twin like its neighbours'.",
        depends=("sglang.kernels.ops.speculative.dspark.dspark_accept._accept_sampling_core",),
        hook=_sample,
        kind="around",
    ),
    Patch(
        target="sglang.kernels.ops.speculative.dspark.markov_sample.MarkovSampleStep.torch",
        why="The twin draws noise over the whole vocabulary for greedy rows too, since a graph capture could not ask: "
        "a fifth of a greedy step on a CPU.",
        remove_when="the host reads the temperatures where nothing is captured.",
        hook=_say_whether_any_row_samples,
        kind="before",
    ),
]
