"""What a server on the CPU platform assumes where the user says nothing."""

from __future__ import annotations

import os
from typing import Any

from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.platform_cpu import ATTENTION_BACKEND, LORA_BACKEND

MAX_TOTAL_TOKENS = 65536
MAX_RUNNING_REQUESTS = 64
# The host's backends that run in torch; intel_amx becomes torch_native where the cores lack AMX. They know plain
# prefill and decoding only.
_HOSTS_BACKENDS = ("torch_native", "flex_attention", "intel_amx")


def cores_per_rank(ranks: int) -> list[list[int]]:
    """The cores of this process dealt out to the ranks of one host, at least one each; shared when there are fewer."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // ranks)
    return [[cores[(rank * each + i) % len(cores)] for i in range(each)] for rank in range(ranks)]


def export_environment(ranks: int) -> None:
    """Set what the server's processes inherit, where the user has not set it."""
    shares = cores_per_rank(ranks)
    chosen = {
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, share)) for share in shares),
        "OMP_NUM_THREADS": str(len(shares[0])),
        # Threads that spin at a barrier starve the server's other processes on a small machine.
        "OMP_WAIT_POLICY": "PASSIVE",
        # A crash would wait a minute for a CUDA core dump.
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    }
    for name, value in chosen.items():
        os.environ.setdefault(name, value)


def check_attention(server_args: Any) -> None:
    """Refuse attention backends that would fail once the weights are loaded. Raises AdaptiveError."""
    speculative = server_args.speculative_algorithm is not None
    for field in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        name = getattr(server_args, field)
        if name in (None, ATTENTION_BACKEND) or (name in _HOSTS_BACKENDS and not speculative):
            continue
        unable = "cannot verify draft tokens" if name in _HOSTS_BACKENDS else "does not run"
        raise AdaptiveError(f"The attention backend {name} {unable} on the CPU platform: drop {_flag(field)}.")
    name = server_args.speculative_draft_attention_backend
    if speculative and name not in (None, ATTENTION_BACKEND):
        flag = _flag("speculative_draft_attention_backend")
        raise AdaptiveError(f"The attention backend {name} does not run a draft on the CPU platform: drop {flag}.")


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def apply(server_args: Any) -> None:
    """Fill in the defaults; assignments are recorded by the host as this platform's declarations.

    Raises AdaptiveError for what the platform cannot serve.
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    check_attention(server_args)
    graphs = server_args.cuda_graph_config
    for phase in Phase.ALL:
        graphs = with_phase(graphs, phase, backend=Backend.DISABLED)
    server_args.cuda_graph_config = graphs
    # Acceptance compares the argmax of two differently batched forwards: in bfloat16 they part at near ties.
    if server_args.dtype == "auto":
        server_args.dtype = "float32"
    if server_args.max_total_tokens is None:
        server_args.max_total_tokens = MAX_TOTAL_TOKENS
    if server_args.max_running_requests is None:
        server_args.max_running_requests = MAX_RUNNING_REQUESTS
    if server_args.speculative_draft_attention_backend is None:
        server_args.speculative_draft_attention_backend = ATTENTION_BACKEND
    # The host's defaults are a GPU's.
    if server_args.attention_backend is None and server_args.enable_deterministic_inference:
        server_args.attention_backend = ATTENTION_BACKEND
    if server_args.lora_backend == "csgmv":
        server_args.lora_backend = LORA_BACKEND
    elif server_args.lora_backend != LORA_BACKEND and (server_args.enable_lora or server_args.lora_paths):
        raise AdaptiveError(
            f"The CPU platform applies LoRA adapters in torch: drop --lora-backend {server_args.lora_backend}."
        )
    # A sliding window is a mask here, not a pool of its own.
    server_args.disable_hybrid_swa_memory = True
    export_environment(server_args.tp_size * server_args.dp_size * server_args.pp_size)


def cpu_backends(server_args: Any, previous: Any) -> None:
    """Resolution hook: our attention backend where the host would pick its own CPU engine's."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    if resolving_view(server_args).attention_backend is None:
        declare_resolution(server_args, "adaptive_cpu", attention_backend=ATTENTION_BACKEND)
    previous(server_args)
