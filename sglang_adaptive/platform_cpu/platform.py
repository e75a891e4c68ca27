"""The host's platform seam, filled in for a plain CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.arg_groups import choices
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import KVPoolKind, PlatformCapabilities, SRTPlatform

from sglang_adaptive.patches import cpu_arguments, registry
from sglang_adaptive.platform_cpu import ATTENTION_BACKEND, LORA_BACKEND, adapters, defaults, kernels


class AdaptiveCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Serves on a machine without an accelerator, for development and tests."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def __init__(self) -> None:
        # This runs in every process of the server, before any argument is parsed.
        choices.add_attention_backend_choices([ATTENTION_BACKEND])
        choices.add_draft_attention_backend_choices([ATTENTION_BACKEND])
        choices.add_deterministic_attention_backend_choices([ATTENTION_BACKEND])
        choices.add_radix_supported_deterministic_attention_backend_choices([ATTENTION_BACKEND])
        register_resolution_hook("handle_cpu_backends")(defaults.cpu_backends)
        # The first step with a hook in which the model's configuration is final.
        register_resolution_hook("handle_speculative_decoding")(adapters.check)

    def apply_server_args_defaults(self, server_args: Any) -> None:
        defaults.apply(server_args)
        registry.apply(cpu_arguments.PATCHES)

    def get_device(self, device_id: int | None = 0) -> str:
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return True

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == ATTENTION_BACKEND

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        if kind != "mha":
            return None
        from sglang_adaptive.platform_cpu.pool import LazyKVPool

        return LazyKVPool

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        return kernels.speculative_cache_locs

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def init_backend(self) -> None:
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        from sglang_adaptive.patches import cpu_models

        registry.apply(cpu_models.PATCHES)

        @register_attention_backend(ATTENTION_BACKEND)
        def create(model_runner):
            from sglang_adaptive.platform_cpu.attention import AdaptiveCpuAttention

            return AdaptiveCpuAttention(model_runner)

    def post_load_model(self, model: torch.nn.Module) -> None:
        from sglang.srt.runtime_context import get_exec, get_lora, get_spec

        from sglang_adaptive.patches import cpu_eagle, cpu_kernels, cpu_seeds, cpu_weights, cpu_worker
        from sglang_adaptive.platform_cpu.linear import pack_linear_layers

        if pack_linear_layers(model) > 0:
            registry.apply(cpu_weights.PATCHES)
        # The target loads first: every host module is imported by now and no speculative worker exists yet.
        if get_lora().enable_lora:
            from sglang.srt.lora.backend.lora_registry import register_lora_backend

            from sglang_adaptive.patches import cpu_lora
            from sglang_adaptive.platform_cpu.lora import AdaptiveCpuLora

            registry.apply(cpu_lora.PATCHES)
            register_lora_backend(LORA_BACKEND)(lambda: AdaptiveCpuLora)
        if get_exec().deterministic.enable_deterministic_inference:
            registry.apply(cpu_seeds.PATCHES)
        if get_spec().speculative_algorithm is not None:
            registry.apply([*cpu_kernels.PATCHES, *cpu_worker.PATCHES, *cpu_eagle.PATCHES])
