"""What each attention backend of the pinned host can do with verify lengths that differ from request to request."""

from __future__ import annotations

from typing import Any

GRAPHS = "varlen graphs"  # packs the chosen tokens, replaying one captured graph per token tier
EAGER = "packed, without graphs"  # packs the chosen tokens in eager forwards
UNIFORM = "uniform"  # reads one length for all requests: every draft is verified
NONE = "none"  # cannot verify draft tokens at all

EFFECT = {
    GRAPHS: "verifies the chosen tokens only, with CUDA graphs",
    EAGER: "verifies the chosen tokens only, without CUDA graphs",
    UNIFORM: "verifies every draft token: nothing is gained over DSPARK",
    NONE: "refuses to start: this backend cannot verify draft tokens",
}

CAPABILITY = {
    "adaptive_cpu": EAGER,
    "fa3": GRAPHS,
    "fa4": GRAPHS,
    "trtllm_mha": GRAPHS,
    "trtllm_mla": GRAPHS,
    "flashinfer_mla": GRAPHS,
    "flashinfer": EAGER,
    "triton": UNIFORM,
    "torch_native": NONE,
}


def capability(backend: str, mla: bool, triton_ragged: bool = False) -> str:
    """``GRAPHS``, ``EAGER``, ``UNIFORM`` or ``NONE``; a backend that is not listed is taken for ``UNIFORM``.

    The host's name ``flashinfer`` means another backend for a model with latent attention (``mla``). With the option
    ``triton_ragged`` the patches of ``patches/triton_ragged.py`` are in place; ``unable_triton`` says where they do not
    help.
    """
    if backend == "triton" and triton_ragged and not mla:
        return GRAPHS
    return CAPABILITY.get("flashinfer_mla" if mla and backend == "flashinfer" else backend, UNIFORM)


def unable_triton(cfg: Any, model_config: Any) -> str | None:
    """Why attention backend triton, patched, needs one number of tokens for all requests; None where it does not.

    A window is also presumed where only the model's class knows that it has none.
    """
    from sglang.srt.utils import is_hip

    windowed = getattr(model_config.hf_text_config, "use_sliding_window", True) and model_config.sliding_window_size
    if windowed or model_config.is_hybrid_swa or model_config.attention_chunk_size is not None:
        return "attention backend triton verifies one number per request where there are sliding windows"
    if cfg.enable_deterministic_inference:
        return "attention backend triton verifies one number per request under --enable-deterministic-inference"
    if cfg.dcp_size > 1 or is_hip():
        return "attention backend triton verifies one number per request on AMD GPUs and in context-parallel decoding"
    return None


def unable_adapters(cfg: Any) -> str | None:
    """Why LoRA adapters need one number of tokens for all requests; None where there are none or they do not.

    The host's LoRA backends for GPUs lay their segments out for that; the CPU platform's does not.
    """
    adapters = cfg.enable_lora or (cfg.lora_paths and cfg.enable_lora is not False)
    if adapters and cfg.device != "cpu":
        return "LoRA adapters are laid out for one number per request"
    return None


def unable_target(model_config: Any) -> str | None:
    """Why a target cannot verify a different number of tokens per request whatever the backend; None where it can.

    Positions of multimodal rotary embeddings are laid out for one length per request. Of the recurrent layers only
    KDA's kernels take ragged lengths.
    """
    from sglang.srt.configs.hybrid_arch import kimi_linear_config, mambaish_config

    if model_config.model_is_mrope:
        return "multimodal rotary positions are laid out for one number per request"
    if mambaish_config(model_config) is not None and kimi_linear_config(model_config) is None:
        return "the target's recurrent layers cannot verify a different number per request"
    return None
