"""Which attention backends can verify a different number of tokens per request, in one place.

The host's backends read the packed layout of a step or they do not; two of those that do not fail badly: Triton ignores
it and verifies wrongly, FlashInfer raises under CUDA graphs. So a backend that is not listed here verifies uniformly.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Capability:
    """Whether ragged verification runs under CUDA graphs and without them, and where that was run by this project."""

    graphs: bool
    eager: bool
    measured: str


RAGGED = {
    "fa3": Capability(graphs=True, eager=True, measured="H200"),
    "adaptive_cpu": Capability(graphs=False, eager=True, measured="CPU"),
    "fa4": Capability(graphs=True, eager=True, measured="not yet"),
    "trtllm_mha": Capability(graphs=True, eager=True, measured="not yet"),
    "trtllm_mla": Capability(graphs=True, eager=True, measured="not yet"),
    "flashinfer_mla": Capability(graphs=True, eager=True, measured="not yet"),
    "dsv4": Capability(graphs=True, eager=True, measured="not yet"),
}


def uniform_reason(backends: tuple[str, ...]) -> str | None:
    """Why a server with these attention backends verifies uniformly; None when it need not."""
    missing = sorted({name for name in backends if name not in RAGGED})
    if not missing:
        return None
    return (
        f"attention backend {missing[0]} cannot verify a different number of tokens per request, so every draft token "
        f"is verified (backends that can: {', '.join(RAGGED)})"
    )
