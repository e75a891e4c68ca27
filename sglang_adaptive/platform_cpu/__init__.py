"""The reference CPU platform: serving on a machine without an accelerator, for development and tests."""

from __future__ import annotations

import os

PLATFORM_CLASS = "sglang_adaptive.platform_cpu.platform.AdaptiveCpuPlatform"
ATTENTION_BACKEND = "adaptive_cpu"
LORA_BACKEND = "torch_native"


def accelerator_visible() -> bool:
    """Whether torch sees any accelerator at all (CUDA, ROCm, XPU, MPS, NPU, HPU, MUSA ...)."""
    import torch

    if torch.accelerator.is_available():
        return True
    # Vendors whose backend registers with torch under its own name only.
    for name in ("npu", "hpu", "musa", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            return True
    return False


def activate() -> str | None:
    """Entry point of the group ``sglang.srt.platforms``.

    Returns:
        The dotted path of the platform class, or None where an accelerator is visible or where the host's own CPU
        engine was asked for (``SGLANG_USE_CPU_ENGINE=1``).
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" or accelerator_visible():
        return None
    return PLATFORM_CLASS
