"""What the step costs of a server depend on, so that those of another one are never taken for its own."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from sglang.srt.runtime_context import get_model, get_parallel, get_spec
from sglang.srt.speculative.dspark_components.dspark_planner import ragged_capture_num_tokens

from sglang_adaptive import HOST_VERSION, __version__
from sglang_adaptive.runtime import seeds


def cost_key(worker: Any) -> dict[str, str]:
    """Facts about a server, by name: its costs are those of another one whose facts are equal."""
    runner = worker.model_runner
    device = torch.device(worker.device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hardware = f"{properties.name}, {properties.multi_processor_count} SMs"
    else:
        hardware = f"{_cpu_name()}, {torch.get_num_threads()} threads"
    facts = {
        "family": worker.family,
        "target": get_model().model_path,
        "target_config": hashlib.sha256(runner.model_config.hf_config.to_json_string().encode()).hexdigest()[:16],
        "draft": get_spec().speculative_draft_model_path,
        "dtype": str(runner.dtype),
        "quantization": str(runner.model_config.quantization),
        "gamma": worker.gamma,
        "narrow_drafts": worker.narrow_widths,
        "hardware": hardware,
        "tp_size": get_parallel().tp_size,
        "target_backend": type(runner.attn_backend).__name__,
        "draft_backend": type(worker.draft_model_runner.attn_backend).__name__,
        "graphs": ragged_capture_num_tokens(model_runner=runner),
        "max_requests": runner.max_running_requests,
        "versions": [__version__, HOST_VERSION, torch.__version__],
    }
    if device.type == "cuda":
        facts["times"] = "the longer one of host and device"
    facts |= worker.profiled_facts
    if seeds.enabled():
        # The host then computes with other kernels.
        facts["deterministic"] = True
    return {name: fact if isinstance(fact, str) else json.dumps(fact) for name, fact in facts.items()}


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "cpu"
