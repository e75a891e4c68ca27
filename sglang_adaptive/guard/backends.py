"""What each attention backend of the pinned host can do with verify lengths that differ from request to request."""

from __future__ import annotations

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


def capability(backend: str, mla: bool) -> str:
    """``GRAPHS``, ``EAGER``, ``UNIFORM`` or ``NONE``; a backend that is not listed is taken for ``UNIFORM``.

    The host's name ``flashinfer`` means another backend for a model with latent attention (``mla``).
    """
    return CAPABILITY.get("flashinfer_mla" if mla and backend == "flashinfer" else backend, UNIFORM)
