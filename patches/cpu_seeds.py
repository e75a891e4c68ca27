"""CPU platform, ``--enable-deterministic-inference``: applied when a model has loaded under that flag."""

from __future__ import annotations

from typing import Any

from sglang_adaptive.patches.registry import Patch
from sglang_adaptive.platform_cpu import kernels


def _hash(original: Any, seed: Any, positions: Any, col_indices: Any) -> Any:
    return kernels.murmur_hash32(seed, positions, col_indices)


def _eager(compiled: Any, *args: Any) -> Any:
    return compiled._torchdynamo_orig_callable(*args)


def _leave_kernels(original: Any, runner: Any) -> None:
    return None


PATCHES = [
    Patch(
        target="sglang.kernels.ops.sampling.murmur_hash.murmur_hash32",
        why="On a CPU it calls a kernel of the host's own CPU engine, which needs an AMX build.",
        remove_when="the host gives the kernel a torch twin.",
        hook=_hash,
        kind="around",
    ),
    Patch(
        target="sglang.srt.layers.sampler.multinomial_with_seed",
        why="torch.compile would build C++ code in the middle of the first requests, and again for other shapes.",
        remove_when="the host compiles it on GPUs only.",
        hook=_eager,
        kind="around",
    ),
    Patch(
        target="sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
        why="It installs Triton kernels in the place of torch's, and refuses a machine without an accelerator; the "
        "platform computes in float32 instead.",
        remove_when="the host asks an out-of-tree platform for its batch-invariant kernels.",
        hook=_leave_kernels,
        kind="around",
    ),
]
